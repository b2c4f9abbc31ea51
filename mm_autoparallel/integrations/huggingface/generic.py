"""A config.json of a kind that no reader of this package knows: its live class is taken apart in a process of its own.

That process needs torch and transformers, fetches nothing and runs no code but that of the installed transformers. What
it finds is kept as plain files in this user's cache, by the content of all that has a say in it: the model
(traced_model.py), and beside it the folder of its traces for the samples of the job.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from typing import Any

from mm_autoparallel.child_process import python_command
from mm_autoparallel.errors import JobError
from mm_autoparallel.files import hash_sources, read_document, write_text_atomically
from mm_autoparallel.integrations.huggingface.config import FAMILIES, LLAVA_TOWERS
from mm_autoparallel.integrations.huggingface.defaults import TEXT_DEFAULTS
from mm_autoparallel.integrations.huggingface.hub_cache import name_in_cache
from mm_autoparallel.model.job.traced_model import parse_traced_model
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.model_form import REFUSAL, TracedHere
from mm_autoparallel.private import make_private, private_folders
from mm_autoparallel.validation import nearest

LONGEST_S = 1800.0
"""Assumed: a model of a hundred layers of several kinds takes a minute a micro-batch."""

_TRACEBACK = "Traceback (most recent call last):"
_SOURCES = (
    *("profilers/trace", "profilers/stack.py", "profilers/meter.py", "profilers/huggingface_classes.py"),
    *("profilers/transformers_releases.py", "model/job", "model/readers", "integrations/huggingface"),
)


_OF_ANY_TEXT = ("internvl", "llava", "mistral3")
"""Types that are read here, and that transformers builds around a text of any type, which `text_config` names."""


def is_generic(document: Mapping[str, Any]) -> bool:
    """Whether `document` is a Hugging Face config of a type that no reader here knows, or of several parts of which one
    is so: a LLaVA's tower, or the text of a LLaVA, an InternVL or a Mistral 3."""
    return "schema" not in document and _unread_type(document) is not None


def _unread_type(document: Mapping[str, Any]) -> tuple[str, str, Collection[str]] | None:
    """The first key that names a type which no reader here knows, that type, and the types that one knows."""
    model_type = document.get("model_type")
    if not isinstance(model_type, str):
        return None
    named: list[tuple[str, object, Collection[str]]] = [("model_type", model_type, FAMILIES)]
    if model_type == "llava":
        named.append(("vision_config.model_type", _type_of(document, "vision_config"), LLAVA_TOWERS))
    if model_type in _OF_ANY_TEXT:
        named.append(("text_config.model_type", _type_of(document, "text_config"), TEXT_DEFAULTS))
    return next(((key, own, known) for key, own, known in named if isinstance(own, str) and own not in known), None)


def _type_of(document: Mapping[str, Any], part: str) -> object:
    """What a part says of its type; None where it says nothing, and has the usual one."""
    section = document.get(part)
    return section.get("model_type") if isinstance(section, Mapping) else None


def trace_config(
    document: Mapping[str, Any], path: Path, workload: Workload, freeze: Mapping[str, bool], mbs: Sequence[int]
) -> TracedHere:
    """The model of the config.json `document`, read from `path`, with traces of `mbs` samples of `workload`.

    Raises JobError where torch or transformers is not installed, and where its class cannot be built or taken apart.
    """
    model_type = document.get("model_type")
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        key, unread, known = _unread_type(document) or ("model_type", str(model_type), FAMILIES)
        raise JobError(
            f"{key} is {unread!r}, which no reader here knows{nearest(unread, list(known))}; its class in "
            f"transformers can be taken apart, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed here. Install `mm-autoparallel[torch]`, or run "
            "`mm-autoparallel trace JOB` where they are and "
            f"name the model's file that it writes in the job; read without them are {', '.join(known)}",
            where=f"model file {path}",
        )
    request = {
        "config": dict(document),
        "workload": workload.model_dump(mode="json"),
        "freeze": dict(freeze),
        "mbs": list(mbs),
        "name": f"{model_type}-{name_in_cache(path) or path.stem}",
        "versions": {name: _version(name) for name in ("torch", "transformers")},
        "sources": hash_sources(_SOURCES),
    }
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    folder = _cache_folder(path) / digest[:16]
    if not (folder / "model.json").exists():
        _run(folder, request, path)
    model = parse_traced_model(read_document(folder / "model.json", "model file"), folder / "model.json")
    return TracedHere(model, folder / "traces")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cache_folder(path: Path) -> Path:
    for folder in private_folders():
        if make_private(folder / "traced"):
            return folder / "traced"
    raise JobError(
        "traces of it are kept in this user's cache, and neither that nor the temporary folder can "
        "be written by this user alone; set XDG_CACHE_HOME to a folder of one's own",
        where=f"model file {path}",
    )


def _run(folder: Path, request: Mapping[str, Any], path: Path) -> None:
    """Have it traced into `folder`. The model's file comes last: where it is, all is there."""
    make_private(folder)
    write_text_atomically(folder / "request.json", json.dumps(dict(request) | {"path": str(path)}))
    command = python_command("mm_autoparallel.profilers.trace.child", str(folder))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        raise JobError(
            f"taking its class apart took more than {LONGEST_S:g} s, and was ended; run "
            "`mm-autoparallel trace JOB`, which has no limit, and name the model's file that it writes",
            where=f"model file {path}",
        ) from None
    if done.returncode == 0 and (folder / "model.json").exists():
        return
    if done.returncode == 2 and (folder / REFUSAL).exists():
        raise JobError(str(read_document(folder / REFUSAL, "refusal")["reason"]))
    raise JobError(f"taking its class apart failed: {_last_error(done.stderr)}", where=f"model file {path}")


def _last_error(stderr: str) -> str:
    """What a process that failed said last: its exception without the lines of code it passed, or its last lines."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    if _TRACEBACK in lines:
        last = len(lines) - lines[::-1].index(_TRACEBACK)
        lines = list(dropwhile(lambda line: line.startswith(" "), lines[last:]))
    else:
        lines = lines[-3:]
    return " ".join(" ".join(lines).split())[:600]
