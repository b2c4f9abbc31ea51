"""What Megatron-LM's arguments say of experts' exchange and of graphs, by the words that jobs and strategies have.

Names, defaults and what goes with what: megatron/core/transformer/transformer_config.py; --moe-fb-overlap is
MindSpeed's (features_manager/moe/fb_overlap.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mm_autoparallel.model.job.stacks import Dispatcher, Graphs
from mm_autoparallel.model.job.workload import Overlap

DISPATCHER = "moe_token_dispatcher_type"
SHARED_OVERLAP = "moe_shared_expert_overlap"
_BATCH_OVERLAPS = ("overlap_moe_expert_parallel_comm", "moe_fb_overlap")
_BACKENDS: dict[str, Dispatcher] = {"deepep": "deepep", "hybridep": "hybridep"}
_UNKNOWN = ("allgather", "alltoall_seq")
"""Dispatchers that no job names: nothing is then said of how tokens travel."""

_OLD_GRAPHS = ("enable_cuda_graph", "external_cuda_graph")
_IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")
_SCOPES = ("cuda_graph_scope", "cuda_graph_modules")


@dataclass(frozen=True)
class MegatronChoices:
    """Empty, or none: the arguments do not say."""

    dispatcher: Dispatcher = ""
    graphs: Graphs = ""
    overlap: Overlap = "none"


def read_megatron_choices(arguments: Mapping[str, Any]) -> MegatronChoices:
    """The choices of `arguments`, whose keys are names of flags with dashes or underscores.

    Raises ValueError, naming the argument, where it is not understood or goes with none of the others.
    """
    plain = {key.lstrip("-").replace("-", "_"): value for key, value in arguments.items()}
    return MegatronChoices(_read_dispatcher(plain), _read_graphs(plain), _read_overlap(plain))


def _read_dispatcher(plain: Mapping[str, Any]) -> Dispatcher:
    kind = plain.get(DISPATCHER)
    if plain.get("moe_enable_deepep") is True and kind != "flex":
        raise ValueError(f"moe_enable_deepep goes with {DISPATCHER} flex alone, which is {kind}")
    if kind == "flex":
        backend = plain.get("moe_flex_dispatcher_backend") or "deepep"
        if backend not in _BACKENDS:
            raise ValueError(f"moe_flex_dispatcher_backend is {backend}; known are {', '.join(_BACKENDS)}")
        return _BACKENDS[backend]
    if kind is None or kind in _UNKNOWN:
        return ""
    if kind != "alltoall":
        raise ValueError(f"{DISPATCHER} is {kind}; known are alltoall, flex, {', '.join(_UNKNOWN)}")
    return "alltoall"


def _read_graphs(plain: Mapping[str, Any]) -> Graphs:
    implementation = plain.get("cuda_graph_impl")
    if implementation is None:
        return "partial" if any(plain.get(name) is True for name in _OLD_GRAPHS) else ""
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"cuda_graph_impl is {implementation}; known are {', '.join(_IMPLEMENTATIONS)}")
    if implementation == "none":
        return "none"
    whole = implementation == "full_iteration" or any("full_iteration" in str(plain.get(key)) for key in _SCOPES)
    return "full" if whole else "partial"


def _read_overlap(plain: Mapping[str, Any]) -> Overlap:
    by_batches = next((name for name in _BATCH_OVERLAPS if plain.get(name) is True), None)
    if by_batches and plain.get(SHARED_OVERLAP) is True:
        raise ValueError(f"{by_batches} and {SHARED_OVERLAP} are both given; Megatron-LM takes one of the two")
    if by_batches:
        return "micro_batches"
    return "shared_experts" if plain.get(SHARED_OVERLAP) is True else "none"
