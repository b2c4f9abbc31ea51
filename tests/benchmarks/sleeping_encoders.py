"""Orders of decoders and encoders played by threads that sleep, against the simulator's step.

`python tests/benchmarks/sleeping_encoders.py [--repeats 5] [--stretch 5]` prints simulated and measured steps. One
thread a device runs its words in turn; an action waits for what `Tasks` says, then for the way, then sleeps as long as
it takes. What the machine adds (wake-ups) is measured, not taken off; stretched times make it less of the whole.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

from encoder_bubbles import CASES, make

from mm_autoparallel.pipeline.placement.bubbles.run import place_encoded
from mm_autoparallel.pipeline.simulate.encoders.play import Player, Words
from mm_autoparallel.pipeline.simulate.encoders.tasks import Tasks


def run(tasks: Tasks, words: Words, stretch: float) -> float:
    """Milliseconds from the start of all threads to the end of the last, as if times were not stretched."""
    player = Player(tasks)
    done = [threading.Event() for _ in range(tasks.num_tasks)]
    ended_s = [0.0] * tasks.num_tasks
    lengths, lags = (tasks.length_ms * stretch).tolist(), (tasks.lag_ms * stretch).tolist()
    waits = tasks.dependency.tolist()
    ready = threading.Barrier(tasks.num_lanes + 1)

    def device(mine: list[int]) -> None:
        ready.wait()
        for task in mine:
            begin_s = time.perf_counter()
            if waits[task] < tasks.num_tasks:
                done[waits[task]].wait()
                begin_s = max(begin_s, ended_s[waits[task]] + lags[task] / 1e3)
            time.sleep(max(0.0, begin_s + lengths[task] / 1e3 - time.perf_counter()))
            ended_s[task] = time.perf_counter()
            done[task].set()

    threads = [threading.Thread(target=device, args=(player.tasks_of(words, lane),)) for lane in range(tasks.num_lanes)]
    for thread in threads:
        thread.start()
    ready.wait()
    began_s = time.perf_counter()
    for thread in threads:
        thread.join()
    return (max(ended_s) - began_s) * 1e3 / stretch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stretch", type=float, default=1.0, help="times the times")
    arguments = parser.parse_args()
    for case in CASES:
        result = place_encoded(make(*case))
        assert result.tasks is not None
        assert result.words is not None
        measured = [run(result.tasks, result.words, arguments.stretch) for _ in range(arguments.repeats)]
        median_ms = statistics.median(measured)
        print(
            f"{case}: simulated {result.step_ms:.1f} ms, measured {median_ms:.1f} (median of {len(measured)}), "
            f"{100 * (median_ms / result.step_ms - 1):+.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
