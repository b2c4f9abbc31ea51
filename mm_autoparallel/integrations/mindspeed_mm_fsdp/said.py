"""What the YAML of MindSpeed-MM's FSDP trainer says to `lint`: its keys by quantity, and keys that it does not read.

Sizes: params/parallel_args.py and distributed/parallel_state.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mm_autoparallel.files import read_document
from mm_autoparallel.integrations import file_rules as rules
from mm_autoparallel.integrations.config_said import RULES, find_twice, find_unknown, flatten, locate_by, say
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.findings import Finding, Linter
from mm_autoparallel.integrations.mindspeed_mm_fsdp.launch import read_launch
from mm_autoparallel.integrations.mindspeed_mm_fsdp.trainer_yaml import WHAT, read_trainer
from mm_autoparallel.integrations.said_findings import find_sizes

_P = "parallel"
KEYS = {
    "tp": (f"{_P}.tensor_parallel_size", f"{_P}.tp_size"),
    "cp": (f"{_P}.ulysses_parallel_size", f"{_P}.ring_attention_size", f"{_P}.cp_size"),
    "ep": (f"{_P}.expert_parallel_size", f"{_P}.ep_size"),
    "mbs": ("training.micro_batch_size", "training.per_device_train_batch_size"),
    "global_batch_size": ("training.gradient_accumulation_steps",),
    "zero": (f"{_P}.fully_shard_parallel_size", f"{_P}.fsdp_size"),
    "recompute": ("features.recompute", f"{_P}.recompute"),
}
KNOWN = {
    _P: [
        *(key.removeprefix(f"{_P}.") for keys in KEYS.values() for key in keys if key.startswith(_P)),
        *("fsdp_plan", "ep_plan", "tp_plan", "expert_fully_shard_parallel_size", "recompute_plan"),
        *("fsdp_modules", "tp_colwise", "tp_rowwise", "ep_modules", "ep_fsdp_size", "ep_fsdp_modules", "ep_dispatcher"),
        *("cp_type", "recompute_modules", "ignored_modules", "reshard_after_forward", "param_dtype", "reduce_dtype"),
        *("shard_placement_fn", "efsdp_shard_placement_fn", "num_to_forward_prefetch", "num_to_backward_prefetch"),
    ]
}
locate = locate_by(KEYS)


def find(path: Path, given: Given) -> Iterator[Finding]:
    """All findings in the YAML behind `path`, a launch script or that YAML. Raises JobError where it cannot be read."""
    launch = read_launch(path)
    twice = [*find_twice(launch.yaml_path)]
    yield from twice
    if twice:
        return
    fields = dict(flatten(read_document(launch.yaml_path, WHAT)))
    given = replace(given, world_size=given.world_size or launch.world_size)
    said = say(launch.yaml_path, given, fields, KEYS)
    yield from find_unknown(said, fields, KNOWN)
    trainer = read_trainer(launch.yaml_path, launch.checkout)
    sizes = {"cp": trainer.cp, "ep": trainer.ep if trainer.expert_modules else 1, "etp": 1, "tp": 1}
    world, shard = said.number("world_size"), trainer.shard
    numbers = {key: number for key, number in said.numbers.items() if key not in ("global_batch_size", "mbs")}
    said = replace(said, numbers={**numbers, **sizes}, ulysses=trainer.ring == 1)
    yield from find_sizes(said)
    if world and shard and world % shard:
        message = f"{KEYS['zero'][0]} {shard} does not divide {world} devices"
        yield said.found(rules.WORLD, message, "zero", f"{KEYS['zero'][0]}: auto")
    for key in trainer.ignored:
        yield said.found(rules.IDLE, f"{key} is not read by the release in this checkout", key)


LINTER = Linter(RULES, find, locate)
