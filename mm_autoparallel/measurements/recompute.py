"""What tables call recompute → whether all layers recompute, and which operators of the others do."""

from __future__ import annotations

from typing import get_args

from mm_autoparallel.measurements.table import Unrepresentable
from mm_autoparallel.model.job.workload import RecomputeOperator

OPERATORS: tuple[str, ...] = get_args(RecomputeOperator)


def recompute_of(text: str) -> tuple[bool, tuple[str, ...]]:
    """`full`, `none`, `selective` (the attention core, as Korthikanti et al. 2022 mean it), or operators by Megatron's
    names, with commas between; what follows in brackets or after a plus is left out.

    Raises Unrepresentable for any other word.
    """
    plain = text.split("(")[0].split("+")[0].strip().strip("[]").strip()
    if plain == "full":
        return True, ()
    if plain in ("", "none", "no", "[]"):
        return False, ()
    if plain == "selective":
        return False, ("core_attn",)
    operators = tuple(part.strip() for part in plain.split(","))
    unknown = [operator for operator in operators if operator not in OPERATORS]
    if unknown:
        raise Unrepresentable(
            f"the recompute {text!r} is not understood; known are full, none, selective, and of operators "
            f"{', '.join(OPERATORS)}"
        )
    return False, operators
