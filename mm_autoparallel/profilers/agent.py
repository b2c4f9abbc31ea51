"""The process that starts the ranks of one node through torch.distributed.run, and writes down how they failed.

`python -m mm_autoparallel.profilers.agent FAILURES.json OPTIONS-OF-TORCHRUN … PROGRAM …`: what torchrun would
print for a person goes into a file for the launcher: one record a failed rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mm_autoparallel.files import write_text_atomically


def main() -> int:
    """Run until all ranks have ended; 1 where one failed."""
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    report, *options = sys.argv[1:]
    torchrun: Any = torch.distributed.run  # it has no types
    try:
        torchrun.run(torchrun.parse_args(options))
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "local_rank": failure.local_rank, "exit_code": failure.exitcode, "time_s": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        write_text_atomically(Path(report), json.dumps({"failures": failures}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
