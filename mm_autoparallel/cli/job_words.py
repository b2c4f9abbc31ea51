"""A job without a file: flags as the sections of a job, for `plan --model` and `init`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.arguments import count
from mm_autoparallel.errors import JobError

if TYPE_CHECKING:
    from mm_autoparallel.api.jobs import JobWords

PATH = Path("of the command line")
"""What messages call such a job."""

_SECTIONS = ("cluster", "workload", "search", "freeze", "adapters")
_WHOLE = ("profiles", "calibration")


def add_model_arguments(parser: argparse.ArgumentParser, required: bool) -> None:
    """What only a job without a file needs."""
    group = parser.add_argument_group("a model" if required else "in place of JOB: a model")
    group.add_argument(
        "--model",
        metavar="NAME",
        required=required,
        help="a Hugging Face config.json, another model file, or the name of a published model",
    )
    group.add_argument("--gbs", "--global-batch-size", type=count, metavar="N", help="samples of a step")
    group.add_argument("--seq", "--seq-length", type=count, metavar="N", help="tokens of a sample, those of images too")


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """What a model and a launch script need both."""
    group = parser.add_argument_group("where it trains, and its samples")
    group.add_argument("--device", metavar="NAME", help="the device of the cluster, by its name in the catalog")
    group.add_argument(
        "--nnodes", "--nodes", "--num-nodes", type=count, metavar="N", help="nodes (default: 1, or a script's own)"
    )
    group.add_argument(
        "--nproc-per-node",
        "--devices-per-node",
        type=count,
        metavar="N",
        help="devices of a node (default: 8, or a script's own)",
    )
    group.add_argument("--cluster", type=Path, metavar="FILE", help="a job file whose cluster is meant instead")
    group.add_argument(
        "--image-tokens", "--image-tokens-per-sample", type=count, metavar="N", help="text tokens of a sample's images"
    )
    group.add_argument(
        "--images", "--images-per-sample", type=count, metavar="N", help="images of a sample (default: 1)"
    )
    group.add_argument("--max-vpp", type=count, metavar="N", help="chunks of a stage that are tried, at most")


def describe_flags(arguments: argparse.Namespace, path: Path = PATH) -> JobWords:
    """The job that the flags describe. path: what messages call it, and beside it lies what it names.

    Raises JobError where a flag is missing, malformed or contradicts another.
    """
    from mm_autoparallel.api.jobs import describe_job

    for flag, value in (("--gbs", arguments.gbs), ("--seq", arguments.seq)):
        if value is None:
            what = "samples of a step" if flag == "--gbs" else "tokens of a sample"
            raise JobError(f"--model {arguments.model}: {flag} is missing, the {what}; give {flag} N")
    sections: dict[str, Any] = {
        "cluster": find_cluster(arguments)
        or _said(device=arguments.device, num_nodes=arguments.nnodes or 1, devices_per_node=arguments.nproc_per_node),
        "workload": _said(
            global_batch_size=arguments.gbs,
            seq_length=arguments.seq,
            image_tokens_per_sample=arguments.image_tokens,
            images_per_sample=arguments.images,
        ),
        "search": _said(max_vpp=arguments.max_vpp),
    }
    for word in arguments.set:
        _set(sections, word)
    return describe_job(arguments.model, path=path, **sections)


def _said(**values: object) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def find_cluster(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The cluster section of the file that --cluster names; None where a device is named instead.

    Raises JobError where neither is, or both are.
    """
    section = read_cluster(arguments.cluster, arguments.device)
    for name in ("nnodes", "nproc_per_node") if section is not None else ():
        if getattr(arguments, name) is not None:
            raise JobError(f"--{name.replace('_', '-')} and --cluster both say what the cluster is; give one")
    return section


def read_cluster(path: Path | None, device: str | None) -> dict[str, Any] | None:
    """The cluster section of the job file at `path`; None where a device is named instead.

    Raises JobError where neither is, or both are.
    """
    from mm_autoparallel.files import describe_value, read_document
    from mm_autoparallel.model.job.devices import DEVICES

    if path is None:
        if device is None:
            raise JobError(f"--device is missing, or --cluster FILE; known devices are {', '.join(DEVICES)}")
        return None
    if device is not None:
        raise JobError("--device and --cluster both say what the cluster is; give one")
    section = read_document(path, "cluster file").get("cluster")
    if not isinstance(section, dict):
        raise JobError(
            f"cluster file {path}: cluster is {describe_value(section)}; the mapping that a job file has there is "
            "expected"
        )
    return section


def _set(sections: dict[str, Any], word: str) -> None:
    """Put the KEY=VALUE of `--set` into its section."""
    from mm_autoparallel.api.jobs import change_document

    key, value = parse_change(word)
    sections.update(change_document(sections, {key: value}, Path(f"--set {word}")))


def add_set_argument(parser: argparse.ArgumentParser) -> None:
    """`--set`."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another value of a key of the job file, as search.tp=[1,2,4] or cluster.num_nodes=8; may stand again",
    )


def parse_changes(words: Sequence[str]) -> dict[str, Any]:
    """Keys and values of all `--set`. Raises JobError where one is malformed."""
    return dict(map(parse_change, words))


def parse_change(word: str) -> tuple[str, Any]:
    """KEY and VALUE of a `--set`. Raises JobError where it is malformed, or KEY can be none of a job file."""
    from mm_autoparallel.files import read_document
    from mm_autoparallel.validation import nearest

    name, equals, text = word.partition("=")
    section, dot, key = name.partition(".")
    if not equals or section not in (*_SECTIONS, *_WHOLE) or bool(dot) != (section in _SECTIONS) or (dot and not key):
        hint = nearest(section, (*_SECTIONS, *_WHOLE))
        raise JobError(
            f"--set {word}: KEY=VALUE is expected{hint}; KEY is {', '.join(f'{s}.…' for s in _SECTIONS)} or "
            f"{' or '.join(_WHOLE)}, as in a job file"
        )
    return name, read_document(Path(f"--set {word}"), "the value of", JobError, part=f"value: {text}").get("value")
