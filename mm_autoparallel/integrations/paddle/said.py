"""What arguments of PaddleFormers' or PaddleNLP's trainer say to `lint`: by quantity, and what goes with what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.config_files import spell_by
from mm_autoparallel.integrations.config_said import Fields, deal, flatten, make_linter, say
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.paddle.names import (
    FORMERS,
    GRANULARITY,
    KNOWN,
    MBS,
    NLP,
    SEGMENTS,
    SEQUENCE,
    SHARDING,
    SIZES,
    STEPS,
)
from mm_autoparallel.integrations.paddle.read import deal_layers
from mm_autoparallel.integrations.paddle.written import decide_values
from mm_autoparallel.integrations.said import KeyTable, Said


def _of(size: str) -> tuple[str, ...]:
    return tuple(names[size] for names in SIZES.values())


KEYS = {
    "tp": _of("tp"),
    "pp": _of("pp"),
    "vpp": _of("vpp"),
    "cp": _of("sep"),
    "ep": _of("ep"),
    "etp": _of("etp"),
    "mbs": (MBS,),
    "micro_batches": (STEPS,),
    "seq_length": ("max_seq_len", "max_seq_length"),
    "zero": (SHARDING,),
    "layers": (SEGMENTS, *_of("pp")),
    "recompute": (GRANULARITY, "recompute"),
}
KNOWN_KEYS = {"": KNOWN}
TABLE = KeyTable(
    exclusive=(("bf16", "fp16"), *((SIZES[FORMERS][size], SIZES[NLP][size]) for size in ("tp", "pp"))),
    cancelled=(
        *((SEQUENCE, f"{key}=1") for key in _of("tp")),
        (GRANULARITY, "recompute=false"),
        *((key, f"{pp}=1") for key, pp in zip(_of("vpp"), _of("pp"), strict=True)),
    ),
)


def read_said(path: Path, given: Given) -> tuple[Said, Fields]:
    """What the arguments at `path` say, and they themselves. Raises JobError where they cannot be read."""
    arguments = read_document(path, "arguments")
    fields = dict(flatten(arguments))
    said = say(path, given, fields, KEYS, table=TABLE)
    kind = str(fields.get(SHARDING) or "")
    zero = int(kind[-1]) if kind.startswith("stage") and kind[-1:].isdigit() else int(fields.get(SHARDING) is True)
    numbers = {**said.numbers, "zero": zero, "etp": said.number("etp") or 1}
    numbers["divides"] = int(said.holds(SEQUENCE))
    total, pp = said.number("num_layers"), said.size("pp")
    vpp = said.size("vpp") if pp > 1 else 1
    layers = deal(str(path), lambda: deal_layers(arguments, total or 0, pp, vpp, str(path))) if total else None
    mends = {"zero": f"{SHARDING}: stage1"}
    return replace(said, numbers=numbers, layers=layers, mends=mends, most_zero=1, ulysses=True), fields


LINTER = make_linter(read_said, KEYS, spell_by(decide_values), KNOWN_KEYS)
