"""DeepSpeed's layer with experts in a launch script: flags that MindSpeed has to 2.1.0_core_r0.8.0, and what they say.

Names, defaults and what goes with what: _add_moe_args and validate_args_wrapper of mindspeed/arguments.py; which layers
have experts: layer_number % expert_interval == 0, counted from 1 (MindSpeed's transformer layer).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.passed import Passed

KIND, LEGACY = "--moe-model-type", "--use-legacy-models"
REARRANGED, CAPACITY, INTERVAL = "--enable-token-rearrange-opt", "--moe-train-capacity-factor", "--expert-interval"
_DEEPSPEED, _MEGATRON = "deepspeed_moe", "megatron_moe"

REFUSED = {
    "--moe-no-drop": "gives each expert room for the fullest one's tokens, which differ from step to step; take it out",
    "--moe-dynamic-padding": "goes with --moe-no-drop, which no job says; take it out",
}
"""Flag → why no job says it; of DeepSpeed's layer alone."""

ROUTING = ("--noisy-gate-policy", "--no-use-rts", "--moe-use-sinkhorn")
"""Which tokens an expert gets; how many it gets is its room, whatever they say."""

NOTED = {
    "--use-pipe-experts": "computes experts beside their exchange; the step that is told has the exchange in the open",
}
PIPED = ("--pipe-experts-multi-data", "--pipe-experts-multi-stream")
"""In how many parts, and beside what, --use-pipe-experts exchanges."""

MARKS = (KIND, REARRANGED, CAPACITY, *REFUSED, *ROUTING, *NOTED, *PIPED)
SWITCHES = (REARRANGED, *REFUSED, *NOTED, "--no-use-rts", "--moe-use-sinkhorn", "--pipe-experts-multi-stream")

_MOST_ROUTED = 2
"""Experts of a token: top-1 and top-2 gating are what the layer has."""


def is_deepspeed(passed: Passed) -> bool:
    """Whether the script's experts run in DeepSpeed's layer. Raises PlanError for a kind that is neither of the two."""
    kind = passed.text(KIND) or _MEGATRON
    if kind not in (_DEEPSPEED, _MEGATRON):
        raise PlanError(f"{passed.where}: {KIND} is {kind}; {_DEEPSPEED} or {_MEGATRON} is expected")
    return kind == _DEEPSPEED and passed.has("--num-experts")


def read(passed: Passed) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What the flags say, as a job takes it. Raises PlanError naming what the parser refuses, or no job says."""
    if not is_deepspeed(passed):
        for flag in (REARRANGED, CAPACITY, *REFUSED):
            if passed.has(flag):
                raise PlanError(
                    f"{passed.where}: {flag} is of DeepSpeed's layer with experts ({KIND} {_DEEPSPEED}), and this one "
                    "runs none; take it out"
                )
        return
    if not passed.has(LEGACY):
        raise PlanError(f"{passed.where}: {KIND} {_DEEPSPEED} needs {LEGACY}, as MindSpeed's parser says")
    for flag, reason in REFUSED.items():
        if passed.has(flag):
            raise PlanError(f"{passed.where}: {flag} {reason}")
    if (passed.number("--moe-router-topk") or _MOST_ROUTED) > _MOST_ROUTED:
        raise PlanError(f"{passed.where}: DeepSpeed's layer sends a token to one or two experts (--moe-router-topk)")
    yield flags.DEEPSPEED_EXPERTS, ()
    if passed.has(REARRANGED):
        yield flags.REARRANGED, ()
    if passed.has(CAPACITY):
        yield flags.CAPACITY, (_read_capacity(passed),)
    interval, num_layers = passed.number(INTERVAL) or 1, passed.number(flags.NUM_LAYERS) or 0
    if interval > 1:
        yield "--moe-layer-freq", (f"[{','.join(str(int(k % interval == 0)) for k in range(1, num_layers + 1))}]",)


def _read_capacity(passed: Passed) -> str:
    text = passed.text(CAPACITY) or ""
    if not re.fullmatch(r"\d{1,6}(\.\d{0,9})?|\.\d{1,9}", text) or float(text) <= 0:
        raise PlanError(f"{passed.where}: {CAPACITY} is {text!r}; a number above 0 is expected")
    return text
