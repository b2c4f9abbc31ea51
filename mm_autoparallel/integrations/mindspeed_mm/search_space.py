"""Which plans are searched for a MindSpeed-MM script, and which are not: what its code and its own flags can run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mm_autoparallel.integrations.mindspeed_mm import flags
from mm_autoparallel.integrations.mindspeed_mm.arguments import find_argument, find_size, find_switch
from mm_autoparallel.integrations.mindspeed_mm.refusals import find_dispatcher
from mm_autoparallel.model.job.model import Model

MICRO_BATCHES = (1, 2, 4, 8)
"""Sizes that are tried, and so profiled, beside the script's own. Assumed: larger ones add little beyond these."""

IMPLEMENTATION, LOCAL = "--transformer-impl", "local"
"""Without it MindSpeed from 26.0 on leaves attention to each rank's own tokens (checkout.py)."""
NO_OVERLAP = "--no-overlap-p2p-communication"


@dataclass(frozen=True)
class SearchSpace:
    """limits: `search` of a job. workload: what goes with them there. told: what is not searched, in a few words."""

    limits: dict[str, Any]
    workload: dict[str, Any]
    told: tuple[str, ...]


def list_limits(
    arguments: Sequence[str], document: dict[str, Any], model: Model, max_vpp: int | None = None
) -> SearchSpace:
    """The space for a script with `arguments` and the model.json `document`, read as `model`.

    max_vpp: the most chunks a stage, as a person has asked for; None for as many as the script has. Of experts every
    size that divides them; CP where the script has Ulysses; a tower that MindSpeed-MM cannot divide between stages
    under sequence parallel is tried without it too. Raises JobError where an argument is no number.
    """
    limits: dict[str, Any] = {"zero": (int(find_switch(arguments, flags.SHARDED_OPTIMIZER)),)}
    workload: dict[str, Any] = {}
    told = []
    own = find_size(arguments, flags.MICRO_BATCH)
    limits["mbs"] = tuple(sorted({*MICRO_BATCHES, own}))
    told.append(f"MBS other than {', '.join(map(str, limits['mbs']))}")
    experts = model.text.layers.experts
    if experts:
        limits["ep"] = tuple(n for n in range(1, experts.num_experts + 1) if experts.num_experts % n == 0)
        dispatcher = find_dispatcher(document, find_argument(arguments, flags.DISPATCHER))
        if dispatcher is None:
            told.append("ETP other than TP")
        else:
            limits["pp"] = (1,)
            told.append(
                f"PP above 1 (Megatron refuses the token dispatcher {dispatcher} beside --variable-seq-lengths, which "
                "a pipeline needs; with --moe-token-dispatcher-type alltoall it is searched)"
            )
    elif any(encoder.layers.packed for encoder in model.encoders):
        limits["sequence_parallel"] = (True, False)
    if model.text.layers.delta:
        limits["pp"] = (1,)
        told.append("PP above 1 (its layers are dealt out evenly, its tower stays on the first stage)")
    limits["cp"] = _context_sizes(arguments, model)
    if limits["cp"] == (1,):
        needed = f"{flags.CONTEXT_KIND} {flags.ALL_TO_ALL} and {IMPLEMENTATION} {LOCAL}"
        told.append(f"CP above 1 (it is where the script has {flags.CONTEXT} above 1 with {needed})")
    else:
        workload["context_parallel"] = "all_to_all"
    limits["max_vpp"] = max_vpp or find_size(arguments, flags.CHUNKS)
    if limits["max_vpp"] == 1:
        told.append("VPP above 1 (--auto-parallel-max-vpp N asks for it)")
    elif find_switch(arguments, NO_OVERLAP):
        limits["max_vpp"] = 1
        told.append(f"VPP above 1 (without overlap MindSpeed-MM asks for PP 3 or more: take {NO_OVERLAP} out)")
    return SearchSpace(limits, workload, tuple(told))


def _context_sizes(arguments: Sequence[str], model: Model) -> tuple[int, ...]:
    """Divisors of all parts' heads, of which Ulysses gives each rank whole ones; 1 alone where it is not asked for."""
    kinds = (find_argument(arguments, flags.CONTEXT_KIND), find_argument(arguments, IMPLEMENTATION))
    if find_size(arguments, flags.CONTEXT) == 1 or kinds != (flags.ALL_TO_ALL, LOCAL):
        return (1,)
    heads = math.gcd(*(modality.layers.num_heads for modality in model.modalities))
    return tuple(n for n in range(1, heads + 1) if heads % n == 0)
