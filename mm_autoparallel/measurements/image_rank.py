"""What an image rank of its own gains: the tower on ranks beside the pipeline instead of on its first stage.

Both are plans of one job, simulated: the chain with the whole tower before the first stage's text, and the layout whose
tower lies on one rank behind the decoder's (model/costs/arranged.py). A decoder whose layers are known by the shapes of
a table alone counts as one with full attention throughout.
"""

from __future__ import annotations

from dataclasses import replace

from mm_autoparallel.measurements.build import build_job, check_lawful, even_layers
from mm_autoparallel.measurements.devices import DEVICES_PER_NODE, find_device
from mm_autoparallel.measurements.shapes import model_of
from mm_autoparallel.measurements.table import Row
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.calibration import assume_calibration
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan

_PATCHES = 2304
"""Of an image of 768 x 768 pixels in patches of 16: what such rows leave unsaid. Assumed."""
_HOST_MS = {"h100-80g": 1.33}
"""Forward of a text layer on its host: a third of the 4.0 ms that Megatron-LM's functional tests take on H100."""


def predict_gain(row: Row) -> float:
    """The fraction of a step that the image rank of `row` saves, by the assumed figures of its device.

    Raises Unrepresentable where layers do not lie evenly on its stages or the parts do not go together.
    """
    chain = _strategy(row)
    costs = price(row)
    apart = image_rank_apart(costs.job, chain)
    check_lawful(costs.job, apart)
    name, batch = costs.job.model.encoders[0].name, costs.job.workload.global_batch_size
    tower = costs.job.model.encoders[0].layers.num_layers
    text = tuple(even_layers(costs.job.model.text.layers.num_layers, chain))
    steps_ms = []
    for strategy, layers in (
        (chain, {name: (tower, *(0,) * (chain.pp - 1)), "text": text}),
        (apart, {name: (tower, *(0,) * chain.pp), "text": (0, *text)}),
    ):
        none = dict.fromkeys(layers, (0,) * strategy.pp)
        steps_ms.append(evaluate(costs, Plan(strategy, layers, none, batch)).step_ms)
    return 1 - steps_ms[1] / steps_ms[0]


def image_rank_apart(job: Job, chain: Strategy) -> Strategy:
    """`chain` with the encoder on one rank behind it, which serves all its replicas."""
    encoder = ModuleLayout(job.model.encoders[0].name, 1, 1, 1, chain.mbs * chain.dp, rank_offset=chain.world_size)
    return replace(chain, pp=chain.pp + 1, arrangement=Arrangement("disaggregated", "inline", encoder))


def price(row: Row) -> CostModel:
    """The job of a row and its costs, on as many whole nodes as hold the decoder's ranks and one more.

    Raises Unrepresentable where the parts do not go together.
    """
    said = {"text": "decoder", "vision": "qwen2", "patches_per_image": str(_PATCHES)}
    device, chain = find_device(row.text("device")), _strategy(row)
    model = model_of(Row(row.path, row.index, row.line, {**row.cells, **said}), chain.tp)
    merged = model["encoders"][0]["projector"]["merge_tokens"]
    job = build_job(
        row,
        model,
        device,
        (chain.world_size // DEVICES_PER_NODE + 1) * DEVICES_PER_NODE,
        {
            "global_batch_size": row.count("gbs"),
            "seq_length": row.count("tokens_per_sample"),
            "image_tokens_per_sample": _PATCHES // merged,
            "sequence_parallel": False,
            "gradient_bytes": row.positive("gradient_bytes"),
            "stack": "megatron-te",
        },
    )
    assumed = assume_calibration(device, "megatron-core")
    launch_ms = _HOST_MS.get(device, assumed.figures.layer_launch_ms)
    figures = assumed.figures.model_copy(update={"layer_launch_ms": launch_ms})
    return CostModel(job, assumed.model_copy(update={"figures": figures}))


def _strategy(row: Row) -> Strategy:
    return Strategy(pp=row.count("pp"), tp=row.count("tp"), dp=row.count("dp"), mbs=row.count("mbs"))
