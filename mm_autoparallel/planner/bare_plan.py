"""A plan by itself, without the job that it was made for: what its file alone says, and what is then to be believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import read_document
from mm_autoparallel.model.job.sharding import stage_reason
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.schedules.catalog import GIVEN, SCHEDULES
from mm_autoparallel.planner.plan import Plan, parse_strategy
from mm_autoparallel.planner.plan_lists import (
    Refused,
    by_modality,
    check_modes,
    check_order,
    modality_of,
    parse_integer,
    parse_list,
    parse_mapping,
    parse_modes,
    parse_orders,
)


def read_bare_plan(path: Path) -> Plan:
    """The plan in the result file at `path`; its parts are those that hold layers, the global batch is the file's own.

    What needs the model (heads, vocabulary, experts) is not checked. Raises PlanError where a key is missing or
    malformed, or sizes, lists and batch contradict each other.
    """
    return parse_bare_plan(read_document(path, "plan", PlanError), f"plan {path}")


def parse_bare_plan(document: dict[str, Any], where: str) -> Plan:
    """The plan of a result file's content, called `where` in messages. Raises PlanError as `read_bare_plan`."""
    try:
        return _parse(document)
    except Refused as refusal:
        raise PlanError(str(refusal), where=where) from None


def _parse(document: dict[str, Any]) -> Plan:
    strategy = parse_strategy(document)
    if strategy.schedule not in (*SCHEDULES, GIVEN):
        raise Refused(f"schedule {strategy.schedule!r} is not known; known are {', '.join(SCHEDULES)}")
    if reason := stage_reason(strategy.zero):
        raise Refused(reason)
    if "global_batch_size" not in document:
        raise Refused("global_batch_size is missing; give it there, or the job with --job")
    batch = parse_integer(document["global_batch_size"], "global_batch_size", least=1)
    if batch % (strategy.dp * strategy.mbs):
        raise Refused(f"global_batch_size {batch} is no multiple of DP {strategy.dp} x MBS {strategy.mbs}")
    ranks = strategy.tp * strategy.cp * strategy.dp
    if ranks % (strategy.ep * strategy.expert_tp):
        raise Refused(f"EP {strategy.ep} x ETP {strategy.expert_tp} does not divide the {ranks} ranks of TP x CP x DP")
    layers = _parse_lists(document, "placement", strategy)
    held = {modality: counts for modality, counts in layers.items() if any(counts)}
    if "text" not in held:
        raise Refused("layer_placement.llm_layer_placement holds no layers")
    check_order(held, strategy)
    found = _parse_lists(document, "recompute", strategy)
    recompute = {modality: found.get(modality, (0,) * len(counts)) for modality, counts in held.items()}
    modes = by_modality(parse_modes(document, strategy))
    for modality, counts in held.items():
        check_modes(modality, counts, recompute[modality], modes.get(modality, {}), strategy)
    return Plan(strategy, held, recompute, batch, modes=modes, orders=parse_orders(document, strategy))


def _parse_lists(document: dict[str, Any], what: str, strategy: Strategy) -> dict[str, tuple[int, ...]]:
    """Modality → its numbers, text last whatever stands before it in the file."""
    section, ending = f"layer_{what}", f"_layer_{what}"
    found = {
        modality_of(key.removesuffix(ending)): parse_list(value, f"{section}.{key}", strategy, what == "recompute")
        for key, value in parse_mapping(document, section).items()
        if key.endswith(ending)
    }
    return {name: found[name] for name in sorted(found, key=lambda name: name == "text")}
