"""Sixty public launch scripts of three codes: which are read, and what becomes of each when a plan is written into it.

    python tests/frameworks/launch_scripts_census.py --sources FOLDER [--fetch] [--scripts 60] [--list]

FOLDER has clones of Megatron-LM, MindSpeed-LLM and MindSpeed-MM, with or without work trees; --fetch makes those that
are missing with git. Of each its release below is looked at. Scripts are those that start a training which
`export --into` knows, in equal parts of the codes as far as they have so many, evenly spaced in the order of their
paths. Each is read for the devices that it starts, 64 where the machine says them. A plan of its model, stages uneven,
is then written into a copy: every line that changes must hold a flag that the plan decides, or a number of a variable
behind one; `bash -n` must pass where it passed before; the first line must stay; and read again the copy must give the
plan. The same plan in new files (codes that have such) must pass `bash -n`, begin with #! and come back. Exits with 1
where one of these fails, or where less than four fifths are read.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_core_census import DECIDED, TOKENS, VOCABULARY, dialect_of, least_world, plan_for, strangers
from mindspeed_mm_census import IMAGE_TOKENS, WORLD_SIZE, draw, find_config, list_scripts, unpack

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations.accounting import Lost, check_decided
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.megatron_core.dialect import MEGATRON, Dialect
from mm_autoparallel.integrations.mindspeed_mm import flags as of_mindspeed_mm
from mm_autoparallel.integrations.mindspeed_mm.arguments import decoder_settings, find_argument
from mm_autoparallel.integrations.mindspeed_mm.script_files import read_launch
from mm_autoparallel.integrations.mindspeed_mm.trained_model import read_trained_model
from mm_autoparallel.integrations.mindspeed_mm_fsdp.launch_files import is_script as starts_sharded_trainer
from mm_autoparallel.planner.plan import Plan

AT_LEAST_READ_FRACTION = 0.8
TRIES = 40
"""Plans that are drawn for a script, at most, until its code runs one."""
DECIDED |= {value for value in vars(of_mindspeed_mm).values() if isinstance(value, str) and value.startswith("--")}


@dataclass(frozen=True)
class Code:
    """Where a code is published: repository, the branch that is looked at, folders of its scripts."""

    framework: str
    repository: str
    release: str
    below: tuple[str, ...] = ("examples/",)

    @property
    def name(self) -> str:
        """Of the folder that a clone lies in."""
        return self.repository.rsplit("/", 1)[-1]


CODES = (
    Code("megatron-core", "https://github.com/NVIDIA/Megatron-LM", "core_r0.16.0", ("examples/", "docs/")),
    Code("mindspeed-llm", "https://gitcode.com/Ascend/MindSpeed-LLM", "26.1.0"),
    Code("mindspeed-mm", "https://gitcode.com/Ascend/MindSpeed-MM", "2.3.0"),
)


@dataclass
class Outcome:
    """What became of a script. refusal: why it is not read. unwritten: why no plan goes into it, though it is.
    wrong: what is amiss."""

    refusal: str = ""
    unwritten: str = ""
    wrong: tuple[str, ...] = ()


def fetch(code: Code, folder: Path) -> None:
    """Clones the code's release into `folder`; one that is there stays."""
    target = folder / code.name
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["git", "clone", "--quiet", "--bare", "--depth", "1", "--branch", code.release, code.repository]
        subprocess.run([*command, str(target)], check=True)


def scripts_of(code: Code, folder: Path) -> list[Path]:
    """The code's launch scripts in the unpacked `folder`, in order."""
    if code.framework == "mindspeed-mm":
        return [path for path in list_scripts(folder) if not starts_sharded_trainer(path)]
    meant = code.framework == "megatron-core"
    told = {path: dialect_of(path) for path in sorted(folder.rglob("*.sh"))}
    return [path for path, dialect in told.items() if dialect and (dialect is MEGATRON) == meant]


def share_out(numbers: dict[str, int], total: int) -> dict[str, int]:
    """How many scripts of each code are looked at: equal parts, and what one has not goes to the others."""
    parts = dict.fromkeys(numbers, 0)
    while sum(parts.values()) < min(total, sum(numbers.values())):
        least = min((name for name in numbers if parts[name] < numbers[name]), key=lambda name: parts[name])
        parts[least] += 1
    return parts


def spaced(paths: list[Path], number: int) -> Iterator[Path]:
    """`number` of `paths`, evenly spaced."""
    yield from (paths[index * len(paths) // number] for index in range(number))


def look_at(code: Code, path: Path) -> Outcome:
    """Reads the script at `path`, and writes a plan into it."""
    outcome = Outcome()
    kind = next(kind for kind in frameworks()[code.framework].launches() if kind.is_one(path))
    try:
        given = said_beside(code, path)
        kind.read_plan(path, given)
    except PlannerError as refusal:
        outcome.refusal = shorten(refusal, path)
        return outcome
    drawn = random.Random(path.name)
    for _ in range(TRIES):
        try:
            plan = draw_for(code, path, drawn)
            if plan is None:
                continue
            outcome.unwritten = ""
            outcome.wrong = tuple(hold(code, path, plan))
            break
        except PlannerError as refusal:
            outcome.unwritten = shorten(refusal, path)
            if code.framework != "mindspeed-mm":
                break
    return outcome


def said_beside(code: Code, path: Path) -> Given:
    """What the machine or the tokenizer knows, and a script does not."""
    if code.framework == "mindspeed-mm":
        return Given(find_config(path), world_size=WORLD_SIZE, image_tokens=IMAGE_TOKENS)
    dialect = dialect_of(path)
    assert isinstance(dialect, Dialect)
    tokens = None if VOCABULARY.search(path.read_text(encoding="utf-8")) else TOKENS
    return Given(world_size=least_world(path, WORLD_SIZE, dialect), vocab_size=tokens)


def draw_for(code: Code, path: Path, rng: random.Random) -> Plan | None:
    """A plan for the script's model; None where the sizes that were drawn are no plan. Raises PlannerError."""
    if code.framework == "mindspeed-mm":
        launch = read_launch(path, WORLD_SIZE)
        named = launch.find(find_argument(launch.arguments, of_mindspeed_mm.MODEL) or "")
        return draw(read_trained_model(named, decoder_settings(launch.arguments))[1], rng)
    dialect = dialect_of(path)
    assert isinstance(dialect, Dialect)
    return plan_for(path, dialect)


def hold(code: Code, path: Path, plan: Plan) -> Iterator[str]:
    """What is wrong with the script once `plan` is in it, and with new files. Raises PlannerError for a refusal."""
    files = (path,)
    if code.framework == "mindspeed-mm":
        launch = read_launch(path, plan.strategy.world_size)
        files = (launch.find(find_argument(launch.arguments, of_mindspeed_mm.MODEL) or ""), path)
    before = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        written = export_plan(plan, None, code.framework, into=files, out=Path(folder)).files
        text = next(one for one in written if one.name == path.name).read_text(encoding="utf-8")
        copy = path.with_name("census_planned.sh")
        copy.write_text(text, encoding="utf-8")
        if parses(copy) is False and parses(path):
            yield "bash -n refuses it"
        if strangers(before, text):
            yield f"changed: {strangers(before, text)[:2]}"
        if before.splitlines()[:1] != text.splitlines()[:1]:
            yield "its first line changed"
        yield from come_back(code, copy, plan)
        copy.unlink()
    if frameworks()[code.framework].exporter().write is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        new = [one for one in export_plan(plan, None, code.framework, out=Path(folder)).files if one.suffix == ".sh"]
        for one in new:
            if not parses(one) or not one.read_text(encoding="utf-8").startswith("#!"):
                yield f"new {one.name} does not parse, or begins without #!"


def parses(path: Path) -> bool:
    """Whether bash takes the script."""
    return subprocess.run(["bash", "-n", str(path)], capture_output=True, check=False).returncode == 0


def come_back(code: Code, path: Path, plan: Plan) -> Iterator[str]:
    """What differs when the script at `path` is read again."""
    kind = next(kind for kind in frameworks()[code.framework].launches() if kind.is_one(path))
    try:
        given = said_beside(code, path)
        again = kind.read_plan(path, Given(given.model_config, world_size=plan.strategy.world_size,
                                           vocab_size=given.vocab_size, image_tokens=given.image_tokens))  # fmt: skip
        check_decided(again, plan, None)
    except (PlannerError, Lost) as failure:
        yield f"does not come back: {shorten(failure, path)}"


def shorten(failure: Exception, path: Path) -> str:
    """The reason without the file's name."""
    return re.sub(r"\S*/(examples/\S+)", r"\1", str(failure).replace(str(path), "…")).split("; ")[0]


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, metavar="FOLDER")
    parser.add_argument("--fetch", action="store_true", help="clone what is missing")
    parser.add_argument("--scripts", type=int, default=60)
    parser.add_argument("--list", action="store_true", help="say of each script what became of it")
    arguments = parser.parse_args()
    if arguments.sources is None:
        print("skipped: no folder with the codes' clones was named (--sources)")
        return 0
    rows: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        found = {}
        for code in CODES:
            if arguments.fetch:
                fetch(code, arguments.sources)
            unpack(arguments.sources / code.name, code.release, Path(place) / code.name, code.below)
            found[code.name] = scripts_of(code, Path(place) / code.name)
        parts = share_out({name: len(paths) for name, paths in found.items()}, arguments.scripts)
        for code in CODES:
            count = rows[f"{code.name} {code.release}"] = Counter()
            for path in spaced(found[code.name], parts[code.name]):
                outcome = look_at(code, path)
                count["scripts"] += 1
                count["refused" if outcome.refusal else "read"] += 1
                if not outcome.refusal:
                    count["not written" if outcome.unwritten else "wrong" if outcome.wrong else "written"] += 1
                said = [outcome.refusal, outcome.unwritten, *outcome.wrong]
                reasons.update({f"refused: {outcome.refusal}"} if outcome.refusal else ())
                reasons.update({f"not written: {outcome.unwritten}"} if outcome.unwritten else ())
                if arguments.list or outcome.wrong:
                    name = path.relative_to(Path(place))
                    print(f"{name}: {'; '.join(filter(None, said)) or 'read, written, came back'}")
    total: Counter[str] = sum(rows.values(), Counter())
    for name, count in (*rows.items(), ("all", total)):
        keys = ("scripts", "read", "refused", "written", "not written", "wrong")
        print(f"{name:24} " + ", ".join(f"{count[key]} {key}" for key in keys))
    for reason, number in reasons.most_common():
        print(f"{number:4} {reason[:150]}")
    share = total["read"] / max(1, total["scripts"])
    print(f"read: {share:.0%}")
    return int(total["wrong"] > 0 or share < AT_LEAST_READ_FRACTION)


if __name__ == "__main__":
    sys.exit(main())
