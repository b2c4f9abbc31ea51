"""Plans and samples that the tests of the balancer draw."""

from __future__ import annotations

from typing import Any

import numpy as np

from mm_autoparallel import Sample, SampleCost

COST = SampleCost(image_ms=(2e-7, 4e-3, 0.1), token_ms=(1e-6, 0.02))


def plan_document(vision: list[Any], text: list[Any], dp: int = 2, **more: Any) -> dict[str, Any]:
    """What a result file holds."""
    nested = isinstance(text[0], list)
    sizes = {"PP": len(text[0]) if nested else len(text), "TP": 1, "DP": dp, "MBS": 1}
    sizes |= {"VPP": len(text)} if nested else {}
    return {
        "parallel_config": sizes,
        "layer_placement": {"vit_layer_placement": vision, "llm_layer_placement": text},
        "layer_recompute": {},
        **more,
    }


def draw_samples(random: np.random.Generator, count: int) -> list[Sample]:
    """Up to four images of lognormal patches (median 1,100, at most 16,384), lognormal text (median 400)."""
    samples = []
    for _ in range(count):
        patches = random.lognormal(7.0, 0.9, random.integers(0, 5)).clip(64, 16384)
        samples.append(Sample(tuple(int(p) for p in patches), int(np.clip(random.lognormal(6.0, 0.9), 16, 4096))))
    return samples


def roomy_cap(samples: list[Sample], num_bins: int) -> int:
    """A cap of tokens that leaves room for 1.4 times the mean, or for the longest sample."""
    tokens = [sample.num_tokens() for sample in samples]
    return max(max(tokens), int(1.4 * sum(tokens) / num_bins))
