"""The balancer against other rules and against CP-SAT, on drawn heavy-tailed batches, printed.

    python tests/benchmarks/balancing.py [--draws N] [--seed N]            # rules, and how long a dealing takes
    python tests/benchmarks/balancing.py --exact [--limit SECONDS]         # 24 samples against CP-SAT

`step` is the balancer's over that of equal micro-batches, which is no bound: light micro-batches at both ends shorten
fill and drain. A rule's column is its own step over the balancer's, and behind it in how many draws the balancer's is
the shorter one. Costs are scaled so that the busiest stage of the encoder is as busy as that of the decoder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
from dealing_rules import RULES, Batch
from dealt import draw_samples, roomy_cap
from exact_dealing import solve

from mm_autoparallel import BatchBalancer, Sample, SampleCost

PLACEMENTS = {
    1: ([32], [80]),
    2: ([32, 0], [20, 60]),
    4: ([32, 0, 0, 0], [8, 24, 24, 24]),
    8: ([20, 12, 0, 0, 0, 0, 0, 0], [0, 6, 13, 13, 13, 13, 13, 9]),
}
"""Stages → vision and text layers: those of Qwen2-VL-72B."""

SHAPES = (
    (8, 16, 16, 768),
    (8, 16, 16, 1536),
    (8, 8, 64, 3072),
    (8, 16, 16, 4096),
    (8, 16, 32, 4096),
    (8, 32, 16, 4096),
    (8, 32, 32, 4096),
)
"""Stages, replicas, micro-batches, samples."""

EXACT_SHAPES = ((4, 2, 4), (4, 2, 6), (2, 4, 3), (4, 3, 4), (2, 2, 4))
"""Stages, replicas, micro-batches, of 24 samples."""


def level_cost(samples: Sequence[Sample], num_stages: int) -> SampleCost:
    """Of these samples the encoder's busiest stage is as busy as the decoder's."""
    cost = SampleCost(image_ms=(5e-8, 1e-3, 0.05), token_ms=(1e-6, 0.03))
    vision, text = (np.array(counts) / sum(counts) for counts in PLACEMENTS[num_stages])
    encoder_ms = sum(map(cost.encoder_ms, samples)) * vision.max()
    decoder_ms = sum(map(cost.decoder_ms, samples)) * text.max()
    square, linear, fixed = (figure * decoder_ms / encoder_ms for figure in cost.image_ms)
    return SampleCost((square, linear, fixed), cost.token_ms)


def draw(random: np.random.Generator, num_stages: int, dp: int, micro_batches: int, count: int) -> Batch:
    """A global batch whose micro-batches have room for 1.4 times the mean, or for the longest sample."""
    samples = draw_samples(random, count)
    return Batch(samples, dp, micro_batches, roomy_cap(samples, dp * micro_batches), level_cost(samples, num_stages))


def balancer_of(batch: Batch, num_stages: int) -> BatchBalancer:
    """The balancer of this many stages for the batch."""
    vision, text = PLACEMENTS[num_stages]
    plan = {
        "parallel_config": {"PP": num_stages, "TP": 1, "DP": batch.dp, "MBS": 1},
        "layer_placement": {"vit_layer_placement": vision, "llm_layer_placement": text},
    }
    return BatchBalancer(
        plan, dp=batch.dp, micro_batches=batch.micro_batches, token_cap=batch.token_cap, cost=batch.cost
    )


def equal_step_ms(batch: Batch, balancer: BatchBalancer) -> float:
    """The step of as many micro-batches which are all alike: samples divided as no sample can be."""
    total_ms = [sum(map(of, batch.samples)) for of in (batch.cost.encoder_ms, batch.cost.decoder_ms)]
    each = np.array(total_ms) / (batch.dp * batch.micro_batches)
    return float(balancer.law.replica_steps_ms(np.tile(each, (1, batch.micro_batches, 1)))[0])


def compare(shape: tuple[int, int, int, int], draws: int, seed: int) -> str:
    """A row of the table: means over the draws, and the times of a dealing."""
    random = np.random.default_rng(seed)
    steps, bounds, took_ms, used_ms = [], [], [], []
    others: dict[str, list[float]] = {name: [] for name in RULES}
    for number in range(draws):
        batch = draw(random, *shape)
        balancer = balancer_of(batch, shape[0])
        if not number:
            balancer.assign(batch.samples)  # compiles
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        dealt = balancer.assign(batch.samples)
        took_ms.append(1e3 * (time.perf_counter() - begin_s))
        used_ms.append(1e3 * (time.process_time() - begin_cpu_s))
        steps.append(dealt.predicted_ms / equal_step_ms(batch, balancer))
        bounds.append(dealt.regret)
        for name, rule in RULES.items():
            others[name].append(balancer.evaluate(rule(batch), batch.samples) / dealt.predicted_ms)
    told = [f"{np.mean(of):.2f} ({np.mean(np.array(of) > 1.0):.0%})" for of in others.values()]
    p99_ms, p99_cpu_ms = np.percentile(took_ms, 99), np.percentile(used_ms, 99)
    times = f"{np.median(took_ms):.0f} / {p99_ms:.0f} / {p99_cpu_ms:.0f}"
    name = f"{shape[1]} x {shape[2]}, P {shape[0]}, {shape[3]}"
    return " | ".join(["", name, f"{np.mean(steps):.3f}", f"{np.mean(bounds):.0%}", *told, times, ""]).strip()


def compare_exact(shape: tuple[int, int, int], draws: int, seed: int, limit_s: float) -> list[float]:
    """By which fractions the balancer's steps lie above the best that CP-SAT finds, which begins with them."""
    random = np.random.default_rng(seed)
    regrets = []
    for _ in range(draws):
        batch = draw(random, *shape, 24)
        balancer = balancer_of(batch, shape[0])
        dealt = balancer.assign(batch.samples)
        best = solve(batch, PLACEMENTS[shape[0]], dealt.ranks, limit_s)
        best_ms = min(dealt.predicted_ms, balancer.evaluate(best.ranks, batch.samples))
        regrets.append(dealt.predicted_ms / best_ms - 1.0)
        print(
            f"P {shape[0]}, {shape[1]} x {shape[2]}: {dealt.predicted_ms:.2f} ms, CP-SAT {best_ms:.2f} ms "
            f"(not below {best.bound_ms:.2f}), regret {regrets[-1]:.2%}",
            flush=True,
        )
    return regrets


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--exact", action="store_true", help="24 samples against CP-SAT")
    parser.add_argument("--limit", type=float, default=30.0, metavar="SECONDS", help="of CP-SAT, for each draw")
    arguments = parser.parse_args()
    if arguments.exact:
        regrets = [
            regret
            for shape in EXACT_SHAPES
            for regret in compare_exact(shape, arguments.draws, arguments.seed, arguments.limit)
        ]
        print(f"mean regret {np.mean(regrets):.2%}, largest {np.max(regrets):.2%}, {len(regrets)} draws")
        return
    print("| replicas x micro-batches, stages, samples | step | above bound |", " | ".join(RULES), end=" | ")
    print("ms: median / p99 / p99 of CPU |\n" + "|---" * (len(RULES) + 4) + "|")
    for shape in SHAPES:
        print(compare(shape, arguments.draws, arguments.seed), flush=True)


if __name__ == "__main__":
    main()
