"""What single samples cost: laws of a job's own block costs, and the loads of its samples by them.

A layer takes time in proportion to its tokens, but for attention, in proportion to each span's square: linear x +
square x² for a span of x. How much of either is worked out from analytic costs on one device, of as many tokens in more
spans and in fewer, whose matrix products are the same: k samples of spans x take k linear x + k square x², one sample
of spans k x takes k linear x + k² square x². What plans make of a sample's load is its ratio to that of the mean
sample, the same for all strategies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.model.blocks.tokens import count_tokens
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.model import MEL_FRAMES_PER_S, Encoder, MelFrames, Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.samples.sample import SampleCost
from mm_autoparallel.samples.table import SampleTable, add_up

Floats = NDArray[np.float64]

_TIMES = 4
"""Samples that are held against one whose spans are as long as all of theirs."""

Media = Literal["images", "audios", "text"]


@dataclass(frozen=True)
class SampleLaw:
    """square_ms x² + linear_ms x, forward and backward, for each span of x: an image's patches, a recording's seconds,
    a sequence's tokens. mean_span, num_spans: of the job's mean sample."""

    media: Media
    square_ms: float
    linear_ms: float
    mean_span_count: float
    num_spans: int

    def span_ms(self, spans: Floats) -> Floats:
        """[.] of each span."""
        taken: Floats = self.square_ms * spans**2 + self.linear_ms * spans
        return taken

    @property
    def mean_ms(self) -> float:
        """Of the job's mean sample."""
        return self.num_spans * float(self.span_ms(np.array([self.mean_span_count]))[0])


def sample_laws(known: CostModel) -> dict[str, SampleLaw]:
    """Modality → its law. Those that the workload gives nothing to do have none."""
    job, laws = known.job, dict[str, SampleLaw]()
    several_ms, long_ms = _totals_ms(known, mbs=_TIMES), _totals_ms(known, length=_TIMES)
    for modality in job.model.modalities:
        name, tokens = modality.name, count_tokens(modality, job.workload)
        if not several_ms[name] or not tokens.layer_tokens:
            continue
        media: Media = "text"
        span = tokens.layer_tokens / tokens.num_spans
        if isinstance(modality, Encoder):
            media = modality.media
            if isinstance(modality.stem, MelFrames):
                span *= modality.stem.frames_per_token / MEL_FRAMES_PER_S
            else:
                span = tokens.input_tokens / tokens.num_spans
        each_ms = several_ms[name] / (_TIMES * tokens.num_spans)
        more_ms = (long_ms[name] - several_ms[name]) / (_TIMES * tokens.num_spans)
        square_ms = min(max(more_ms / (_TIMES - 1), 0.0), each_ms) / span**2
        linear_ms = each_ms / span - square_ms * span
        laws[name] = SampleLaw(media, square_ms, linear_ms, span, tokens.num_spans)
    return laws


def _totals_ms(known: CostModel, mbs: int = 1, length: int = 1) -> dict[str, float]:
    """Forward and backward of all blocks of each modality, analytic, of `mbs` samples whose spans are `length` times as
    long as those of the job's, and as many, on one device."""
    workload, lengths = known.job.workload, ("seq_length", "image_tokens_per_sample", "audio_tokens_per_sample")
    longer = workload.model_copy(update={key: length * getattr(workload, key) for key in lengths} | {"samples": None})
    costs = CostModel(replace(known.job, profiles=(), workload=longer, samples=None), known.calibration)
    totals = dict.fromkeys(costs.chain.modalities, 0.0)
    found = costs.look_up(Strategy(pp=1, tp=1, dp=1, mbs=mbs))
    for block, cost in zip(costs.chain.blocks, found, strict=True):
        totals[block.modality] += block.count * cost.total_ms
    return totals


def loads_ms(table: SampleTable, law: SampleLaw, model: Model) -> Floats:
    """[n] what each sample of the table takes by a law of `model`."""
    if law.media == "images":
        return add_up(law.span_ms(table.patches.astype(np.float64)), table.images)
    if law.media == "audios":
        return add_up(law.span_ms(table.audio_s), table.recordings)
    return law.span_ms(table.num_tokens(model.merge_tokens, model.audio_tokens_per_s).astype(np.float64))


def relative_loads(known: CostModel, table: SampleTable) -> dict[str, Floats]:
    """Modality → [sequences] loads over that of the job's mean sequence; ones where it has nothing to do.

    Attention is within samples: a sequence's load is the sum of its samples', and of its padding, which is one more.
    """
    laws, model, found = sample_laws(known), known.job.model, {}
    padding = _padding(known, table)
    for modality in model.modalities:
        law = laws.get(modality.name)
        if law is None:
            found[modality.name] = np.ones(table.num_sequences)
            continue
        loads = table.of_sequences(loads_ms(table, law, model))
        if law.media == "text":
            loads = loads + law.span_ms(padding)
        found[modality.name] = loads / law.mean_ms
    return found


def _padding(known: CostModel, table: SampleTable) -> Floats:
    """[sequences] tokens that pad each."""
    source, model = known.job.workload.samples, known.job.model
    if source is None or source.packing is None or not source.packing.padded:
        return np.zeros(table.num_sequences)
    tokens = table.of_sequences(table.num_tokens(model.merge_tokens, model.audio_tokens_per_s))
    padding: Floats = source.packing.tokens - tokens.astype(np.float64)
    return padding


def relative_sizes(known: CostModel, table: SampleTable) -> dict[str, Floats]:
    """Modality → [sequences] tokens over those of the job's mean sequence, in place of loads."""
    model, workload = known.job.model, known.job.workload
    padding = _padding(known, table)
    sizes = {
        "images": (table.image_tokens(model.merge_tokens), workload.image_tokens_per_sample),
        "audios": (table.audio_tokens(model.audio_tokens_per_s), workload.audio_tokens_per_sample),
        "text": (table.num_tokens(model.merge_tokens, model.audio_tokens_per_s), workload.seq_length),
    }
    found = {}
    for modality in model.modalities:
        is_text = not isinstance(modality, Encoder)
        tokens, mean = sizes[modality.media if isinstance(modality, Encoder) else "text"]
        held = table.of_sequences(tokens) + padding if is_text else table.of_sequences(tokens)
        found[modality.name] = held / mean if mean else np.ones(table.num_sequences)
    return found


def sample_cost(laws: Mapping[str, SampleLaw], model: Model) -> SampleCost:
    """The laws of a job as those who deal samples take them: of the encoder of images, and of the decoder."""
    image = next((law for law in laws.values() if law.media == "images"), None)
    text = next(law for law in laws.values() if law.media == "text")
    image_ms = (image.square_ms, image.linear_ms, 0.0) if image else (0.0, 0.0, 0.0)
    frozen = any(encoder.media == "images" and encoder.freeze for encoder in model.encoders)
    return SampleCost(image_ms, (text.square_ms, text.linear_ms), encoder_frozen=frozen)
