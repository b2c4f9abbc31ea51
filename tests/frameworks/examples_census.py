"""Looks at every example of three codes with `lint`: what is read, why the rest is not, and what is found.

    python tests/frameworks/examples_census.py --sources FOLDER [--fetch] [--list]

FOLDER has clones as for launch_scripts_census.py. An example is a script of examples/ (of Megatron-LM of docs/ too)
that starts a Python file, or a YAML that says a training by itself: of an FSDP trainer, or a functional test's. Those
that start what is no training (inference, evaluation, conversion, preprocessing) are counted apart. Read is one from
which `import` makes a plan, with what the machine, the tokenizer or a folder of weights says beside it. Exits with 1
where an error is found in what is read that is not in KNOWN, or a refusal names no reason.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lint_census
from config_census import refusal_of
from launch_scripts_census import CODES, Code, fetch, shorten
from megatron_core_census import OF_TESTS, OTHERS, TOKENS, TRAINS, dialect_of, least_world
from mindspeed_mm_census import IMAGE_TOKENS, WORLD_SIZE, find_config, unpack

from mm_autoparallel.api.imported import find_kind, import_launch
from mm_autoparallel.api.linted import lint_files
from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.framework import LaunchKind
from mm_autoparallel.integrations.launch_script import read_launch_script
from mm_autoparallel.integrations.mindspeed_mm_fsdp.launch import read_launch as read_trainer_launch
from mm_autoparallel.integrations.mindspeed_mm_fsdp.trainer_yaml import read_trainer
from mm_autoparallel.measurements.models import find_model
from mm_autoparallel.measurements.text_models import llama_model

DEVICES = {"Megatron-LM": "h100-80g"}
ASCEND = "ascend-910b-64g"
NO_TRAINING = re.compile(
    r"infer|eval|convert|preprocess|generat|server|checkpoint|retro|msdp|benchmark|export|chat|merge|feature|quantize"
    r"|prepare|get_data|split|download|test_|^main|combine|dequant|understanding"
)
"""In the name of a Python file that trains nothing."""
KNOWN = {
    **lint_census.KNOWN,
    (
        "pretrain_llama32_3b_8k_ms.sh",
        "out-of-memory",
    ): "a peak of 58.6 GiB of 57.9 by PyTorch's count, and it trains by MindSpore",
    (
        "mindspore/deepseek3/pretrain_deepseek3_671b_4k_A3_ms.sh",
        "out-of-memory",
    ): "it passes no --moe-ffn-hidden-size, so that its experts are as wide as its dense layers",
    ("pretrain_qwen3_30b_4k_fsdp2_A5.yaml", "out-of-memory"): "for Ascend A5, whose devices hold more than 64 GB",
    ("finetune_qwen3vl_235B.sh", "out-of-memory"): "one node of 16 devices, too few for 235B weights in FSDP",
}
"""(end of the path, rule) → why a published file has such an error."""
SIZES = {
    "qwen3-8b": find_model("qwen3-8b"),
    "qwen3-14b": llama_model(40, 5120, 17408, 40, 8, 151936, head_dim=128, qk_norm="head"),
    "qwen3-32b": find_model("qwen3-32b"),
    "qwen3-30b-a3b": find_model("qwen3-30b-a3b"),
    "qwen3-235b": find_model("qwen3-235b-a22b"),
    "qwen3-next": {"model_type": "qwen3_next"},
}
"""Folder of weights → the model there; 14B as examples/mcore/qwen3 of MindSpeed-LLM has it, Qwen3-Next as its class."""


@dataclass
class Found:
    """Of one code. reasons: why examples are not read, files: what rules find in those that are."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    rules: Counter[tuple[str, str]] = field(default_factory=Counter)
    strange: list[str] = field(default_factory=list)


def list_examples(folder: Path) -> Iterator[tuple[Path, str]]:
    """Each example below `folder`, and the Python file that it starts; empty for a YAML."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".sh":
            started = read_launch_script(path).started()
            if started:
                yield path, started[0].text
        elif path.suffix in (".yaml", ".yml") and is_training(path):
            yield path, ""


def is_training(path: Path) -> bool:
    """Whether the YAML at `path` says a training by itself."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.name == "model_config.yaml":
        return TRAINS.search(text) is not None and not OTHERS & {*path.parts}
    return all(re.search(rf"^{section}:", text, re.MULTILINE) for section in ("parallel", "training"))


def give(path: Path, name: str, kind: LaunchKind) -> Sequence[Given]:
    """What is said beside the example at `path`, in the order in which it is tried."""
    if name in ("megatron-core", "mindspeed-llm"):
        dialect = dialect_of(path)
        assert dialect is not None
        try:
            world_size = least_world(path, WORLD_SIZE if path.suffix == ".sh" else OF_TESTS, dialect)
        except PlannerError:
            world_size = WORLD_SIZE  # what cannot be read is told then
        return [Given(world_size=world_size), Given(world_size=world_size, vocab_size=TOKENS)]
    config, (nodes, per_node) = find_config(path) or config_of(path), kind.find_devices(path)
    world_size = nodes * per_node if nodes and per_node else said_devices(path)
    several = [Given(world_size=world_size), Given(world_size=world_size, image_tokens=IMAGE_TOKENS)]
    return [*several, Given(config, world_size=world_size, image_tokens=IMAGE_TOKENS)] if config else several


def said_devices(path: Path) -> int:
    """Those that the YAML of MindSpeed-LLM's trainer asks for; of what says none, WORLD_SIZE."""
    try:
        trainer = read_trainer(path) if path.suffix == ".yaml" else None
    except PlannerError:
        return WORLD_SIZE
    return trainer.shard if trainer and trainer.layout.of_llm else WORLD_SIZE


def config_of(path: Path) -> Path | None:
    """A file of the model that a trainer's YAML names by a folder of weights, where its sizes are known."""
    try:
        model = read_trainer(read_trainer_launch(path).yaml_path).section("model")
        folder = Path(model.text("model_name_or_path", "")).name.lower()
    except PlannerError:
        return None
    if folder not in SIZES:
        return None
    config = path.with_suffix(".model.json")
    config.write_text(json.dumps(SIZES[folder]), encoding="utf-8")
    return config


def look_at(code: Code, path: Path, entry: str, found: Found, told: bool) -> None:
    """Counts what becomes of one example."""
    found.counts["examples"] += 1
    if entry and NO_TRAINING.search(Path(entry).name):
        found.counts["no training"] += 1
        return
    try:
        name, kind = find_kind(path, None)
    except JobError:
        found.counts["not read"] += 1
        found.reasons[f"starts {Path(entry).name or 'nothing: a trainer that is not known'}"] += 1
        return
    several = give(path, name, kind)
    given = next((each for each in several if not refusal_of(kind, path, each)), several[-1])
    device = "b200-192g" if "b200" in path.as_posix() else DEVICES.get(code.name, ASCEND)
    findings = lint_files([path], framework=name, device=device, given=given).findings
    try:
        import_launch(path, framework=name, device=device, given=given)
    except PlannerError as refusal:
        found.counts["not read"] += 1
        found.reasons[name_reason(shorten(refusal, path))] += 1
        if not any(one.unread or one.rule.severity == "error" for one in findings):
            found.strange.append(f"{path}: not read, and nothing is found: {refusal}")
        return
    found.counts["read"] += 1
    for severity, key in {(one.rule.severity, one.rule.key) for one in findings}:
        found.rules[severity, key] += 1
    for one in findings:
        is_known = any(str(path).endswith(end) and one.rule.key == rule for end, rule in KNOWN)
        line = f"{path}:{one.line}: {one.rule.severity}: {one.message} [{one.rule.key}]"
        if one.rule.severity == "error" and not is_known:
            found.strange.append(line)
        elif told:
            print(line)


def name_reason(text: str) -> str:
    """The reason without what only this one example says."""
    started = re.search(r"starts (?:\S*/)?(\w+\.py), and neither", text)
    if started:
        return f"starts {started[1]}"
    return re.sub(r" \(again in line \d+\)|line \d+[:,]? ?|^(?:launch (?:script|file)|configuration) …: ", "", text)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, metavar="FOLDER")
    parser.add_argument("--fetch", action="store_true", help="clone what is missing")
    parser.add_argument("--list", action="store_true", help="print every finding")
    arguments = parser.parse_args()
    if arguments.sources is None:
        print("skipped: no folder with the codes' clones was named (--sources)")
        return 0
    assert frameworks()
    total = Found()
    for code in CODES:
        found = Found()
        with tempfile.TemporaryDirectory() as place:
            if arguments.fetch:
                fetch(code, arguments.sources)
            below = (*code.below, "tests/functional_tests/") if code.framework == "megatron-core" else code.below
            unpack(arguments.sources / code.name, code.release, Path(place) / code.name, below)
            for path, entry in list_examples(Path(place) / code.name):
                look_at(code, path, entry, found, arguments.list)
            print(f"{code.name} {code.release}: {dict(found.counts)}", flush=True)
            for reason, number in found.reasons.most_common():
                print(f"  {number:4} not read: {reason.replace(place, '')[:170]}")
            for (severity, key), number in sorted(found.rules.items()):
                print(f"  {number:4} {severity:8} {key}")
            for line in found.strange:
                print(f"  STRANGE {line.replace(place, '')}")
        total.counts += found.counts
        total.strange += found.strange
    print(f"all: {dict(total.counts)}, {len(total.strange)} strange")
    return int(bool(total.strange) or not total.counts["read"])


if __name__ == "__main__":
    sys.exit(main())
