"""A job in words as the text of a job file: every section with what it means, and what else may stand there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from mm_autoparallel.api.jobs import JobWords
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job

_MEANINGS = {
    "num_nodes": "nodes of the cluster",
    "devices_per_node": "of each node",
    "global_batch_size": "samples of one step, over all replicas",
    "seq_length": "tokens of a sample in the text decoder, those of images and audio included",
    "image_tokens_per_sample": "of them, what a sample's images occupy",
    "images_per_sample": "into how many attention spans they divide",
    "audio_tokens_per_sample": "of them, what a sample's audio occupies",
    "stack": "whose code trains",
    "max_vpp": "chunks of a stage that are tried, at most",
    "ep": "expert parallel sizes",
    "tp": "tensor parallel sizes",
    "pp": "pipeline parallel sizes",
    "mbs": "micro-batch sizes",
}
_HEADS = {
    "model": "What is trained: a file beside this one, or its sizes.",
    "cluster": f"Where. Devices of the catalog: {', '.join(DEVICES)}.",
    "workload": "What a step processes; model/job/workload.py has all keys.",
    "search": "Limits of the search: sizes that are not said are all tried, but for ep, etp, zero (1) and max_vpp (1).",
}
_WIDTH = 116


def format_job(words: JobWords, job: Job, name: str) -> str:
    """The text of a job file that is read as `words`. job: as it is read. name: what the file is called."""
    lines = [f"# A job, written by `mm-autoparallel init`. Plan it: mm-autoparallel plan {name}", ""]
    for key, value in words.document.items():
        lines += _fold(_HEADS.get(key, ""))
        lines += _section(key, value, words)
        lines += list(_more(key, value, job))
        lines.append("")
    if "search" not in words.document:
        lines += [*_fold(_HEADS["search"]), *_more("search", {}, job), ""]
    return "\n".join(lines)


def _section(key: str, value: Any, words: JobWords) -> Iterator[str]:
    if not isinstance(value, Mapping) or key == "model":
        yield from yaml.safe_dump({key: value}, sort_keys=False, width=_WIDTH).rstrip().splitlines()
        return
    yield f"{key}:"
    for name, inner in value.items():
        text = yaml.safe_dump(inner, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
        meaning = _MEANINGS.get(name, "")
        if f"{key}.{name}" in words.assumed:
            meaning = f"{meaning}; not said, so taken" if meaning else "not said, so taken"
        line = f"  {yaml.safe_dump(name).removesuffix('...' + chr(10)).strip()}: {text}"
        yield f"{line}  # {meaning}" if meaning else line


def _more(key: str, value: Any, job: Job) -> Iterator[str]:
    """What else may stand there, as comments."""
    given = value if isinstance(value, Mapping) else {}
    media = {encoder.media for encoder in job.model.encoders}
    if key == "workload":
        if "images" in media and "image_tokens_per_sample" not in given:
            yield "  # image_tokens_per_sample: N  # left out, the vision part counts as idle"
        if "audios" in media and "audio_tokens_per_sample" not in given:
            yield "  # audio_tokens_per_sample: N  # left out, the audio part counts as idle"
        if "stack" not in given:
            yield "  # stack: megatron-te  # whose code trains; its laws then hold"
    if key == "search":
        if not given:
            yield "# search:"
        for name, example in (("tp", "[1, 2, 4, 8]"), ("pp", "[1, 2, 4, 8]"), ("mbs", "[1, 2]"), ("max_vpp", "2")):
            if name not in given:
                yield f"{'# ' if not given else ''}  {'' if not given else '# '}{name}: {example}  # {_MEANINGS[name]}"
    if key == "model" and media:
        names = ", ".join(f"{encoder.name}: true" for encoder in job.model.encoders)
        yield f"# freeze: {{{names}}}  # which parts keep their weights; left out: as its kind is usually trained"


def _fold(words: str) -> list[str]:
    """A comment, in lines of a file's width."""
    lines, line = [], "#"
    for word in words.split():
        if len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = "#"
        line += f" {word}"
    return [*lines, line] if words else lines
