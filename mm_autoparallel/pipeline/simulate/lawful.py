"""Whether a placement is one of a problem's: what is wrong with it, in words."""

from __future__ import annotations

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.problem import RECOMPUTE, ChainBlock, Placement, Problem, name_virtual_stage
from mm_autoparallel.pipeline.schedules.catalog import find_schedule


def check_placement(problem: Problem, placement: Placement) -> None:
    """Raise PlanError, naming stage and block, where `placement` is none of `problem`'s: shape, sums, order, pins,
    counts."""
    num_virtual, chain = problem.num_virtual_stages, problem.chain
    if len(placement.layers) != num_virtual or len(placement.modes) != num_virtual:
        raise PlanError(f"the placement has {len(placement.layers)} chunks; the problem has {num_virtual}")
    is_free = find_schedule(problem.schedule, problem.num_chunks).given_by == "placement" or bool(problem.encoders)
    if is_free != bool(placement.orders):
        found, needs = ("no", "needs one text a stage") if is_free else ("an", "takes none: its order is known")
        what = "a pipeline with encoders" if problem.encoders else f"schedule {problem.schedule}"
        raise PlanError(f"the placement has {found} order, and {what} {needs}")
    position = 0
    flat = [(e, i) for e, block in enumerate(chain) for i in range(block.count)]
    for k in range(num_virtual):
        where = _where(problem, k)
        layers, modes = placement.layers[k], placement.modes[k]
        if len(layers) != len(chain) or len(modes) != len(chain):
            raise PlanError(f"{where} names {len(layers)} blocks; the chain has {len(chain)}")
        _check_counts(where, chain, layers, modes)
        for block, n in zip(chain, layers, strict=True):
            if n > block.count:
                raise PlanError(f"{where} holds {n} of {block.name}, and the chain has {block.count}")
        held = [e for e, n in enumerate(layers) for _ in range(n)]
        if held != [e for e, _ in flat[position : position + len(held)]]:
            raise PlanError(
                f"{where} does not continue the chain where the chunk before it ended: blocks are kept in order"
            )
        position += len(held)
        num_layers = sum(n for block, n in zip(chain, layers, strict=True) if block.layer)
        if num_layers == 0:
            raise PlanError(f"{where} holds no layer; every chunk of every stage needs one")
        if problem.max_layers_per_chunk is not None and num_layers > problem.max_layers_per_chunk:
            raise PlanError(
                f"{where} holds {num_layers} layers; max_layers_per_chunk is {problem.max_layers_per_chunk}"
            )
        for e, block in enumerate(chain):
            if (block.pinned == "first" and k > 0 and layers[e]) or (
                block.pinned == "last" and k < num_virtual - 1 and layers[e]
            ):
                raise PlanError(f"{where} holds {block.name}, which is pinned to the {block.pinned} chunk of the chain")
            if layers[e] and not block.may_lie_on(k, num_virtual):
                first, end = block.within or (0, num_virtual)
                raise PlanError(f"{where} holds {block.name}, which lies within virtual stages {first} to {end - 1}")
        if position < len(flat) and position > 0:
            (before, _), (after, _) = flat[position - 1], flat[position]
            glued = (before == after and chain[before].attach) or (
                before != after and (chain[before].attach == "next" or chain[after].attach == "previous")
            )
            if glued:
                raise PlanError(
                    f"{where} parts {chain[before].name} from {chain[after].name}, which must stay together"
                )
    if position != len(flat):
        raise PlanError(f"the placement holds {position} blocks; the chain has {len(flat)}")


def _check_counts(
    where: str, chain: tuple[ChainBlock, ...], layers: tuple[int, ...], modes: tuple[tuple[int, ...], ...]
) -> None:
    """Raise PlanError where one virtual stage's counts of modes are none that its blocks can have."""
    # group → the latest mode of its layers (none is after all), the block with it
    latest: dict[tuple[str, str], tuple[int, str]] = {}
    for block, n, counts in zip(chain, layers, modes, strict=True):
        if len(counts) != len(block.modes):
            raise PlanError(f"{where} counts {len(counts)} modes of {block.name}, which has {len(block.modes)}")
        told = {mode.name: count for mode, count in zip(block.modes, counts, strict=True) if count}
        if n < 0 or min(counts, default=0) < 0 or sum(counts) > n:
            done = " and ".join(
                f"recomputes {count}" if name == RECOMPUTE else f'runs {count} in mode "{name}"'
                for name, count in told.items()
            )
            raise PlanError(
                f"{where} holds {n} of {block.name}{' and ' if done else ''}{done}: it must be "
                f"0 ≤ {'recomputed' if [*told] == [RECOMPUTE] else 'counts of modes, all together,'} ≤ held"
            )
        for m, count in enumerate((*counts, n - sum(counts)) if counts else ()):
            if not count:
                continue
            last, before = latest.get(block.group, (0, ""))
            if m < last:
                name = block.modes[m].name
                done = f"recomputes {block.name}" if name == RECOMPUTE else f'runs {block.name} in mode "{name}"'
                raise PlanError(
                    f"{where} {done} before all of {before}: within a group the first layers go first, "
                    f"and modes in their order"
                )
            latest[block.group] = (m, block.name)


def _where(problem: Problem, virtual_stage: int) -> str:
    return name_virtual_stage(problem, virtual_stage) + ("," if problem.num_chunks > 1 else "")
