"""`data stats FILE...`: how uneven the samples of a data set are, and a compact sample file of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from mm_autoparallel.cli.arguments import count
from mm_autoparallel.cli.output import print_document, print_parts
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
    parser.add_argument("--out", type=Path, metavar="OUT.jsonl", help="write the samples as a compact sample file")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Count, write, print."""
    from mm_autoparallel.api.jobs import read_job
    from mm_autoparallel.api.samples import count_samples
    from mm_autoparallel.samples.record import SampleRules

    if arguments.out is not None:
        check_writable(arguments.out)
    rules = SampleRules(
        patch_size=arguments.patch_size,
        merge_side=arguments.merge,
        most_pixels=arguments.max_pixels,
        characters_count_per_token=arguments.characters_per_token,
    )
    job = None if arguments.job is None else read_job(arguments.job)
    found = count_samples(arguments.files, rules, job, arguments.images)
    if arguments.out is not None:
        with writing(arguments.out):
            found.write(arguments.out)
        say(f"wrote {arguments.out}")
    if arguments.json:
        print_document(found.document())
    else:
        print_parts(found.renderables())
    return 0
