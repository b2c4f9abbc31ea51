"""Seeded small problems of every kind the planner meets, for the oracle tests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem


def random_problem(seed: int, style: Literal["round", "real", "unequal"] = "round") -> Problem:
    """2 to 4 stages, 1 or 2 chunks, micro-batches below, at and above the stages; memory from none to too tight.

    round: small whole numbers, which tie a lot. real: milliseconds to minutes and gigabytes, as measured figures have
    them. unequal: like round, and micro-batches of unequal duration.
    """
    rng = random.Random(seed)
    real_magnitudes = style == "real"
    num_stages = rng.choice([2, 2, 3, 3, 4])
    num_chunks = rng.choice([1, 1, 2]) if num_stages < 4 else rng.choice([1, 1, 1, 2])
    schedule = (
        rng.choice(["interleaved_1f1b", "interleaved_1f1b_low_memory"])
        if num_chunks > 1
        else rng.choice(["1f1b", "1f1b", "1f1b", "gpipe"])
    )
    num_virtual = num_stages * num_chunks
    num_microbatches = rng.choice(
        [rng.randint(1, num_stages), num_stages, rng.randint(num_stages, 3 * num_stages), 4 * num_stages]
    )
    num_layers = num_virtual + rng.randint(0, 2 if real_magnitudes or num_virtual > 4 else 4)
    time_scale = 10 ** rng.uniform(0, 4.8) if real_magnitudes else 1.0

    def milliseconds() -> float:
        return rng.uniform(0.2, 3.0) * time_scale if real_magnitudes else float(rng.randint(1, 6))

    def size_bytes(low: float, high: float) -> float:
        return float(rng.randint(int(low * 1e6), int(high * 1e6))) if real_magnitudes else float(rng.randint(1, 8))

    kinds = rng.choice([1, 2, 2, 3])
    counts = [1] * kinds
    for _ in range(num_layers - kinds):
        counts[rng.randrange(kinds)] += 1
    shared_group = rng.random() < 0.3
    chain: list[ChainBlock] = []
    if rng.random() < 0.4:
        chain.append(
            ChainBlock(
                "embedding",
                "text",
                1,
                milliseconds() / 2,
                milliseconds() / 2,
                size_bytes(100, 4000),
                layer=False,
                pinned="first",
            )
        )
    for i, count in enumerate(counts):
        activation = size_bytes(50, 900)
        modes: tuple[Mode, ...] = ()
        if rng.random() < 0.8:
            kept = rng.choice([0.0, activation // 4])
            restored = rng.choice([0.0, 0.0, activation - kept])
            modes = (Mode("recompute", 0.0, milliseconds(), kept, restored),)
        chain.append(
            ChainBlock(
                f"kind{i}",
                "vision" if i == 0 and kinds > 1 else "text",
                count,
                milliseconds(),
                milliseconds() * rng.choice([0.0, 1.0, 2.0]),
                size_bytes(100, 3000),
                activation,
                modes,
                recompute_group="shared" if shared_group else None,
                transient_bytes=rng.choice([0.0, 0.0, size_bytes(50, 500)]),
                tail_ms=rng.choice([0.0, 0.0, milliseconds() / 4]),
                output_bytes=rng.choice([0.0, size_bytes(10, 100)]),
                sends_gradient=rng.random() < 0.85,
            )
        )
        if i == 0 and kinds > 1 and rng.random() < 0.3:
            chain.append(
                ChainBlock(
                    "projector",
                    "vision",
                    1,
                    milliseconds() / 3,
                    milliseconds() / 3,
                    size_bytes(10, 100),
                    size_bytes(5, 50),
                    layer=False,
                    attach="previous",
                )
            )
    if rng.random() < 0.5:
        chain.append(
            ChainBlock(
                "head",
                "text",
                1,
                milliseconds(),
                milliseconds(),
                size_bytes(100, 4000),
                size_bytes(50, 900),
                layer=False,
                pinned="last",
            )
        )
    byte = 1e9 if real_magnitudes else 1.0
    hop = rng.choice([0.0, 0.0, milliseconds() / 10])
    per_byte = rng.choice([0.0, milliseconds() / (20 * byte if real_magnitudes else 20)])
    problem = Problem(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        schedule=schedule,
        chain=tuple(chain),
        memory_limit_bytes=(0.0,) * num_stages,
        stage_static_bytes=tuple(rng.choice([0.0, size_bytes(100, 2000)]) for _ in range(num_stages)),
        stage_tail_ms=tuple(rng.choice([0.0, milliseconds() / 5]) for _ in range(num_stages)),
        p2p_ms=(hop,) * (num_virtual - 1),
        p2p_ms_per_byte=tuple(per_byte * rng.choice([1.0, 2.0]) for _ in range(num_virtual - 1)),
        max_layers_per_chunk=rng.choice([None, None, None, max(2, num_layers // num_virtual + 1)]),
    )
    everything = sum(
        b.count * (b.static_bytes + b.transient_bytes / 2 + b.activation_bytes * min(num_stages, num_microbatches))
        for b in chain
    )
    tightness = rng.choice(
        [10.0, 1.6, 1.4, 1.2, 1.1, 1.0, 0.9] if real_magnitudes else [10.0, 1.2, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    )
    limits = tuple(
        everything / num_stages * tightness * rng.uniform(0.9, 1.1) + static for static in problem.stage_static_bytes
    )
    if style == "unequal":
        scales = [tuple(rng.choice([0.5, 1.0, 2.0]) for _ in range(num_microbatches)) for _ in chain]
        problem = replace(
            problem, chain=tuple(replace(b, microbatch_scale=s) for b, s in zip(chain, scales, strict=True))
        )
    return replace(problem, memory_limit_bytes=limits)
