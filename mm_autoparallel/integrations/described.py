"""Described: what a user's own files say of a training, of whatever framework; Given: what flags add to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.model.job.model import Model


@dataclass(frozen=True)
class Described:
    """What a user's own files say of a training: sections of a job, and what a person must know of them.

    model: path of the model file, or the model itself. workload, search: sections of a job as its file has them.
    world_size: devices that the files ask for; None where they leave it to the machine. notes: a sentence for each
    figure that was assumed. not_searched: in a few words each, what the search space leaves out. adapters: that
    section of a job, None where weights train themselves. keeps_less: flags by which it holds less than is simulated.
    """

    model: Path | Model
    workload: Mapping[str, object]
    search: Mapping[str, object]
    world_size: int | None = None
    notes: tuple[str, ...] = ()
    not_searched: tuple[str, ...] = ()
    adapters: Mapping[str, object] | None = None
    keeps_less: tuple[str, ...] = ()


@dataclass(frozen=True)
class Given:
    """What a person says beside the files, None where they say nothing.

    model_config: the config.json that has the model's sizes. image_tokens, images: of a sample, after merging, and how
    many images those are. world_size: devices that are planned for. max_vpp: chunks of a stage that are tried, at most.
    vocab_size: tokens of the vocabulary, where the tokenizer alone says it. beside: further files of the training.
    seq_length, global_batch_size, micro_batch_size: where the files leave them to the training's code. device: by its
    name in the catalog, for rules of `lint` that hold on some. entry: which configuration of a file with several.
    """

    model_config: Path | None = None
    image_tokens: int | None = None
    images: int | None = None
    world_size: int | None = None
    max_vpp: int | None = None
    vocab_size: int | None = None
    beside: tuple[Path, ...] = ()
    seq_length: int | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    device: str | None = None
    entry: str | None = None
