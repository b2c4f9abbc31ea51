"""Launch scripts of Megatron-Bridge: the recipe that they start, and the fields that they set over it. Nothing is run.

scripts/training/run_recipe.py: its flags, and Hydra's words behind them. examples/megatron_mimo/qwen35_vl: --component
of finetune_qwen35_vl.py, whose other choices are its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, read_document
from mm_autoparallel.integrations.launch_script import read_launch_script
from mm_autoparallel.integrations.megatron_bridge import mimo
from mm_autoparallel.integrations.megatron_bridge.fields import FIELDS
from mm_autoparallel.integrations.megatron_bridge.recipes import Unread
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.validation import nearest

SCRIPTS = (".sh", ".bash")
RUNNER, MIMO_RUNNER = "run_recipe.py", "finetune_qwen35_vl.py"
_RECIPE, _COMPONENT = "--recipe", "--component"
_WORD = r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'\\]+)"
_OVERRIDE = rf"(?<![\w.$/{{-])\+{{0,2}}(?P<field>[a-z_]+(?:\.\w+)+)=(?P<value>{_WORD})"
_REFERENCE = re.compile(r"\$(?:\w+|\{[^{}]*\})")
_FLAGS = {
    f"--{key}": f"{section}.{key}"
    for section, keys in {
        "train": ("global_batch_size", "micro_batch_size"),
        "dataset": ("seq_length",),
        "model": (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
            *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        ),
    }.items()
    for key in keys
}
"""Of run_recipe.py, in the long form."""
_OF_MIMO: dict[str, tuple[str, int]] = {
    "--micro-batch-size": ("train.micro_batch_size", 1),
    "--global-batch-size": ("train.global_batch_size", 8),
    "--seq-length": ("model.seq_length", 4096),
}
"""Flag of finetune_qwen35_vl.py → field and default."""
_DECIDE = frozenset(field for names in FIELDS.values() for field in names)
_FIXED_OF_MIMO = {"ddp.use_distributed_optimizer": True, "mixed_precision": "bf16_mixed"}
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
    "rank_offset": "rank_offset",
}


def is_script(path: Path) -> bool:
    """Whether the launch script at `path` starts one of both runners."""
    return path.suffix in SCRIPTS and _runner_of(read_launch_script(path)) != ""


def read_script(path: Path) -> tuple[dict[str, Any], str]:
    """Field → value or Unread of what the script at `path` sets, and the recipe below that; empty where it starts MIMO.

    Raises JobError where a field is set to several values, or the script starts none of the runners.
    """
    script = read_launch_script(path)
    runner = _runner_of(script)
    if not runner:
        raise JobError(f"launch script {path}: it starts neither {RUNNER} nor {MIMO_RUNNER} of Megatron-Bridge")
    if runner == MIMO_RUNNER:
        return _read_components(script), ""
    found: dict[str, tuple[str, int]] = {}
    words = [(match["field"], match["value"].strip("\"'"), match.start("field")) for match in script.find(_OVERRIDE)]
    words += [(field, word.text, word.start) for flag, field in _FLAGS.items() for word in script.values(flag)]
    for field, text, start in words:
        if field in _DECIDE and field in found and found[field][0] != text:
            raise JobError(
                f"launch script {path}: {field} is {found[field][0]} in line {script.line(found[field][1])} and "
                f"{text} in line {script.line(start)}; one run a script is read"
            )
        found[field] = text, start
    recipes = {_resolve(script, word.text) for word in script.values(_RECIPE)}
    if len(recipes) != 1:
        raise JobError(f"launch script {path}: it starts {len(recipes)} recipes by {_RECIPE}; one is expected")
    return {field: _value(script, text, start) for field, (text, start) in found.items()}, recipes.pop()


def _runner_of(script: LaunchScript) -> str:
    found = [name for name in (RUNNER, MIMO_RUNNER) if any(script.find(rf"[\w./-]*{re.escape(name)}(?![\w.])"))]
    return found[0] if found else ""


def _read_components(script: LaunchScript) -> dict[str, Any]:
    where = f"launch script {script.path}"
    fields: dict[str, Any] = dict(_FIXED_OF_MIMO)
    for flag, (field, usual) in _OF_MIMO.items():
        words = script.values(flag)
        fields[field] = _value(script, words[-1].text, words[-1].start) if words else usual
    for word in script.values(_COMPONENT):
        text = _resolve(script, word.text)
        name, _, sizes = text.partition("=")
        for size in sizes.split(","):
            key, _, number = size.partition("=")
            if key not in _SIZES or not number.isdigit():
                raise JobError(
                    f"{where}: line {script.line(word.start)}: {_COMPONENT} {text}: {describe_value(size)} is no size"
                    f"{nearest(key, [*_SIZES])}; {', '.join(_SIZES)} with a whole number each are expected"
                )
            fields[f"{mimo.MODULES}.{name}.{_SIZES[key]}"] = int(number)
    if not mimo.is_mimo(fields):
        raise JobError(f"{where}: it passes no {_COMPONENT}; {mimo.LANGUAGE} and images are expected")
    return fields


def _resolve(script: LaunchScript, text: str) -> str:
    """`text` with what its variables hold in their places, as far as the script tells."""

    def replace(match: re.Match[str]) -> str:
        number = script.evaluate(match[0])
        return script.follow(match[0]) if number is None else str(number)

    for _ in range(3):  # variables of variables
        text = _REFERENCE.sub(replace, text)
    return text


def _value(script: LaunchScript, text: str, start: int) -> Any:
    """As Hydra reads it, whose words are YAML's for what is read here."""
    number = script.evaluate(text) if "$" in text else None
    known = _resolve(script, text) if number is None else str(number)
    if "$" in known or "`" in known:
        return Unread(text, f"launch script {script.path}: line {script.line(start)}")
    return read_document(script.path, "launch script", part=f"value: {known or 'null'}\n")["value"]
