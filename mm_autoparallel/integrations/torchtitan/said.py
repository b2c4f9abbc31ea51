"""What a configuration of torchtitan says to `lint`: its keys by quantity, and what goes with what, of 0.2 and newer.

Sizes: distributed/parallel_dims.py; rounds of micro-batches: torch's ScheduleInterleaved1F1B.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mm_autoparallel.files import read_text
from mm_autoparallel.integrations.config_files import spell_by
from mm_autoparallel.integrations.config_said import Fields, deal, flatten, make_linter, say
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.file_rules import UNFILLED
from mm_autoparallel.integrations.said import KeyTable, Said
from mm_autoparallel.integrations.toml_text import parse_toml
from mm_autoparallel.integrations.torchtitan.config import (
    KNOWN,
    LENGTH,
    MAIN,
    ROUNDS,
    STEP,
    TOKENS,
    Config,
    counts_tokens,
    read_config,
    read_document,
)
from mm_autoparallel.integrations.torchtitan.read import read_layers
from mm_autoparallel.integrations.torchtitan.written import decide_values

_P, _T = "parallelism", "training"
_SHARDS, _COPIES = f"{_P}.data_parallel_shard_degree", f"{_P}.data_parallel_replicate_degree"
_PARTS, _ROUND, _LOCAL = (
    f"{_P}.module_fqns_per_model_part",
    f"{_P}.pipeline_parallel_microbatch_size",
    f"{_T}.local_batch_size",
)
KEYS = {
    "tp": (f"{_P}.tensor_parallel_degree",),
    "pp": (f"{_P}.pipeline_parallel_degree",),
    "cp": (f"{_P}.context_parallel_degree",),
    "ep": (f"{_P}.expert_parallel_degree",),
    "etp": (f"{_P}.expert_tensor_parallel_degree",),
    "dp": (_SHARDS, _COPIES),
    "mbs": (_ROUND, _LOCAL, f"{_T}.{TOKENS}"),
    "micro_batches": (_LOCAL, f"{_P}.{ROUNDS}", f"{_T}.{TOKENS}"),
    "global_batch_size": (f"{_T}.global_batch_size", f"{_T}.{STEP}"),
    "seq_length": (f"{_T}.seq_len", f"{_T}.{LENGTH}"),
    "layers": (_PARTS, f"{_P}.pipeline_parallel_degree"),
    "recompute": ("activation_checkpoint.mode", "activation_checkpoint", "RECOMPUTED"),
    "zero": (_SHARDS,),
}
_COUNTS = {
    "mbs": f"{_T}.{TOKENS}",
    "micro_batches": f"{_P}.{ROUNDS}",
    "global_batch_size": f"{_T}.{STEP}",
    "seq_length": f"{_T}.{LENGTH}",
}
"""What the newest code says in their place, most in tokens."""
_MENDS = {"global_batch_size": f"{_T}.{STEP}, a multiple of {TOKENS} x {ROUNDS} x DP"}
_LESS = [f"{_P}.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
_PP, _TP = KEYS["pp"][0], KEYS["tp"][0]
TABLE = KeyTable(
    idle=((f"{_P}.pipeline_parallel_schedule_csv", (f"{_P}.pipeline_parallel_schedule=PipelineScheduleMulti",)),),
    cancelled=(
        *((key, _PARTS) for key in (*_LESS, f"{_P}.pipeline_parallel_layers_per_stage")),
        (_PARTS, f"{_PP}=1"),
        (f"{_P}.enable_async_tensor_parallel", f"{_TP}=1"),
    ),
)


def read_said(path: Path, given: Given) -> tuple[Said, Fields]:
    """What the configuration at `path` says, and its fields. Raises JobError where it cannot be read."""
    if path.suffix == ".toml":
        document = parse_toml(read_text(path, "configuration", "TOML"), str(path))
        known = {name: _known_of(document.get(name), KNOWN[name, "0.2"].split()) for name in (_P, _T)}
        config = read_document({**document, **known}, str(path))
        fields = dict(flatten(document))
    else:
        config = read_config(path, given)
        fields = dict(flatten({_P: config.parallelism, _T: config.training}))
    said = _say(path, given, config, fields)
    return (replace(said, keys={**said.keys, **_COUNTS}, mends=_MENDS) if config.version == MAIN else said), fields


def find_version(path: Path) -> str:
    """The generation whose keys the file at `path` has."""
    if path.suffix == ".toml":
        return "0.2"
    return MAIN if counts_tokens(read_text(path, "file", "Python")) else "0.3"


def _known_of(section: object, known: list[str]) -> object:
    """A section without the keys that nobody knows, which have findings of their own."""
    return {key: value for key, value in section.items() if key in known} if isinstance(section, dict) else section


def _say(path: Path, given: Given, config: Config, fields: Fields) -> Said:
    said = say(path, given, fields, KEYS, table=TABLE)
    numbers = dict(said.numbers)
    pp, world = said.size("pp"), said.number("world_size")
    copies, shards = (_whole(fields.get(key)) for key in (_COPIES, _SHARDS))
    rest = said.group * (copies or 1)
    if shards is None and world and world % rest == 0:
        shards = world // rest
    for name in ("dp", "zero"):  # whose keys are not these numbers
        numbers.pop(name, None)
    if shards:
        numbers["dp"] = shards * (copies or 1)
        numbers["ranks"] = shards * said.size("cp") * said.size("tp")
    local = said.number("micro_batches") or 8
    mbs = (_whole(fields.get(_ROUND)) or 1) if pp > 1 else local
    numbers |= {"mbs": mbs, "etp": said.number("etp") or 1, "divides": int(said.size("tp") > 1)}
    numbers.pop("micro_batches", None)
    if pp > 1 and local % mbs == 0:
        rounds = max(1, local // mbs // pp)
        numbers |= {"micro_batches": local // mbs, "group": local // mbs // rounds}
    total = said.number("num_layers")
    where = str(path)
    layers = deal(where, lambda: read_layers(config, where, {"text": total or 0}, pp)["text"]) if total else None
    fills = str(config.parallelism.get("pipeline_parallel_schedule", "1F1B")).upper() == "1F1B"
    return replace(said, numbers=numbers, layers=layers, fills=fills, accumulates=True)


def _whole(value: object) -> int | None:
    """A size; None where it is left out, or is whatever remains (-1)."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


_KNOWN = {section: names.split() for (section, version), names in KNOWN.items() if version == "0.2"}
LINTER = make_linter(read_said, KEYS, spell_by(decide_values, find_version), _KNOWN, (UNFILLED,))
