"""Write the gradients of one step of the training script, once for each line of flags.

The file that is given holds pairs of a number of processes and lines of flags. Processes are forked from this one, so
that all of them import torch once. The folder that --save names then holds gradients
where a checkpoint holds weights, zeros of parts that do not train; and loss.txt, the step's loss.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import torch.distributed as dist

SCRIPT_FOLDER = Path(__file__).parents[2] / "examples" / "qwen2vl"


def fork_all(groups: list[tuple[int, list[str]]]) -> int:
    """Run each group's lines in as many processes as it says, group after group. 0 where all ended well."""
    sys.path.insert(0, str(SCRIPT_FOLDER))
    import pretrain_vlm  # noqa: F401  (before the fork)

    for number, lines in groups:
        ranks = set()
        for rank in range(number):
            pid = os.fork()
            if not pid:
                return _run_rank(rank, number, lines)
            ranks.add(pid)
        while ranks:
            pid, status = os.wait()
            ranks.discard(pid)
            if status:
                for left in ranks:
                    os.kill(left, signal.SIGKILL)
                return 1
    return 0


def _run_rank(rank: int, number: int, lines: list[str]) -> int:
    """One of the forked processes. They meet at a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
    meeting = (Path.cwd() / f"meeting-{number}").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=number)
    return write_all(lines)


def write_all(lines: list[str]) -> int:
    """The first exit code that is not 0, else 0."""
    import pretrain_vlm
    from training import Trainer

    class OneStep(Trainer):
        """A share of a run that computes gradients and writes them."""

        def run(self, planned_ms: float | None = None) -> None:
            """One step, its gradients in the place of the weights, and these written."""
            for part in self.parts:
                part.optimizer = _Idle(part.optimizer.param_groups)
            loss, _ = self.step(0)
            for parameter in self.parameters:
                values = parameter.detach()
                if parameter.grad is None:
                    values.zero_()
                else:
                    values.copy_(parameter.grad)
            self.save()
            if not dist.get_rank():
                (self.arguments.save / "loss.txt").write_text(repr(loss), encoding="utf-8")

    pretrain_vlm.Trainer = OneStep
    for line in lines:
        sys.argv = [str(SCRIPT_FOLDER / "pretrain_vlm.py"), *shlex.split(line)]
        if code := pretrain_vlm.main():
            return code
    dist.destroy_process_group()
    return 0


class _Idle:
    """An optimizer that updates nothing and clears no gradients."""

    def __init__(self, param_groups: list[dict]) -> None:
        self.param_groups = param_groups

    def step(self) -> None: ...

    def zero_grad(self, set_to_none: bool) -> None: ...


if __name__ == "__main__":
    sys.exit(fork_all(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
