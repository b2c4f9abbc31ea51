"""`data stats FILE...`: how uneven the samples of a data set are, and a compact sample file of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from mm_autoparallel.cli.arguments import count
from mm_autoparallel.cli.output import print_document, print_parts
from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.terminal import check_writable, say, writing

HELP = "count the samples of a data set: images, patches, tokens, and how much they differ"
DESCRIPTION = (
    "Count images, patches, audio and tokens of the samples in FILE...: JSONL, CSV, parquet (Hugging Face), a list in "
    "JSON (LLaVA's conversations), MindSpeed-MM's data.json, WebDataset's tar. Figures: mean, p50, p95, p99, the most, "
    "and standard deviation over mean; with a job also what encoders and decoder take."
)


def _characters(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of characters from 0.1 to 100")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("what", choices=("stats",), metavar="stats")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--job", type=Path, metavar="JOB", help="whose model cuts images into patches, and its costs")
    parser.add_argument("--patch-size", type=count, metavar="N", help="pixels of a patch's side, where FILE has pixels")
    parser.add_argument(
        "--merge", type=count, default=2, metavar="N", help="patches a side that become one token, without a job"
    )
    parser.add_argument("--max-pixels", type=count, metavar="N", help="larger images are scaled down to so many")
    parser.add_argument("--images", type=Path, metavar="DIR", help="the folder of images that FILE names without sizes")
    parser.add_argument(
        "--characters-per-token", type=_characters, metavar="X", help="of text whose tokens nobody has counted"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="OUT.jsonl",
        help="write the samples as a compact sample file, that of JOB where it has none yet",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def _check_out(out: Path | None) -> None:
    """Raises JobError where the samples cannot be written there."""
    from mm_autoparallel.files import is_there

    if out is None:
        return
    if out.suffix.lower() != ".jsonl":
        raise JobError(f"--out {out}: a compact sample file is JSONL; name it .jsonl")
    if is_there(out):
        raise JobError(f"{out} is there already and stays as it is; give another file with --out, or move it")
    check_writable(out)


def run(arguments: argparse.Namespace) -> int:
    """Count, write, print."""
    from mm_autoparallel.api.jobs import read_job
    from mm_autoparallel.api.samples import count_for, count_samples, is_waiting
    from mm_autoparallel.files import is_folder
    from mm_autoparallel.samples.rules import SampleRules

    _check_out(arguments.out)
    rules = SampleRules(
        patch_size=arguments.patch_size,
        merge_side=arguments.merge,
        most_pixels=arguments.max_pixels,
        characters_count_per_token=arguments.characters_per_token,
    )
    out: Path | None = arguments.out
    told = f"wrote {out}" if out is None or is_folder(out.parent) else f"wrote {out}, and made its folder"
    if out is not None and arguments.job is not None and is_waiting(arguments.job, out):
        with writing(out):
            found = count_for(arguments.job, out, arguments.files, rules, arguments.images)
    else:
        job = None if arguments.job is None else read_job(arguments.job)
        found = count_samples(arguments.files, rules, job, arguments.images)
        if out is not None:
            with writing(out):
                found.write(out)
    if out is not None:
        say(told)
    if arguments.json:
        print_document(found.document())
    else:
        print_parts(found.renderables())
    return 0
