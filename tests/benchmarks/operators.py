"""What the operator base is worth: how long a look-up takes in a large one, and how well layers are predicted from it.

    python tests/benchmarks/operators.py look-up [--rows 1000000]
    python tests/benchmarks/operators.py held-out [--rounds 15] [--source micro-benchmark]

held-out: times operators of some layers of Qwen2-VL's decoder (transformers) on one core of this machine, predicts
other layers all of whose operators are among them, and compares with those layers' own times; then the same with part
of the base taken away. Times are of the thread's own clock, so that other work on the machine has no part in them.
Nothing is asserted: what is printed is the table in docs/guide/operators.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_autoparallel.model.profiles.operators.base import SOURCES, OperatorBase, Sampled, Source
from mm_autoparallel.model.profiles.operators.form import OperatorForm, TensorForm
from mm_autoparallel.model.profiles.operators.platform import Platform
from mm_autoparallel.model.profiles.operators.times import OperatorTimes

NUM_LOOKED_UP = 20_000
TOKENS = 256
HIDDEN_SIZES = (384, 512, 640)
KEPT_FRACTIONS = (1.0, 0.9, 0.7, 0.5, 0.2, 0.0)
NUM_DRAWS = 5
"""Times that a part of the base is taken away anew, for each part that is kept."""

# ------------------------------------------------------------------------------------------------------------- look-up


def many_forms(count: int) -> Iterator[OperatorForm]:
    """Products of as many shapes."""
    for number in range(count):
        rows, inner = 1 + number % 1000, 1 + number // 1000
        shapes = ((rows, inner), (inner, 64), (rows, 64))
        tensors = [TensorForm(shape=shape, dtype="bf16") for shape in shapes]
        moved_bytes = 2 * (rows * inner + inner * 64 + rows * 64)
        yield OperatorForm(
            operator="aten::mm",
            inputs=tuple(tensors[:2]),
            outputs=(tensors[2],),
            flops=2 * rows * inner * 64,
            moved_bytes=moved_bytes,
        )


def time_look_ups(num_rows: int) -> list[tuple[str, float]]:
    """µs a look-up, in the file and again in memory, of a base of `num_rows` times; of drawn forms in drawn order."""
    platform = Platform("a-device", {"torch": "2.6.0"})
    with tempfile.TemporaryDirectory() as folder, OperatorBase.open_to_add(Path(folder, "operators.sqlite")) as base:
        base.add(platform, "micro-benchmark", (Sampled(form, (1.0,)) for form in many_forms(num_rows)))
        drawn = random.Random(0).sample(range(num_rows), min(NUM_LOOKED_UP, num_rows))
        picked = set(drawn)
        wanted = [form for number, form in enumerate(many_forms(num_rows)) if number in picked]
        random.Random(1).shuffle(wanted)
        start_s = time.thread_time()
        num_keys = len({form.digest for form in wanted})
        keyed_us = (time.thread_time() - start_s) / num_keys * 1e6
        times = OperatorTimes.of(base, platform.device, platform.software)
        assert times
        found = [("form to key", keyed_us)]
        for name in ("first look-up", "second look-up"):
            start_s = time.thread_time()
            for form in wanted:
                times.find_us(form)
            found.append((name, (time.thread_time() - start_s) / num_keys * 1e6))
    return found


# ------------------------------------------------------------------------------------------------------------ held out


@dataclass(frozen=True)
class Sizes:
    """Of one layer."""

    hidden_size: int
    ffn_size: int
    num_heads: int

    def __str__(self) -> str:
        return f"hidden {self.hidden_size}, ffn {self.ffn_size}, {self.num_heads} heads"


def list_layers() -> tuple[list[Sizes], list[Sizes]]:
    """Layers that are timed, and others of the same operators in other company."""
    known, unseen = [], []
    for hidden in HIDDEN_SIZES:
        narrow, wide = 2 * hidden, 4 * hidden
        few, many = hidden // 128, hidden // 64
        known += [Sizes(hidden, narrow, few), Sizes(hidden, wide, many)]
        unseen += [Sizes(hidden, narrow, many), Sizes(hidden, wide, few)]
    return known, unseen


def build_step(sizes: Sizes) -> Callable[[], None]:
    """One forward and backward of such a layer on TOKENS tokens, as in the midst of a stage: gradients are there."""
    import torch
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLDecoderLayer, Qwen2VLRotaryEmbedding

    width = sizes.hidden_size // sizes.num_heads
    config = Qwen2VLTextConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.ffn_size,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_heads,
        num_hidden_layers=1,
        vocab_size=8,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [width // 8, width // 4, width // 8],
        },
    )
    config._attn_implementation = "sdpa"
    layer = Qwen2VLDecoderLayer(config, 0)
    state = torch.randn(1, TOKENS, sizes.hidden_size, requires_grad=True)
    gradient = torch.randn(1, TOKENS, sizes.hidden_size)
    positions = torch.arange(TOKENS)[None, None].expand(3, 1, TOKENS)
    tables = Qwen2VLRotaryEmbedding(config)(state, positions)

    def step() -> None:
        output: Any = layer(state, position_embeddings=tables, attention_mask=None)
        torch.autograd.backward(output[0] if isinstance(output, tuple) else output, gradient)

    for _ in range(3):
        step()
    return step


def time_together(
    known: Sequence[Callable[[], None]], unseen: Sequence[Callable[[], None]], num_rounds: int
) -> tuple[list[Sampled], list[float]]:
    """Operators inside `known`, and µs of each of `unseen`: a round has all of them, so that what disturbs the machine
    disturbs both alike."""
    from mm_autoparallel.profilers.operators.clock import OperatorClock

    clock, found_us = OperatorClock(time.thread_time), [[] for _ in unseen]
    for _ in range(num_rounds):
        for step in known:
            with clock:
                step()
        for step, samples_us in zip(unseen, found_us, strict=True):
            start_s = time.thread_time()
            step()
            samples_us.append((time.thread_time() - start_s) * 1e6)
    return clock.found, [statistics.median(samples_us) for samples_us in found_us]


def list_operators(step: Callable[[], None]) -> list[Any]:
    """The operators of `step` as a trace has them."""
    from mm_autoparallel.profilers.trace.recorder import Recorder

    with Recorder() as recorder:
        recorder.open("step")
        step()
        recorder.close()
    return list(recorder.tally("step").operators("forward"))


@dataclass(frozen=True)
class Predicted:
    """Means over unseen layers and draws; errors relative to what was measured."""

    kept_fraction: float
    coverage_fraction: float
    regressed_fraction: float
    median_error_fraction: float
    largest_error_fraction: float


def predict(num_rounds: int, source: Source, say: Callable[[str], None]) -> list[Predicted]:
    """Unseen layers from bases of which more and more is taken away."""
    import torch

    from mm_autoparallel.profilers.device import keep_freed_memory, platform_at_hand
    from mm_autoparallel.profilers.operators.benchmark import measure_forms

    torch.set_num_threads(1)
    keep_freed_memory()
    known, unseen = list_layers()
    steps = [build_step(sizes) for sizes in unseen]
    timed, measured_us = time_together([build_step(sizes) for sizes in known], steps, num_rounds)
    if source == "micro-benchmark":
        timed, _ = measure_forms([one.form for one in timed], torch.device("cpu"), now=time.thread_time)
    samples = {one.form.digest: one for one in timed}
    operators = [list_operators(step) for step in steps]
    platform = platform_at_hand("the-core-at-hand")
    found = []
    for kept in KEPT_FRACTIONS:
        errors, covered, regressed = [], [], []
        for draw in range(1 if kept in (0.0, 1.0) else NUM_DRAWS):
            chosen = random.Random(draw).sample(sorted(samples), round(kept * len(samples)))
            for sizes, real_us, told in zip(unseen, measured_us, operators, strict=True):
                coverage = cover_with(platform, [samples[digest] for digest in chosen], told)
                errors.append(coverage.total_ms * 1e3 / real_us - 1.0)
                covered.append(coverage.coverage_fraction)
                regressed.append(coverage.regressed_ms / coverage.total_ms)
                if kept == 1.0:
                    say(f"{sizes}: measured {real_us / 1e3:.2f} ms, predicted {coverage.total_ms:.2f} ms")
        distances = [abs(error) for error in errors]
        spread = statistics.median(distances), max(distances)
        found.append(Predicted(kept, statistics.mean(covered), statistics.mean(regressed), *spread))
    return found


def cover_with(platform: Platform, samples: Sequence[Sampled], operators: Sequence[Any]) -> Any:
    """The prediction of `operators` from a base of these samples, by its sources."""
    from mm_autoparallel.model.job.cluster import Cluster
    from mm_autoparallel.model.job.strategy import Strategy
    from mm_autoparallel.model.operators.analytic import rates_of
    from mm_autoparallel.model.operators.traced_table import cover
    from mm_autoparallel.model.profiles.calibration import find_calibration
    from mm_autoparallel.profilers.device import identify_device

    device = identify_device()
    cluster = Cluster(device=device, num_nodes=1, devices_per_node=1)
    rates = rates_of(cluster, find_calibration(device.name), Strategy(pp=1, tp=1, dp=1, mbs=1))
    with tempfile.TemporaryDirectory() as folder, OperatorBase.open_to_add(Path(folder, "operators.sqlite")) as base:
        base.add(platform, "micro-benchmark", samples)
        times = OperatorTimes.of(base, platform.device, platform.software)
        return cover(operators, rates, times)


def describe(found: Sequence[Predicted]) -> list[str]:
    """The table of errors by coverage, as Markdown."""
    rows = [
        "| forms kept | coverage | regressed share | median error | largest error |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        figures = (one.kept_fraction, one.coverage_fraction, one.regressed_fraction)
        errors = (one.median_error_fraction, one.largest_error_fraction)
        rows.append(f"| {' | '.join(f'{100 * figure:.1f} %' for figure in (*figures, *errors))} |")
    return rows


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("look-up", "held-out"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--source", choices=SOURCES[:2], default="block profile")
    arguments = parser.parse_args()
    if arguments.what == "look-up":
        for name, took_us in time_look_ups(arguments.rows):
            print(f"{name}: {took_us:.2f} us of {arguments.rows:,} rows")
        return 0
    print("\n".join(describe(predict(arguments.rounds, arguments.source, print))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
