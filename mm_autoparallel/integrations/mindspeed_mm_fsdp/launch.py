"""Which YAML and how many devices a launch script starts MindSpeed-MM's FSDP trainer with. Nothing is run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import is_there
from mm_autoparallel.integrations.launch_script import find_world_size, read_launch_script
from mm_autoparallel.integrations.mindspeed_mm_fsdp.llm_yaml import TRAINER as OF_LLM
from mm_autoparallel.integrations.shell_text import LaunchScript

TRAINER = "mindspeed_mm/fsdp/train/trainer.py"
_BETWEEN = r"(?:[ \t]|\\\r?\n)+"
_CALL = re.compile(
    rf"(?<![\w./-])(?P<code>[\w./-]{{0,200}}(?:mindspeed_mm/fsdp/[\w./-]{{1,200}}\.py|{re.escape(OF_LLM)}))[\"']?{_BETWEEN}(?P<word>[^\s|&;<>\\]+)"
    rf"(?P<rest>(?:{_BETWEEN}[^\s|&;<>\\]+)*)"
)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_OVERRIDE, _OF_LLM_OVERRIDE = re.compile(r"[\w.]+=\S*"), re.compile(r"--[\w.]+\S*|[\"']?\$\S+")
_MAX_VARIABLES = 20


@dataclass(frozen=True)
class Launch:
    """yaml_path: the trainer's YAML. checkout: the folder that the script is started in; None where it is not known.

    world_size: devices that it starts; None where only the machine knows.
    """

    script_path: Path | None
    yaml_path: Path
    checkout: Path | None
    world_size: int | None


def starts_trainer(text: str) -> bool:
    """Whether the script `text` starts the FSDP trainer, or one of the trainers beside it."""
    return _find_call(LaunchScript(Path("script"), text)) is not None


def read_launch(path: Path) -> Launch:
    """The trainer's YAML behind `path`: a launch script, or the YAML itself.

    Raises JobError where the script does not start the trainer, starts one of a single model, names a YAML that is not
    there, or has values behind it: MindSpeed-MM's trainer takes the YAML alone (params/argument.py), so they do not
    happen.
    """
    if path.suffix.lower() in (".yaml", ".yml"):
        return Launch(None, path, find_checkout(path), None)
    script = read_launch_script(path)
    call = _find_call(script)
    if call is None:
        raise JobError(
            f"launch script {path}: it starts neither {TRAINER}, MindSpeed-MM's FSDP trainer, nor {OF_LLM}, that of "
            "MindSpeed-LLM"
        )
    if not call["code"].endswith((TRAINER, OF_LLM)):
        raise JobError(
            f"launch script {path}: line {script.line(call.start())} starts {call['code']}, the trainer of one model "
            f"alone; trainings of {TRAINER} are planned"
        )
    of_llm = call["code"].endswith(OF_LLM)
    overrides = [word for word in call["rest"].split() if (_OF_LLM_OVERRIDE if of_llm else _OVERRIDE).fullmatch(word)]
    if overrides:
        raise JobError(
            f"launch script {path}: line {script.line(call.start())} gives {overrides[0]} behind the YAML, "
            + ("which counts more than it" if of_llm else "which the trainer does not read")
            + "; write it into the YAML, or take it out"
        )
    named = _fill_in(script, call["word"].strip("\"'"), call)
    yaml_path, checkout = _find_yaml(path, named)
    return Launch(path, yaml_path, checkout, find_world_size(script))


def find_checkout(path: Path) -> Path | None:
    """The folder above `path` that holds MindSpeed-MM's FSDP trainer."""
    return next((folder for folder in path.resolve().parents if is_there(folder / TRAINER)), None)


def _find_call(script: LaunchScript) -> re.Match[str] | None:
    """The last call outside comments."""
    lines = [line if not line.lstrip().startswith("#") else " " * len(line) for line in script.text.split("\n")]
    return next(iter([*_CALL.finditer("\n".join(lines))][-1:]), None)


def _fill_in(script: LaunchScript, word: str, call: re.Match[str]) -> str:
    for _ in range(_MAX_VARIABLES):
        found = _VARIABLE.search(word)
        assigned = script.assignments(found[1] or found[2]) if found else []
        if not found or not assigned:
            break
        word = word[: found.start()] + assigned[-1].text + word[found.end() :]
    if re.search(r"[$`<>]", word):
        raise JobError(
            f"launch script {script.path}: line {script.line(call.start())} starts the trainer with {word}, which is "
            "known only when the script runs; give the YAML itself"
        )
    return word


def _find_yaml(script_path: Path, named: str) -> tuple[Path, Path | None]:
    """As the checkout's folder has it; else by its name beside the script."""
    relative = Path(named)
    if relative.is_absolute():
        folders: list[Path] = []
        found = relative if is_there(relative) else None
    else:
        folders = [*script_path.resolve().parents]
        found = next((folder / relative for folder in folders if is_there(folder / relative)), None)
    beside = script_path.parent / relative.name
    if found is None and not is_there(beside):
        raise JobError(
            f"launch script {script_path}: it starts the trainer with {named}, and there is no such file from a folder "
            "above the script, nor beside it; give the YAML itself"
        )
    folder = next((folder for folder in folders if found == folder / relative), None)
    return found or beside, find_checkout(found or beside) or folder
