"""What an image rank of its own gains: the tower on ranks beside the pipeline instead of on its first stage.

Colocated, M micro-batches take T = (M − 1) · max(τ) + Σ τ over the stages, with the tower in the first τ; apart the
tower runs beside it, and half a pass of it leads in before the first stage has its images. A plan cannot say that
ranks hold the tower alone, so this is worked out from the costs of blocks. A decoder whose layers are known by the
shapes of a table alone counts as one with full attention throughout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mm_autoparallel.measurements.build import build_job, check_lawful
from mm_autoparallel.measurements.devices import find_device
from mm_autoparallel.measurements.shapes import model_of
from mm_autoparallel.measurements.table import Row, Unrepresentable
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.calibration import assume_calibration

_PATCHES = 2304
"""Of an image of 768 x 768 pixels in patches of 16: what such rows leave unsaid. Assumed."""
_HOST_MS = {"h100-80g": 1.33}
"""Forward of a text layer on its host: a third of the 4.0 ms that Megatron-LM's functional tests take on H100."""


def gained_fraction(num_microbatches: int, stages_ms: Sequence[float], tower_ms: float) -> float:
    """The part of a step that the tower apart saves. stages_ms: what one micro-batch takes each stage without it."""
    colocated = [stages_ms[0] + tower_ms, *stages_ms[1:]]
    together_ms = (num_microbatches - 1) * max(colocated) + sum(colocated)
    apart_ms = (num_microbatches - 1) * max(stages_ms) + sum(stages_ms) + tower_ms / 2
    return 1 - apart_ms / together_ms


def predict_gain(row: Row) -> float:
    """The fraction of a step that the image rank of `row` saves, by the assumed figures of its device.

    Raises Unrepresentable where layers do not lie evenly on its stages or the parts do not go together.
    """
    strategy = Strategy(pp=row.count("pp"), tp=row.count("tp"), dp=row.count("dp"), mbs=row.count("mbs"))
    said = {"text": "decoder", "vision": "qwen2", "patches_per_image": str(_PATCHES)}
    device = find_device(row.text("device"))
    model = model_of(Row(row.path, row.index, row.line, {**row.cells, **said}), strategy.tp)
    merged = model["encoders"][0]["projector"]["merge_tokens"]
    job = build_job(
        row,
        model,
        device,
        strategy.world_size,
        {
            "global_batch_size": row.count("gbs"),
            "seq_length": row.count("tokens_per_sample"),
            "image_tokens_per_sample": _PATCHES // merged,
            "sequence_parallel": False,
            "gradient_bytes": row.positive("gradient_bytes"),
            "stack": "megatron-te",
        },
    )
    check_lawful(job, strategy)
    times = _times_ms(job, strategy, device)
    text, vision = (modality.layers.num_layers for modality in (job.model.text, job.model.encoders[0]))
    if text % strategy.pp:
        raise Unrepresentable(f"{text} text layers do not lie evenly on PP {strategy.pp}")
    stages = [text // strategy.pp * times["text_layer"]] * strategy.pp
    stages[0] += times["text_pre"]
    stages[-1] += times["text_post"]
    tower_ms = vision * times["vision_layer"] + times["vision_pre"] + times["vision_post"]
    return gained_fraction(strategy.num_microbatches(job.workload.global_batch_size), stages, tower_ms)


def _times_ms(job: Job, strategy: Strategy, device: str) -> Mapping[str, float]:
    """Forward and backward of one of each block."""
    assumed = assume_calibration(device, "megatron-core")
    launch_ms = _HOST_MS.get(device, assumed.figures.layer_launch_ms)
    figures = assumed.figures.model_copy(update={"layer_launch_ms": launch_ms})
    costs = CostModel(job, assumed.model_copy(update={"figures": figures}))
    problem = build_problem(costs, strategy)
    return {block.name: block.forward_ms + block.backward_ms for block in problem.chain}
