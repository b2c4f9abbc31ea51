"""The example's steps under orders that split backwards against its steps under 1F1B, predicted and as trained.

    python tests/benchmarks/example_orders.py [--rounds 5]

First what a backward in two parts costs the example's layers. Then each case of CASES: its predicted steps come from
the times of its virtual stages, each measured on one thread while another process does the same, since two share caches
and memory; the measured ones from two gloo processes that train one order after the other, round by round. A machine's
pace changes, so the measured gain is the median of the rounds' gains, each of two runs next to each other. Predicted
steps lack optimizer, data and messages. Leave the machine alone meanwhile. Times are printed, never asserted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from order_steps import Layer, launch, play

from mm_autoparallel.integrations.torch.schedule_csv import join_untrained
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES, V_CHUNKS
from mm_autoparallel.pipeline.schedules.torch_csv import Orders, write_rows

ROOT = Path(__file__).parents[2]
RUN_FLAGS = ROOT / "tests" / "examples" / "run_flags.py"
sys.path.insert(0, str(ROOT / "examples" / "qwen2vl"))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from parting_costs import Example, Times  # noqa: E402

from model import Piece  # noqa: E402

FLAGS = (
    "--num-layers 8 --vision-num-layers 4 --hidden-size 256 --ffn-hidden-size 1024 --vocab-size 2048 --seq-length 256 "
    "--image-size 112"
)
STEPS = 5
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
    Case("zb_h1", 2, (4, 0), (4, 4), (4, 0), (4, 4)),
    Case("zb_h1", 3, (4, 0), (4, 4), (4, 0), (4, 4)),
    Case("zb_h1", 2, (4, 0), (4, 4), (4, 0), (4, 4), frozen=True),
    Case("zb_h1", 2, (4, 0), (5, 3), (4, 0), (5, 3), frozen=True),
    Case("zb_h2", 3, (4, 0), (4, 4), (4, 0), (4, 4)),
    Case("zbv", 2, (4, 0, 0, 0), (2, 2, 2, 2), (4, 0), (3, 5)),
    Case("zb_h1", 8, (4, 0), (1, 7), (4, 0), (1, 7)),
    Case("zbv", 6, (4, 0, 0, 0), (0, 3, 4, 1), (4, 0), (3, 5)),
    Case("zbv", 4, (2, 2, 0, 0), (0, 2, 4, 2), (4, 0), (4, 4), frozen=True),
    Case("v_half", 4, (4, 0, 0, 0), (1, 3, 3, 1), (4, 0), (4, 4), frozen=True),
)
"""The first six gain and the others lose, by times that may be 6 % off: a machine does not repeat them better."""


Key = tuple[tuple[Piece, ...], Piece | None, bool]
"""A virtual stage: its pieces, the last piece of the one before it, None of the first, and whether vision is frozen."""

LAYERS: dict[str, Key] = {
    "vision layer": ((Piece("vision", "layer", 1),), Piece("vision", "layer", 1), False),
    "text layer": ((Piece("text", "layer", 1),), Piece("text", "layer", 1), False),
    "text layer, recomputed": ((Piece("text", "layer", 1, 1, 1),), Piece("text", "layer", 1), False),
    "head and loss": ((Piece("text", "post"),), Piece("text", "layer", 1), False),
}


def keys_of(case: Case) -> Iterator[list[Key]]:
    """Virtual stages under 1F1B, then under the case's order."""
    for _, vision, text in both(case):
        parts_of = pieces_of(vision, text)
        before = [None, *(pieces[-1] for pieces in parts_of)]
        yield [(pieces, last, case.frozen) for pieces, last in zip(parts_of, before[:-1], strict=True)]


def all_keys() -> list[Key]:
    """Everything that is measured, in one order in every process."""
    return list(dict.fromkeys([*LAYERS.values(), *(key for case in CASES for keys in keys_of(case) for key in keys)]))


def measure(out: Path) -> None:
    """One process's part of measuring `all_keys`; rank 0 writes the times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    flags = f"{FLAGS} --global-batch-size 4"
    examples = [Example(flags), Example(f"{flags} --freeze-ViT")]
    found = []
    for pieces, before, frozen in all_keys():
        dist.barrier()
        found.append(astuple(examples[frozen].measure(pieces, before)))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


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


def predict(times_of: dict[Key, Times], case: Case) -> list[float]:
    """ms of a step's pipeline under 1F1B and under the case's order; messages and the optimizer take nothing."""
    found = []
    for (order, _, _), keys in zip(both(case), keys_of(case), strict=True):
        times = [times_of[key] for key in keys]
        ms: list[Layer] = [(one.forward_ms, one.input_ms, one.weight_ms) for one in times]
        found.append(play(order, ms, [one.whole_ms for one in times]))
    return found


def tell_parting(times_of: dict[Key, Times]) -> None:
    """The table of what parting costs."""
    print("The example, two processes of one thread; ms of a micro-batch, medians")
    print(f"{'what':<24}{'F':>8}{'B':>8}{'I':>8}{'W':>8}{'(I+W)/B':>9}")
    for what, key in LAYERS.items():
        times = times_of[key]
        print(
            f"{what:<24}{times.forward_ms:>8.2f}{times.whole_ms:>8.2f}{times.input_ms:>8.2f}{times.weight_ms:>8.2f}"
            f"{times.parted_factor:>9.2f}"
        )


def train(rounds: int) -> list[list[tuple[float, float]]]:
    """ms of each case's step in each round, under 1F1B and under its order: medians of a run's steps but the first."""
    lines = []
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
                    + (" --freeze-ViT" if case.frozen else "")
                )
        runs = [(f"{line} --log-file {turn}_{k}.jsonl") for turn in range(rounds) for k, line in enumerate(lines)]
        (folder / "flags.txt").write_text("\n".join(runs), encoding="utf-8")
        launch(2, RUN_FLAGS, "flags.txt", folder=folder)
        step_ms = [[run_step_ms(folder / f"{turn}_{k}.jsonl") for k in range(len(lines))] for turn in range(rounds)]
    return [[(row[2 * number], row[2 * number + 1]) for row in step_ms] for number in range(len(CASES))]


def run_step_ms(log: Path) -> float:
    """The median of a run's steps but the first, from its log file."""
    rows = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return float(statistics.median([row["elapsed_ms"] for row in rows if "elapsed_ms" in row][1:]))


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # what the processes are started with
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    with tempfile.TemporaryDirectory() as name:
        launch(2, Path(__file__), "--measure", "times.json", folder=Path(name))
        rows = json.loads((Path(name) / "times.json").read_text(encoding="utf-8"))
    times_of = {key: Times(*row) for key, row in zip(all_keys(), rows, strict=True)}
    tell_parting(times_of)
    predicted = [predict(times_of, case) for case in CASES]
    measured = train(arguments.rounds)
    print(
        f"\nSteps of two processes, ms, medians of {arguments.rounds} runs of {STEPS - 1} steps; gain: 1F1B's over the "
        "order's - 1, measured: the median of the runs' gains"
    )
    columns = ("1F1B", "order", "gain", "1F1B", "order", "gain", "sign")
    print(f"{'':<34}{'predicted':>27}{'measured':>27}")
    print(f"{'order':<8}{'text layers':<16}{'batch':>10}" + "".join(f"{column:>9}" for column in columns))
    right = 0
    for case, told, of_rounds in zip(CASES, predicted, measured, strict=True):
        taken = [statistics.median(one) for one in zip(*of_rounds, strict=True)]
        gains = [told[0] / told[1] - 1, statistics.median(plain / parted - 1 for plain, parted in of_rounds)]
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
