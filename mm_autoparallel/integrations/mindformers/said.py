"""What a pretrain YAML of MindFormers says to `lint`: its keys by quantity, and what goes with what.

micro_batch_num: at least as many as stages (MindSpore, parallel_config of its pipeline). Chunks of a stage count where
pipeline_interleave is on (pretrain_yaml.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path

from mm_autoparallel.errors import PlanError, PlannerError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.config_said import Fields, flatten, make_linter, say
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.file_rules import UNFILLED
from mm_autoparallel.integrations.mindformers.layout import read_layout
from mm_autoparallel.integrations.mindformers.model_section import WHAT
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, read_pretrain, recompute_config
from mm_autoparallel.integrations.mindformers.yaml_keys import PRETRAIN, TEMPLATE_V2, written
from mm_autoparallel.integrations.said import KeyTable, Said

_FORMS = (PRETRAIN, TEMPLATE_V2)


def _of(name: str) -> tuple[str, ...]:
    return tuple(written(path) for form in _FORMS if (path := getattr(form, name)))


_MODELS = _of("model")
KEYS = {
    **{name: _of(name) for name in ("dp", "tp", "pp", "cp", "ep", "mbs", "global_batch_size")},
    "vpp": _of("vp"),
    "micro_batches": _of("num_microbatches"),
    "layers": (*_of("offset"), *_of("pp")),
    "recompute": ("recompute_config.recompute", "recompute_config"),
    "zero": _of("optimizer_parallel"),
    "heads": tuple(f"{model}.{key}" for model in _MODELS for key in ("num_heads", "num_attention_heads")),
    "query_groups": tuple(f"{model}.{key}" for model in _MODELS for key in ("n_kv_heads", "num_key_value_heads")),
    "seq_length": tuple(f"{model}.{key}" for model in _MODELS for key in ("seq_length", "max_length")),
    "positions": tuple(f"{model}.max_position_embeddings" for model in _MODELS),
    "experts": ("moe_config.expert_num", *(f"{model}.n_routed_experts" for model in _MODELS)),
}
KNOWN = {
    "parallel_config": [
        *(path[-1] for one in fields_of(PRETRAIN) if (path := getattr(PRETRAIN, one.name)) and len(path) == 2),
        *("use_seq_parallel", "vocab_emb_dp", "gradient_aggregation_group", "optimizer_shard", "context_parallel_algo"),
        *(
            "expert_model_parallel",
            "ulysses_degree_in_cp",
            "seq_split_num",
            "recompute",
            "select_recompute",
            "mem_coeff",
        ),
    ]
}
"""Of a section that has nothing else, but for what decides no plan."""

_INTERLEAVE = "parallel.pipeline_config.pipeline_interleave"
TABLE = KeyTable(
    idle=((f"{written(PRETRAIN.vp)}!=1", (_INTERLEAVE,)),),
    cancelled=(
        ("parallel_config.use_seq_parallel", f"{written(PRETRAIN.tp)}=1"),
        (f"{written(PRETRAIN.vp)}!=1", f"{written(PRETRAIN.pp)}=1"),
    ),
)


def read_said(path: Path, given: Given) -> tuple[Said, Fields]:
    """What the YAML at `path` says, and its fields. Raises JobError where it cannot be read."""
    fields = dict(flatten(read_document(path, WHAT)))
    said = say(path, given, fields, KEYS, table=TABLE)
    numbers = {**said.numbers, "dp": said.size("dp"), "ranks": said.size("dp") * said.size("tp") * said.size("cp")}
    numbers |= {"etp": 1, "group": said.number("micro_batches") or 1, "divides": 0}
    said = replace(said, numbers=numbers, fills=True)
    try:
        pretrain = read_pretrain(path, given.model_config)
    except PlannerError:
        return said, fields  # import says why
    try:
        layout = read_layout(pretrain)
    except PlanError as failure:
        return replace(said, layers=failure.reason), fields
    layers = tuple(held for row in layout.layers for held in row)
    return replace(said, layers=layers, recompute=tuple(_asked(pretrain, layers))), fields


def _asked(pretrain: Pretrain, layers: tuple[int, ...]) -> Iterator[int]:
    """Layers that each virtual stage is to recompute, as the list stands there; none where it is of another form."""
    value = recompute_config(pretrain).get("recompute")
    rows = value if isinstance(value, list) and all(isinstance(row, list) for row in value) else [value]
    flat = [count for row in rows if isinstance(row, list) for count in row]
    if len(flat) == len(layers) and all(type(count) is int for count in flat):
        yield from flat


LINTER = make_linter(read_said, KEYS, known=KNOWN, more=(UNFILLED,))
