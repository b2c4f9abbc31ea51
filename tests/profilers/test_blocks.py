"""Figures of the toy's blocks against closed forms, and their sums against what whole models and stages keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import toy_model as toy  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from mm_autoparallel.model.job.job import Job  # noqa: E402
from mm_autoparallel.model.readers.job_file import parse_job  # noqa: E402
from mm_autoparallel.profilers.blocks import Blocks, Figures, LiveModel, measure_optimizer  # noqa: E402
from mm_autoparallel.profilers.clock import Effort  # noqa: E402
from mm_autoparallel.profilers.kinds import Kinds, check_parts, find_kinds, live_layout  # noqa: E402
from mm_autoparallel.profilers.layout import find_layout, layers_of  # noqa: E402
from mm_autoparallel.profilers.lockstep import ALONE  # noqa: E402
from mm_autoparallel.profilers.meter import KeptActivations  # noqa: E402
from mm_autoparallel.profilers.observe import observe  # noqa: E402
from mm_autoparallel.profilers.shard import fake_mesh  # noqa: E402
from mm_autoparallel.profilers.split import find_split  # noqa: E402
from mm_autoparallel.profilers.subject import Build, Layout  # noqa: E402
from mm_autoparallel.profilers.transformers_releases import fitting, read_config  # noqa: E402

CPU = torch.device("cpu")
QUICK = Effort(budget_s=0.2, min_rounds=3, max_rounds=3, max_warm_up=1)
FLOAT = 4
STATE = toy.SEQ_LENGTH * toy.WIDTH * FLOAT
"""Bytes of a hidden state of one sample; vision and text have equally many tokens, and tables are as large."""


def measure(
    model: nn.Module, job: Job, step: Callable[[], Tensor], layout: Layout | None = None
) -> tuple[dict[str, Figures], Kinds]:
    kinds = find_kinds(job)
    layout = live_layout(kinds, find_layout(model, layout))
    split = find_split(model, layout, step)
    layers = layers_of(model, layout)
    check_parts(kinds, split.parts, layers)
    live = LiveModel(model, layout, split, layers, CPU)
    blocks = Blocks(live, kinds, step, observe(model, layout, split, step, CPU), ALONE)
    return blocks.measure(QUICK, tp=1), kinds


def measure_toy(num_samples: int, job: Job | None = None) -> dict[str, Figures]:
    job = job or toy.make_job()
    model = toy.build_model(Build(find_kinds(job).depth, CPU))
    frozen = [model.vision.embed, model.vision.blocks] if job.model.encoders[0].freeze else []
    for module in frozen:
        module.requires_grad_(False)
    return measure(model, job, lambda: toy.forward_step(model, num_samples, job.workload), toy.LAYOUT)[0]


@pytest.fixture(scope="module")
def figures() -> dict[str, Figures]:
    return measure_toy(num_samples=2)


def test_layers_keep_the_inputs_of_their_matrices(figures: dict[str, Figures]) -> None:
    inner = 2 * toy.SEQ_LENGTH * toy.INNER * FLOAT
    for kind in ("vision_layer", "text_layer"):
        assert figures[kind].activation_bytes == 2 * STATE + inner
        assert figures[kind].checkpoint_bytes == 2 * STATE
        assert figures[kind].output_bytes == 2 * STATE
        assert figures[kind].parameter_count == 2 * toy.WIDTH * toy.INNER + toy.WIDTH + toy.INNER


def test_ends_keep_what_they_are_the_first_to_save(figures: dict[str, Figures]) -> None:
    patches = 2 * toy.IMAGE_TOKENS * toy.MERGE * toy.PATCH * FLOAT
    ids, logits = 2 * toy.SEQ_LENGTH * 8, 2 * toy.SEQ_LENGTH * toy.VOCAB * FLOAT
    assert figures["vision_pre"].activation_bytes == patches + STATE  # and the table that its layers share
    assert figures["vision_post"].activation_bytes == 2 * STATE
    assert figures["text_pre"].activation_bytes == ids + STATE
    assert figures["text_post"].activation_bytes == 2 * STATE + logits + FLOAT  # and the loss's total weight
    assert {kind: figures[kind].output_bytes for kind in ("vision_pre", "vision_post", "text_pre")} == {
        "vision_pre": 2 * STATE,
        "vision_post": 2 * toy.IMAGE_TOKENS * toy.WIDTH * FLOAT,
        "text_pre": 2 * STATE,
    }
    assert figures["text_post"].parameter_count == toy.VOCAB * toy.WIDTH


def test_passing_bytes(figures: dict[str, Figures]) -> None:
    """Backward of a layer holds the gradients before and after relu, or that of the whole head."""
    inner = 2 * toy.SEQ_LENGTH * toy.INNER * FLOAT
    assert inner <= figures["text_layer"].transient_bytes <= 3 * inner
    assert figures["text_post"].transient_bytes >= 2 * toy.SEQ_LENGTH * toy.VOCAB * FLOAT


def test_everything_takes_time(figures: dict[str, Figures]) -> None:
    for kind, found in figures.items():
        assert found.forward_ms.num_samples == 3
        if kind.endswith("_layer"):
            assert found.recompute_ms is not None
        else:
            assert found.forward_ms.median_ms > 0
            assert found.recompute_ms is None
    assert figures["vision_pre"].backward_input_ms.median_ms == 0.0, "nothing before it wants a gradient"


def test_a_backward_in_two_parts(figures: dict[str, Figures]) -> None:
    """Of layers whose input wants a gradient. torch keeps the graph until the weights have theirs."""
    for kind, found in figures.items():
        assert (found.split_extra_ms is None) == (not kind.endswith("_layer"))
        assert (found.kept_for_weight_bytes is None) == (not kind.endswith("_layer"))
        if found.kept_for_weight_bytes is not None and found.split_extra_ms is not None:
            assert found.kept_for_weight_bytes == found.activation_bytes, "gradients of outputs weigh what relu kept"
            assert found.split_extra_ms.median_ms >= 0.0


def kept_by(module: nn.Module, run: Callable[[], Tensor]) -> int:
    with KeptActivations(module) as kept:
        output = run()
    found = kept.kept_bytes
    del output
    return found


def test_a_deeper_model_keeps_the_sum_of_its_blocks(figures: dict[str, Figures]) -> None:
    model = toy.Toy(toy.NUM_LAYERS)
    workload = toy.make_job().workload
    predicted = sum(
        found.activation_bytes * toy.NUM_LAYERS.get(kind.removesuffix("_layer"), 1) for kind, found in figures.items()
    )
    assert predicted == kept_by(model, lambda: toy.forward_step(model, 2, workload))


def test_a_stage_in_the_midst_keeps_its_layers_and_a_table_of_its_own(figures: dict[str, Figures]) -> None:
    model = toy.Toy(toy.NUM_LAYERS)
    tokens = torch.randint(toy.VOCAB, (2, toy.SEQ_LENGTH))

    def stage() -> Tensor:
        state, table = torch.randn(2, toy.SEQ_LENGTH, toy.WIDTH, requires_grad=True), torch.ones(16, toy.WIDTH)
        for layer in model.layers[2:]:
            state = layer(state, table)
        return nn.functional.cross_entropy(model.head(state).flatten(0, 1), tokens.flatten())

    ids = tokens.numel() * 8  # counted with text_pre, which is on another stage
    predicted = 4 * figures["text_layer"].activation_bytes + figures["text_post"].activation_bytes
    assert kept_by(model, stage) == predicted + STATE + ids


def test_frozen_layers_run_forward_and_no_more() -> None:
    encoder = toy.JOB["model"]["encoders"][0] | {"freeze": True}
    figures = measure_toy(1, toy.make_job(**{"model.encoders": [encoder]}))
    for kind in ("vision_pre", "vision_layer"):
        frozen = figures[kind]
        assert frozen.backward_input_ms.median_ms == frozen.backward_weight_ms.median_ms == 0.0
        assert frozen.activation_bytes == frozen.checkpoint_bytes == 0
        assert frozen.recompute_ms is None
    assert figures["vision_layer"].parameter_count > 0
    assert figures["vision_post"].activation_bytes == STATE


def test_collectives_that_did_not_happen_are_added_by_their_price() -> None:
    job = toy.make_job()
    with fake_mesh(4, "cpu") as mesh:
        model = toy.build_model(Build(find_kinds(job).depth, CPU, mesh))
        kinds, layout = find_kinds(job), toy.LAYOUT

        def step() -> Tensor:
            return toy.forward_step(model, 1, job.workload)

        split = find_split(model, layout, step)
        live = LiveModel(model, layout, split, layers_of(model, layout), CPU)
        blocks = Blocks(live, kinds, step, observe(model, layout, split, step, CPU, check=False), ALONE)
        figures = blocks.measure(QUICK, 4, price=lambda issued: 1e6 * sum(one.size_bytes / STATE for one in issued))
    layer, rest = figures["text_layer"], figures["text_post"]
    # one sum forward; one backward, for the input of the columns; all at a price that no computation takes
    assert round(layer.forward_ms.median_ms / 1e6) == 1
    assert round((layer.backward_input_ms.median_ms + layer.backward_weight_ms.median_ms) / 1e6) == 1
    assert round(layer.backward_weight_ms.median_ms / 1e6) == 0
    assert layer.recompute_ms is not None
    assert round(rest.forward_ms.median_ms / 1e6) == 0
    assert layer.parameter_count == (2 * toy.WIDTH * toy.INNER + toy.INNER) // 4 + toy.WIDTH


def test_an_optimizer_step_over_one_block() -> None:
    layers = [toy.Layer(), toy.Layer()]
    more = [parameter for layer in layers for parameter in layer.parameters()]
    before = [parameter.detach().clone() for parameter in more]
    for parameter in more:
        parameter.grad = torch.ones_like(parameter)
    timing = measure_optimizer(toy.build_optimizer, more, more[:4], 1, CPU, QUICK, ALONE)
    assert timing is not None
    assert timing.num_samples == 3
    assert not any(torch.equal(*pair) for pair in zip(before, more, strict=True)), "it really steps"
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in more), "gradients stay"
    frozen = [parameter.requires_grad_(False) for parameter in more]
    assert measure_optimizer(toy.build_optimizer, frozen, [], 1, CPU, QUICK, ALONE) is None


# ------------------------------------------------------------------------------------------------------ Hugging Face

WIDTH, IMAGE_ID, SEQ_LENGTH, IMAGE_TOKENS = 32, 60, 24, 4


def qwen2vl_job() -> Job:
    document = {
        "model": {
            "name": "qwen2vl-tiny",
            "encoders": [
                {
                    "name": "vision",
                    "freeze": False,
                    "stem": {"type": "patches", "in_features": 96},
                    "layers": {"num_layers": 5, "hidden_size": 16, "ffn_size": 64, "num_heads": 2, "norm": "layer"},
                    "projector": {"merge_tokens": 4, "layer_sizes": [64, 64, WIDTH]},
                }
            ],
            "text": {
                "vocab_size": 64,
                "tied": True,
                "layers": {
                    "num_layers": 6,
                    "hidden_size": WIDTH,
                    "ffn_size": 48,
                    "num_heads": 4,
                    "num_kv_groups": 2,
                    "norm": "rms",
                },
            },
        },
        "cluster": toy.JOB["cluster"],
        "workload": {"global_batch_size": 8, "seq_length": SEQ_LENGTH, "image_tokens_per_sample": IMAGE_TOKENS},
    }
    return parse_job(document, Path("qwen2vl.yaml"))


def build_qwen2vl(num_vision_layers: int, num_text_layers: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    document = {
        "model_type": "qwen2_vl",
        "text_config": {
            "model_type": "qwen2_vl_text",
            "vocab_size": 64,
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": num_text_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
            **ends,
        },
        "vision_config": {
            "depth": num_vision_layers,
            "embed_dim": 16,
            "hidden_size": WIDTH,
            "num_heads": 2,
            "patch_size": 4,
        },
        "image_token_id": IMAGE_ID,
        "video_token_id": 61,
        "vision_start_token_id": 62,
        "vision_end_token_id": 63,
        "tie_word_embeddings": True,
        **ends,
    }
    torch.manual_seed(0)
    model: nn.Module = transformers.Qwen2VLForConditionalGeneration(read_config(document))
    return model.train()


def qwen2vl_step(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 50, (2, SEQ_LENGTH), generator=generator)
    ids[:, 3], ids[:, 4 : 4 + IMAGE_TOKENS] = 62, IMAGE_ID
    batch = {
        "input_ids": ids,
        "pixel_values": torch.randn(32, 96, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE_ID).int(),
    }
    loss: Tensor = model(**fitting(batch, model), labels=ids, use_cache=False).loss
    return loss


def test_qwen2vl_s_blocks_add_up_to_the_deeper_model() -> None:
    model = build_qwen2vl(3, 3)
    figures, _ = measure(model, qwen2vl_job(), lambda: qwen2vl_step(model))
    depth = {"vision_layer": 5, "text_layer": 6}
    deeper = build_qwen2vl(5, 6)
    kept = kept_by(deeper, lambda: qwen2vl_step(deeper))
    assert sum(found.activation_bytes * depth.get(kind, 1) for kind, found in figures.items()) == kept
    count = sum(parameter.numel() for parameter in deeper.parameters())
    assert sum(found.parameter_count * depth.get(kind, 1) for kind, found in figures.items()) == count
    assert figures["text_post"].parameter_count == WIDTH, "a tied head holds its norm alone"
    assert figures["text_layer"].output_bytes == 2 * SEQ_LENGTH * WIDTH * FLOAT
