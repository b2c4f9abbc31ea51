"""Against a real checkout, where MINDSPEED_MM_CHECKOUT names one: its files, and its own code that reads them.

Methods are taken out of its sources and run with stand-ins for the modules around them, so that nothing has to be
installed.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.launch_script import read_launch_script
from mm_autoparallel.integrations.mindspeed_mm.launch_script import read_sizes
from mm_autoparallel.integrations.mindspeed_mm.live_config import cut_model, recompute_of_stage
from mm_autoparallel.integrations.mindspeed_mm.model_json import read_model_json
from mm_autoparallel.integrations.mindspeed_mm.plan_files import read_plan_back, write_plan
from mm_autoparallel.integrations.mindspeed_mm.refusals import check_flags
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

NAMED = os.environ.get("MINDSPEED_MM_CHECKOUT")
CHECKOUT = Path(NAMED or "none")
DrawPlan = Callable[[Model, Strategy, int, random.Random], Plan]

pytestmark = pytest.mark.skipif(NAMED is None, reason="MINDSPEED_MM_CHECKOUT names no checkout of MindSpeed-MM")

PAIRS = [
    (script, CHECKOUT / named[1])
    for script in sorted(CHECKOUT.glob("examples/*/finetune_*.sh"))
    for named in [re.search(r'MM_MODEL="?(\S+?)"?\n', script.read_text())]
    if named and (CHECKOUT / named[1]).exists() and '"text_decoder"' in (CHECKOUT / named[1]).read_text()
]
"""Launch scripts with the model.json that they train."""

MODEL_FILES = sorted({path for _, path in PAIRS})


def code_of(path: str, *names: str) -> dict[str, Any]:
    """The functions, classes and methods called `names` in a source of the checkout; their globals may be added to."""
    tree = ast.parse((CHECKOUT / path).read_text())
    found = [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names
    ]
    for node in found:
        node.decorator_list = []
    assert {node.name for node in found} == set(names)
    scope: dict[str, Any] = {"print": lambda *_: None, "TransformerConfig": object, "Any": Any}
    exec(compile(ast.Module(body=list(found), type_ignores=[]), path, "exec"), scope)
    return scope


def readable(model_json: Path) -> Model:
    try:
        return read_model_json(model_json)
    except JobError as error:
        pytest.skip(str(error))


def script_of(plannable: Path) -> None:
    text = plannable.read_text()
    try:
        check_flags(lambda flag: f"{flag} " in text, None, plannable.name)
    except JobError as error:
        pytest.skip(str(error))


def test_there_are_launch_scripts() -> None:
    assert PAIRS


@pytest.mark.parametrize(("script", "model_json"), PAIRS, ids=[script.stem for script, _ in PAIRS])
@pytest.mark.parametrize("vpp", [1, 2])
def test_round_trip(script: Path, model_json: Path, vpp: int, tmp_path: Path, draw_plan: DrawPlan) -> None:
    script_of(script)
    model, rng = readable(model_json), random.Random(script.stem)
    for pp, tp, zero in itertools.product((1, 2, 8), (1, 4), (0, 1)):
        if pp == 1 and vpp > 1:
            continue
        plan = draw_plan(model, Strategy(pp=pp, tp=tp, dp=2, mbs=2, vpp=vpp, zero=zero), 64, rng)
        files = write_plan(plan, model_json, script, tmp_path / f"{pp}-{tp}-{zero}").files
        assert read_plan_back(*files, world_size=plan.strategy.world_size) == plan


@pytest.mark.parametrize("model_json", MODEL_FILES, ids=[f"{path.parent.name}-{path.stem}" for path in MODEL_FILES])
@pytest.mark.parametrize("vpp", [1, 2])
def test_its_own_code_builds_what_the_plan_says(
    model_json: Path, vpp: int, tmp_path: Path, draw_plan: DrawPlan
) -> None:
    """VLMModel's methods on its own ConfigReader: layers that each stage builds, where ends go, what recomputes."""
    model = readable(model_json)
    script = next(script for script, path in PAIRS if path == model_json)
    script_of(script)
    pp = 4
    plan = draw_plan(model, Strategy(pp=pp, tp=1, dp=1, mbs=1, vpp=vpp), 64, random.Random(model_json.stem))
    (placed, _) = write_plan(plan, model_json, script, tmp_path).files
    reader = code_of("mindspeed_mm/configs/config.py", "ConfigReader")
    reader["get_dtype"] = str
    parts = {"vision": "_build_image_encoder_model", "text": "_build_text_decoder_model"}
    if "audio" in plan.layers:
        parts["audio"] = "_build_audio_encoder_model"
    code = code_of("mindspeed_mm/models/vlm_model.py", *parts.values())
    code |= dict.fromkeys(
        ("get_vit_layer_spec", "get_projector_layer_spec", "get_llm_layer_spec", "get_audio_layer_spec"),
        lambda _config: None,
    )
    code |= {"get_args": lambda: SimpleNamespace(hetero_parallel=False)}
    code |= dict.fromkeys(("VisionModel", "MMGPTModel", "AudioModel"), lambda **options: SimpleNamespace(**options))
    ends: dict[str, list[int]] = {name: [] for name in parts}
    for k in range(pp * vpp):
        chunk, stage = divmod(k, pp)
        config = reader["ConfigReader"](json.loads(placed.read_text()))
        sections = {"vision": "image_encoder", "audio": "audio_encoder", "text": "text_decoder"}
        this = SimpleNamespace(
            pp_size=pp, pp_rank=stage, enable_vp=vpp > 1, vp_rank=chunk, vp_size=vpp, pre_process=None,
            post_process=None, share_embeddings_and_output_weights=False, reward_process=False,
        )  # fmt: skip
        with recompute_of_stage(config, stage, chunk):
            for name, method in parts.items():
                section = getattr(config, sections[name])
                inner = section if name == "text" else getattr(section, f"{name}_encoder")
                count = plan.layers[name][k]
                built = code[method](this, section)
                assert (built is not None) == (count > 0)
                if built is None:
                    continue
                assert inner.num_layers == count * pp * vpp  # Megatron divides it by stages and chunks again
                before = sum(plan.layers[name][:k])
                assert built.pre_process == (before == 0)
                assert built.post_process == (before + count == sum(plan.layers[name]))
                if built.post_process:
                    ends[name].append(k)
                recomputed = plan.recompute[name][k]
                assert getattr(inner, "recompute_num_layers", None) == (recomputed or None)
                assert getattr(inner, "recompute_method", None) == ("block" if recomputed else None)
    assert all(len(found) == 1 for found in ends.values())


@pytest.mark.parametrize("model_json", MODEL_FILES, ids=[f"{path.parent.name}-{path.stem}" for path in MODEL_FILES])
def test_a_real_configuration_is_cut(model_json: Path) -> None:
    readable(model_json)
    reader = code_of("mindspeed_mm/configs/config.py", "ConfigReader")
    reader["get_dtype"] = str
    config = reader["ConfigReader"](json.loads(model_json.read_text()))
    cut_model(config, {"vision": 2, "text": 3})
    assert config.to_dict()["text_decoder"]["num_layers"] == 3
    assert config.image_encoder.vision_encoder.pipeline_num_layers == [2]


@pytest.mark.parametrize("count", [0, 3])
def test_its_own_code_hands_the_settings_to_megatron(count: int) -> None:
    """get_model_config, which each part goes through, with stand-ins for Megatron's two classes."""
    reader = code_of("mindspeed_mm/configs/config.py", "ConfigReader")
    reader["get_dtype"] = str
    model_json = next(path for _, path in PAIRS if path.parent.name in ("qwen2vl", "qwen2.5vl"))

    class Settings:
        recompute_granularity = recompute_method = recompute_num_layers = num_layers = hidden_size = None
        params_dtype = activation_func = kv_channels = ffn_hidden_size = cp_comm_type = None
        num_attention_heads = num_query_groups = None

        def __init__(self, **settings: Any) -> None:
            vars(self).update(settings)

    class Anything:
        multi_latent_attention = False

        def __getattr__(self, name: str) -> None:
            return None

    path = "mindspeed_mm/utils/transformer_model_config.py"
    more = ("MindSpeedArgsRequired",) if "class MindSpeedArgsRequired" in (CHECKOUT / path).read_text() else ()
    code = code_of(path, "get_model_config", "get_class_variables", *more)
    code |= {"TransformerConfig": Settings, "ModelParallelConfig": type("Parallel", (), {}), "get_args": Anything}
    code |= {"ConfigReader": reader["ConfigReader"], "get_dtype": str, "F": SimpleNamespace(silu=1, gelu=2)}
    config = reader["ConfigReader"](json.loads(model_json.read_text()))
    config.text_decoder.pipeline_recompute_num_layers = [count]
    with recompute_of_stage(config, 0):
        part = code["get_model_config"](config.text_decoder)
    assert part.recompute_num_layers == (count or None)
    assert part.recompute_granularity == ("full" if count else None)


def test_the_names_that_the_hook_takes_over() -> None:
    """`pretrain` as the hook calls it, and where it branches."""
    source = (CHECKOUT / "mindspeed_mm" / "training.py").read_text()
    (pretrain,) = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == "pretrain"]
    assert [argument.arg for argument in pretrain.args.args] == [
        "train_valid_test_dataset_provider",
        "model_provider",
        "model_type",
        "forward_step_func",
        "process_non_loss_data_func",
        "extra_args_provider",
        "args_defaults",
    ]
    assert '"auto_parallel_mm"' in ast.get_source_segment(source, pretrain)  # type: ignore[operator]
    script = (CHECKOUT / "pretrain_vlm.py").read_text()
    assert "from mindspeed_mm.training import pretrain" in script
    assert "deepcopy(args.mm.model)" in script, "the recompute of one chunk must not stay for the next"
    assert "def extra_args_provider_decorator(" in (CHECKOUT / "mindspeed_mm" / "arguments.py").read_text()
    assert "def merge_mm_args(" in (CHECKOUT / "mindspeed_mm" / "configs" / "config.py").read_text()
    patches = (CHECKOUT / "mindspeed_mm" / "patchs" / "patch_manager.py").read_text()
    assert "def apply_patches_from_config" in patches


QWEN = [pair for pair in PAIRS if pair[0].parent.name == "qwen2.5vl" and "fsdp" not in pair[0].name]


@pytest.mark.parametrize(("script", "model_json"), QWEN, ids=[script.stem for script, _ in QWEN])
def test_its_own_code_takes_sizes_from_the_modules(script: Path, model_json: Path, tmp_path: Path) -> None:
    """--hetero-parallel: what validate_args makes of both files is the plan, and each module gets its own sizes."""
    document = json.loads(model_json.read_text())
    for part in document["image_encoder"].values():
        part["freeze"] = True
    frozen = tmp_path / "model.json"
    frozen.write_text(json.dumps(document, indent=4))
    model = readable(frozen)
    encoder = Arrangement("colocated", "phases", ModuleLayout("vision", 1, 1, 16, 2))
    num_layers = model.text.layers.num_layers
    plan = Plan(
        Strategy(2, 4, 2, 4, arrangement=encoder),
        {"vision": (0, 0), "text": (5, num_layers - 5)},
        {"vision": (0, 0), "text": (0, 0)},
        64,
    )
    placed, launched = write_plan(plan, frozen, script, tmp_path / "out").files
    assert read_plan_back(placed, launched, 16) == plan
    passed = read_sizes(read_launch_script(launched), 16)
    written = json.loads(placed.read_text(), object_hook=lambda found: SimpleNamespace(**found))
    args = SimpleNamespace(hetero_parallel=True, tp_2d=False, world_size=16, data_parallel_size=16)
    args.global_batch_size, args.mm = passed.global_batch_size, SimpleNamespace(model=written)
    args.tensor_model_parallel_size = passed.sizes["tp"]
    args.pipeline_model_parallel_size = passed.sizes["pp"]
    args.context_parallel_size = passed.sizes["cp"]
    tree = ast.parse((CHECKOUT / "mindspeed_mm/patchs/validate_args_patch.py").read_text())
    (block,) = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "hetero" in ast.unparse(node.test)]

    def ensure_valid(holds: bool, message: str = "") -> None:
        assert holds, message

    exec(
        compile(ast.Module(body=[block], type_ignores=[]), "block", "exec"),
        {"args": args, "ensure_valid": ensure_valid},
    )
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    assert (*sizes, args.data_parallel_size, args.global_batch_size) == (4, 2, 1, 2, 64)
    align = code_of("mindspeed_mm/utils/hetero_parallel.py", "hetero_align_config")["hetero_align_config"]
    align(written.image_encoder.vision_encoder, written.image_encoder)
    found = written.image_encoder.vision_encoder
    assert (found.tensor_model_parallel_size, found.pipeline_model_parallel_size) == (1, 1)
    assert len(found.pipeline_num_layers) == found.pipeline_model_parallel_size
    assert len(written.text_decoder.pipeline_num_layers) == args.pipeline_model_parallel_size
