"""Which layers are on which stage, as Megatron-LM's flags say it and as it then divides them.

Counts are flat, a number for each virtual stage: chunk x PP + stage, the order of the layout's cells too
(megatron/core/transformer/pipeline_parallel_layer_layout.py). A layout is such as `Ett|ttt|tt|tL`: the embedding, t for
a layer, m for one of multi-token prediction, the loss.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import describe_value
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.passed import Passed
from mm_autoparallel.records import MAX_LAYERS

_TIMES = re.compile(r"\(([^()]+)\)\*(\d{1,5})|([^()*])\*(\d{1,5})")


def write_layers(counts: Sequence[int], pp: int, num_mtp: int) -> dict[str, tuple[str, ...] | None]:
    """The flags that put `counts` layers on the virtual stages, in the simplest words that Megatron-LM has for them.

    num_mtp: layers of multi-token prediction, which stay in front of the loss. All flags that could say something else
    are told to be absent.
    """
    values: dict[str, tuple[str, ...] | None] = dict.fromkeys(
        (
            *(flags.CHUNKS, flags.LAYERS_PER_CHUNK, flags.LAYOUT, flags.FIRST, flags.LAST),
            *(flags.COUNTS_EMBEDDING, flags.COUNTS_LOSS),
        )
    )
    vpp = len(counts) // pp
    if len({*counts}) == 1:
        return values | ({flags.CHUNKS: (str(vpp),)} if vpp > 1 else {})
    if vpp == 1 and len({*counts[1:]}) == 1:
        return values | {flags.FIRST: (str(counts[0]),)}
    if vpp == 1 and len({*counts[:-1]}) == 1:
        return values | {flags.LAST: (str(counts[-1]),)}
    if vpp == 1 and len({*counts[1:-1]}) == 1:
        return values | {flags.FIRST: (str(counts[0]),), flags.LAST: (str(counts[-1]),)}
    return values | {flags.LAYOUT: (format_layout(counts, num_mtp),)}


def format_layout(counts: Sequence[int], num_mtp: int) -> str:
    """The layout with `counts` layers in its cells, whose last holds `num_mtp` more and the loss."""
    return f"E{'|'.join('t' * count for count in counts)}{'m' * num_mtp}L"


def parse_layout(text: str, where: str) -> tuple[tuple[int, ...], int]:
    """The layers in each cell of the layout `text`, and how many of multi-token prediction there are.

    Products and commas are read as Megatron-LM reads them: `Ett|(tt|)*3t,L`. Raises PlanError where it is no layout.
    """
    plain = _multiply(text.replace(",", ""), where)
    if not re.fullmatch(r"E[t|]*[m|]*L", plain):
        raise PlanError(
            f"{flags.LAYOUT} is {describe_value(text)}; E, then t for each layer with | between stages, then "
            "m for each layer of multi-token prediction, then L are expected",
            where=where,
        )
    return tuple(cell.count("t") for cell in plain.split("|")), plain.count("m")


def _multiply(text: str, where: str) -> str:
    """Brackets first, then single letters, each written out as often as is said."""
    while match := _TIMES.search(text):
        what, times = match[1] or match[3], int(match[2] or match[4])
        if len(text) + len(what) * times > 10 * MAX_LAYERS:
            raise PlanError(f"{flags.LAYOUT} has more cells and layers than a model may have", where=where)
        text = text[: match.start()] + what * times + text[match.end() :]
    return text


def read_layers(passed: Passed, num_layers: int, pp: int) -> tuple[int, ...]:
    """The layers on each virtual stage, of `num_layers` in all on `pp` stages, as Megatron-LM divides them.

    Raises PlanError where it would refuse to (validate_args, and get_num_layers_to_build in
    megatron/core/transformer/transformer_block.py), or would leave layers out.
    """
    where = passed.where
    layout = passed.text(flags.LAYOUT)
    ways = [flag for flag in (flags.LAYOUT, flags.CHUNKS, flags.LAYERS_PER_CHUNK) if passed.has(flag)]
    if len(ways) > 1:
        raise PlanError(f"{ways[0]} and {ways[1]} both say how stages are divided; Megatron-LM takes one", where=where)
    first, last = passed.number(flags.FIRST), passed.number(flags.LAST)
    accounts = (passed.has(flags.COUNTS_EMBEDDING), passed.has(flags.COUNTS_LOSS))
    if layout is not None:
        if first or last or any(accounts):
            raise PlanError(
                f"{flags.LAYOUT} says all layers, and {flags.FIRST} or its like stands beside it", where=where
            )
        counts, _ = parse_layout(layout, where)
        if len(counts) % pp:
            raise PlanError(
                f"{flags.LAYOUT} has {len(counts)} cells, which {flags.PIPELINE} {pp} must divide", where=where
            )
    else:
        counts = _divide(passed, num_layers, pp, (first, last), accounts)
    if sum(counts) != num_layers:
        raise PlanError(f"its stages hold {sum(counts)} layers, and {flags.NUM_LAYERS} is {num_layers}", where=where)
    return counts


def _divide(
    passed: Passed, num_layers: int, pp: int, ends: tuple[int | None, int | None], accounts: tuple[bool, bool]
) -> tuple[int, ...]:
    where, (first, last) = passed.where, ends
    if (first or last) and any(accounts):
        raise PlanError(
            f"{flags.FIRST} or {flags.LAST} goes with no --account-for-…; take one of them out", where=where
        )
    total = num_layers - (first or 0) - (last or 0) + sum(accounts)
    between = pp - bool(first) - bool(last)
    if total < 0 or (between and total % between):
        what = "layers, with those counted for embedding and loss," if any(accounts) else "layers"
        raise PlanError(f"{total} {what} cannot be divided evenly among {between} stages", where=where)
    stages = [total // between if between > 0 else 0] * pp
    stages[0], stages[-1] = first or stages[0], last or stages[-1]
    vpp = _count_chunks(passed, stages[0], first or last)
    wrong = next((held for held in stages if held % vpp), None)
    if wrong is not None:
        raise PlanError(f"{wrong} layers of a stage cannot be divided among {vpp} chunks", where=where)
    counts = [held // vpp for _ in range(vpp) for held in stages]
    counts[0] -= accounts[0]
    counts[-1] -= accounts[1]
    return tuple(counts)


def _count_chunks(passed: Passed, of_stage: int, uneven: int | None) -> int:
    """Chunks of a stage that holds `of_stage` layers."""
    each = passed.number(flags.LAYERS_PER_CHUNK)
    if each is None:
        return passed.number(flags.CHUNKS) or 1
    if uneven or of_stage % each:
        raise PlanError(
            f"{flags.LAYERS_PER_CHUNK} {each} "
            + (f"goes with stages of equal layers alone; pass {flags.CHUNKS}" if uneven else f"must divide {of_stage}"),
            where=passed.where,
        )
    return of_stage // each
