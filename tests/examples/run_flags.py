"""Run the training script several times in one process, once for each line of flags in a file.

Started by torch.distributed.run in the place of the script itself: what the processes import, they import once.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import torch.distributed as dist

SCRIPT_FOLDER = Path(__file__).parents[2] / "examples" / "qwen2vl"


def run_lines(lines: list[str]) -> int:
    """The first exit code that is not 0, else 0."""
    sys.path.insert(0, str(SCRIPT_FOLDER))
    import pretrain_vlm

    dist.init_process_group("gloo")
    for line in lines:
        sys.argv = [str(SCRIPT_FOLDER / "pretrain_vlm.py"), *shlex.split(line)]
        if code := pretrain_vlm.main():
            return code
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(run_lines(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))
