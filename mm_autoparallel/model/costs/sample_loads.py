"""What single samples cost: laws of a job's own block costs, and the loads of its samples by them.

A layer takes time in proportion to its tokens, but for attention, in proportion to each span's square: linear x +
square x² for a span of x. How much of either is worked out from analytic costs on one device, of as many tokens in more
spans and in fewer, whose matrix products are the same: k samples of spans x take k linear x + k square x², one sample
of spans k x takes k linear x + k² square x². Of images and recordings that is asked at the size that their own have,
each weighed by its size: a mean sample may have a twentieth of an image, of which a pass would take what a host takes
to launch it, and an image no more. What plans make of a sample's load is its ratio to that of the mean sample, over
its `Scarcity`: how many times as long a micro-batch of mean samples takes as its law says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.model.blocks.tokens import count_tokens
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import MEL_FRAMES_PER_S, Encoder, MelFrames, Modality, Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.samples.sample import SampleCost
from mm_autoparallel.samples.table import SampleTable, add_up

Floats = NDArray[np.float64]

_MEDIA = ("image_tokens_per_sample", "audio_tokens_per_sample")
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


def sample_laws(known: CostModel, table: SampleTable) -> dict[str, SampleLaw]:
    """Modality → its law, as such samples need it. Those that the workload gives nothing to do have none."""
    job, laws, usual = known.job, dict[str, SampleLaw](), _with_usual_media(known.job, table)
    several_ms, long_ms = _totals_ms(known, usual, mbs=_TIMES), _totals_ms(known, usual, length=_TIMES)
    for modality in job.model.modalities:
        name = modality.name
        if not several_ms[name] or not count_tokens(modality, job.workload).layer_tokens:
            continue
        media, span, num_spans = _measure(modality, usual)
        each_ms = several_ms[name] / (_TIMES * num_spans)
        more_ms = (long_ms[name] - several_ms[name]) / (_TIMES * num_spans)
        square_ms = min(max(more_ms / (_TIMES - 1), 0.0), each_ms) / span**2
        linear_ms = each_ms / span - square_ms * span
        laws[name] = SampleLaw(media, square_ms, linear_ms, *_measure(modality, job.workload)[1:])
    return laws


def _measure(modality: Modality, workload: Workload) -> tuple[Media, float, int]:
    """Of one sample, what its spans are of, how long each is in the unit of SampleLaw, and how many there are."""
    tokens = count_tokens(modality, workload)
    span = tokens.layer_tokens / tokens.num_spans
    if not isinstance(modality, Encoder):
        return "text", span, tokens.num_spans
    if isinstance(modality.stem, MelFrames):
        return modality.media, span * modality.stem.frames_per_token / MEL_FRAMES_PER_S, tokens.num_spans
    return modality.media, tokens.input_tokens / tokens.num_spans, tokens.num_spans


def _with_usual_media(job: Job, table: SampleTable) -> Workload:
    """The job's workload with one image of the samples' usual size, and one such recording."""
    workload, changes = job.workload, dict[str, int]()
    for name, sizes, tokens_each in (
        ("image", table.patches.astype(np.float64), 1.0 / job.model.merge_tokens),
        ("audio", table.audio_s, job.model.audio_tokens_per_s),
    ):
        if getattr(workload, f"{name}_tokens_per_sample") and sizes.sum():
            usual = float(np.sum(sizes**2) / np.sum(sizes))
            changes |= {f"{name}_tokens_per_sample": max(1, round(usual * tokens_each)), f"{name}s_per_sample": 1}
    media = sum(changes.get(key, getattr(workload, key)) for key in _MEDIA)
    return workload.model_copy(update=changes | {"seq_length": max(workload.seq_length, media)})


class Scarcity:
    """How many times as long a micro-batch of mean samples takes as the law of a modality says, which is of images or
    recordings of their usual size; 1 where the mean sample has one of these or more."""

    def __init__(self, known: CostModel, table: SampleTable) -> None:
        self._laws, self._usual = sample_laws(known, table), _with_usual_media(known.job, table)
        self._known = CostModel(replace(known.job, samples=None), known.calibration)
        self._found: dict[tuple[str, int], float] = {}

    def __call__(self, modality: str, mbs: int) -> float:
        """Of so many samples a micro-batch."""
        if (modality, mbs) not in self._found:
            self._found[modality, mbs] = self._work_out(modality, mbs)
        return self._found[modality, mbs]

    def _work_out(self, modality: str, mbs: int) -> float:
        law, job = self._laws.get(modality), self._known.job
        if law is None or law.media == "text":
            return 1.0
        of = next(one for one in job.model.modalities if one.name == modality)
        _, span, num_spans = _measure(of, self._usual)
        usual_ms = num_spans * float(law.span_ms(np.array([span]))[0])
        mean, at_usual = (_totals_ms(self._known, each, mbs)[modality] for each in (job.workload, self._usual))
        return max(1.0, (mean / law.mean_ms) / (at_usual / usual_ms))


def _totals_ms(known: CostModel, workload: Workload, mbs: int = 1, length: int = 1) -> dict[str, float]:
    """Forward and backward of all blocks of each modality, analytic, of `mbs` samples whose spans are `length` times as
    long as those of `workload`, and as many, on one device."""
    lengths = ("seq_length", *_MEDIA)
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
    laws, model, found = sample_laws(known, table), known.job.model, {}
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
    token_ms = text.square_ms, text.linear_ms
    return SampleCost(image_ms, token_ms, encoder_frozen=frozen, merge_tokens=model.merge_tokens)
