"""Reads every launch script that MindSpeed-MM ships, and counts what becomes of it; counts may grow and never fall.

    python tests/frameworks/mindspeed_mm_census.py --repository CLONE [--releases 2.3.0 master] [--plans 10] [--record]

Of each release (a branch or tag of the clone, which needs no work tree) every script under examples/ that trains a
vision-language, omni, audio-language or OCR model is described as `plan --script` does it. Into those that are read,
plans drawn at random are written; each written script is run by bash with stand-ins for all programs, and what its
launcher is handed is compared word by word with what the script as shipped hands it. The floors stand in
tests/fixtures/mindspeed_mm_census.json; --record writes them anew.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import yaml
from drawn_plans import draw_plan
from mindspeed_mm_fsdp_census import CONFIGS as TRAINER_CONFIGS

from mm_autoparallel.errors import JobError, PlanError, PlannerError
from mm_autoparallel.integrations.catalog import find_launch
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.launch_script import list_arguments, read_launch_script
from mm_autoparallel.integrations.mindspeed_mm.arguments import decoder_settings, find_argument, find_switch
from mm_autoparallel.integrations.mindspeed_mm.flags import (
    CHUNKS,
    CONTEXT,
    CONTEXT_KIND,
    EMPTY_OPTIMIZER,
    EXPERT,
    GLOBAL_BATCH,
    MICRO_BATCH,
    MODEL,
    PIPELINE,
    SEQUENCE_PARALLEL,
    SHARDED_OPTIMIZER,
    SIZES,
    TENSOR,
    VARIABLE_LENGTHS,
)
from mm_autoparallel.integrations.mindspeed_mm.fsdp2_config import CONFIG_PATH, RECOMPUTE, RESHARD
from mm_autoparallel.integrations.mindspeed_mm.fsdp2_config import find_config as find_config_of_fsdp2
from mm_autoparallel.integrations.mindspeed_mm.launch import FSDP
from mm_autoparallel.integrations.mindspeed_mm.script_files import (
    Launch,
    read_launch,
    read_script_plan,
    sharded_model,
    write_script_plan,
)
from mm_autoparallel.integrations.mindspeed_mm.trained_model import FOLDER_KEY, read_trained_model
from mm_autoparallel.integrations.mindspeed_mm_fsdp.launch import read_launch as read_trainer_launch
from mm_autoparallel.integrations.mindspeed_mm_fsdp.launch_files import is_script, is_yaml
from mm_autoparallel.integrations.mindspeed_mm_fsdp.trainer_yaml import read_trainer
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

FIXTURES = Path(__file__).parents[1] / "fixtures"
FLOORS = FIXTURES / "mindspeed_mm_census.json"
RELEASES = ("2.0.0", "2.1.0", "2.2.0", "2.3.0", "26.0.0", "26.1.0", "master")

TRAINS = re.compile(
    r"(pretrain_(vlm|internvl|llava|deepseekvl|transformers|omni|whisper|videoalign|minicpmv?\w*|qwen2vl|qwen3vl|qwen3_5)"
    r"|posttrain_qwen2vl_dpo|fsdp/train/trainer|fsdp/tasks/\w+/train(er)?|finetune_(ocr2?|vl))\.py"
)
"""Entries that train a model which reads images, video or speech and answers in text (or speaks)."""

DIFFUSION = ("examples/ltx2/",)
"""Folders whose scripts start such an entry and train something else."""

NO_SIZES = re.compile(r"there is no such file|neither --mm-model nor a YAML is behind it")
"""Refusals of scripts whose model's sizes no file of the release says."""

OTHER_TRAINING = re.compile(
    r"which trains (after pretraining|a reward model|an encoder and decoder|a mixture)|of one model alone"
)
"""Refusals of scripts that train something else than one vision-language model."""

CONFIGS = {
    "Qwen3-VL-8B-Instruct": "qwen3_vl_8b",
    "Qwen3-VL-30B-A3B-Instruct": "qwen3_vl_30b_a3b",
    "Qwen3-VL-30B-Instruct": "qwen3_vl_30b_a3b",
    "Qwen3-VL-32B-Instruct": "qwen3_vl_32b",
    "Qwen3-VL-235B-A22B-Instruct": "qwen3_vl_235b_a22b",
    "Qwen3-VL-235B-Instruct": "qwen3_vl_235b_a22b",
    "InternVL3_5-30B-A3B-Instruct": "internvl3_5_30b_a3b",
    "GLM-4.5V": "glm4_5v",
    "Magistral-Small-2509": "magistral_small_2509",
    "Qwen3-Omni-30B-A3B-Instruct": "qwen3_omni_30b_a3b",
}
"""Published models that scripts name by folder → their sizes among the fixtures."""

WORLD_SIZE, IMAGE_TOKENS = 64, 256
STANDINS = (
    *("tee", "grep", "awk", "chmod", "mkdir", "find", "date", "cat", "tail", "head", "touch", "sleep", "ls", "rm"),
    *("cp", "mv", "hostname", "sed", "tr", "cut"),
)
"""Programs that scripts start beside the training; the stand-ins do nothing."""


@dataclass
class Count:
    """What became of a release's scripts. plans: by outcome. refused: reason → scripts."""

    scripts: int = 0
    outcome: Counter[str] = field(default_factory=Counter)
    plans: Counter[str] = field(default_factory=Counter)
    refused: dict[str, list[str]] = field(default_factory=dict)

    def share(self) -> str:
        """Of the scripts that train one vision-language model whose sizes the release says, how many are read."""
        no_sizes, other = (
            sum(len(names) for reason, names in self.refused.items() if kind.search(reason))
            for kind in (NO_SIZES, OTHER_TRAINING)
        )
        wanted = self.scripts - no_sizes - other
        read = self.scripts - self.outcome["refused"]
        return (
            f"read {read} of {self.scripts}; {no_sizes} without sizes, {other} other trainings: {read} of {wanted}, "
            f"{read / max(1, wanted):.0%}"
        )

    def document(self) -> dict[str, object]:
        """The numbers that stand as floors, and what is refused."""
        return {
            "scripts": self.scripts,
            **{key: self.outcome[key] for key in ("read", "read with image tokens", "read with a config")},
            "plans right": self.plans["right"],
            "plans wrong": self.plans["wrong"] + self.plans["sharded plans wrong"],
            "sharded plans right": self.plans["sharded plans right"],
        }


def unpack(repository: Path, release: str, folder: Path, below: tuple[str, ...] = ("examples/",)) -> None:
    """The texts of `release` in the folders `below` into `folder`; binary files may be missing from a clone, and are
    not needed."""
    listed = git(repository, "ls-tree", "-r", release).decode()
    wanted = []
    for line in listed.splitlines():
        about, path = line.split("\t")
        if path.startswith(below) and path.endswith((".sh", ".json", ".yaml", ".yml")):
            wanted.append((about.split()[2], path))
    found = git(repository, "cat-file", "--batch", content="\n".join(name for name, _ in wanted))
    start = 0
    for _, path in wanted:
        end = found.index(b"\n", start)
        _, *about = found[start:end].split()
        start = end + 1
        if len(about) < 2:
            continue
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(found[start : start + int(about[1])])
        start += int(about[1]) + 1


def git(repository: Path, *command: str, content: str = "") -> bytes:
    git_folder = repository / ".git" if (repository / ".git").exists() else repository
    ran = subprocess.run(["git", "--git-dir", git_folder, *command], input=content.encode(), capture_output=True)
    if ran.returncode:
        raise SystemExit(ran.stderr.decode())
    return ran.stdout


def list_scripts(folder: Path) -> Iterator[Path]:
    """Scripts that train what is counted, in order."""
    for path in sorted(folder.glob("examples/**/*.sh")):
        started = read_launch_script(path).started()
        name = path.relative_to(folder).as_posix()
        if started and TRAINS.search(started[0].text) and not name.startswith(DIFFUSION):
            yield path


def describe(path: Path, count: Count, name: str) -> Described | None:
    """As `plan --script` does; with what a person would have to add, where something is missing."""
    config = find_config(path)
    added: tuple[tuple[str, Given], ...] = (
        ("read", Given(world_size=WORLD_SIZE)),
        ("read with image tokens", Given(world_size=WORLD_SIZE, image_tokens=IMAGE_TOKENS)),
        ("read with a config", Given(config, world_size=WORLD_SIZE)),
    )
    reason = ""
    for outcome, given in added if config else added[:2]:
        try:
            described = find_launch(path).describe(path, given)
        except PlannerError as error:
            reason = reason or str(error)
            if config:
                reason = str(error)
            continue
        count.outcome[outcome] += 1
        return described
    count.outcome["refused"] += 1
    count.refused.setdefault(shorten(reason, path), []).append(name)
    return None


def shorten(reason: str, path: Path) -> str:
    """The reason without the names of this one script and file."""
    reason = re.sub(r"(launch script|model file|model config|configuration|data file) \S+: ", r"\1: ", reason)
    return reason.replace(str(path.parents[2]), "").split("; ")[0]


def find_config(path: Path) -> Path | None:
    """The fixture with the sizes of the folder that the script's model file names, of a trainer's YAML that of its kind
    of model; None without one."""
    if is_yaml(path) or is_script(path):
        with suppress(PlannerError, KeyError):
            kind = read_trainer(read_trainer_launch(path).yaml_path).section("model").text("model_id", "")
            return FIXTURES / TRAINER_CONFIGS[kind]
        return None
    text = "".join(
        near.read_text(errors="replace") for near in sorted(path.parent.glob("*")) if near.suffix in (".json", ".yaml")
    )
    try:
        launch = read_launch(path, WORLD_SIZE)
        text = launch.find(find_argument(launch.arguments, MODEL) or "").read_text()
    except (PlannerError, OSError):
        pass
    if FOLDER_KEY not in text:
        return None
    named = next(
        (fixture for folder, fixture in CONFIGS.items() if re.search(rf"[/ ]{re.escape(folder)}[\"\s]", text)), None
    )
    found = (FIXTURES / room / f"{named}.json" for room in ("huggingface", "mindspeed_mm_configs"))
    return next((path for path in found if path.exists()), None)


def count_release(folder: Path, num_plans: int) -> Count:
    count = Count()
    for path in list_scripts(folder):
        name = path.relative_to(folder).as_posix()
        count.scripts += 1
        described = describe(path, count, name)
        if described is not None and not (is_yaml(path) or is_script(path)):  # mindspeed_mm_fsdp_census.py writes those
            launch = read_launch(path, WORLD_SIZE)
            if find_switch(launch.arguments, FSDP):
                check_sharded_plans(path, launch, folder, num_plans, count)
            elif launch.config is None:
                check_plans(path, launch, folder, num_plans, count)
    return count


def check_sharded_plans(path: Path, launch: Launch, folder: Path, num_plans: int, count: Count) -> None:
    """Plans of FSDP2: batches, whether weights are kept and what recomputes, read back, and no other word changed."""
    rng = random.Random(path.name)
    given = Given(find_config(path), world_size=WORLD_SIZE)
    source, sharding = launch.config or path, find_config_of_fsdp2(launch.arguments, launch.find)
    model = sharded_model(path, given)
    count.plans["scripts of FSDP2"] += 1
    for _ in range(num_plans):
        strategy = Strategy(
            pp=1, tp=1, dp=WORLD_SIZE, mbs=rng.choice((1, 2, 4)), zero=3, reshard=rng.choice((True, False))
        )
        plan = draw_plan(model, strategy, WORLD_SIZE * strategy.mbs * rng.choice((1, 3, 8)), rng)
        with tempfile.TemporaryDirectory() as out:
            done = write_script_plan(plan, path, Path(out), given, False)
            flags, other = (one.read_text() for one in done.files)
            difference = _compare_sharded(plan, (source, flags), (sharding, other), str(done.files[1]), path, folder)
            if launch.config is None:
                moved = path.with_name("census_planned.sh")
                moved.write_text(flags)
                back = read_script_plan(moved, given)
                moved.unlink()
                if (back.strategy, back.global_batch_size) != (plan.strategy, plan.global_batch_size):
                    difference = difference or f"it reads back as {back.strategy}, {back.global_batch_size}"
        count.plans["sharded plans wrong" if difference else "sharded plans right"] += 1
        if difference:
            print(f"WRONG {path}: {plan.strategy}: {difference}", file=sys.stderr)


def _compare_sharded(
    plan: Plan, flags: tuple[Path, str], sharding: tuple[Path, str], named: str, path: Path, folder: Path
) -> str:
    """What a file says that is neither the plan's nor was there before; nothing where all is as it should be."""
    wanted = {MICRO_BATCH: plan.strategy.mbs, GLOBAL_BATCH: plan.global_batch_size, CONFIG_PATH: named}
    if flags[0] == path:
        before, after = (group(_words(text, path, folder, plan)) for text in (path.read_text(), flags[1]))
        changed = {flag for flag in before.keys() | after.keys() if before.get(flag) != after.get(flag)}
        values = {flag: {one[0] for one in after.get(flag, [("missing",)])} for flag in wanted}
    else:
        old, new = yaml.safe_load(flags[0].read_text()), yaml.safe_load(flags[1])
        if {**old, "gpt_args": 0} != {**new, "gpt_args": 0}:
            return "more than gpt_args changed"
        old, new = ({f"--{key.replace('_', '-')}": v for key, v in one["gpt_args"].items()} for one in (old, new))
        changed = {flag for flag in old.keys() | new.keys() if old.get(flag) != new.get(flag)}
        values = {flag: {str(new.get(flag))} for flag in wanted}
    if changed - wanted.keys():
        return f"{', '.join(sorted(changed - wanted.keys()))} changed"
    wrong = [flag for flag, value in wanted.items() if values[flag] != {str(value)}]
    if wrong:
        return f"{wrong[0]} is {values[wrong[0]]}, and {wanted[wrong[0]]} is planned"
    old, new = yaml.safe_load(sharding[0].read_text()), yaml.safe_load(sharding[1])
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    if changed - {RESHARD, RECOMPUTE}:
        return f"{', '.join(sorted(changed))} of {sharding[0].name} changed"
    return "" if new.get(RESHARD, True) == plan.strategy.reshard else f"{RESHARD} is {new.get(RESHARD)}"


def _words(text: str, path: Path, folder: Path, plan: Plan) -> list[str]:
    """What the launcher is handed; of scripts that bash does not run as they are shipped, what their text passes."""
    return run(text, path, folder, plan) or list_arguments(LaunchScript(path, text), plan.strategy.world_size)


def check_plans(path: Path, launch: Launch, folder: Path, num_plans: int, count: Count) -> None:
    rng = random.Random(path.name)
    model_path = launch.find(find_argument(launch.arguments, MODEL) or "")
    _, model = read_trained_model(model_path, decoder_settings(launch.arguments))
    for _ in range(num_plans):
        plan = draw(model, rng)
        if plan is None:
            continue
        with tempfile.TemporaryDirectory() as out:
            try:
                written = find_launch(path).write_plan(plan, path, Path(out), Given(world_size=WORLD_SIZE), False).files
            except PlanError:
                count.plans["refused by law"] += 1
                continue
            except JobError as error:
                count.plans["refused by its files"] += 1
                count.refused.setdefault(shorten(str(error), path), []).append(path.name)
                continue
            before = run(path.read_text(), path, folder, plan)
            after = run(written[1].read_text(), path, folder, plan)
            difference = compare(before, after, plan, str(written[0]))
            count.plans["wrong" if difference else "right"] += 1
            if difference:
                print(f"WRONG {path}: {plan.strategy}: {difference}", file=sys.stderr)


def draw(model: Model, rng: random.Random) -> Plan | None:
    pp, vpp = rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 1, 2))
    chained = sum(m.layers.num_layers for m in model.modalities if m.name != "audio")
    if (pp == 1 and vpp > 1) or pp * vpp >= chained:
        return None
    experts = model.text.layers.experts
    strategy = Strategy(
        pp=pp,
        tp=rng.choice((1, 2, 4)),
        cp=rng.choice((1, 1, 2)),
        dp=rng.choice((1, 2, 4, 8)),
        ep=rng.choice((1, 2)) if experts else 1,
        mbs=rng.choice((1, 2, 4)),
        vpp=vpp,
        zero=rng.choice((0, 1)),
    )
    return draw_plan(model, strategy, strategy.dp * strategy.mbs * pp * rng.choice((1, 3, 8)), rng)


def run(text: str, path: Path, folder: Path, plan: Plan) -> list[str]:
    """What the launcher is handed when bash runs `text`, on as many nodes as the plan needs."""
    devices = plan.strategy.world_size
    processes = 8 if devices % 8 == 0 else devices
    nodes = devices // processes
    text = re.sub(r"^((?:export )?(?:NPUS|GPUS|NPROC)_PER_NODE=)\S+", rf"\g<1>{processes}", text, flags=re.MULTILINE)
    text = re.sub(
        r"^((?:export )?NNODES=)[\d$][{\d]*\S*(?<!\))[ \t]*(#.*)?$", rf"\g<1>{nodes}", text, flags=re.MULTILINE
    )
    with tempfile.TemporaryDirectory() as place:
        script, handed = Path(place) / "script.sh", Path(place) / "handed"
        script.write_text(text)
        subprocess.run(
            ["/bin/bash", script],
            cwd=folder,
            env={"PATH": str(programs()), "HOME": place, "HANDED": str(handed), "NODES": str(nodes)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
        return handed.read_text().split("\0")[:-1] if handed.exists() else []


@lru_cache
def programs() -> Path:
    """A folder with stand-ins for all programs: launchers write down their words, and the rest does nothing."""
    folder = Path(tempfile.mkdtemp(prefix="census-"))
    atexit.register(shutil.rmtree, folder)
    for name in STANDINS:
        (folder / name).symlink_to("/bin/true")
    make(folder / "wc", 'case "$*" in "-l") echo $NODES;; *) echo "$NODES $2";; esac')
    for name in ("torchrun", "msrun", "python", "python3"):
        make(folder / name, 'printf "%s\\0" "$@" > $HANDED')
    return folder


def make(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def group(words: Sequence[str]) -> dict[str, list[tuple[str, ...]]]:
    """Flag → what stands behind each place of it; words before the first flag under ''."""
    found: dict[str, list[tuple[str, ...]]] = {"": [()]}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            found.setdefault(flag, []).append((value,) if value else ())
        else:
            found[flag][-1] += (word,)
    return found


def compare(before: list[str], after: list[str], plan: Plan, model_json: str) -> str:
    """What of `after` is not as the plan and the script as shipped have it; nothing where all is."""
    if not before or not after:
        return "nothing was started"
    strategy = plan.strategy
    expected, found = group(before), group(after)
    values = {flag: getattr(strategy, name) for flag, name in SIZES.items()}
    values |= {MICRO_BATCH: strategy.mbs, GLOBAL_BATCH: plan.global_batch_size, MODEL: model_json}
    for flag, value in values.items():
        there = expected.pop(flag, None)
        words = found.pop(flag, [])
        if there is None and value == 1 and flag in (TENSOR, CONTEXT, EXPERT, CHUNKS, PIPELINE) and not words:
            continue
        # A list that two flags end in one variable has the words behind the last flag too.
        if any(one[:1] != (str(value),) for one in words) or not words:
            return f"{flag} is {words}, and {value} is planned"
        if there is not None and [one[1:] for one in words] != [one[1:] for one in there]:
            return f"behind {flag} stand {words}, and {there} stood there"
    divided = strategy.sequence_parallel and (strategy.tp > 1 or SEQUENCE_PARALLEL in expected)
    varied = strategy.pp > 1 or VARIABLE_LENGTHS in expected
    switches = {SHARDED_OPTIMIZER: strategy.zero > 0, SEQUENCE_PARALLEL: divided, VARIABLE_LENGTHS: varied}
    for flag, on in switches.items():
        if (flag in found) != on:
            return f"{flag} is {'there' if flag in found else 'missing'}"
        tail = [one for one in expected.pop(flag, []) if one]
        if tail != [one for one in found.pop(flag, []) if one]:
            return f"words behind {flag} changed"
    if strategy.cp > 1 and CONTEXT_KIND not in found:
        return f"{CONTEXT_KIND} is missing"
    for flag in (CONTEXT_KIND, EMPTY_OPTIMIZER):
        if flag not in expected:
            found.pop(flag, None)
    for key in expected.keys() | found.keys():
        if expected.get(key) != found.get(key):
            return f"{key or 'the beginning'} is {found.get(key)}, and {expected.get(key)} stood there"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, default=os.environ.get("MINDSPEED_MM_REPOSITORY"))
    parser.add_argument("--releases", nargs="+", default=RELEASES)
    parser.add_argument("--plans", type=int, default=10, help="drawn for each script")
    parser.add_argument("--record", action="store_true", help="write the floors anew")
    arguments = parser.parse_args()
    if arguments.repository is None:
        print("no clone of MindSpeed-MM is named (--repository, or MINDSPEED_MM_REPOSITORY): nothing is counted")
        return 0
    floors = json.loads(FLOORS.read_text()) if FLOORS.exists() else {}
    fallen = []
    for release in arguments.releases:
        with tempfile.TemporaryDirectory() as place:
            unpack(arguments.repository, release, Path(place))
            count = count_release(Path(place), arguments.plans)
        counts = count.document() | {"plans drawn": arguments.plans}
        print(f"{release}: {json.dumps(counts)} {dict(count.plans)}")
        print(f"  {count.share()}")
        for reason, names in sorted(count.refused.items(), key=lambda item: -len(item[1])):
            print(f"  {len(names):4} {reason}\n       {', '.join(sorted(set(names))[:4])}")
        floor = floors.get(release, {})
        reached = sum(count.outcome[key] for key in count.outcome if key.startswith("read"))
        wanted = sum(value for key, value in floor.items() if key.startswith("read"))
        if reached < wanted:
            fallen.append(f"{release}: {reached} scripts are read, and {wanted} were")
        fallen += [
            f"{release}: {counts[kind]} {kind}, and {floor[kind]} were"
            for kind in ("plans right", "sharded plans right")
            if arguments.plans >= floor.get("plans drawn", 0) and counts[kind] < floor.get(kind, 0)
        ]
        if counts["plans wrong"]:
            fallen.append(f"{release}: {counts['plans wrong']} plans have a wrong word")
        floors[release] = counts
    if arguments.record:
        FLOORS.write_text(json.dumps(floors, indent=1) + "\n")
    for line in fallen:
        print(f"FALLEN {line}", file=sys.stderr)
    return 1 if fallen else 0


if __name__ == "__main__":
    sys.exit(main())
