"""What parting a backward costs in torch: times of the example's stages and layers, whole and in two parts.

`measure` times one virtual stage as torch.distributed.pipelining runs it: F, B, or in its place I and W. Imported by
example_orders.py, which puts the example's folder on the path first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from arguments import make_parser, read_model_document, read_shape
from data import make_batch
from model import Piece, Recipe, Stage, build_stage, output_of
from sizes import make_config

REPEATS = 7
"""Of which the median counts; one more comes first."""


@dataclass(frozen=True)
class Times:
    """Of one micro-batch. whole_ms: B; input_ms and weight_ms: I and W, which stand in its place."""

    forward_ms: float
    whole_ms: float
    input_ms: float
    weight_ms: float

    @property
    def parted_factor(self) -> float:
        """(I + W) / B."""
        return (self.input_ms + self.weight_ms) / self.whole_ms


class Example:
    """The example's model under a line of its flags, stage by stage on one thread."""

    def __init__(self, flags: str) -> None:
        arguments = make_parser().parse_args(flags.split())
        document = read_model_document(arguments)
        self.shape, self.config = read_shape(arguments, document), make_config(document)
        self.recipe = Recipe(self.config, arguments.seed, 0.02, torch.device("cpu"), torch.float32)
        self.batch = make_batch([0], self.shape, self.config, arguments.seed).tensors()

    def measure(self, pieces: tuple[Piece, ...], before: Piece | None) -> Times:
        """Times of the stage that holds `pieces`; before: the last piece of the stage before it, None of the first."""
        stage = build_stage(self.recipe, pieces)
        runs = [self._run(stage, before) for _ in range(REPEATS + 1)][1:]
        return Times(*(statistics.median(column) for column in zip(*runs, strict=True)))

    def _run(self, stage: Stage, before: Piece | None) -> tuple[float, float, float, float]:
        forward_ms, (output, given) = _timed(lambda: self._forward(stage, before))
        gradients = None if output.dim() == 0 else (torch.ones_like(output),)
        whole = output if gradients is None else (output,)
        whole_ms, _ = _timed(lambda: stage_backward(whole, gradients, given))
        output, given = self._forward(stage, before)
        if before is None:
            return forward_ms, whole_ms, 0.0, whole_ms
        input_ms, (_, groups) = _timed(
            lambda: stage_backward_input([output], list(gradients or ()) or None, given, stage.parameters())
        )
        weight_ms, _ = _timed(lambda: stage_backward_weight(stage.parameters(), groups))
        return forward_ms, whole_ms, input_ms, weight_ms

    def _forward(self, stage: Stage, before: Piece | None) -> tuple[Tensor, list[Tensor]]:
        inputs = {name: self.batch[name] for name in stage.wanted}
        hidden = None
        if before is not None:
            meta = output_of(before, self.config, 1, self.shape, torch.float32)
            hidden = torch.randn(meta.shape, requires_grad=True)
        given = [] if hidden is None else [hidden]
        return stage(hidden, **inputs), [*given, *inputs.values()]


Result = TypeVar("Result")


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    began = time.perf_counter()
    result = work()
    return 1e3 * (time.perf_counter() - began), result
