"""Trainers that launch scripts start and that no framework here reads, told by name with what stands in the way."""

from __future__ import annotations

from pathlib import Path

from mm_autoparallel.integrations.launch_script import SUFFIXES, read_launch_script

_OTHERS = (
    (
        r"(?<![\w./-])(?P<what>(?:megatron|swift)[ \t]+(?:pt|sft|rlhf))(?![\w.-])",
        "it starts `{what}`, ms-swift's command, which takes the model from a folder of weights and spells flags in "
        "its own way; that is not read",
    ),
    (
        r"^[ \t]*(?:source|\.)[ \t]+[\"']?(?P<what>\S*scripts/models/[\w.-]+\.sh|\S*SCRIPT_DIR\S*/models/[\w.-]+\.sh)",
        "it takes its model from {what}, as slime's scripts do, and trains by reinforcement beside engines that "
        "generate, which is not planned",
    ),
    (
        r"(?<![\w-])(?P<what>(?:pretrain_(?:bert|t5|ict|retro|vision_\w+)|finetune_t5)\.py)(?![\w.])",
        "it starts {what}; decoders, and vision-language models around one, are planned",
    ),
)
"""Pattern of a script → what it does."""


def name_trainer(path: Path) -> str:
    """What the script at `path` starts that is known and not read, a clause; empty where nothing is known of it.

    Raises JobError where a script cannot be read.
    """
    if path.suffix not in SUFFIXES or not path.suffix:
        return ""
    script = read_launch_script(path)
    for pattern, what in _OTHERS:
        for match in script.find(pattern):
            found = match["what"].strip("\"'")
            return f"line {script.line(match.start('what'))}: {what.format(what=' '.join(found.split()))}"
    return ""
