"""Certificates changed in meaning, given to `verify`: none whose claim is false may be confirmed.

    python tests/oracle/mutate_certificates.py --certificates 200 --seed 1 --out false

A mutant is a certificate of `place`, with its bound raised above the optimum, its problem altered (and the hash made
right again), its placement swapped for another, parts of its proof dropped or changed, or another method's name on it.
The claim of a mutant is judged by brute force; one that stays true may be confirmed.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import brute_force
import compare
import generate
import generate_free
import mutate_free
import semantics
from semantics import Document

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.pipeline.certify.certificate import problem_sha256, read_certificate, write_certificate
from mm_autoparallel.pipeline.certify.verify import verify
from mm_autoparallel.pipeline.placement import PlacementResult, compile_kernels, place
from mm_autoparallel.pipeline.placement.relaxation.tree import FractionalTree
from mm_autoparallel.pipeline.problem import Problem

METHODS = ("cuts", "tree", "mixtures", "prices", "orders")
LIMIT_S = 5.0
CONFIRMED_TO = 1e-6  # the coarsest of what `verify` promises
MOST_PLACEMENTS = 20_000


class Mutant(NamedTuple):
    """what: how it was changed. false: why its claim is false, "" where it is true."""

    name: str
    what: str
    document: Document
    false: str


# ------------------------------------------------------------------------------------------------------ what is claimed


def placement_of(document: Document) -> Document:
    """The placement that a certificate names, as the oracle reads it. Raises KeyError where parts are missing."""
    problem, placement = document["problem"], document["placement"]
    total = semantics.num_virtual_stages(problem)

    def count(block: Document, mode: str, k: int) -> int:
        if mode == "recompute":
            return int(placement["recompute"][block["name"]][k])
        return int(placement.get("modes", {})[block["name"]][mode][k])

    order = {"order": placement["order"]} if "order" in placement else {}
    return order | {
        "layers": [[int(placement["layers"][block["name"]][k]) for block in problem["chain"]] for k in range(total)],
        "modes": [
            [[count(block, mode["name"], k) for mode in semantics.modes_of(block)] for block in problem["chain"]]
            for k in range(total)
        ],
    }


def named(problem: Document, placement: Document) -> Document:
    """A placement as a certificate names it."""
    rows = range(semantics.num_virtual_stages(problem))
    entry: Document = {"layers": {}, "recompute": {}, "modes": {}}
    for e, block in enumerate(problem["chain"]):
        entry["layers"][block["name"]] = [placement["layers"][k][e] for k in rows]
        entry["recompute"][block["name"]] = [0 for _ in rows]
        for m, mode in enumerate(semantics.modes_of(block)):
            counts = [placement["modes"][k][e][m] for k in rows]
            if mode["name"] == "recompute":
                entry["recompute"][block["name"]] = counts
            else:
                entry["modes"].setdefault(block["name"], {})[mode["name"]] = counts
    if "order" in placement:
        entry["order"] = [word.split() if isinstance(word, str) else list(word) for word in placement["order"]]
    return entry if entry["modes"] else {key: entry[key] for key in entry if key != "modes"}


def why_false(document: Document) -> str:
    """Why the claim is false; "" where it is true. Raises TooLarge, or KeyError and its like where parts lack."""
    problem, step_ms, bound_ms = document["problem"], document["step_ms"], document["lower_bound_ms"]
    placement = placement_of(document)
    is_free = mutate_free.is_free(problem)
    if is_free != ("order" in placement):
        return "an order where it is known, or none where it is free"
    if is_free:
        return mutate_free.why_false(document, placement)
    reason = semantics.unlawful(problem, placement)
    if reason:
        return reason
    right_ms = semantics.evaluate(problem, placement).step_ms
    if not math.isclose(step_ms, right_ms, rel_tol=1e-5, abs_tol=1e-9):
        return f"step_ms {step_ms!r}, {right_ms!r} right"
    if document["proof"]["method"] == "none" or bound_ms is None:
        return ""
    best_ms = brute_force.brute_force(problem, MOST_PLACEMENTS).step_ms
    if bound_ms > best_ms * (1 + CONFIRMED_TO) + compare.TINY_MS:
        return f"lower_bound_ms {bound_ms!r}, the optimum is {best_ms!r}"
    return ""


# -------------------------------------------------------------------------------------------------------- certificates


def certificates(seed: int, folder: Path) -> Iterator[tuple[str, Document]]:
    """Certificates of seeded problems: what `place` writes, and bounds by prices in place of it; free orders too."""
    while True:
        for mood in generate_free.MOODS:
            name = f"{mood}-{seed}"
            free = mutate_free.certificate(name, folder)
            if free is not None:
                yield f"free-{name}", free
            if mood not in generate.MOODS:
                continue
            document = generate.problem(name)
            try:
                problem = compare.read(document)
                result = place(problem, time_limit_s=2.0)
            except Exception:  # noqa: BLE001, S112 - `compare.py` tells of it
                continue
            if result.placement is None or brute_force.count_placements(document, MOST_PLACEMENTS) > MOST_PLACEMENTS:
                continue
            path = folder / "certificate.json"
            if seed % 2 and result.step_ms:
                result = _bounded_by_prices(problem, result)
            write_certificate(path, problem, result)
            yield name, json.loads(path.read_text(encoding="utf-8"))
        seed += 1


def _bounded_by_prices(problem: Problem, result: PlacementResult) -> PlacementResult:
    """The small problems here are proven otherwise; large ones are not."""
    tree = FractionalTree(problem, result.step_ms)
    tree.advance(result.step_ms, result.step_ms, 2_000, lambda: False)
    if not tree.lower_bound_ms > 0:
        return result
    return replace(result, proof="prices", prices=tree.proof(), lower_bound_ms=min(tree.lower_bound_ms, result.step_ms))


# ------------------------------------------------------------------------------------------------------------ mutations


def claim_more(draw: random.Random, document: Document) -> str:
    """A bound above the optimum, with a placement that is no better."""
    problem = document["problem"]
    is_free = mutate_free.is_free(problem)
    best: Any = mutate_free.best(problem) if is_free else brute_force.brute_force(problem, MOST_PLACEMENTS)
    worse = mutate_free.worse(draw, problem, best.step_ms * (1 + 1e-4)) if is_free else []
    for _ in range(0 if is_free else 40):
        placement = generate.some_placement(draw, problem)
        if placement is not None and not semantics.unlawful(problem, placement):
            step_ms = semantics.evaluate(problem, placement).step_ms
            if step_ms > best.step_ms * (1 + 1e-4):
                worse.append((step_ms, placement))
    if worse and draw.random() < 0.8:
        document["step_ms"], placement = draw.choice(worse)
        document["placement"] = named(problem, placement)
        share = draw.choice((1.0, 1.0, 0.5, draw.random()))
        document["lower_bound_ms"] = best.step_ms + share * (document["step_ms"] - best.step_ms)
        return "worse placement"
    document["lower_bound_ms"] = best.step_ms * draw.choice((1 + 1e-5, 1.001, 1.1, 2.0))
    if draw.random() < 0.5:
        document["step_ms"] = max(document["step_ms"], document["lower_bound_ms"])
    return "raised bound"


def alter_problem(draw: random.Random, document: Document) -> str:
    """One figure of the problem is another; where the placement is still lawful, its new step is claimed."""
    problem = document["problem"]
    where, key = draw.choice([(of, key) for of in _mappings(problem) for key in of if key != "schema"])
    value = where[key]
    if isinstance(value, bool):
        where[key] = not value
    elif isinstance(value, (int, float)):
        where[key] = draw.choice((value * 2, value + 1, value // 2, 0, value * 1.5))
        if key in ("count", "num_stages", "num_chunks", "num_microbatches", "max_layers_per_chunk"):
            where[key] = max(1, int(value) + draw.choice((-1, 1)))
    elif isinstance(value, list) and value and all(isinstance(one, float) for one in value):
        value[draw.randrange(len(value))] *= draw.choice((0.0, 0.5, 2.0))
    elif key == "schedule":
        where[key] = draw.choice(generate.SCHEDULES)
    else:
        del where[key]
    return f"problem's {key}"


def claim_again(document: Document) -> None:
    """The step, gap and hash that go with the rest."""
    problem = document["problem"]
    document["problem_sha256"] = problem_sha256(compare.read(problem))
    step_ms = mutate_free.play(problem, placement_of(document))
    if step_ms is not None:
        proven = document["lower_bound_ms"] == document["step_ms"]
        document["step_ms"] = step_ms
        if proven:
            document["lower_bound_ms"] = document["step_ms"]


def move_layer(draw: random.Random, document: Document) -> str:
    """One layer on another stage, or in another mode."""
    counts = draw.choice([of for of in _lists(document["placement"]) if of and isinstance(of[0], int)])
    one, other = draw.randrange(len(counts)), draw.randrange(len(counts))
    counts[one] -= 1
    counts[other] += draw.choice((0, 1))
    return "moved layer"


def change_order(draw: random.Random, document: Document) -> str:
    """What a stage runs, where that is the placement's."""
    order = document["placement"].get("order")
    return mutate_free.change_order(draw, order) if order else "no order"


def drop_part(draw: random.Random, document: Document) -> str:
    """A cut, a price, a division of the space is left out."""
    lists = [of for of in _lists(document["proof"]) if of]
    if not lists:
        return "nothing to drop"
    counts = draw.choice(lists)
    del counts[draw.randrange(len(counts))]
    return "dropped part"


def change_proof(draw: random.Random, document: Document) -> str:
    """Figures of the proof are others."""
    numbers = [(of, key) for of in [*_mappings(document["proof"]), *_lists(document["proof"])] for key in _numbers(of)]
    if not numbers:
        return "nothing to change"
    for _ in range(draw.choice((1, 1, 3, 10))):
        where, key = draw.choice(numbers)
        value = where[key]
        where[key] = (
            max(0, value + draw.choice((-1, 1)))
            if isinstance(value, int)
            else value * draw.choice((0.0, 0.5, 0.999, 1.001, 2.0, 1e3, -1.0))
        )
    return "changed proof"


def rename_method(draw: random.Random, document: Document) -> str:
    """The claim stands on another method; on cuts that are true ones, of the best placement and of others."""
    method = draw.choice(METHODS)
    if method == "cuts" and not mutate_free.is_free(document["problem"]):
        problem = document["problem"]
        tried = [generate.some_placement(draw, problem) for _ in range(10)]
        tried.append(brute_force.brute_force(problem, MOST_PLACEMENTS).placement)
        document["proof"] = {
            "method": method,
            "cuts": [
                {"placement": named(problem, one)} for one in tried if one and not semantics.unlawful(problem, one)
            ],
        }
    else:
        document["proof"] = {"method": method} if draw.random() < 0.8 else document["proof"] | {"method": method}
    return method


def empty_parts(draw: random.Random, document: Document) -> str:
    """A part of the space is said to hold nothing."""
    parts = document["proof"].get("parts")
    if not parts:
        return "no parts"
    parts[draw.randrange(len(parts))] = {}
    return "empty part"


def _mappings(value: Any) -> list[Document]:
    if isinstance(value, dict):
        return [value, *[found for one in value.values() for found in _mappings(one)]]
    return [found for one in value for found in _mappings(one)] if isinstance(value, list) else []


def _lists(value: Any) -> list[list[Any]]:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return ([value] if isinstance(value, list) else []) + [found for one in inner for found in _lists(one)]


def _numbers(value: Any) -> list[Any]:
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [key for key in keys if isinstance(value[key], (int, float)) and not isinstance(value[key], bool)]


def mutants(seed: int, count: int, of_each: int = 5) -> Iterator[Mutant]:
    """`count` mutants of seeded certificates, about half of them with a false claim."""
    made = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, document in certificates(seed, Path(folder)):
            for i in range(of_each):
                draw = random.Random(f"{name}-{i}")
                mutant = copy.deepcopy(document)
                try:
                    what = _mutate(draw, mutant)
                    false = why_false(mutant)
                except (KeyError, IndexError, TypeError, ValueError, AssertionError, PlannerError, ZeroDivisionError):
                    false, what = "no certificate", "malformed"
                except brute_force.TooLarge:
                    continue
                yield Mutant(f"{name}-{i}", what, mutant, false)
                made += 1
                if made == count:
                    return


def _mutate(draw: random.Random, document: Document) -> str:
    what = []
    if draw.random() < 0.3:
        what.append(alter_problem(draw, document))
        claim_again(document)
    if draw.random() < 0.75:
        what.append(claim_more(draw, document))
    changes = (move_layer, change_order, drop_part, change_proof, rename_method, empty_parts)
    chosen = [change for change in changes if draw.random() < (0.1 if change in (move_layer, change_order) else 0.25)]
    what += [change(draw, document) for change in chosen]
    if draw.random() < 0.9 and document["lower_bound_ms"] is not None:
        step_ms = document["step_ms"]
        document["gap_fraction"] = 1 - document["lower_bound_ms"] / step_ms if step_ms else 0.0
    return ", ".join(what)


# -------------------------------------------------------------------------------------------------------------- verdict


def judge(mutant: Mutant, limit_s: float = LIMIT_S) -> str:
    """ "confirmed", "refused", "open", "crash", or "FALSE CONFIRMATION"."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "certificate.json"
        path.write_text(json.dumps(mutant.document), encoding="utf-8")
        try:
            verify(read_certificate(path), limit_s)
        except PlannerError as error:
            return "open" if "bound not confirmed" in str(error) else "refused"
        except Exception:  # noqa: BLE001 - whatever escapes is what we look for
            return f"crash: {traceback.format_exc().strip().splitlines()[-1][:200]}"
    return "FALSE CONFIRMATION" if mutant.false else "confirmed"


def main() -> int:
    """0 where no false claim is confirmed and nothing crashes, 1 else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--certificates", type=int, default=200, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, help="folder for mutants that are wrongly confirmed or crash")
    arguments = parser.parse_args()
    compile_kernels()
    counts: Counter[str] = Counter()
    bad = 0
    for mutant in mutants(arguments.seed, arguments.certificates):
        verdict = judge(mutant)
        counts[f"{'false' if mutant.false else 'true'} claim, {verdict}"] += 1
        if verdict.startswith(("FALSE", "crash")):
            bad += 1
            print(f"{mutant.name} ({mutant.what}; {mutant.false}): {verdict}", flush=True)
            if arguments.out is not None:
                arguments.out.mkdir(parents=True, exist_ok=True)
                path = arguments.out / f"mutant_{mutant.name}.json"
                path.write_text(json.dumps(mutant.document | {"note": mutant.false}), encoding="utf-8")
    for key, count in sorted(counts.items()):
        print(f"{count:8d} {key}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
