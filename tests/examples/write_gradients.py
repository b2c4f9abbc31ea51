"""Write the gradients of one step of the training script, once for each line of flags in a file.

Started in the place of the script itself. The folder that --save names then holds gradients
where a checkpoint holds weights, zeros of parts that do not train; and loss.txt, the step's loss.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import torch.distributed as dist

SCRIPT_FOLDER = Path(__file__).parents[2] / "examples" / "qwen2vl"


def write_all(lines: list[str]) -> int:
    """The first exit code that is not 0, else 0."""
    sys.path.insert(0, str(SCRIPT_FOLDER))
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

    dist.init_process_group("gloo")
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
    sys.exit(write_all(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))
