"""What MindSpeed-MM's forward passes ask of a strategy, and of where layers lie.

Read from its sources, 2.0 to 26.1: mindspeed_mm/models/vlm_model.py, and qwen2vl_vit_model.py, internvit_model.py and
vision_transformer_block.py of models/vision/vision_encoders. Data flows through encoders first and every virtual stage
holds a layer, so the first encoder, where it lies whole on one virtual stage, lies on the first: stage 0, chunk 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mm_autoparallel.model.job.model import Encoder, Model
from mm_autoparallel.model.job.workload import Workload

if TYPE_CHECKING:
    from mm_autoparallel.model.job.strategy import Strategy


def is_mindspeed_mm(workload: Workload) -> bool:
    """Whether these laws hold."""
    return workload.stack == "mindspeed-mm"


@dataclass(frozen=True)
class Whole:
    """An encoder that must lie on one virtual stage; with_text: on that where the text decoder begins.

    reason: what breaks otherwise, a clause. remedy: what else would do. windows: it is the law of window attention
    under VPP, of which checkouts from 26.1 on ask less: not to lie behind chunk 0.
    """

    modality: str
    reason: str
    remedy: str
    with_text: bool = False
    windows: bool = False


def list_whole(model: Model, workload: Workload, strategy: Strategy) -> tuple[Whole, ...]:
    """The encoders of `model` that lie whole on one virtual stage; none with one stage or for another stack."""
    if not is_mindspeed_mm(workload) or strategy.pp == 1:
        return ()
    divided = strategy.divides_sequences(workload)
    return tuple(whole for encoder in model.encoders if (whole := _find_whole(encoder, strategy, divided)))


def _find_whole(encoder: Encoder, strategy: Strategy, divided: bool) -> Whole | None:
    name = encoder.name
    if encoder.media == "audios":
        reason = "its tokens join the text on the rank that made them and are not sent on"
        return Whole(name, reason, "all of it must lie there", with_text=True)
    if divided and encoder.layers.packed:
        what = f"TP {strategy.tp} with sequence parallel"
        reason = f"with {what} each stage of the tower divides tokens among its ranks, and only the first has any"
        return Whole(name, reason, "plan without sequence parallel or with TP 1")
    if strategy.cp > 1:
        reason = f"with CP {strategy.cp} each stage of the tower divides and gathers all tokens once more"
        return Whole(name, reason, "plan with CP 1")
    if strategy.vpp > 1 and encoder.layers.window:
        reason = f"with VPP {strategy.vpp} it counts wrongly which of the later layers see whole images, not windows"
        remedy = "plan with VPP 1 (from 26.1 on it may lie on several stages of chunk 0; that is not searched)"
        return Whole(name, reason, remedy, windows=True)
    return None


def describe_gradients(model: Model, workload: Workload, strategy: Strategy) -> str:
    """What a person must know of gradients under `strategy`, a sentence; empty where they are those of one device.

    vlm_model.py gathers the embeddings that images are put into by Megatron's gather_from_sequence_parallel_region, and
    qwen2vl_vit_model.py its tower's output. Its backward sums the ranks' gradients, and each rank has all of them.
    Models under mindspeed_mm/mcore put images in before tokens are divided.
    """
    if not is_mindspeed_mm(workload) or strategy.zero == 3:
        return ""
    joins = any(encoder.media == "images" for encoder in model.encoders) and not model.text.layers.delta
    if not joins or not strategy.divides_sequences(workload):
        return ""
    return (
        f"TP {strategy.tp} with sequence parallel: MindSpeed-MM sums gradients of the word embedding and of Qwen2's "
        f"towers over the TP ranks though each has them whole, {strategy.tp} times too large; the loss begins as on "
        "one device, and clipping and optimizers other than Adam act on the larger norm. Without --sequence-parallel "
        "they are right (search.sequence_parallel with false in it tries that, for models without experts)"
    )


def needs_even_text(model: Model) -> bool:
    """Whether every virtual stage must hold equally many text layers: the number of a layer says if it has experts.

    A stage's first layer gets the number (virtual stage) x (layers held), as get_transformer_layer_offset of
    megatron/core/transformer/transformer_layer.py works it out from what vlm_model.py gives it.
    """
    experts = model.text.layers.experts
    return experts is not None and bool(experts.dense_layers)


def strategy_reasons(model: Model, workload: Workload, strategy: Strategy) -> Iterator[str]:
    """Why MindSpeed-MM cannot run `strategy`, wherever the layers lie; nothing for another stack."""
    if not is_mindspeed_mm(workload):
        return
    yield from chunk_reasons(strategy, strategy.num_microbatches(workload.global_batch_size))
    yield from head_reasons(model, strategy)
    num_layers, num_virtual = model.text.layers.num_layers, strategy.pp * strategy.vpp
    if needs_even_text(model) and num_layers % num_virtual:
        yield (
            f"PP {strategy.pp} x VPP {strategy.vpp} does not divide the {num_layers} text layers: some have no "
            "experts, and Megatron numbers them as if every stage held equally many"
        )


def chunk_reasons(strategy: Strategy, num_microbatches: int) -> Iterator[str]:
    """megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving, core 0.8, 0.12."""
    if strategy.vpp > 1 and num_microbatches % strategy.pp:
        yield (
            f"its {num_microbatches} micro-batches are no multiple of PP {strategy.pp}, which Megatron asks for with "
            f"VPP {strategy.vpp}; plan with a global batch that is"
        )


def head_reasons(model: Model, strategy: Strategy) -> Iterator[str]:
    """Every context parallel form that all parts share (Ulysses) gives each rank whole heads."""
    for modality in model.modalities:
        heads, ranks = modality.layers.num_heads, strategy.tp * strategy.cp
        if strategy.cp > 1 and heads % ranks:
            yield (
                f"CP {strategy.cp} with TP {strategy.tp} divides the {heads} attention heads of {modality.name} among "
                f"{ranks} ranks, and MindSpeed-MM gives each rank whole heads; plan with another CP"
            )


def older_reasons(
    model: Model, strategy: Strategy, recompute: Mapping[str, Sequence[int]], parts_divide: bool
) -> Iterator[str]:
    """What 2.0 and 2.1 cannot run beside the laws of all, a sentence each.

    recompute: by modality and virtual stage. parts_divide: model.json says `sequence_parallel` in every part, which
    --sequence-parallel does not reach there (mindspeed_mm/utils/transformer_model_config.py).
    """
    if strategy.tp > 1 and strategy.sequence_parallel and not parts_divide:
        yield (
            f"it has TP {strategy.tp} with sequence parallel, and this checkout (2.0 or 2.1) divides the tokens among "
            "the ranks by --sequence-parallel while the layers follow model.json, which does not say so; say "
            '"sequence_parallel": true in every part of model.json, or plan with "SEQUENCE_PARALLEL": false'
        )
    for encoder in model.encoders:
        again = sum(recompute.get(encoder.name, ()))
        if again and encoder.layers.packed:
            yield (
                f"it recomputes {again} {encoder.name} layers, and this checkout (2.0 or 2.1) hands its rotary angles "
                "to Megatron's checkpoint as a pair, which saves single tensors alone, and no windows; plan with 0"
            )


def placement_reasons(
    model: Model,
    workload: Workload,
    strategy: Strategy,
    layers: Mapping[str, Sequence[int]],
    counts_chunks: bool = False,
) -> Iterator[str]:
    """The rules that `layers[modality][virtual stage]` break, a sentence each; nothing for another stack.

    counts_chunks: the checkout is one that counts the layers before a stage of chunk 0 rightly (26.1 on).
    """
    for whole in list_whole(model, workload, strategy):
        counts = layers.get(whole.modality, ())
        held = [k for k, count in enumerate(counts) if count]
        if whole.with_text:
            joins = next(k for k, count in enumerate(layers["text"]) if count)
            for k in held:
                if k != joins:
                    yield (
                        f"it places {counts[k]} {whole.modality} layers on {strategy.name_stage(k)}, and "
                        f"MindSpeed-MM keeps the whole {whole.modality} encoder where the text decoder begins, on "
                        f"{strategy.name_stage(joins)}, for {whole.reason}; {whole.remedy}"
                    )
        elif len(held) > 1 and not (whole.windows and counts_chunks and held[-1] < strategy.pp):
            places = ", ".join(strategy.name_stage(k) for k in held)
            yield (
                f"it places {whole.modality} layers on {places}, and MindSpeed-MM cannot run that: {whole.reason}; "
                f"place them all on {strategy.name_stage(held[0])}, or {whole.remedy}"
            )
    if is_mindspeed_mm(workload) and needs_even_text(model):
        yield from _number_reasons(model, strategy, layers["text"])


def describe_whole(model: Model, workload: Workload, strategy: Strategy) -> str:
    """What the placement laws ask of every plan under `strategy`, in words; empty where they ask nothing."""
    told = [
        f"{whole.modality} lies whole {'where text begins' if whole.with_text else 'on one virtual stage'}, because in "
        f"MindSpeed-MM {whole.reason} ({whole.remedy})"
        for whole in list_whole(model, workload, strategy)
    ]
    if is_mindspeed_mm(workload) and needs_even_text(model) and strategy.pp > 1:
        told.append("every stage holds equally many text layers, by whose numbers Megatron tells which have experts")
    return "; ".join(told)


def _number_reasons(model: Model, strategy: Strategy, counts: Sequence[int]) -> Iterator[str]:
    experts = model.text.layers.experts
    assert experts is not None
    before = 0
    for k, count in enumerate(counts):
        if count and before != k * count:
            yield (
                f"it places {count} text layers on {strategy.name_stage(k)} behind {before} others, and "
                f"Megatron would number them from {k * count}: in this model the number decides which layers have "
                f"experts ({len(experts.dense_layers)} have none), so every stage must hold equally many text layers"
            )
        before += count
