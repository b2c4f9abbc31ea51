"""Plans that MindSpeed-MM cannot run, each refused by the rule it breaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.mindspeed_mm.model_json import read_model_json
from mm_autoparallel.integrations.mindspeed_mm.plan_files import write_plan
from mm_autoparallel.integrations.mindspeed_mm.plan_law import WORKLOAD, check_plan, has_frozen_stage
from mm_autoparallel.model.job.layers import Experts, Window
from mm_autoparallel.model.job.mindspeed_mm_law import describe_gradients
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.model.readers.model_file import read_model
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan

OMNI = Path(__file__).parents[1] / "fixtures" / "mindspeed_mm_models" / "qwen2.5omni_7b.json"
PATH = Path("model.json")


@pytest.fixture
def model(model_json: Path) -> Model:
    return read_model_json(model_json)


def test_the_plan_itself_is_lawful(model: Model, tiny_plan: Plan) -> None:
    check_plan(tiny_plan, model, PATH)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"schedule": "gpipe"}, "its schedule is gpipe, and MindSpeed-MM runs 1f1b with VPP 1"),
        ({"ep": 2}, "EP 2 divides experts, and the model has none"),
        ({"zero": 2}, "ZeRO stage 2 has no flag"),
        ({"zero": 3, "reshard": False}, "ZeRO stage 3 has no flag"),
        ({"optimizer_offload": True}, "MindSpeed has no step there"),
        ({"cp": 2, "dp": 1, "cp_kind": "ring"}, "it chooses CP by ring, and a launch script says that by"),
        ({"rank_order": "tp-cp-ep-pp-dp"}, "--use-tp-pp-dp-mapping, which is not written"),
        ({"cp": 4, "dp": 1}, "CP 4 with TP 2 divides the 4 attention heads of vision among 8 ranks"),
    ],
)
def test_strategies(model: Model, tiny_plan: Plan, strategy: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(replace(tiny_plan, strategy=replace(tiny_plan.strategy, **strategy)), model, PATH)


@pytest.mark.parametrize(
    ("mode", "switch"),
    [("selective", "--recompute-gran"), ("activation", "--recompute-activation"), ("offload", "--swap-attention")],
)
def test_modes_of_single_layers(model: Model, tiny_plan: Plan, mode: str, switch: str) -> None:
    counts = (0, 1) + (0,) * (len(tiny_plan.layers["text"]) - 2)
    with pytest.raises(PlanError, match=f"runs 1 text layers of stage 1 in the mode {mode}.*{switch}.*search.modes"):
        check_plan(replace(tiny_plan, modes={"text": {mode: counts}}), model, PATH)


@pytest.mark.parametrize(
    ("strategy", "batch", "message"),
    [
        (Strategy(pp=1, tp=1, dp=1, mbs=1, vpp=2), 8, "VPP 2 needs a pipeline of at least 2 stages"),
        (Strategy(pp=2, tp=1, dp=1, mbs=1, vpp=2), 7, "7 micro-batches are no multiple of PP 2"),
        (
            Strategy(pp=2, tp=1, dp=1, mbs=1, vpp=2, schedule="interleaved_1f1b_low_memory"),
            8,
            "MindSpeed-MM runs interleaved_1f1b with VPP 2",
        ),
    ],
)
def test_chunks(model: Model, strategy: Strategy, batch: int, message: str) -> None:
    rest = (0,) * (strategy.pp * strategy.vpp - 2)
    layers = {"vision": (6, 0, *rest), "text": (1, 9 - len(rest), *(1 for _ in rest))}
    plan = Plan(strategy, layers, {"vision": (0, 0, *rest), "text": (0, 0, *rest)}, batch)
    with pytest.raises(PlanError, match=message):
        check_plan(plan, model, PATH)


@pytest.mark.parametrize(
    ("layers", "recompute", "message"),
    [
        ({"vision": (6, 0), "text": (4, 7)}, {}, "places 11 text layers, and model.json has 10"),
        ({"vision": (6, 0, 0), "text": (4, 6)}, {}, "layers of vision hold 3 numbers, .* are 2 virtual stages"),
        ({"text": (4, 6)}, {}, "layers of vision hold 0 numbers"),
        (
            {"vision": (6, 0), "audio": (1, 0), "text": (4, 6)},
            {},
            "places audio layers, and model.json has vision, text",
        ),
        ({"vision": (6, 0), "video": (1, 0), "text": (4, 6)}, {}, "places video layers, and a model.json has"),
        ({}, {"text": (5, 0)}, "recomputes 5 text layers on stage 0, which holds 4"),
    ],
)
def test_numbers(
    model: Model,
    tiny_plan: Plan,
    layers: dict[str, tuple[int, ...]],
    recompute: dict[str, tuple[int, ...]],
    message: str,
) -> None:
    plan = replace(tiny_plan, layers=layers or tiny_plan.layers, recompute=dict(tiny_plan.recompute) | recompute)
    with pytest.raises(PlanError, match=message):
        check_plan(plan, model, PATH)


@pytest.mark.parametrize(("audio", "lawful"), [((0, 32, 0, 0), True), ((32, 0, 0, 0), False), ((0, 16, 16, 0), False)])
def test_audio_stays_where_text_begins(audio: tuple[int, ...], lawful: bool) -> None:
    plan = Plan(
        Strategy(pp=4, tp=1, dp=1, mbs=1),
        layers={"vision": (30, 2, 0, 0), "audio": audio, "text": (0, 8, 10, 10)},
        recompute={"vision": (0,) * 4, "audio": (0,) * 4, "text": (0,) * 4},
        global_batch_size=8,
    )
    if lawful:
        check_plan(plan, read_model_json(OMNI), OMNI)
        return
    with pytest.raises(PlanError, match="keeps the whole audio encoder where the text decoder begins, on stage 1"):
        check_plan(plan, read_model_json(OMNI), OMNI)


@pytest.mark.parametrize(
    ("text", "vision", "lawful"),
    [((5, 5), (6, 0), True), ((4, 6), (6, 0), False), ((0, 10), (6, 0), False)],
)
def test_numbered_layers_are_spread_evenly(
    model: Model, tiny_plan: Plan, text: tuple[int, ...], vision: tuple[int, ...], lawful: bool
) -> None:
    """The first layer has no experts: Megatron tells by a layer's number, and numbers as if stages were equal."""
    experts = Experts(num_experts=4, top_k=2, ffn_size=32, dense_layers=(0,))
    layers = model.text.layers.model_copy(update={"experts": experts})
    mixed = model.model_copy(update={"text": model.text.model_copy(update={"layers": layers})})
    none = {"vision": (0, 0), "text": (0, 0)}
    plan = replace(tiny_plan, layers={"vision": vision, "text": text}, recompute=none)
    if lawful:
        check_plan(plan, mixed, PATH)
        return
    with pytest.raises(PlanError, match="every stage must hold equally many text layers"):
        check_plan(plan, mixed, PATH)
    with pytest.raises(PlanError, match="EP 3 does not divide the model's 4 experts"):
        check_plan(replace(plan, strategy=replace(plan.strategy, ep=3)), mixed, PATH)
    with pytest.raises(PlanError, match="ETP 64 divides experts otherwise than all else"):
        check_plan(replace(plan, strategy=replace(plan.strategy, etp=64)), mixed, PATH)


WINDOWS = Window(num_tokens=16, full_layers=(5,))


@pytest.mark.parametrize(
    ("sizes", "vision", "window", "message"),
    [
        ({"tp": 2}, (6, 0), False, ""),
        ({"tp": 2}, (5, 1), False, "places vision layers on stage 0, stage 1, .* with TP 2 with sequence parallel"),
        ({"tp": 2, "sequence_parallel": False}, (5, 1), False, ""),
        ({"tp": 1}, (5, 1), True, ""),
        ({"tp": 1, "cp": 2}, (5, 1), False, "with CP 2 each stage of the tower divides and gathers"),
        ({"tp": 1, "cp": 2}, (6, 0), False, ""),
        ({"tp": 1, "vpp": 2}, (6, 0, 0, 0), True, ""),
        ({"tp": 1, "vpp": 2}, (5, 1, 0, 0), False, ""),
        ({"tp": 1, "vpp": 2}, (5, 1, 0, 0), True, "VPP 2 it counts wrongly which of the later layers .* chunk 0, or"),
        ({"tp": 1, "vpp": 2}, (4, 1, 1, 0), True, "on stage 0, chunk 0, stage 1, chunk 0, stage 0, chunk 1"),
    ],
)
def test_towers_that_no_stage_may_part(
    model: Model, sizes: dict[str, Any], vision: tuple[int, ...], window: bool, message: str
) -> None:
    if window:
        encoder = model.encoders[0]
        encoder = encoder.model_copy(update={"layers": encoder.layers.model_copy(update={"window": WINDOWS})})
        model = model.model_copy(update={"encoders": (encoder,)})
    rest = len(vision) - 2
    text = (0, 10) if not rest else (0, 0, 5, 5) if vision[1] else (0, 4, 3, 3)
    none = (0,) * len(vision)
    strategy = Strategy(**({"pp": 2, "dp": 1, "mbs": 1} | sizes))
    plan = Plan(strategy, {"vision": vision, "text": text}, {"vision": none, "text": none}, 8)
    if not message:
        check_plan(plan, model, PATH)
        return
    with pytest.raises(PlanError, match=message):
        check_plan(plan, model, PATH)
    # 26.1 has mended what is counted within chunk 0, and nothing behind it
    if sizes.get("vpp") and not any(vision[2:]):
        check_plan(plan, model, PATH, counts_chunks=True)
    else:
        with pytest.raises(PlanError, match=message):
            check_plan(plan, model, PATH, counts_chunks=True)


@pytest.mark.parametrize(
    ("freeze", "text", "vpp", "frozen"),
    [
        ({}, (0, 10), 1, True),
        ({}, (1, 9), 1, False),
        ({"vision": False}, (0, 10), 1, False),
        ({"vision_projector": False}, (0, 10), 1, False),
        ({}, (0, 0, 5, 5), 2, False),
        ({"text": True}, (4, 6), 1, True),
    ],
)
def test_stages_with_nothing_to_train(
    model: Model, freeze: dict[str, bool], text: tuple[int, ...], vpp: int, frozen: bool
) -> None:
    vision = (6, *(0 for _ in text[1:])) if vpp == 1 else (3, 3, 0, 0)
    none = (0,) * len(text)
    strategy = Strategy(pp=2, tp=1, dp=1, mbs=1, vpp=vpp)
    plan = Plan(strategy, {"vision": vision, "text": text}, {"vision": none, "text": none}, 8)
    assert has_frozen_stage(plan, model.with_freeze(freeze)) is frozen


class TestGradients:
    """Where images join divided embeddings, MindSpeed-MM sums gradients that every rank has whole (docs, What was

    learned): such plans run, and are told.
    """

    @pytest.mark.parametrize(
        ("sizes", "told"),
        [
            ({"tp": 2}, True),
            ({"tp": 2, "sequence_parallel": False}, False),
            ({"tp": 1, "dp": 4}, False),
        ],
    )
    def test_of_a_strategy(self, model: Model, sizes: dict[str, Any], told: bool) -> None:
        strategy = Strategy(**({"pp": 2, "dp": 2, "mbs": 1} | sizes))
        assert ("gradients" in describe_gradients(model, WORKLOAD, strategy)) == told
        assert not describe_gradients(model.model_copy(update={"encoders": ()}), WORKLOAD, strategy)
        other = WORKLOAD.model_copy(update={"stack": "mindspeed"})
        assert not describe_gradients(model, other, strategy)

    def test_of_a_model_whose_images_join_before_tokens_are_divided(self) -> None:
        path = Path(__file__).parents[1] / "fixtures" / "huggingface" / "qwen3_5_9b.json"
        assert not describe_gradients(read_model(path), WORKLOAD, Strategy(pp=1, tp=2, dp=2, mbs=1))

    def test_where_the_plan_is_written_and_where_it_is_estimated(
        self, model_json: Path, launch_script: Path, tiny_plan: Plan, tmp_path: Path
    ) -> None:
        done = write_plan(tiny_plan, model_json, launch_script, tmp_path)
        assert tiny_plan.strategy.tp == 2
        assert done.approximations[0].startswith("TP 2 with sequence parallel: MindSpeed-MM sums gradients")
        undivided = replace(tiny_plan, strategy=replace(tiny_plan.strategy, sequence_parallel=False))
        told = write_plan(undivided, model_json, launch_script, tmp_path / "undivided").approximations
        assert not any("gradients" in sentence for sentence in told)
        document = {
            "model": read_model_json(model_json).model_dump(),
            "cluster": {"num_nodes": 2, "devices_per_node": 8, "device": "ascend-910b-64g"},
            "workload": {"global_batch_size": tiny_plan.global_batch_size, "seq_length": 1024, "stack": "mindspeed-mm"},
        }
        job = parse_job(document, Path("job"))
        assert done.approximations[0] in evaluate(job, tiny_plan).warnings
        assert not any("gradients" in sentence for sentence in evaluate(job, undivided).warnings)
