"""What a person says to `import` and `lint` beside launch files: the same options, read the same way."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mm_autoparallel.cli.arguments import count

if TYPE_CHECKING:
    from mm_autoparallel.integrations.described import Given


def add_given(parser: argparse.ArgumentParser) -> None:
    """Options of the framework, the cluster, the model and its samples."""
    parser.add_argument("--from", dest="framework", metavar="NAME", help="the framework (default: told by the file)")
    parser.add_argument("--entry", metavar="NAME", help="which configuration, of a file that has several")
    parser.add_argument("--device", metavar="NAME", help="the device of the cluster, by its name in the catalog")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="a job file whose cluster is meant instead")
    parser.add_argument("--world-size", type=count, metavar="N", help="devices, where only the machine knows")
    parser.add_argument("--model", type=Path, metavar="FILE", help="the model's own file, where flags do not say it")
    parser.add_argument("--vocab-size", type=count, metavar="N", help="tokens, where the tokenizer alone says it")
    parser.add_argument("--seq-length", type=count, metavar="N", help="tokens of a sample, where no file says it")
    parser.add_argument("--global-batch-size", type=count, metavar="N", help="samples of a step, where no file says it")
    parser.add_argument("--micro-batch-size", type=count, metavar="N", help="MBS, where no file says it")
    parser.add_argument("--image-tokens", type=count, metavar="N", help="text tokens of a sample's images")
    parser.add_argument("--images", type=count, metavar="N", help="images of a sample (default: 1)")


def read_given(arguments: argparse.Namespace, beside: Sequence[Path] = ()) -> Given:
    """What the options say. beside: further files of the training."""
    from mm_autoparallel.integrations.described import Given

    return Given(
        arguments.model,
        arguments.image_tokens,
        arguments.images,
        arguments.world_size,
        vocab_size=arguments.vocab_size,
        beside=tuple(beside),
        seq_length=arguments.seq_length,
        global_batch_size=arguments.global_batch_size,
        micro_batch_size=arguments.micro_batch_size,
        entry=arguments.entry,
    )
