"""Traces of a model that nobody described: its structure as a TracedModel, and a TracedEntry for each of its blocks.

A layer is run by itself, called as its model called it, as a described one is (tracer.py). What stands before and after
layers comes from the cut run of its route (cut_run.py). Where an end holds parameters that train with something else
than the rest of it, those are a block of their own without work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.traced_model import TracedBlock, TracedDecoder, TracedEncoder, TracedModel
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.traced import TracedEntry
from mm_autoparallel.profilers.meter import KeptActivations, count_bytes
from mm_autoparallel.profilers.stack import LayerStack
from mm_autoparallel.profilers.trace.anatomy import Anatomy, Part, Slot
from mm_autoparallel.profilers.trace.cut_run import CutForward, Kind, MemberCall, copy_state
from mm_autoparallel.profilers.trace.fakes import choose_as_accelerator, on_fakes
from mm_autoparallel.profilers.trace.routes import count_tokens, input_table, run_route, weight_given_by
from mm_autoparallel.profilers.trace.tracer import Figures, list_phases, trace_stack

_CPU = torch.device("cpu")
_TOLD_FRACTION, _MOST_TOLD = 0.01, 4
"""Of a model, what may be idle without a word; and how many modules are named (assumed)."""


def describe_model(live: nn.Module, class_name: str, name: str, anatomy: Anatomy) -> TracedModel:
    """The model of `live` with its own freezing: encoders frozen, projectors and text trained."""
    config: Any = live.config
    table = input_table(live)
    text = next(part for part in anatomy.parts if part.name == "text")
    encoders = [_describe_encoder(part) for part in anatomy.parts if part is not text]
    head = weight_given_by(live, "get_output_embeddings")
    tied = table is not None and head is table
    return TracedModel(
        schema="mm-autoparallel/traced-model/1",
        name=name,
        class_name=class_name,
        parameter_count=sum(parameter.numel() for parameter in live.parameters()),
        encoders=tuple(encoders),
        text=TracedDecoder(
            hidden_size=text.hidden_size,
            blocks=_list_blocks(text),
            vocab_size=int(getattr(config.get_text_config(), "vocab_size", 0) or 0),
            tied=tied,
            table_count=table.numel() if table is not None and tied else 0,
        ),
        tokens_per_image=next((r.fixed_tokens for r in anatomy.routes if "images" in (r.media, r.beside)), 0),
        tokens_per_audio=next((r.fixed_tokens for r in anatomy.routes if "audios" in (r.media, r.beside)), 0),
        remarks=(*anatomy.remarks, *_tell_idle(live, text)),
    )


def _tell_idle(live: nn.Module, text: Part) -> tuple[str, ...]:
    """What no forward that was found reaches, where it is more than a hundredth of the model."""
    idle = {id(each) for each in text.parameters.get(Slot("idle"), ())}
    whole = sum(each.numel() for each in live.parameters())
    left = {name: each.numel() for name, each in live.named_parameters() if id(each) in idle}
    if sum(left.values()) <= _TOLD_FRACTION * whole:
        return ()
    holders = dict.fromkeys(".".join(name.split(".")[:2]) for name in left)
    more = f" and {len(holders) - _MOST_TOLD} more" if len(holders) > _MOST_TOLD else ""
    return (
        f"{sum(left.values()):,} of its {whole:,} parameters ({sum(left.values()) / whole:.1%}) are reached by no "
        f"forward that was found, and count as frozen and without work: {', '.join([*holders][:_MOST_TOLD])}{more}",
    )


def _describe_encoder(part: Part) -> TracedEncoder:
    return TracedEncoder(
        name=part.name,
        kind=part.media,
        hidden_size=part.hidden_size,
        blocks=_list_blocks(part),
        freeze=part.media != "text",
    )


def _list_blocks(part: Part) -> tuple[TracedBlock, ...]:
    counts = {slot: sum(each.numel() for each in owned) for slot, owned in part.parameters.items()}
    num_of_kind = {kind: part.kinds.count(kind) for kind in set(part.kinds)}
    blocks = []
    if counts.get(Slot("idle")):
        blocks.append(
            TracedBlock(
                kind=f"{part.name}_idle",
                role="pre",
                parameter_count=counts[Slot("idle")],
                trains_with="nothing",
                what="parameters that no step of training reaches",
            )
        )
    blocks.append(TracedBlock(kind=f"{part.name}_pre", role="pre", parameter_count=counts.get(Slot("pre"), 0)))
    for kind, run in groupby(part.kinds):
        blocks.append(
            TracedBlock(
                kind=layer_kind(part, kind),
                role="layer",
                count=len(list(run)),
                parameter_count=counts.get(Slot("layer", kind), 0) // num_of_kind[kind],
                what=part.whats[kind],
            )
        )
    if counts.get(Slot("own_post")):
        blocks.append(TracedBlock(kind=f"{part.name}_norm", role="post", parameter_count=counts[Slot("own_post")]))
    trains_with: Literal["modality", "projector"] = "modality" if part.name == "text" else "projector"
    blocks.append(
        TracedBlock(
            kind=f"{part.name}_post",
            role="post",
            parameter_count=counts.get(Slot("post"), 0),
            trains_with=trains_with,
        )
    )
    return tuple(blocks)


def layer_kind(part: Part, kind: int) -> str:
    """`text_layer` where a part has one kind, else `text_layer_1`, `text_layer_2` as they first come."""
    return f"{part.name}_layer" if len(set(part.kinds)) == 1 else f"{part.name}_layer_{kind + 1}"


def freeze_as(live: nn.Module, model: TracedModel, anatomy: Anatomy) -> None:
    """Gradients for what `model` trains, and for nothing else."""
    live.requires_grad_(False)
    for part in anatomy.parts:
        modality = next(each for each in model.parts if each.name == part.name)
        for slot, owned in part.parameters.items():
            frozen = modality.freeze
            if slot.role == "post" and isinstance(modality, TracedEncoder):
                frozen = modality.projector_freeze
            for parameter in owned:
                if parameter.is_floating_point():
                    parameter.requires_grad_(not frozen and slot.role != "idle")


@dataclass(frozen=True)
class Sizes:
    """Of one micro-batch: samples, and what each holds."""

    mbs: int
    workload: Workload

    def of(self, media: str) -> tuple[int, int]:
        """(tokens of one sample, how many images, sounds or samples of text they divide into)."""
        workload = self.workload
        if media == "images":
            return workload.image_tokens_per_sample, workload.images_per_sample
        if media == "audios":
            return workload.audio_tokens_per_sample, workload.audios_per_sample
        return workload.seq_length, 1


def trace_parts(
    live: nn.Module, model: TracedModel, anatomy: Anatomy, sizes: Sizes, recompute: bool
) -> tuple[TracedEntry, ...]:
    """An entry for each kind of block that the workload gives something to do. Raises ProfileError where it cannot be.

    live: with the gradients of `freeze_as`.
    """
    entries: list[TracedEntry] = []
    upstream = any(
        not (encoder.freeze and encoder.projector_freeze) and sizes.of(encoder.kind)[0] for encoder in model.encoders
    )
    for index, route in enumerate(anatomy.routes):
        parts = [part for part in anatomy.parts if part.route == index]
        tokens, count = sizes.of(route.media)
        if not parts or not tokens:
            continue
        if route.beside and not sizes.of(route.beside)[0]:
            word = {"images": "image", "audios": "audio"}[route.beside]
            raise ProfileError(
                f"workload.{word}_tokens_per_sample is 0, and {model.name} runs its text beside {route.beside} alone; "
                f"give {word}_tokens_per_sample"
            )
        asked = tokens if route.media == "text" else tokens // count
        media_count = sizes.of(route.beside or route.media)[1] * sizes.mbs
        step = route.step(sizes.mbs, asked, media_count)
        reached = upstream and route.media == "text"
        run = run_route(live, anatomy.lists_of(index), anatomy.part_of(index), step, reached)
        live.zero_grad(set_to_none=True)
        if route.beside and route.fixed_tokens:
            _check_tokens(model, route.beside, route.fixed_tokens * media_count, sizes)
        if route.media != "text":
            _check_tokens(model, route.media, count_tokens(run.output), sizes)
        for part in parts:
            entries += _trace_part(live, part, run, sizes, recompute)
    return tuple(entries)


def _check_tokens(model: TracedModel, media: str, given: int, sizes: Sizes) -> None:
    tokens, count = sizes.of(media)
    if given != tokens * sizes.mbs:
        word = "image" if media == "images" else "audio"
        each = given / (count * sizes.mbs)
        raise ProfileError(
            f"workload.{word}_tokens_per_sample is {tokens} in {count} {media}, and {count} {media} of {model.name} "
            f"become {each * count:g} tokens of text; give {word}_tokens_per_sample as {word}s_per_sample x {each:g}"
        )


def _trace_part(live: nn.Module, part: Part, run: CutForward, sizes: Sizes, recompute: bool) -> list[TracedEntry]:
    tokens, spans = sizes.of(part.media)
    calls = {(call.path, call.index): call for call in run.calls}
    entries = []

    def add(kind: str, figures: Figures) -> None:
        entries.append(
            TracedEntry(
                kind=kind, tp=1, sequence_parallel=False, mbs=sizes.mbs, tokens=tokens, spans=spans, **vars(figures)
            )
        )

    layer_bytes = 0
    if not part.lists:
        layer_bytes = _add_tower(part, run, add)
    for kind in () if not part.lists else dict.fromkeys(part.kinds):
        members = [at for at, own in zip(part.order, part.kinds, strict=True) if own == kind]
        call = calls.get(members[1] if len(members) > 1 else members[0])
        if call is None:
            raise ProfileError(f"{part.name}: {members[0][0]}[{members[0][1]}] is not called with samples of this size")
        count = sum(each.numel() for each in part.parameters.get(Slot("layer", kind), ())) // len(members)
        figures = _trace_layer(live, call, count, recompute)
        layer_bytes = figures.output_bytes or 0
        add(layer_kind(part, kind), figures)
    if part.lists:
        add(f"{part.name}_pre", _end_figures(part, run, "pre", layer_bytes))
        add(f"{part.name}_post", _end_figures(part, run, "post", run.gaps[part.gaps[1]].output_bytes))
    for slot, name in ((Slot("idle"), "idle"), (Slot("own_post"), "norm")):
        owned = part.parameters.get(slot, ())
        if owned:
            passed = layer_bytes if name == "norm" else 0
            count = sum(each.numel() for each in owned)
            add(f"{part.name}_{name}", Figures(count, count_bytes(owned), 0, 0, 0, passed, 0, 0, None, ()))
    return entries


def _add_tower(part: Part, run: CutForward, add: Callable[[str, Figures], None]) -> int:
    """A tower in one block. Its work and that of its ends are one; it counts where something trains. Bytes it gives."""
    whole = _end_figures(part, run, "post", run.gaps[0].output_bytes)
    slots = {"layer": Slot("layer", 0), "pre": Slot("pre"), "post": Slot("post")}
    works = "layer" if any(each.requires_grad for each in part.parameters.get(slots["layer"], ())) else "post"
    idle = Figures(0, 0, 0, 0, 0, whole.output_bytes, 0, 0, None, ())
    for name, slot in slots.items():
        owned = part.parameters.get(slot, ())
        figures = replace(
            whole if name == works else idle,
            parameter_count=sum(each.numel() for each in owned),
            parameter_bytes=count_bytes(owned),
            gradient_bytes=count_bytes([each for each in owned if each.requires_grad]),
        )
        add(layer_kind(part, 0) if name == "layer" else f"{part.name}_{name}", figures)
    return whole.output_bytes or 0


def _trace_layer(live: nn.Module, call: MemberCall, parameter_count: int, recompute: bool) -> Figures:
    try:
        return _trace_alone(live, call.kind, parameter_count, recompute)
    except RuntimeError as failure:  # of one that reads, past its arguments, what a run before it made
        reason = " ".join(str(failure).split())[:200]
        raise ProfileError(f"{call.path}[{call.index}] cannot be run by itself: {reason}") from None


def _trace_alone(live: nn.Module, kind: Kind, parameter_count: int, recompute: bool) -> Figures:
    with on_fakes(live):
        member = _Alone(kind.member)
        stack = LayerStack([member, member], kind.call, _CPU)
        kept = KeptActivations(live)
        found = []
        for num_layers in (1, 2):
            with kept:
                graph = stack.forward(num_layers)
            found.append(kept.kept_bytes)
            del graph
        hidden_bytes = stack.state.numel() * stack.state.element_size()
        figures = trace_stack(
            stack, kept, parameter_count, found[1] - found[0], hidden_bytes + kind.beside_bytes, recompute
        )
    live.zero_grad(set_to_none=True)
    return figures


def _copy_cache(leaf: Any) -> Any:
    """Tensors stay: a gradient flows through the hidden state."""
    return leaf if isinstance(leaf, torch.Tensor) else copy_state(leaf)


class _Alone(nn.Module):
    """A layer that is run by itself, and recomputed as it ran first."""

    def __init__(self, member: nn.Module) -> None:
        super().__init__()
        self.member = member

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer gives, each time from the state that it was first called with."""
        args, kwargs = pytree.tree_map(_copy_cache, (args, kwargs))
        with choose_as_accelerator():
            return self.member(*args, **kwargs)


def _end_figures(part: Part, run: CutForward, role: str, output_bytes: int) -> Figures:
    owned: Sequence[nn.Parameter] = part.parameters.get(Slot("pre" if role == "pre" else "post"), ())
    at = part.gaps[0 if role == "pre" else 1]
    if role == "pre" and at > 0:  # what runs between two parts counts after the first
        return Figures(sum(each.numel() for each in owned), count_bytes(owned), 0, 0, 0, output_bytes, 0, 0, None, ())
    gap, recorder = run.gaps[at], run.recorder
    return Figures(
        parameter_count=sum(each.numel() for each in owned),
        parameter_bytes=count_bytes(owned),
        gradient_bytes=count_bytes([each for each in owned if each.requires_grad]),
        activation_bytes=max(0, gap.kept_bytes),
        checkpoint_bytes=max(0, gap.kept_bytes),
        output_bytes=output_bytes,
        forward_transient_bytes=recorder.passing_bytes(f"{at} forward"),
        backward_transient_bytes=recorder.passing_bytes(f"{at} backward"),
        recompute_transient_bytes=None,
        operators=list_phases(
            recorder.tally(f"{at} forward"), recorder.tally(f"{at} backward"), recorder.tally(f"{at} inputs")
        ),
    )
