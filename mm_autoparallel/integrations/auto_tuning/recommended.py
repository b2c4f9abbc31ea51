"""What Auto Tuning prints at its end: the recommended configurations, a line for each of their figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.units import MIB

TITLE = "The recommended configs are:"
PERFORMANCE, MEMORY = "Performance", "Memory"
TRAINED, BY_TRIAL = "Trained Performance", "Performance by trial"
"""Of the plan itself, and as planned times what training its cut took over what that was planned to take."""


@dataclass(frozen=True)
class Recommended:
    """A plan with what is known of it.

    mc2: fused products and transfers hide tensor parallel traffic. token_rearrange: tokens of experts are sorted once.
    trained_ms: of a step as it was trained. by_trial_ms: as follows from training a cut of it (cut.py). None: neither.
    """

    plan: Plan
    step_ms: float
    peak_bytes: float
    mc2: bool = False
    token_rearrange: bool = False
    trained_ms: float | None = None
    by_trial_ms: float | None = None


def format_recommended(configs: Sequence[Recommended]) -> str:
    """The block as a whole, its names padded to 30 characters and its values to 40, as upstream has them."""
    return "".join(f"{line}\n" for line in _list_lines(configs))


def _list_lines(configs: Sequence[Recommended]) -> Iterator[str]:
    yield TITLE
    for number, config in enumerate(configs, start=1):
        yield f"<==========Top #{number} config==========>"
        for name, value in describe(config).items():
            yield f"{name:<30}{value:<40}"


def describe(config: Recommended) -> Mapping[str, str]:
    """Name → value of each line. Layers that recompute are those of the whole model: stages need not be alike."""
    strategy, recompute = config.plan.strategy, config.plan.recompute
    values = {
        "Data Parallel Size": strategy.dp,
        "Tensor Parallel Size": strategy.tp,
        "Pipeline Parallel Size": strategy.pp,
        "Virtual Pipeline Size": strategy.vpp,
        "Context Parallel Size": strategy.cp,
        "Expert Parallel Size": strategy.ep,
        "ZeRO1": strategy.zero >= 1,
        "MC2": config.mc2,
        "Token Rearrange": config.token_rearrange,
        "Micro Batch Size": strategy.mbs,
        "Recompute layer": sum(map(sum, recompute.values())),
        PERFORMANCE: f"{config.step_ms:.3f} ms",
        MEMORY: f"{config.peak_bytes / MIB:.1f} MB",
    }
    for name, known_ms in ((TRAINED, config.trained_ms), (BY_TRIAL, config.by_trial_ms)):
        if known_ms is not None:
            values[name] = f"{known_ms:.3f} ms"
    return {name: str(value) for name, value in values.items()}
