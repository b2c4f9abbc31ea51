"""Problems whose order is to be found (`"schedule": "free"`): what words of F, I, W and B cost, and the best of all.

Written from the documented semantics, like `semantics`, and sharing nothing with the package. A placement has, beside
"layers" and "modes", an "order": the text of each stage, `0F0 1F0 0I0 0W0 1B0`: micro-batch, kind, chunk (0).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import brute_force
import numpy as np
import semantics
import word_search
from brute_force import TooLarge
from semantics import Cost, Document, fits, limits, modes_of, spread

KINDS = {"F": word_search.FORWARD, "B": word_search.WHOLE, "I": word_search.INPUT, "W": word_search.WEIGHT}
LETTERS = {kind: letter for letter, kind in KINDS.items()}
Token = tuple[int, str]  # micro-batch, letter


class NoOrder(Exception):
    """Words that are none: an action missing or twice, or a stage that waits for ever."""


class Best(NamedTuple):
    """step_ms: inf and no placement where nothing fits. searched: how many placements' words were looked at."""

    step_ms: float
    placement: Document | None
    searched: int = 0


class Stages(NamedTuple):
    """Figures of each stage of one placement, times [stage] of [micro-batch], hops and tails.

    contents: bytes, by `split_content`. own: static bytes beside those of blocks."""

    forward: list[Any]
    gradient: list[Any]
    whole: list[Any]
    weight: list[Any]
    there: list[float]
    back: list[float]
    tails: list[float]
    contents: list[Document]
    own: list[float]


def split_content(problem: Document, stage: int, held: list[int], modes: list[list[int]]) -> Document:
    """`semantics.content`, and: input_gradient and weight, [micro-batches] ms; pending: bytes that a micro-batch keeps
    between its input gradient and its weight gradient."""
    content = semantics.content(problem, stage, held, modes)
    factor = spread(problem.get("stage_time_factor") or 1.0, problem["num_stages"])[stage]
    link = spread(problem.get("host_ms_per_byte") or 0.0, problem["num_stages"])[stage]
    gradient, weight, moved = (np.zeros(problem["num_microbatches"]) for _ in range(3))
    pending = 0.0
    for block, scale, count, taken in zip(problem["chain"], semantics.scales(problem), held, modes, strict=True):
        weight_ms = block.get("backward_weight_ms", 0.0)
        gradient_ms = count * (block["backward_ms"] - weight_ms)
        for mode, in_mode in zip(modes_of(block), taken, strict=True):
            gradient_ms += in_mode * mode.get("extra_backward_ms", 0.0)
            moved += in_mode * mode.get("host_bytes", 0.0) * scale
        gradient += gradient_ms * scale
        weight += count * (weight_ms + block.get("split_extra_ms", 0.0)) * scale
        pending += count * block.get("kept_for_weight_bytes", block.get("activation_bytes", 0.0))
    return content | {
        "input_gradient": np.maximum(factor * gradient, link * moved),
        "weight": factor * weight,
        "pending": pending,
    }


def stages_of(problem: Document, layers: list[list[int]], contents: list[Document]) -> Stages:
    there, back = semantics.hops(problem, [max(e for e, count in enumerate(row) if count) for row in layers])
    tails = semantics.stage_tails(problem, np.array(layers))
    names = ("forward", "input_gradient", "backward", "weight")
    times = [[of[name] for of in contents] for name in names]
    own = spread(problem.get("stage_static_bytes", 0.0), problem["num_stages"])
    return Stages(*times, there, back, [t + of["tail"] for t, of in zip(tails, contents, strict=True)], contents, own)


def peak_of(content: Document, own: float, moments: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Bytes of a stage on its device and on its host; moments: (in flight, pending) of micro-batches."""
    passing = max(flight * content["activation"] + pending * content["pending"] for flight, pending in moments)
    at_work = content["restored"] + passing + content["transient"]
    at_step = content["step"] + min(content["step_once"], content["step_shard"])
    on_host = content["host_static"] + max(flight for flight, _ in moments) * content["host"]
    return own + content["static"] + max(at_work, at_step), on_host


# ------------------------------------------------------------------------------------------------------- one placement


def tokens(word: str | Sequence[str]) -> list[Token]:
    """`0F0 1F0 …`, or its parts. Raises NoOrder."""
    parsed = []
    for text in word.split() if isinstance(word, str) else word:
        match = re.fullmatch(r"(\d+)([FBIW])0", text)
        if match is None:
            raise NoOrder(f"{text!r} is no action of one chunk")
        parsed.append((int(match[1]), match[2]))
    return parsed


def moments_of(word: Sequence[Token]) -> list[tuple[int, int]]:
    """(in flight, pending) after each forward and after each input gradient."""
    flight, pending = 0, 0
    moments = []
    for _, letter in word:
        flight += {"F": 1, "I": -1, "B": -1, "W": 0}[letter]
        pending += {"F": 0, "I": 1, "B": 0, "W": -1}[letter]
        if letter in "FI":
            moments.append((flight, pending))
    return moments


def play_tokens(of: Stages, words: Sequence[Sequence[Token]]) -> float:
    """The step: actions start when their stage and what they wait for is ready; inf where some never are."""
    stages = len(words)
    ends: list[dict[Token, float]] = [{} for _ in words]  # "I" of a whole backward too: what others wait for
    at, free = [0] * stages, [0.0] * stages
    times = {"F": of.forward, "I": of.gradient, "B": of.whole, "W": of.weight}
    moving = True
    while moving:
        moving = False
        for s, word in enumerate(words):
            while at[s] < len(word):
                m, letter = word[at[s]]
                needs: list[float | None] = []
                if letter == "F" and s > 0:
                    end = ends[s - 1].get((m, "F"))
                    needs = [None if end is None else end + of.there[s - 1]]
                elif letter in "BI":
                    needs = [ends[s].get((m, "F"))]
                    if s < stages - 1:
                        end = ends[s + 1].get((m, "I"))
                        needs.append(None if end is None else end + of.back[s])
                elif letter == "W":
                    needs = [ends[s].get((m, "I"))]
                if None in needs:
                    break
                start = max([free[s], *(need for need in needs if need is not None)])
                free[s] = ends[s][m, "I" if letter == "B" else letter] = start + float(times[letter][s][m])
                at[s] += 1
                moving = True
    if any(place < len(word) for place, word in zip(at, words, strict=True)):
        return np.inf
    return max(end + tail for end, tail in zip(free, of.tails, strict=True))


def play_words(problem: Document, layers: list[list[int]], modes: list[list[list[int]]], words: Sequence[Any]) -> Cost:
    """Step and peaks of a placement whose stages run these words, fitting or not. Raises NoOrder."""
    count = problem["num_microbatches"]
    parsed = [tokens(word) for word in words]
    if len(parsed) != problem["num_stages"]:
        raise NoOrder(f"{len(parsed)} words of {problem['num_stages']} stages")
    for s, word in enumerate(parsed):
        done = set(word)
        split = {m for m in range(count) if (m, "I") in done}
        wanted = {(m, letter) for m in range(count) for letter in ("FIW" if m in split else "FB")}
        if done != wanted or len(word) != len(done):
            raise NoOrder(f"stage {s} runs {word}")
    contents = [split_content(problem, s, layers[s], modes[s]) for s in range(len(parsed))]
    of = stages_of(problem, layers, contents)
    step = play_tokens(of, parsed)
    if step == np.inf:
        raise NoOrder(f"waits for ever: {words}")
    peaks = [
        peak_of(content, own, moments_of(word)) for content, own, word in zip(contents, of.own, parsed, strict=True)
    ]
    return Cost(step, [peak for peak, _ in peaks], [host for _, host in peaks])


def unlawful(problem: Document, placement: Document) -> str:
    """Why this is no placement with an order that fits; "" where it is one."""
    roomy = {key: value for key, value in problem.items() if key != "host_limit_bytes"}
    wrong = semantics.unlawful(roomy | {"memory_limit_bytes": np.inf, "schedule": "gpipe"}, placement)
    if wrong:
        return wrong
    try:
        cost = play_words(problem, placement["layers"], placement["modes"], placement["order"])
    except NoOrder as error:
        return str(error)
    for name, kept, most in zip(("device", "host"), cost[1:], limits(problem), strict=True):
        for s, (peak, limit) in enumerate(zip(kept, most, strict=True)):
            if not fits(peak, limit):
                return f"stage {s} keeps {peak} of {limit} bytes on its {name}"
    return ""


# ----------------------------------------------------------------------------------------------------------- all words


def allowed_moments(problem: Document, stage: int, content: Document, own: float) -> np.ndarray:
    """[in flight, pending]: whether the memory of `stage` takes that many micro-batches."""
    count = problem["num_microbatches"]
    device, host = (limit[stage] for limit in limits(problem))
    allowed = np.zeros((count + 2, count + 2), dtype=np.bool_)
    for flight in range(count + 1):
        for pending in range(count + 1 - flight):
            peak, on_host = peak_of(content, own, [(flight, pending)])
            allowed[flight, pending] = fits(peak, device) and fits(on_host, host)
    return allowed


def best_word(
    problem: Document, of: Stages, upper_ms: float = np.inf, allowed: np.ndarray | None = None
) -> tuple[float, list[str]]:
    """The smallest step below `upper_ms` over all words that fit, and words that have it; (inf, []) where none has."""
    count = problem["num_microbatches"]
    for times in (of.forward, of.gradient, of.whole, of.weight):
        for row in times:
            if not np.all(np.asarray(row) == row[0]):
                raise TooLarge  # micro-batches that differ: another order than FIFO may be the best
    if allowed is None:
        allowed = np.array([allowed_moments(problem, s, c, of.own[s]) for s, c in enumerate(of.contents)])
    rows = [
        np.array([row[0] for row in times], dtype=float) for times in (of.forward, of.gradient, of.whole, of.weight)
    ]
    hops = [np.array([*times, 0.0]) for times in (of.there, of.back)]
    step, path, _ = word_search.best_order(count, *rows, *hops, np.array(of.tails), allowed, upper_ms)
    words: list[list[str]] = [[] for _ in of.tails]
    done = np.zeros((len(words), 3), dtype=int)  # forwards, gradients, and nothing
    pending: list[list[int]] = [[] for _ in words]
    for s, kind in path.tolist():
        if kind == word_search.WEIGHT:
            m = pending[s].pop(0)
        else:
            m = done[s, min(kind, 1)]
            done[s, min(kind, 1)] += 1
            if kind == word_search.INPUT:
                pending[s].append(m)
        words[s].append(f"{m}{LETTERS[kind]}0")
    return float(step), [" ".join(word) for word in words] if path.size else []


# ------------------------------------------------------------------------------------------------ placements and words


def least_step(of: Stages, count: int) -> float:
    """No order is faster: a stage works after its first forward's arrival; a micro-batch goes and returns."""
    least, before = 0.0, 0.0
    way = sum(row[0] for row in of.forward) + sum(of.there)
    for s in range(len(of.tails) - 1, -1, -1):
        way += of.whole[s][0] if s == 0 else of.gradient[s][0] + of.back[s - 1]
    for s, tail in enumerate(of.tails):
        least = max(least, before + count * (of.forward[s][0] + of.whole[s][0]) + tail)
        before += of.forward[s][0] + (of.there[s] if s < len(of.there) else 0.0)
    return float(max(least, way + of.tails[0]))


def placements(problem: Document, most: float = 20_000) -> list[tuple[float, Stages, np.ndarray, Document]]:
    """All that some order of fits: the least step that it can have, its figures, what its memory takes, and itself.
    Raises TooLarge where they are more than `most`."""
    stages, count = problem["num_stages"], problem["num_microbatches"]
    known: dict[Any, list[tuple[list[list[int]], Document, np.ndarray]]] = {}
    own = spread(problem.get("stage_static_bytes", 0.0), stages)

    def options(stage: int, begin: int, end: int) -> list[tuple[list[list[int]], Document, np.ndarray]]:
        key = stage, begin, end
        if key not in known:
            held = brute_force.held_between(problem, begin, end)
            known[key] = []
            for modes in brute_force.mode_counts(problem, held):
                content = split_content(problem, stage, held, modes)
                allowed = allowed_moments(problem, stage, content, own[stage])
                if allowed[1, 0]:  # one micro-batch after the other, each with its whole backward, keeps the least
                    known[key].append((modes, content, allowed))
        return known[key]

    found = []
    for cut in brute_force.cuts(problem):
        ranges = list(pairwise(cut))
        layers = [brute_force.held_between(problem, *ends) for ends in ranges]
        of_stage = [options(s, *ends) for s, ends in enumerate(ranges)]
        for choice in product(*of_stage):
            if len(found) >= most:
                raise TooLarge
            of = stages_of(problem, layers, [content for _, content, _ in choice])
            placement = {"layers": layers, "modes": [modes for modes, _, _ in choice]}
            found.append((least_step(of, count), of, np.array([allowed for *_, allowed in choice]), placement))
    return found


def best_free(problem: Document, most: float = 20_000) -> Best:
    """The smallest step over placements and words; the placement has its "order". Raises TooLarge."""
    best = Best(np.inf, None)
    searched = 0
    for least, of, allowed, placement in sorted(placements(problem, most), key=lambda item: item[0]):
        if least >= best.step_ms:
            break
        searched += 1
        step, words = best_word(problem, of, best.step_ms, allowed)
        if words:
            best = Best(step, placement | {"order": words})
    return best._replace(searched=searched)
