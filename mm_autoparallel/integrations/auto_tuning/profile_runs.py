"""Their profile runs: what Auto Tuning measures on the devices at hand before it models anything, each a training.

Every run trains as many layers as it has stages, with micro-batches of one sample, ZeRO 1 and whole blocks recomputed.
Beyond 32 devices nothing is recorded of which sizes it takes; the base stays at TP 8 here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.auto_tuning.space import Laws

WIDEST, NUM_EXPERTS = 8, 4
LONGEST_TOKENS, LEAST_TOKENS = 32768, 2048
"""Of a profiled sequence, and of a context parallel rank's part of it."""


@dataclass(frozen=True)
class ProfileRun:
    """One training that is measured. mc2: fused products and transfers. ep: None without experts."""

    tp: int
    dp: int
    seq_length: int
    pp: int = 1
    cp: int = 1
    mc2: bool = False
    ep: int | None = None

    @property
    def name(self) -> str:
        """Its folder below the work folder."""
        experts = "" if self.ep is None else f"_{self.ep}ep_{NUM_EXPERTS}experts"
        fused = "_mc2" if self.mc2 else ""
        sizes = f"{self.tp}tp_{self.dp}dp_{self.pp}pp_{self.cp}cp_1mbs"
        return f"auto_tuning_profiling_{sizes}{experts}{fused}_{self.seq_length}seq"


def list_profile_runs(laws: Laws, num_devices: int, seq_length: int, has_experts: bool) -> tuple[ProfileRun, ...]:
    """The runs on `num_devices`, in their order. Raises JobError where these are no multiple of four."""
    if num_devices < 4 or num_devices % 4:
        raise JobError(f"Auto Tuning profiles on a multiple of four devices, and here are {num_devices}")
    return tuple(_list_runs(laws, num_devices, min(seq_length, LONGEST_TOKENS), has_experts))


def _list_runs(laws: Laws, num_devices: int, seq_length: int, has_experts: bool) -> Iterator[ProfileRun]:
    def run(tp: int, pp: int = 1, cp: int = 1, ep: int = NUM_EXPERTS) -> ProfileRun:
        dp = num_devices // (tp * pp * cp)
        dealt = min(ep, max(dp, cp)) if has_experts else None  # not dp * cp, as in the search
        return ProfileRun(tp, dp, seq_length, pp, cp, ep=dealt)

    base = min(num_devices // 4, WIDEST)
    other = 2 * base if base < WIDEST else laws.profiled_again
    for tp in (base, other):
        yield run(tp)
        yield replace(run(tp), mc2=True)
    yield run(base, pp=2)
    for tp, cp in ((base, 4), (base, 2), (other, 2)):
        if seq_length // cp >= LEAST_TOKENS:
            yield run(tp, cp=cp)
    if has_experts:
        yield run(base, ep=1)
        yield run(base, pp=2, ep=1)
