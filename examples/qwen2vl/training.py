"""Training: builds this rank's stages, runs the iterations, and says how they go as Megatron-LM does."""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen2VLConfig

from checkpoint import Weights, save_checkpoint
from colocated import deal_samples
from data import Batch, SampleShape, make_batch
from failures import TrainingError
from mm_autoparallel.profilers.meter import KeptActivations, count_bytes
from mm_autoparallel.profilers.torch_releases import device_module
from model import Fill
from optimizer import clip_gradients, learning_rate
from parallel import Ranks, gather_counts, join, sum_over_ranks, wait_for_device
from parallelism import Parallelism
from parts import Builder
from uneven import UnevenBatches


class Trainer:
    """One rank's share of a training run."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        config: Qwen2VLConfig,
        shape: SampleShape,
        parallelism: Parallelism,
    ) -> None:
        self.arguments, self.config, self.shape, self.parallelism = arguments, config, shape, parallelism
        device = join()
        share = parallelism.dp * parallelism.micro_batch_size
        if arguments.global_batch_size % share:
            raise TrainingError(
                f"--global-batch-size {arguments.global_batch_size} is no multiple of {share}: "
                f"{parallelism.dp} replicas times --micro-batch-size {parallelism.micro_batch_size}."
            )
        self.share = Builder(arguments, config, shape, parallelism, device, self._find_weights()).build()
        self.parts, self.pipeline = self.share.parts, self.share.pipeline
        self.bare = [stage for part in self.parts for stage in part.bare]
        self.parameters = [parameter for part in self.parts for parameter in part.parameters]
        self.ranks = ranks = self.parts[-1].ranks
        self.uneven: UnevenBatches | None = None
        if arguments.uneven_images:
            place = ranks.place("dp")
            self.uneven = UnevenBatches(arguments, config, shape, parallelism, place, ranks.size("dp"))
        self.dealt: dict[str, Any] = {}

    def _find_weights(self) -> Fill | None:
        """How parts take their weights from --load; nothing where there is no checkpoint yet, as Megatron-LM has it."""
        folder = self.arguments.load
        if folder is None:
            return None
        weights = Weights(folder)
        if not len(weights):
            if dist.get_rank() == 0:
                print(f"warning: --load {folder} holds no *.safetensors; training begins from random weights")
            return None
        return weights.fill

    def save(self) -> None:
        """Write the weights to --save."""
        stages = [
            (k, stage, held, part.ranks)
            for part in self.parts
            for (k, held), stage in zip(part.held, part.bare, strict=True)
        ]
        try:
            save_checkpoint(self.arguments.save, stages, self.config)
        except OSError as failure:
            raise TrainingError(f"--save {self.arguments.save} cannot be written: {failure}.") from failure

    def run(self, planned_ms: float | None = None) -> None:
        """All iterations, and at their end how `planned_ms`, a plan's step, compares with what they took.

        Raises TrainingError where the loss is no number any more.
        """
        arguments = self.arguments
        self._record({"arguments": {key: str(value) for key, value in sorted(vars(arguments).items())}}, mode="w")
        gc.collect()
        taken_ms = []
        gc.freeze()  # what was built stays; looking through it again and again would make pauses
        for iteration in range(arguments.train_iters):
            kept = KeptActivations(*self.bare) if arguments.log_memory and iteration == 0 else None
            start_s = time.perf_counter()
            loss, rate = self.step(iteration, kept)
            elapsed_ms = 1e3 * (time.perf_counter() - start_s)
            taken_ms.append(elapsed_ms)
            if not math.isfinite(loss):
                raise TrainingError(
                    f"The loss of iteration {iteration + 1} is {loss}, so training ends here. A lower --lr, "
                    f"a limit by --clip-grad, or a warm-up by --lr-warmup-iters may help; --lr is {arguments.lr}."
                )
            if kept is not None:
                self._report_memory(kept)
            if (iteration + 1) % arguments.log_interval == 0:
                self._report(iteration, elapsed_ms, loss, rate)
            every = arguments.save_interval
            if arguments.save and (iteration + 1 == arguments.train_iters or (every and (iteration + 1) % every == 0)):
                self.save()
        if planned_ms is not None and len(taken_ms) > 1 and not dist.get_rank():
            measured_ms = statistics.median(taken_ms[1:])  # the first one is warm-up
            print(
                f" step time: planned {planned_ms:.1f} ms, measured {measured_ms:.1f} ms (median of "
                f"{len(taken_ms) - 1}), planned / measured - 1: {planned_ms / measured_ms - 1:+.1%}",
                flush=True,
            )

    def step(self, iteration: int, kept: KeptActivations | None = None) -> tuple[float, float]:
        """One iteration: its mean loss over all samples, and the learning rate it was made with."""
        arguments, ranks = self.arguments, self.ranks
        with kept or nullcontext():
            loss = self._run_uneven(iteration, self.uneven) if self.uneven else self._run_equal(iteration)
        for part in self.parts:
            part.average()
        if arguments.clip_grad > 0:
            clip_gradients([(part.parameters, part.copies) for part in self.parts], arguments.clip_grad)
        rate = learning_rate(iteration, arguments)
        for part in self.parts:
            for group in part.optimizer.param_groups:
                group["lr"] = rate
            part.optimizer.step()
            # Gradients keep their memory from step to step; FSDP2 makes its own anew.
            part.optimizer.zero_grad(set_to_none=self.parallelism.fsdp)
        wait_for_device(ranks)
        return sum_over_ranks((loss or 0.0) / self.parts[-1].copies, ranks), rate

    def _run_equal(self, iteration: int) -> float | None:
        """Forwards and backwards of an iteration of equal samples; the mean loss where this rank computes it."""
        share, ranks, size = self.share, self.ranks, self.arguments.global_batch_size
        if share.encodes:
            loss = share.pipeline.run(self._make_batch(iteration, [i for call in self._calls(ranks) for i in call]))
        else:
            per_replica = size // ranks.size("dp")
            samples = range(ranks.place("dp") * per_replica, (ranks.place("dp") + 1) * per_replica)
            if share.prefetch is not None:
                is_last, batch = iteration + 1 == self.arguments.train_iters, self._make_batch(iteration, samples)
                loss = share.prefetch.run(share.pipeline, iteration, self._make_calls, batch, is_last)
            elif share.colocated is None:
                loss = share.pipeline.run(self._make_batch(iteration, samples))
            else:
                loss = share.colocated.run(share.pipeline, self._make_rounds(iteration, samples))
        if share.crossing is not None:
            share.crossing.finish()
        return loss

    def _make_rounds(self, iteration: int, samples: range) -> list[tuple[list[Batch], Batch]]:
        """What a colocated encoder takes in each of its calls, and the decoder's replica of `samples`, by rounds."""
        calls = self._make_calls(iteration)
        num_rounds = len(samples) // (self.pipeline.num_microbatches * self.parallelism.micro_batch_size)
        sizes = len(calls) // num_rounds, len(samples) // num_rounds
        return [
            (calls[k * sizes[0] :][: sizes[0]], self._make_batch(iteration, samples[k * sizes[1] :][: sizes[1]]))
            for k in range(num_rounds)
        ]

    def _make_calls(self, iteration: int) -> list[Batch]:
        """What an encoder on the decoder's devices takes in each of its calls."""
        return [self._make_batch(iteration, call, with_pixels=True) for call in self._calls(self.parts[0].ranks)]

    def _calls(self, ranks: Ranks) -> list[list[int]]:
        """Samples of the global batch by calls of an encoder of sizes of its own, which `ranks` hold."""
        sizes, encoder = self.parallelism, self.parallelism.encoder
        assert encoder is not None
        own = encoder.arrangement.encoder
        decoder, at_once = (sizes.dp, sizes.micro_batch_size), encoder.arrangement.away
        return deal_samples(self.arguments.global_batch_size, decoder, (own.dp, own.mbs), ranks.place("dp"), at_once)

    def _make_batch(self, iteration: int, samples: Sequence[int], with_pixels: bool | None = None) -> Batch:
        """These samples of an iteration's global batch; with pixels where this rank's pipeline needs them."""
        arguments, first = self.arguments, iteration * self.arguments.global_batch_size
        wanted = self.pipeline.needs_pixels if with_pixels is None else with_pixels
        return make_batch([first + i for i in samples], self.shape, self.config, arguments.seed, wanted)

    def _run_uneven(self, iteration: int, uneven: UnevenBatches) -> float:
        """The same of samples that differ; what this replica adds to the mean over all words, times the replicas, over
        which gradients are averaged."""
        everyone, copies = uneven.in_iteration(iteration), self.ranks.size("dp")
        num_words = sum(map(uneven.num_words, everyone))
        micro_batches = uneven.micro_batches(iteration)
        weights = {i: copies * uneven.num_words(i) / num_words for held in micro_batches for i in held}
        seed, shapes = self.arguments.seed, uneven.shapes
        batches = [
            [(make_batch([i], shapes[i], self.config, seed), weights[i]) for i in held] for held in micro_batches
        ]
        losses = dict(zip(weights, self.pipeline.run_samples(batches), strict=True))
        told = torch.tensor([losses.get(i, 0.0) for i in everyone], dtype=torch.float64).to(self.ranks.device)
        dist.all_reduce(told)
        self.dealt = {"sample_losses": told.tolist(), "micro_batches": micro_batches}
        return sum(weights[i] * loss for i, loss in losses.items())

    # ------------------------------------------------------------------------------------------------- saying so

    def _report(self, iteration: int, elapsed_ms: float, loss: float, rate: float) -> None:
        arguments = self.arguments
        (peak_bytes,) = zip(*gather_counts([_peak_bytes(self.ranks.device)], self.ranks), strict=True)
        if dist.get_rank():
            return
        consumed = (iteration + 1) * arguments.global_batch_size
        num_tokens = arguments.global_batch_size * arguments.seq_length
        if self.uneven:
            num_tokens = sum(self.uneven.shapes[i].seq_length for i in self.uneven.in_iteration(iteration))
        tokens_per_s = 1e3 * num_tokens / elapsed_ms
        print(
            f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {iteration + 1:8d}/{arguments.train_iters:8d} | "
            f"consumed samples: {consumed:12d} | elapsed time per iteration (ms): {elapsed_ms:.1f} | "
            f"tokens/s: {tokens_per_s:.1f} | learning rate: {rate:.6E} | "
            f"global batch size: {arguments.global_batch_size:5d} | lm loss: {loss:.6E} | "
            f"peak memory (MiB): {max(peak_bytes) / 2**20:.1f} |",
            flush=True,
        )
        self._record(
            {
                "iteration": iteration + 1,
                "elapsed_ms": elapsed_ms,
                "tokens_per_s": tokens_per_s,
                "learning_rate": rate,
                "loss": loss,
                "peak_bytes": list(peak_bytes),
            }
            | self.dealt
        )

    def count_memory(self, kept: KeptActivations) -> list[dict[str, int]]:
        """Bytes of each rank after a step: what it holds all the time, and the most that autograd `kept`."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        state = [
            value
            for part in self.parts
            for states in part.optimizer.state.values()
            for value in states.values()
            if isinstance(value, Tensor) and value.dim()
        ]
        counts = [count_bytes(self.parameters), count_bytes(gradients), count_bytes(state), kept.peak_bytes]
        places = [self.ranks.place(dimension) for dimension in ("pp", "dp", "tp")]
        places[0] += self.share.before
        names = ("stage", "replica", "tp_rank", "parameter_bytes", "gradient_bytes", "optimizer_bytes")
        everyone = gather_counts([*places, *counts], self.ranks)
        return [dict(zip((*names, "activation_bytes"), row, strict=True)) for row in everyone]

    def _report_memory(self, kept: KeptActivations) -> None:
        rows = self.count_memory(kept)
        if dist.get_rank():
            return
        for rank, row in enumerate(rows):
            parts = ("parameters", "gradients", "optimizer", "kept activations")
            sizes = (row[f"{name}_bytes"] / 2**20 for name in ("parameter", "gradient", "optimizer", "activation"))
            told = " | ".join(f"{part} {size:.1f}" for part, size in zip(parts, sizes, strict=True))
            print(f" memory of rank {rank} (stage {row['stage']}, MiB): {told}", flush=True)
            self._record({"rank": rank} | row)

    def _record(self, entry: dict[str, Any], mode: str = "a") -> None:
        path = self.arguments.log_file
        if path is None or dist.get_rank():
            return
        try:
            with path.open(mode, encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as failure:
            raise TrainingError(f"--log-file {path} cannot be written: {failure}.") from failure


def _peak_bytes(device: torch.device) -> int:
    """The most memory of this process so far: the allocator's on an accelerator, the process's own on CPU."""
    if device.type != "cpu":
        return int(device_module(device.type).max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
