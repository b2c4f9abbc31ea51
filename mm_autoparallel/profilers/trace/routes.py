"""Ways to run a part of a model that nobody described: which method, on samples of which form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.profilers.trace import samples
from mm_autoparallel.profilers.trace.cut_run import CutForward, MemberCall, run_cut_forward
from mm_autoparallel.profilers.trace.fakes import on_fakes

Media = Literal["images", "audios", "text"]

PROBE_TOKENS = 64
"""Assumed: of text, and of an image of any size, where only the structure is asked for."""

MOST_ENTRIES = 3
"""Assumed: first matrices that refused a sample whose sizes are tried: later ones lie deeper in the model."""

_MIXED = ("same dtype", "expected scalar type", "same type", "to have dtype")
"""Of messages of PyTorch 2.13 where an operator gets numbers of two types."""

Step = Callable[[int, int, int], Callable[[], Any]]
"""(samples, tokens of text or of one image or sound, images or sounds in all) → one forward of a route."""


@dataclass(frozen=True)
class Route:
    """A way to run a part of the model. fixed_tokens: of each image or sound, where that does not follow what is asked
    for. beside: what runs with the text, where everything runs at once. refused: why the likeliest way did not run,
    where this one is another.
    """

    media: Media
    step: Step
    fixed_tokens: int = 0
    beside: Media | None = None
    refused: str = ""


def list_routes(model: nn.Module, config: Any, dtype: torch.dtype) -> Iterator[tuple[Media, Iterator[Step]]]:
    """Of each medium the ways to try, the likeliest first; text last."""
    encoded: tuple[tuple[Media, str, tuple[str, ...]], ...] = (
        ("images", "vision_config", ("get_image_features", "get_video_features")),
        ("audios", "audio_config", ("get_audio_features",)),
    )
    for media, described, names in encoded:
        encode = next(filter(None, (_find_method(model, name) for name in names)), None) or _find_tower(model, media)
        tower = getattr(config, described, encode)
        if encode is not None and tower is not None:
            yield media, _feature_steps(encode, config, media, dtype)
        elif tower is not None:
            yield media, iter(())
    yield "text", _text_steps(model, config)


def _find_method(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """Of the innermost module that has it and says what it takes: outer ones hand on whatever they get."""
    found = None
    for _, module in model.named_modules():
        method = getattr(module, name, None)
        if callable(method) and "args" not in samples.signature_of(method):
            found = method
    return found


def _find_tower(model: nn.Module, media: Media) -> Callable[..., Any] | None:
    """What a class does that has a tower and a projector, by the names of transformers, and no method for both."""
    name = {"images": "vision_tower", "audios": "audio_tower"}[media]
    for holder in model.modules():
        tower, projector = (getattr(holder, each, None) for each in (name, "multi_modal_projector"))
        if isinstance(tower, nn.Module) and isinstance(projector, nn.Module):
            return _behind(tower, projector)
    return None


def _behind(tower: nn.Module, projector: nn.Module) -> Callable[..., Any]:
    @wraps(tower.forward)
    def encode(*args: Any, **kwargs: Any) -> Any:
        return projector(tower(*args, **kwargs).last_hidden_state)

    return encode


def _feature_steps(encode: Callable[..., Any], config: Any, media: Media, dtype: torch.dtype) -> Iterator[Step]:
    entries: list[samples.Entry] = []

    def form(way: int, needed: bool, entry: samples.Entry | None) -> Step:
        def step(num_samples: int, tokens: int, count: int) -> Callable[[], Any]:
            given = _ways(config, media, count, num_samples, tokens, dtype, entry)[way]
            chosen = samples.fitting(given, encode, needed)
            missing = [name for name in samples.asked_for(encode) if name not in chosen]
            if missing:
                raise TypeError(f"it asks for {' and '.join(missing)}")
            batch = samples.made(chosen)

            def forward() -> Any:
                try:
                    return _features(encode(**batch))
                except Exception as failure:
                    found = samples.entry_of(failure)
                    if entry is None and found is not None and found not in entries:
                        entries.append(found)
                    raise

            return forward

        return step

    ways = _ways(config, media, 1, 1, PROBE_TOKENS, dtype)
    for way, given in enumerate(ways):
        whole = samples.fitting(given, encode)
        for needed in (False, True):
            if not needed or samples.fitting(given, encode, needed).keys() != whole.keys():
                yield form(way, needed, None)
    for entry in entries[:MOST_ENTRIES]:
        for way in range(len(ways)):
            yield form(way, False, entry)


def _ways(
    config: Any,
    media: Media,
    count: int,
    num_samples: int,
    tokens: int,
    dtype: torch.dtype,
    entry: samples.Entry | None = None,
) -> list[samples.Batch]:
    if media == "images":
        return list(samples.image_batches(config, count, num_samples, tokens, dtype, entry))
    return list(samples.audio_batches(config, count, tokens, dtype, entry))


def _features(output: Any) -> Any:
    """What becomes tokens of text, of all that an encoder gives."""
    for name in ("pooler_output", "last_hidden_state"):
        found = getattr(output, name, None)
        if found is not None:
            return found
    return output


def _vocab_size(model: nn.Module, config: Any) -> int:
    table = input_table(model)
    text = config.get_text_config()
    return int(getattr(text, "vocab_size", 0) or (table.shape[0] if table is not None else 2))


def input_table(model: Any) -> nn.Parameter | None:
    """The vocabulary table; None where a class says none."""
    weight = weight_given_by(model, "get_input_embeddings")
    return weight if weight is not None and weight.dim() == 2 else None


def weight_given_by(model: Any, method: str) -> nn.Parameter | None:
    """The weight of the module that a method of transformers' classes gives; None where the class has none."""
    weight = getattr(_module_given_by(model, method), "weight", None)
    return weight if isinstance(weight, nn.Parameter) else None


def _module_given_by(model: Any, method: str) -> Any:
    try:
        return getattr(model, method)()
    except (NotImplementedError, AttributeError):  # how transformers says that there is none
        return None


def _text_steps(model: nn.Module, config: Any) -> Iterator[Step]:
    """The model on tokens alone; else the text inside of one that does not run without images, and its head."""
    vocab_size = _vocab_size(model, config)

    def form(inner: nn.Module, way: int) -> Step:
        head = _head_outside(model, inner)

        def step(num_samples: int, tokens: int, _: int) -> Callable[[], Any]:
            batch = samples.coded(samples.text_batch(inner, vocab_size, num_samples, tokens), inner)[way]
            return lambda: _loss(inner(**batch), batch, head)

        return step

    for path, module in model.named_modules():
        named = path.rpartition(".")[2] in ("", "thinker", "language_model", "text_model", "decoder")
        if named and "input_ids" in samples.signature_of(module.forward):
            for way in range(len(samples.coded(samples.text_batch(module, vocab_size, 1, 1), module))):
                yield form(module, way)


def _head_outside(model: nn.Module, inner: nn.Module) -> nn.Linear | None:
    """The matrix by which `model` makes logits of what `inner` gives; None where `inner` has it itself."""
    head = _module_given_by(model, "get_output_embeddings")
    if isinstance(head, nn.Linear) and all(head is not module for module in inner.modules()):
        return head
    return None


def whole_steps(model: nn.Module, config: Any, dtype: torch.dtype, beside: Media) -> Iterator[Step]:
    """Ways to run all of the model at once, on tokens (of as many as an image takes at the least) and images, or sounds

    as long as the text.
    """
    vocab_size, places = _vocab_size(model, config), samples.count_places(config, model.forward)

    def form(way: int, labels: bool) -> Step:
        def step(num_samples: int, tokens: int, count: int) -> Callable[[], Any]:
            batch = samples.text_batch(model, vocab_size, num_samples, max(tokens, places))
            if not labels:
                batch.pop("labels", None)
            each = tokens if beside == "audios" else PROBE_TOKENS
            given = _ways(config, beside, max(count, num_samples), num_samples, each, dtype)[way]
            chosen = samples.fitting(given, model.forward)
            if not any(callable(value) for value in chosen.values()):
                raise TypeError(f"it asks for no {beside} of this form")
            batch = samples.made(chosen) | batch
            if places:
                batch = samples.with_places(batch, places)
            return lambda: _loss(model(**batch), batch)

        return step

    for way in range(len(_ways(config, beside, 1, 1, PROBE_TOKENS, dtype))):
        for labels in (True, False):
            yield form(way, labels)


def _loss(output: Any, batch: samples.Batch, head: nn.Linear | None = None) -> Any:
    """The model's own loss, or that of its logits, or of what `head` makes of its vectors; else whatever it gives."""
    loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if isinstance(loss, Tensor):
        return loss
    hidden = getattr(output, "last_hidden_state", None)
    if head is not None and logits is None and isinstance(hidden, Tensor) and hidden.shape[-1] == head.in_features:
        logits = head(hidden)
    labels = batch.get("decoder_input_ids", batch.get("input_ids"))
    if isinstance(logits, Tensor) and logits.dim() == 3 and labels is not None and logits.shape[:2] == labels.shape:
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    return logits if isinstance(logits, Tensor) else output


def first_that_runs(
    model: nn.Module, lists: Mapping[str, nn.ModuleList], media: Media, steps: Iterator[Step]
) -> tuple[Route, CutForward] | str:
    """The first way in which the route runs and calls layers, and that run; else why the last one did not.

    An encoder that no way makes call layers, but one makes run (a single matrix, a tokenizer of convolutions), runs so.
    """
    tried, reasons = list[Step](), list[str]()
    found = _first_of(model, lists, media, steps, tried, reasons)
    if found is None and any(words in reason for reason in reasons for words in _MIXED):
        found = _first_of(model, lists, media, map(_autocast, tried), [], [])
    if found is not None:
        return replace(found[0], refused=next(iter(reasons), "")), found[1]
    told = [
        reason
        for reason in reasons
        if not reason.startswith(("TypeError", "ValueError: not enough", "ValueError: too many"))
    ]
    return (told or reasons or ["its class offers no way"])[0]


def _first_of(
    model: nn.Module,
    lists: Mapping[str, nn.ModuleList],
    media: Media,
    steps: Iterable[Step],
    tried: list[Step],
    reasons: list[str],
) -> tuple[Route, CutForward] | None:
    """As first_that_runs. tried, reasons: get the ways before it, and why those did not."""
    bare: tuple[Step, CutForward] | None = None
    for step in steps:
        tried.append(step)
        try:
            with _unsaid():
                run = run_route(model, lists, {path: path for path in lists}, step(1, PROBE_TOKENS, 1), False)
        except Exception as failure:  # noqa: BLE001 — whatever code of 300 classes raises on samples of a wrong form
            reasons.append(f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}")
            continue
        if not run.calls:
            reasons.append("it calls no member of a list of layers")
            if media != "text" and bare is None and run.used and count_tokens(run.output):
                bare = step, run
            continue
        given = PROBE_TOKENS if media == "text" else count_tokens(run.output)
        if not given:
            reasons.append("it gives no vectors for tokens of text")
            continue
        if given == PROBE_TOKENS:
            return Route(media, step), run
        return _fit_tokens(model, lists, media, step, given), run
    if bare is not None:
        return _fit_tokens(model, lists, media, bare[0], count_tokens(bare[1].output)), bare[1]
    return None


def _autocast(step: Step) -> Step:
    """`step` under bf16 autocast: how classes are trained that have fp32 numbers among their bf16 weights."""

    def form(num_samples: int, tokens: int, count: int) -> Callable[[], Any]:
        forward = step(num_samples, tokens, count)

        def run() -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return forward()

        return run

    return form


@contextmanager
def _unsaid() -> Iterator[None]:
    """Keeps to itself what PyTorch logs, with its stack, of each operator that samples of a wrong form make fail."""
    told = logging.getLogger("torch._subclasses.fake_tensor")
    before = told.level
    told.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        told.setLevel(before)


def _fit_tokens(model: nn.Module, lists: Mapping[str, nn.ModuleList], media: Media, step: Step, given: int) -> Route:
    """A route that gives another number of tokens than it was asked for: always the same, or a multiple or part."""
    try:
        larger = run_route(model, lists, {}, step(1, 4 * PROBE_TOKENS, 1), False)
    except Exception:  # noqa: BLE001 — as above: then it takes one size alone
        return Route(media, step, given)
    model.zero_grad(set_to_none=True)
    if count_tokens(larger.output) != 4 * given:
        return Route(media, lambda num_samples, _, count: step(num_samples, PROBE_TOKENS, count), given)

    def scaled(num_samples: int, tokens: int, count: int) -> Callable[[], Any]:
        return step(num_samples, max(1, tokens * PROBE_TOKENS // given), count)

    return Route(media, scaled)


def count_tokens(output: Any) -> int:
    """Vectors in what an encoder gave; of what it gave for several layers of text, (layer, vectors) each, the first."""
    if isinstance(output, Tensor):
        return output.numel() // output.shape[-1] if output.dim() else 0
    if isinstance(output, Mapping):
        return count_tokens(next(iter(output.values()), None))
    if isinstance(output, (list, tuple)):
        of_layers = bool(output and isinstance(output[0], tuple) and output[0]) and isinstance(output[0][0], int)
        return count_tokens(output[0][1]) if of_layers else sum(count_tokens(each) for each in output)
    return 0


def run_route(
    model: nn.Module,
    lists: Mapping[str, nn.ModuleList],
    part_of: Mapping[str, str],
    forward: Callable[[], Any],
    reached: bool,
) -> CutForward:
    """One cut run without memory. Layers that hand things to later ones past their outputs are all run."""
    calls: list[MemberCall] = []
    try:
        with on_fakes(model):
            return run_cut_forward(model, lists, part_of, forward, reached, calls=calls)
    except (ProfileError, KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError):
        model.zero_grad(set_to_none=True)
        if not calls:  # it never came to a layer: the samples are of a wrong form
            raise
        with on_fakes(model):
            return run_cut_forward(model, lists, part_of, forward, reached, frugal=False)
