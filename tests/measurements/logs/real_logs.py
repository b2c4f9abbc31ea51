"""Reads all logs below some folders and says how many of each framework were read, and why others were not.

    python tests/measurements/logs/real_logs.py FOLDER... [--device NAME] [--fact NAME=VALUE]

For `make nightly` with LOGS="FOLDER..."; no log is kept here. Public repositories whose logs were read so while this
was written: stark-sim/megatron-deepspeed-lock-clock (Megatron-DeepSpeed), elena-lyulina/Megatron-LM-Attention-Benchmark
(Megatron-LM), QIU023/torchtitan_attention_residual (torchtitan); clone them and name the clones. A log either becomes a
case or is refused in words: anything else is a crash, and the script fails.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.measurements.logs.catalog import find_reader, read_cases
from mm_autoparallel.measurements.logs.facts import KNOWN, parse_facts
from mm_autoparallel.measurements.logs.log import read_log

ENDINGS = (".log", ".out", ".txt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, count, print."""
    parser = argparse.ArgumentParser(description="read all logs below some folders")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--device", default="a100-80g", metavar="NAME", help="what all of them are taken to have run on"
    )
    parser.add_argument("--fact", action="append", default=[], metavar="NAME=VALUE", help="what they leave open")
    options = parser.parse_args(arguments)
    read: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for path in sorted(path for folder in options.folders for path in folder.rglob("*") if path.suffix in ENDINGS):
        try:
            name = find_reader(read_log(path)).name
        except PlannerError:
            read["of no such framework"] += 1
            continue
        reason = _try_to_read(path, options.device, options.fact)
        if reason is None:
            read[name] += 1
        else:
            refused[f"{name}: {_plain(reason, path)}"] += 1
    for name, number in read.most_common():
        print(f"{number:5} {name}")
    for reason, number in refused.most_common():
        print(f"{number:5} refused, {reason}")
    return 0


def _try_to_read(path: Path, device: str, told: Sequence[str]) -> str | None:
    """Why the log is refused; None where it is read. Facts that it does not leave open are left out."""
    facts = parse_facts(told)
    try:
        read_cases([path], device, facts)
    except PlannerError as refusal:
        idle = [fact for fact in told if fact.partition("=")[0] in KNOWN.keys() - facts.asked]
        if idle and "leaves that open" in str(refusal):
            return _try_to_read(path, device, [fact for fact in told if fact not in idle])
        return str(refusal)
    return None


def _plain(reason: str, path: Path) -> str:
    """A reason without its file and numbers, so that alike ones are counted together."""
    return re.sub(r"\d[\d,.]*", "N", reason.replace(f"log {path}", "").strip(": "))[:160]


if __name__ == "__main__":
    raise SystemExit(main())
