"""Memory of many divisions, in several processes that tell it in lines of JSON: nothing is ever unpickled.

Each lists the same divisions as whoever starts it and prints of every STEP-th lawful one, from BEGIN on, its peak,
limit, layers and the reason why it does not fit.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mm_autoparallel.child_process import python_command
from mm_autoparallel.errors import BackendError, JobError
from mm_autoparallel.integrations.mindformers.layout import Layout
from mm_autoparallel.integrations.mindformers.model_job import build_job
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, read_pretrain
from mm_autoparallel.integrations.mindformers.search.division import Division, Scope, divide, list_divisions
from mm_autoparallel.integrations.mindformers.search.lowest_memory import find_lowest_memory
from mm_autoparallel.streams import write_output

_FEW = 256
"""Assumed: so few divisions are worked out sooner than processes start."""

_POLL_S = 0.2


@dataclass(frozen=True)
class Measured:
    """Of a lawful division: bytes of its fullest stage and what it may hold, the layout, and why that does not fit.

    The first three are None where the division turned out to be none, for `reason`.
    """

    peak_bytes: float | None
    limit_bytes: float | None
    layout: Layout | None
    reason: str


def measure_divisions(
    pretrain: Pretrain,
    global_batch_size: int,
    scope: Scope,
    lawful: Sequence[Division],
    num_processes: int,
    should_stop: Callable[[], bool],
) -> dict[Division, Measured]:
    """Of each lawful division, as `list_divisions` gives them; less those that a stop left out.

    Raises BackendError where a process fails.
    """
    if num_processes == 1 or len(lawful) < _FEW:
        found = {}
        for division, measured in zip(lawful, _measure(pretrain, global_batch_size, scope, lawful), strict=True):
            found[division] = measured
            if should_stop():
                break
        return found
    command = python_command(__name__, str(pretrain.path), str(global_batch_size), json.dumps(asdict(scope)))
    processes = [
        subprocess.Popen(
            [*command, str(begin), str(num_processes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for begin in range(num_processes)
    ]
    try:
        outputs = [_wait(process, should_stop) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {
        lawful[begin + number * num_processes]: _parse(line)
        for begin, output in enumerate(outputs)
        for number, line in enumerate(output.splitlines())
    }


def _wait(process: subprocess.Popen[str], should_stop: Callable[[], bool]) -> str:
    """What the process has told when it ends; nothing where the search is stopped before."""
    said = None
    while said is None and not should_stop():
        said = _listen(process)
    if said is None:
        return ""
    output, errors = said
    if process.returncode != 0:
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        raise BackendError(f"a process that works memory out ended with code {process.returncode}: {last}")
    return output


def _listen(process: subprocess.Popen[str]) -> tuple[str, str] | None:
    """What the process said, once it has ended; None where it still runs after a while."""
    try:
        return process.communicate(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _measure(
    pretrain: Pretrain, global_batch_size: int, scope: Scope, lawful: Sequence[Division]
) -> Iterator[Measured]:
    job = build_job(pretrain, global_batch_size)
    for division in lawful:
        try:
            lowest = find_lowest_memory(divide(pretrain, division, global_batch_size), job, scope.reserve_bytes)
        except JobError as error:  # of this division alone
            yield Measured(None, None, None, str(error))
            continue
        reason = f"memory: {lowest.reason}" if lowest.reason else ""
        yield Measured(lowest.peak_bytes, min(lowest.stage_limit_bytes), lowest.layout, reason)


def _parse(line: str) -> Measured:
    peak_bytes, limit_bytes, layers, reason = json.loads(line)
    layout = None
    if layers is not None:
        grid = tuple(map(tuple, layers))
        layout = Layout(grid, grid)
    return Measured(peak_bytes, limit_bytes, layout, reason)


def main(path: str, global_batch_size: str, scope_text: str, begin: str, step: str) -> None:
    """Work out every `step`-th division and print it. scope_text: the Scope in JSON."""
    pretrain, batch = read_pretrain(Path(path)), int(global_batch_size)
    said = json.loads(scope_text)
    scope = Scope(**{**said, "sizes": {name: tuple(sizes) for name, sizes in said["sizes"].items()}})
    divisions = list_divisions(pretrain, build_job(pretrain, batch), scope)
    lawful = [division for division, reason in divisions if reason is None][int(begin) :: int(step)]
    for found in _measure(pretrain, batch, scope, lawful):
        layers = None if found.layout is None else found.layout.layers
        line = json.dumps([found.peak_bytes, found.limit_bytes, layers, found.reason])
        write_output(f"{line}\n")
