"""What keywords of Colossal-AI's plugin say to `lint`: by quantity, and what goes with what (0.5).

Pairs: the constructor's assertions (booster/plugin/hybrid_parallel_plugin.py); micro-batches: pipeline/schedule/.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.colossalai.read import (
    CHECKPOINTS,
    COUNTS,
    KEYWORDS,
    read_counts,
    read_keywords,
    read_layers,
)
from mm_autoparallel.integrations.colossalai.written import decide_values
from mm_autoparallel.integrations.config_files import spell_by
from mm_autoparallel.integrations.config_said import BATCHES, Fields, deal, flatten, make_linter, say
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.file_rules import UNFILLED
from mm_autoparallel.integrations.said import KeyTable, Said

KEYS = {
    "tp": ("tp_size",),
    "pp": ("pp_size",),
    "cp": ("sp_size",),
    "vpp": ("num_model_chunks",),
    "mbs": ("microbatch_size",),
    "micro_batches": ("num_microbatches",),
    "zero": ("zero_stage",),
    "layers": ("num_layers_per_stage", "pp_size"),
    "recompute": (f"{CHECKPOINTS}.{COUNTS}", CHECKPOINTS),
    "optimizer_offload": ("cpu_offload",),
}
KNOWN = {"": KEYWORDS.split()}
_DIVIDES, _MODE = "enable_sequence_parallelism", "sequence_parallelism_mode"
TABLE = KeyTable(
    exclusive=(
        ("pp_style=1f1b", "num_model_chunks!=1"),
        ("pp_style=interleaved", "num_model_chunks=1"),
        (f"{_MODE}=split_gather|ring", "tp_size=1"),
    ),
    needed=(("sp_size!=1", (_DIVIDES,)),),
    idle=(
        (_MODE, (_DIVIDES,)),
        ("cpu_offload", ("zero_stage=1|2",)),
    ),
    cancelled=(("num_model_chunks!=1", "pp_size=1"),),
)


def read_said(path: Path, given: Given) -> tuple[Said, Fields]:
    """What the keywords at `path` say, and they themselves. Raises JobError where they cannot be read."""
    keywords = read_keywords(path)
    fields = dict(flatten(keywords))
    mode = keywords.get(_MODE) or "all_to_all"
    shares = keywords.get(_DIVIDES) is True and mode in ("all_to_all", "ring_attn")
    divides = int(keywords.get(_DIVIDES) is True and mode == "split_gather")
    numbers = {"divides": divides, **({} if shares else {"cp": 1})}
    said = replace(
        say(path, given, fields, KEYS, numbers, table=TABLE, takes=BATCHES), most_zero=1, ulysses=mode == "all_to_all"
    )
    total, pp, vpp = said.number("num_layers"), said.size("pp"), said.size("vpp") if said.size("pp") > 1 else 1
    layers = deal(str(path), lambda: read_layers(keywords, str(path), total or 0, pp, vpp)) if total else None
    section = keywords.get(CHECKPOINTS)
    again: tuple[int, ...] = ()
    if isinstance(layers, tuple) and isinstance(section, dict):
        try:
            again = read_counts(section.get(COUNTS), len(layers), str(path), COUNTS)
        except PlanError:
            again = ()  # of another length, which import says
    ulysses = mode == "all_to_all"
    return replace(said, layers=layers, recompute=again, fills=True, most_zero=1, ulysses=ulysses), fields


LINTER = make_linter(read_said, KEYS, spell_by(decide_values), KNOWN, (UNFILLED,))
