"""The YAML of another division of the same model: the user's text with the keys changed that must be, and no others.

Where other keys repeat a number that changes (`dataset_strategy`, callbacks), by an anchor or by itself, they follow.
"""

from __future__ import annotations

from typing import Any

from mm_autoparallel.integrations.mindformers.decoder import layers_key
from mm_autoparallel.integrations.mindformers.layout import Layout, layout_changes
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
from mm_autoparallel.integrations.yaml_text import KeyPath, edit_yaml, set_yaml_values

PROFILING: dict[KeyPath, Any] = {
    ("profile",): True,
    ("init_start_profile",): True,
    ("profile_communication",): True,
    ("profile_memory",): True,
    ("op_time",): True,
    ("profile_level",): 1,
    ("profile_start_step",): 4,
    ("profile_stop_step",): 6,
}
"""Keys of MindFormers' profiler: two steps behind the first, which still compile (the values of Taylor's ND search)."""


def format_divided(
    pretrain: Pretrain,
    divided: Pretrain,
    layout: Layout,
    profile_output: str | None = None,
    dataset: str | None = None,
) -> str:
    """The text of `pretrain` for the sizes of `divided` (another division of it) and `layout`.

    profile_output: where a profile of it goes; None: it is not profiled. dataset: in place of the data set that it
    names. Raises JobError where the text is written so that an edit would change more, or it names no data set.
    """
    keys = pretrain.keys
    pairs: tuple[tuple[KeyPath | None, int | bool, int | bool], ...] = (
        (keys.dp, pretrain.dp, divided.dp),
        (keys.tp, pretrain.tp, divided.tp),
        (keys.pp, pretrain.pp, divided.pp),
        (keys.ep, pretrain.ep, divided.ep),
        (keys.cp, pretrain.cp, divided.cp),
        (keys.num_microbatches, pretrain.num_microbatches, divided.num_microbatches),
        (keys.global_batch_size, pretrain.global_batch_size, divided.global_batch_size),
        (keys.optimizer_parallel, pretrain.optimizer_parallel, divided.optimizer_parallel),
        (keys.mbs, pretrain.mbs, divided.mbs),
        (keys.vp, pretrain.vp, divided.vp),
        (
            (*keys.model, layers_key(pretrain.model)),
            pretrain.num_layers - pretrain.mtp_depth,
            divided.num_layers - divided.mtp_depth,
        ),
    )
    changes: dict[KeyPath, Any] = {path: new for path, old, new in pairs if path is not None and old != new}
    changes |= layout_changes(divided, layout)
    if divided.vp > 1:  # pp_interleave_num alone runs one chunk a stage
        changes["parallel", "pipeline_config", "pipeline_interleave"] = True
    if profile_output is not None:
        changes |= PROFILING | {("profile_output",): profile_output}
    if dataset is not None:
        changes[_dataset_path(pretrain)] = dataset
    text, document = edit_yaml(pretrain.text, changes, aliases_follow=True)
    repetitions = _repetitions(document, pretrain, divided)
    return set_yaml_values(text, repetitions) if repetitions else text


def _dataset_path(pretrain: Pretrain) -> KeyPath:
    node: Any = pretrain.document
    path: KeyPath = ("train_dataset", "data_loader", "dataset_dir")
    for key in path:
        if not isinstance(node, dict) or key not in node:
            raise pretrain.error(
                ".".join(map(str, path)), "is missing, so its loader takes its data elsewhere; leave --dataset out"
            )
        node = node[key]
    return path


def _repetitions(document: dict[str, Any], pretrain: Pretrain, divided: Pretrain) -> dict[KeyPath, Any]:
    """Values that still repeat what `pretrain` said: dataset_strategy's data parallel ranks, numbers of callbacks."""
    changes: dict[KeyPath, Any] = {}
    parallel = document.get("parallel")
    strategy = parallel.get("dataset_strategy") if isinstance(parallel, dict) else None
    if isinstance(strategy, list) and all(isinstance(entry, list) and entry for entry in strategy):
        followed = [[divided.dp if entry[0] == pretrain.dp else entry[0], *entry[1:]] for entry in strategy]
        if followed != strategy:
            changes["parallel", "dataset_strategy"] = followed
    numbers = {
        "num_layers": (pretrain.num_layers - pretrain.mtp_depth, divided.num_layers - divided.mtp_depth),
        "micro_batch_num": (pretrain.num_microbatches, divided.num_microbatches),
    }
    callbacks = document.get("callbacks")
    for index, callback in enumerate(callbacks if isinstance(callbacks, list) else ()):
        for key, (old, new) in numbers.items():
            if isinstance(callback, dict) and callback.get(key) == old != new:
                changes["callbacks", index, key] = new
    return changes
