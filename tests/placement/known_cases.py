"""The known-answer problems of tests/fixtures/known_answers as Problems."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Placement, Problem, place_in_modes

FIXTURES = Path(__file__).parents[1] / "fixtures" / "known_answers"
MB = 1e6


@cache
def fixture(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))


def _problem(
    num_stages: int,
    num_chunks: int,
    num_microbatches: int,
    schedule: str,
    chain: tuple[ChainBlock, ...],
    limits: tuple[float, ...],
    **more: Any,
) -> Problem:
    hops = num_stages * num_chunks - 1
    p2p_ms = more.pop("p2p_ms", 0.0)
    return Problem(
        num_stages,
        num_chunks,
        num_microbatches,
        schedule,
        chain,
        limits,
        (0.0,) * num_stages,
        (0.0,) * num_stages,
        (p2p_ms,) * hops,
        (0.0,) * hops,
        **more,
    )


def taylor_case(name: str) -> tuple[Problem, dict[str, Any]]:
    """Units: forward of one expert layer = 1. One chunk is 1f1b; `order` names the interleaved one."""
    case = fixture("taylor")["cases"][name]
    backward, dense, head = case["backward_ratio"], case["layer_ratio"], case["head_loss"]
    extra = (dense, case["recompute_ratio"])
    forward = (dense, 1.0)
    blocks = [
        ChainBlock(
            block,
            "text",
            case[f"{block}_layers"],
            forward[i],
            forward[i] * backward,
            case["static_mb"][i] * MB,
            case["activation_mb"][i] * MB,
            (Mode("recompute", 0.0, extra[i], case["recomputed_mb"][i] * MB),),
        )
        for i, block in enumerate(("dense", "moe"))
    ]
    chain = (*blocks, ChainBlock("head", "text", 1, head, head * backward, layer=False, pinned="last"))
    first, others, last = (limit * MB for limit in case["limit_mb"])
    limits = (first, *[others] * (case["num_stages"] - 2), last)
    interleaved = "interleaved_1f1b" if case["order"] == "default" else "interleaved_1f1b_low_memory"
    schedule = "1f1b" if case["num_chunks"] == 1 else interleaved
    return _problem(case["num_stages"], case["num_chunks"], case["num_microbatches"], schedule, chain, limits), case


def multimodal_case(name: str) -> tuple[Problem, dict[str, Any]]:
    """First and last layers of a modality carry its ends; recompute saves what a plain layer keeps, and restores it
    once."""
    data = fixture("mindspeed_mm_milp")
    case = data["cases"][name]
    profile = data["profiles"][case["profile"]]
    chain = []
    for modality, prefix, count in zip(("vision", "text"), ("vit", "llm"), case["num_layers"], strict=True):
        plain_forward, _, _, plain_kept = profile[prefix]
        for block, n in ((f"{prefix}_pre", 1), (prefix, count - 2), (f"{prefix}_post", 1)):
            forward, backward, static, kept = profile[block]
            modes = (Mode("recompute", 0.0, plain_forward, (kept - plain_kept) * MB, plain_kept * MB),)
            chain.append(ChainBlock(block, modality, n, forward, backward, static * MB, kept * MB, modes))
    limits = (data["memory_limit_mb"] * MB,) * case["num_stages"]
    return _problem(case["num_stages"], 1, case["num_microbatches"], "1f1b", tuple(chain), limits), case


def program_placement(problem: Problem, case: dict[str, Any]) -> Placement:
    """The placement that the mixed-integer program found (it never recomputes on the last stage)."""
    layers: list[list[int]] = [[] for _ in range(problem.num_stages)]
    recompute: list[list[int]] = [[] for _ in range(problem.num_stages)]
    for modality, total in zip(("vision", "text"), case["num_layers"], strict=True):
        begin = 0
        counts = case["milp"][f"{modality}_layers"]
        for stage, (held, again) in enumerate(zip(counts, [*case["milp"][f"{modality}_recompute"], 0], strict=True)):
            ends = [0, 1, total - 1, total]
            for low, high in pairwise(ends):
                n = max(0, min(begin + held, high) - max(begin, low))
                layers[stage].append(n)
                recompute[stage].append(min(n, again))
                again -= recompute[stage][-1]
            begin += held
    return place_in_modes(problem, layers, {"recompute": recompute})


def large_case(name: str) -> tuple[Problem, dict[str, Any]]:
    data = fixture("large")
    case = data["cases"][name]
    blocks = []
    for block, count in (("dense", 3), ("moe", case["moe_layers"])):
        forward, backward, static, kept, extra, checkpoint = data["chain"][block]
        blocks.append(
            ChainBlock(
                block, "text", count, forward, backward, static, kept, (Mode("recompute", 0.0, extra, checkpoint),)
            )
        )
    forward, backward = data["chain"]["head"]
    chain = (*blocks, ChainBlock("head", "text", 1, forward, backward, layer=False, pinned="last"))
    limits = (case["memory_limit_bytes"],) * case["num_stages"]
    problem = _problem(
        case["num_stages"],
        case["num_chunks"],
        case["num_microbatches"],
        case["schedule"],
        chain,
        limits,
        max_layers_per_chunk=case["max_layers_per_chunk"],
    )
    return problem, case
