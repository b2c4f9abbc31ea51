"""Known flags: which of those that a script passes no release has, since a fork added them.

known_flags.txt names what Megatron-LM (v1.0 to core_v0.19.0, and main of November 2026), MindSpeed, MindSpeed-LLM and
MindSpeed-MM pass to add_argument, and the fields of Megatron-LM's configuration classes, of which its parser makes
flags. launcher_flags.txt names those of torchrun, msrun, deepspeed, srun, sbatch and nsys, which stand in the same
script.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from mm_autoparallel.integrations.launch_script import SUFFIXES
from mm_autoparallel.integrations.megatron_core.passed import Passed

_FILES = ("known_flags.txt", "launcher_flags.txt")
_NEGATIONS = ("--no-", "--disable-")


@cache
def _known() -> frozenset[str]:
    texts = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in _FILES)
    return frozenset(flag for text in texts for flag in text.split())


def is_known(flag: str) -> bool:
    """Whether some release has it, written with dashes or underscores, or its opposite, or it is a launcher's."""
    plain = "--" + flag[2:].replace("_", "-")
    opposite = next(("--" + plain.removeprefix(no) for no in _NEGATIONS if plain.startswith(no)), plain)
    return plain in _known() or opposite in _known()


def tell_unknown(passed: Passed) -> tuple[str, ...]:
    """A sentence on the flags of a launch script that no release has; nothing where there are none. A configuration
    that is read as flags has keys of its own.
    """
    unknown = [flag for flag in passed.words if not is_known(flag)]
    if not unknown or passed.script.path.suffix not in SUFFIXES:
        return ()
    return (
        f"{', '.join(unknown)}: no release of Megatron-LM or of the codes that are read as it is has "
        f"{'this flag' if len(unknown) == 1 else 'these flags'}; where a fork changes the model by "
        f"{'it' if len(unknown) == 1 else 'them'}, what is planned is another one",
    )
