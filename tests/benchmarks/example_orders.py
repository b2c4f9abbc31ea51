"""The example's steps under orders that split backwards against its steps under 1F1B, predicted and as trained.

    python tests/benchmarks/example_orders.py [--rounds 5]

First what a backward in two parts costs the example's layers. Then each case of CASES: its predicted steps come from
the times of its virtual stages, each measured alone on one thread; the measured ones from two gloo processes that train
one order after the other, round by round, since a machine's pace changes. Leave the machine alone meanwhile. Times are
printed, never asserted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from order_steps import Layer, launch, play

from mm_autoparallel.integrations.torch.schedule_csv import join_untrained
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES, V_CHUNKS
from mm_autoparallel.pipeline.schedules.torch_csv import Orders, write_rows

ROOT = Path(__file__).parents[2]
RUN_FLAGS = ROOT / "tests" / "examples" / "run_flags.py"
sys.path.insert(0, str(ROOT / "examples" / "qwen2vl"))
import torch  # noqa: E402
from parting_costs import Example, Times  # noqa: E402

from model import Piece  # noqa: E402

FLAGS = (
    "--num-layers 8 --vision-num-layers 4 --hidden-size 256 --ffn-hidden-size 1024 --vocab-size 2048 --seq-length 256 "
    "--image-size 112"
)
STEPS = 4
"""Of a run; the first one does not count."""


@dataclass(frozen=True)
class Case:
    """An order with layers of its virtual stages, against 1F1B with those of its stages."""

    order: str
    num_microbatches: int
    vision: tuple[int, ...]
    text: tuple[int, ...]
    plain_vision: tuple[int, ...]
    plain_text: tuple[int, ...]
    frozen: bool = False


CASES = (
    Case("zb_h1", 2, (4, 0), (3, 5), (4, 0), (3, 5)),
    Case("zb_h1", 4, (4, 0), (3, 5), (4, 0), (3, 5)),
    Case("zb_h1", 2, (4, 0), (5, 3), (4, 0), (5, 3)),
    Case("zb_h1", 2, (4, 0), (4, 4), (4, 0), (4, 4), frozen=True),
    Case("zb_h1", 8, (4, 0), (1, 7), (4, 0), (1, 7)),
    Case("zbv", 2, (4, 0, 0, 0), (1, 3, 3, 1), (4, 0), (3, 5)),
    Case("zbv", 4, (4, 0, 0, 0), (1, 3, 3, 1), (4, 0), (3, 5)),
    Case("zbv", 2, (4, 0, 0, 0), (1, 2, 3, 2), (4, 0), (4, 4), frozen=True),
    Case("v_half", 2, (4, 0, 0, 0), (1, 3, 3, 1), (4, 0), (3, 5)),
    Case("zbv", 2, (2, 2, 0, 0), (0, 2, 4, 2), (4, 0), (3, 5)),
)


class Stages:
    """Times of virtual stages of the example, each measured once."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._example = Example(f"{FLAGS} --global-batch-size 4")
        self._frozen = Example(f"{FLAGS} --global-batch-size 4 --freeze-ViT")

    @cache  # noqa: B019  (one of it lives as long as the program)
    def times(self, pieces: tuple[Piece, ...], before: Piece | None, frozen: bool) -> Times:
        return (self._frozen if frozen else self._example).measure(pieces, before)


def pieces_of(vision: tuple[int, ...], text: tuple[int, ...]) -> list[tuple[Piece, ...]]:
    """Of every virtual stage: ends of a modality lie with its first and its last layer."""
    last_vision = max(k for k, count in enumerate(vision) if count)
    found = []
    for k, (of_vision, of_text) in enumerate(zip(vision, text, strict=True)):
        before_vision, before_text = sum(vision[:k]), sum(text[:k])
        found.append(
            tuple(
                piece
                for is_there, piece in (
                    (k == 0, Piece("vision", "pre")),
                    (of_vision > 0, Piece("vision", "layer", before_vision, of_vision)),
                    (k == last_vision, Piece("vision", "post")),
                    (k == last_vision, Piece("text", "pre")),
                    (of_text > 0, Piece("text", "layer", before_text, of_text)),
                    (k == len(vision) - 1, Piece("text", "post")),
                )
                if is_there
            )
        )
    return found


def order_of(schedule: str, num_chunks: int, num_microbatches: int) -> Orders:
    """Of two stages, as torch runs it: the first virtual stage has no input to give a gradient of."""
    known = SCHEDULES[schedule]
    stages = tuple(known.order(2, num_chunks, num_microbatches, stage) for stage in range(2))
    return join_untrained(Orders(stages, num_chunks, num_microbatches, known.v_shaped), 0)[0]


def both(case: Case) -> Iterator[tuple[Orders, tuple[int, ...], tuple[int, ...]]]:
    """1F1B's order and layers, then the case's own."""
    yield order_of("1f1b", 1, case.num_microbatches), case.plain_vision, case.plain_text
    num_chunks = V_CHUNKS if SCHEDULES[case.order].v_shaped else 1
    yield order_of(case.order, num_chunks, case.num_microbatches), case.vision, case.text


def predict(stages: Stages, case: Case, order: Orders, vision: tuple[int, ...], text: tuple[int, ...]) -> float:
    """ms of a step's pipeline; messages and the optimizer take nothing."""
    parts_of = pieces_of(vision, text)
    ms: list[Layer] = []
    whole_ms = []
    for k, pieces in enumerate(parts_of):
        times = stages.times(pieces, None if k == 0 else parts_of[k - 1][-1], case.frozen)
        ms.append((times.forward_ms, times.input_ms, times.weight_ms))
        whole_ms.append(times.whole_ms)
    return play(order, ms, whole_ms)


def tell_parting(stages: Stages) -> None:
    """The table of what parting costs."""
    vision, text = Piece("vision", "layer", 1), Piece("text", "layer", 1)
    print("The example, one thread; ms of a micro-batch, medians")
    print(f"{'what':<24}{'F':>8}{'B':>8}{'I':>8}{'W':>8}{'(I+W)/B':>9}")
    for what, piece, before in (
        ("vision layer", vision, vision),
        ("text layer", text, text),
        ("text layer, recomputed", Piece("text", "layer", 1, 1, 1), text),
        ("head and loss", Piece("text", "post"), text),
    ):
        times = stages.times((piece,), before, frozen=False)
        print(
            f"{what:<24}{times.forward_ms:>8.2f}{times.whole_ms:>8.2f}{times.input_ms:>8.2f}{times.weight_ms:>8.2f}"
            f"{times.parted_factor:>9.2f}"
        )


def train(rounds: int) -> list[tuple[list[float], list[float]]]:
    """ms of each case's steps, under 1F1B and under its order."""
    lines, of_line = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, case in enumerate(CASES):
            for which, (order, vision, text) in enumerate(both(case)):
                csv = folder / f"{number}_{which}.csv"
                csv.write_text(write_rows(order.stages, order.v_shaped), encoding="utf-8")
                lines.append(
                    f"{FLAGS} --global-batch-size {case.num_microbatches} --train-iters {STEPS} "
                    f"--pipeline-model-parallel-size 2 --vit-layer-placement {','.join(map(str, vision))} "
                    f"--llm-layer-placement {','.join(map(str, text))} --pipeline-order {csv.name}"
                    + " --freeze-ViT"
                    * case.frozen
                )
                of_line.append((number, which))
        runs = [(f"{line} --log-file {turn}_{k}.jsonl") for turn in range(rounds) for k, line in enumerate(lines)]
        (folder / "flags.txt").write_text("\n".join(runs), encoding="utf-8")
        launch(2, RUN_FLAGS, "flags.txt", folder=folder)
        found: list[tuple[list[float], list[float]]] = [([], []) for _ in CASES]
        for turn in range(rounds):
            for k, (number, which) in enumerate(of_line):
                rows = map(json.loads, (folder / f"{turn}_{k}.jsonl").read_text(encoding="utf-8").splitlines())
                found[number][which].extend([row["elapsed_ms"] for row in rows if "elapsed_ms" in row][1:])
    return found


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    stages = Stages()
    tell_parting(stages)
    predicted = [[predict(stages, case, *one) for one in both(case)] for case in CASES]
    measured = train(arguments.rounds)
    print(
        f"\nSteps of two processes, ms, medians of {arguments.rounds * (STEPS - 1)}; gain: 1F1B's over the order's - 1"
    )
    columns = ("1F1B", "order", "gain", "1F1B", "order", "gain", "sign")
    print(f"{'':<34}{'predicted':>27}{'measured':>27}")
    print(f"{'order':<8}{'text layers':<16}{'batch':>10}" + "".join(f"{column:>9}" for column in columns))
    right = 0
    for case, told, steps_ms in zip(CASES, predicted, measured, strict=True):
        taken = [statistics.median(one) for one in steps_ms]
        gains = [plain_ms / parted_ms - 1 for plain_ms, parted_ms in (told, taken)]
        same = gains[0] * gains[1] > 0
        right += same
        text = ",".join(map(str, case.text)) + " frozen" * case.frozen
        cells = [
            [f"{one[0]:>9.1f}", f"{one[1]:>9.1f}", f"{gain:>+9.1%}"]
            for one, gain in ((told, gains[0]), (taken, gains[1]))
        ]
        print(
            f"{case.order:<8}{text:<16}{case.num_microbatches:>10}"
            + "".join(cells[0] + cells[1])
            + f"{'same' if same else 'other':>9}"
        )
    print(f"{right} of {len(CASES)} signs are those predicted")


if __name__ == "__main__":
    main()
