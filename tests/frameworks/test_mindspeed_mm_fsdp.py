"""MindSpeed-MM's FSDP trainer: launch script and YAML to a job, a plan into the YAML and back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.described import Described
from mm_autoparallel.integrations.mindspeed_mm_fsdp.describe import describe
from mm_autoparallel.integrations.mindspeed_mm_fsdp.launch import read_launch, starts_trainer
from mm_autoparallel.integrations.mindspeed_mm_fsdp.module_patterns import (
    count_layers,
    find_layer_lists,
    matches,
    name_layers,
)
from mm_autoparallel.integrations.mindspeed_mm_fsdp.plan_yaml import read_plan_back, write_plan, yaml_with_plan
from mm_autoparallel.integrations.mindspeed_mm_fsdp.trainer_yaml import FEATURES, SCATTERED, read_trainer
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.search.planner import search

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIG = FIXTURES / "huggingface" / "qwen3_vl_30b_a3b.json"
NUM_LAYERS = 48
TEXT = "model.language_model.layers"

Edit = Callable[[str, str], None]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A copy of the launch script in a checkout's place, the YAML beside it."""
    folder = tmp_path / "checkout" / "training"
    shutil.copytree(FIXTURES / "mindspeed_mm_fsdp", folder)
    return folder / "finetune.sh"


@pytest.fixture
def edit(script: Path) -> Edit:
    """Replaces a text of the YAML, which must stand there once, or of the script."""

    def change(old: str, new: str) -> None:
        for path in (script, script.with_name("trainer.yaml")):
            text = path.read_text()
            if text.count(old) == 1:
                path.write_text(text.replace(old, new))
                return
        raise AssertionError(old)

    return change


def form_job(described: Described) -> Job:
    assert isinstance(described.model, Model)
    assert described.world_size
    cluster = {"num_nodes": described.world_size // 8, "devices_per_node": 8, "device": "ascend-910b-64g"}
    document: dict[str, Any] = {"model": described.model.model_dump(), "cluster": cluster}
    return parse_job(document | {"workload": dict(described.workload), "search": dict(described.search)}, Path("job"))


def model_of(script: Path) -> Model:
    found = describe(script, model_config=CONFIG).model
    assert isinstance(found, Model)
    return found


def form_plan(recompute: int = NUM_LAYERS, offload: int = 0, batch: int = 128, **sizes: Any) -> Plan:
    strategy = Strategy(**({"pp": 1, "tp": 1, "dp": 16, "mbs": 2, "zero": 3} | sizes))
    modes = {"text": {"recompute_offload": (offload,)}} if offload else {}
    layers = {"vision": (27,), "text": (NUM_LAYERS,)}
    return Plan(strategy, layers, {"vision": (0,), "text": (recompute,)}, batch, modes=modes)


class TestPatterns:
    @pytest.mark.parametrize(
        ("pattern", "name", "found"),
        [
            ("a.layers.{*}", "a.layers.12", True),
            ("a.layers.{*}", "a.layers.12.mlp", False),
            ("a.layers.{0-11}", "a.layers.11", True),
            ("a.layers.{0-11}", "a.layers.12", False),
            ("*.layers.{2-3}.mlp", "x.y.layers.3.mlp", True),
            ("a.layer?.{*}", "a.layers.0", True),
            ("axlayers", "a.layers", False),
            ("a.{two}", "a.2", False),
            ("*" * 200, "a", False),
            ("a" + "{*}" * 90, "a" + "1" * 90, False),
        ],
    )
    def test_names_that_a_pattern_means(self, pattern: str, name: str, found: bool) -> None:
        assert matches(pattern, name) is found

    @pytest.mark.parametrize("first", [0, 1, 7, 48])
    def test_the_first_layers_are_named_each_once(self, first: int) -> None:
        patterns = name_layers(TEXT, first, NUM_LAYERS)
        assert len(patterns) <= 1
        assert count_layers(patterns, TEXT, NUM_LAYERS) == first

    def test_whose_list_of_layers_a_pattern_names(self) -> None:
        patterns = [
            "vision_tower.encoder.blocks.{*}",
            "mtp.layers.{*}",
            "thinker.audio_tower.layers.{0-3}",
            "language_model.model.layers.{*}.mlp",
            "language_model.model.layers.{*}",
        ]
        assert find_layer_lists(patterns, ["vision", "audio", "text"]) == {
            "vision": "vision_tower.encoder.blocks",
            "audio": "thinker.audio_tower.layers",
            "text": "language_model.model.layers",
        }
        assert "audio" not in find_layer_lists(patterns, ["vision", "text"])


class TestReading:
    def test_figures_of_the_job(self, script: Path) -> None:
        found = describe(script, model_config=CONFIG)
        assert found.world_size == 16
        assert found.workload["global_batch_size"] == 2 * 4 * 16
        assert found.workload["seq_length"] == 2048
        assert found.workload["image_tokens_per_sample"] == 262144 // 32**2
        assert found.workload["loss_chunk_tokens"] == 512
        # fp32 shards of weights and two moments, fp32 gradients, bf16 weights where they are gathered
        assert [found.workload[f"{name}_bytes"] for name in ("weight", "gradient", "optimizer")] == [2, 4, 10]
        assert found.search["ep"] == [1, 2, 4, 8, 16]
        assert found.search["cp"] == [1, 2, 4]
        assert found.search["shard"] == [0, 2, 4, 8]
        assert found.search["modes"] == ["recompute_offload", "recompute"]
        model = model_of(script)
        assert (model.encoders[0].freeze, model.encoders[0].projector.freeze, model.text.freeze) == (True, True, False)
        assert any("cutoff_len" in note for note in found.notes)
        form_job(found)

    def test_what_trains_now(self, script: Path) -> None:
        assert read_plan_back(script, model_of(script)) == form_plan()

    def test_ranks_that_share_a_sequence_take_no_batch(self, script: Path, edit: Edit) -> None:
        edit("ulysses_parallel_size: 1", "ulysses_parallel_size: 4")
        assert describe(script, model_config=CONFIG).workload["global_batch_size"] == 2 * 4 * 4
        found = read_plan_back(script, model_of(script))
        assert (found.strategy.cp, found.strategy.dp, found.strategy.cp_kind) == (4, 4, "all_to_all")

    def test_the_yaml_itself_with_the_world_size(self, script: Path) -> None:
        path = script.with_name("trainer.yaml")
        with pytest.raises(JobError, match="how many devices train is not known"):
            describe(path, model_config=CONFIG)
        assert describe(path, model_config=CONFIG, world_size=32).workload["global_batch_size"] == 2 * 4 * 32

    def test_the_model_lies_where_the_yaml_says(self, script: Path) -> None:
        with pytest.raises(JobError, match=r"weights/Some-VL.*--model-config PATH"):
            describe(script)
        folder = script.parents[1] / "weights" / "Some-VL"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(CONFIG.read_text())
        assert read_launch(script).checkout == script.parents[1].resolve()
        assert describe(script).world_size == 16

    def test_samples_shorter_than_they_may_be(self, script: Path) -> None:
        found = describe(script, model_config=CONFIG, seq_length=128)
        assert (found.workload["seq_length"], found.workload["image_tokens_per_sample"]) == (128, 128)
        assert not any("cutoff_len" in note for note in found.notes)

    def test_samples_of_speech_alone(self, script: Path, edit: Edit) -> None:
        edit("model_id: qwen3_vl_moe", "model_id: qwen3_asr")
        found = describe(script, model_config=FIXTURES / "mindspeed_mm_configs" / "qwen3_asr_1_7b.json")
        assert found.workload["audio_tokens_per_sample"] == found.workload["seq_length"] == 2048
        assert any("one recording" in note for note in found.notes)

    def test_an_image_whose_tokens_convolutions_merge(self, script: Path, edit: Edit) -> None:
        edit("model_id: qwen3_vl_moe", "model_id: step3_vl")
        edit("freeze: [model.visual]", "freeze: [model.vision_model]")
        found = describe(script, model_config=FIXTURES / "mindspeed_mm_configs" / "step3_vl_10b.json")
        assert found.workload["image_tokens_per_sample"] == 262144 // (4 * 14) ** 2
        assert any("convolutions behind the vision layers count as trained" in note for note in found.notes)

    def test_layers_that_run_on_parts_of_a_micro_batch(self, script: Path, edit: Edit) -> None:
        """As many samples as the YAML says, where it says so of all of the decoder's layers."""
        plan = f"  chunkmbs_plan: {{apply_modules: ['{TEXT}.{{*}}'], chunk_mbs: 1}}\n"
        edit("  enable_chunk_loss: true\n", f"  enable_chunk_loss: true\n  enable_chunk_mbs: true\n{plan}")
        assert describe(script, model_config=CONFIG).workload["text_chunk_samples"] == 1
        edit("chunkmbs_plan: {apply_modules: ['model.language_model.layers.{*}']", "chunkmbs_plan: {apply_modules: [a]")
        assert describe(script, model_config=CONFIG).workload["text_chunk_samples"] == 0

    def test_a_release_whose_features_are_scattered(self, script: Path, edit: Edit) -> None:
        path = script.with_name("trainer.yaml")
        text = path.read_text()
        features = text[text.index("features:") : text.index("training:")]
        text = text.replace(features, "").replace(
            "  ulysses_parallel_size: 1", f"  recompute: true\n  recompute_plan: {{apply_modules: ['{TEXT}.{{0-9}}']}}"
        )
        path.write_text(text.replace("  freeze:", "  enable_chunk_loss: true\n  freeze:"))
        trainer = read_trainer(path)
        assert trainer.layout is SCATTERED
        assert trainer.loss_chunk_tokens == 1024
        assert read_plan_back(script, model_of(script)).recompute["text"] == (10,)
        assert describe(script, model_config=CONFIG).search["shard"] == [0]

    def test_keys_of_another_release_are_told(self, script: Path, edit: Edit) -> None:
        edit("  ulysses_parallel_size: 1", "  recompute: true")
        edit("features:", "elsewhere:")
        code = script.parents[1] / "mindspeed_mm" / "fsdp" / "params"
        code.mkdir(parents=True)
        (code / "parallel_args.py").touch()
        (code / "feature_args.py").touch()
        trainer = read_trainer(script.with_name("trainer.yaml"), script.parents[1])
        assert trainer.layout is FEATURES
        assert trainer.ignored == ("parallel.recompute",)
        assert trainer.recompute == ()
        (code / "feature_args.py").unlink()
        assert read_trainer(script.with_name("trainer.yaml"), script.parents[1]).layout is SCATTERED

    def test_other_scripts(self, script: Path) -> None:
        assert starts_trainer(script.read_text())
        assert not starts_trainer(
            "torchrun pretrain_vlm.py x.yaml\n# torchrun mindspeed_mm/fsdp/train/trainer.py x.yaml"
        )


REFUSED = [
    ("ulysses_parallel_size: 1", "tensor_parallel_size: 2", "tensor_parallel_size is 2"),
    ("ulysses_parallel_size: 1", "ulysses_parallel_size: 2\n  ring_attention_size: 2", "two ways at once"),
    ("ulysses_parallel_size: 1", "ulysses_parallel_size: 3", "does not divide the 16 devices"),
    ("ulysses_parallel_size: 1", "ulysses_parallel_size: many", 'ulysses_parallel_size is "many"'),
    ("size: auto", "size: some", 'fully_shard_parallel_size is "some"'),
    ("reduce_dtype: fp32", "cpu_offload: true", "cpu_offload is true"),
    ("optimizer: adamw", "lora: {enable: true}", "lora.enable is true"),
    ("optimizer: adamw", "quantization_plan: {recipe_name: mxfp8}", "fewer bits"),
    ("cutoff_len: 2048", "cutoff: 1", "cutoff_len is missing"),
    ("model_id: qwen3_vl_moe", "model_id: qwen3_5_moe", 'config.json of "qwen3_vl_moe"'),
    ("model_id: qwen3_vl_moe", "model_id: qwen3_tts", "model_id is qwen3_tts, a model that speaks"),
    ("freeze: [model.visual]", "freeze: model.visual", 'freeze is "model.visual"'),
    ("enable_chunk_loss: true", "enable_chunk_loss: 1", "enable_chunk_loss is 1"),
    ("enable_chunk_loss: true", "enable_ep_balance: true", "enable_ep_balance is true"),
    ("*MODEL", "&MODEL x", "second occurrence of the anchor in line 20 in line 27"),
    ("parallel:", "parallels:", "it has no parallel"),
    ("${config_path}", "${config_path} training.micro_batch_size=4", "training.micro_batch_size=4 behind the YAML"),
    ("${config_path}", "$CONFIG", "known only when the script runs"),
    ("=training/trainer.yaml", "=training/none.yaml", "no such file"),
    ("fsdp/train/trainer.py \\", "fsdp/tasks/funasr/trainer.py \\", "the trainer of one model alone"),
]


@pytest.mark.parametrize(("old", "new", "reason"), REFUSED)
def test_what_is_refused(script: Path, edit: Edit, old: str, new: str, reason: str) -> None:
    edit(old, new)
    with pytest.raises(JobError) as failure:
        describe(script, model_config=CONFIG)
    assert reason in str(failure.value)
    assert "\n" not in str(failure.value)


class TestWriting:
    def test_nothing_changes_under_the_plan_that_is_there(self, script: Path, edit: Edit) -> None:
        edit("  skip_flash_attn_recompute: true\n", "")
        path = script.with_name("trainer.yaml")
        assert yaml_with_plan(form_plan(), model_of(script), path) == (path.read_text(), [])

    def test_only_values_that_the_plan_decides_change(self, script: Path, tmp_path: Path) -> None:
        plan = form_plan(10, 5, mbs=1, ep=16, shard=8, reshard=False)
        before = script.with_name("trainer.yaml").read_text()
        done = write_plan(plan, model_of(script), script, tmp_path / "out")
        assert script.with_name("trainer.yaml").read_text() == before
        written = done.files[0].read_text()
        document = yaml.safe_load(written)
        expected = yaml.safe_load(before)
        expected["parallel"] |= {"fully_shard_parallel_size": 8, "expert_parallel_size": 16}
        expected["parallel"]["fsdp_plan"]["reshard_after_forward"] = False
        expected["features"]["recompute_plan"]["apply_modules"] = [f"{TEXT}.{{0-14}}"]
        expected["features"]["enable_activation_offload"] = True
        expected["features"]["activation_offload_plan"]["apply_modules"] = [f"{TEXT}.{{0-4}}"]
        expected["training"] |= {"micro_batch_size": 1, "gradient_accumulation_steps": 8}
        expected["model"]["skip_flash_attn_recompute"] = False
        assert document == expected
        for kept in ("# all ranks", "&MODEL 'weights/Some-VL'  # quoted", "# every layer", "*MODEL"):
            assert kept in written
        assert any("skip_flash_attn_recompute" in told for told in done.approximations)
        assert read_plan_back(done.files[0], model_of(script), 16) == plan

    def test_no_recompute_is_a_switch(self, script: Path) -> None:
        text, _ = yaml_with_plan(form_plan(0), model_of(script), script.with_name("trainer.yaml"))
        features = yaml.safe_load(text)["features"]
        assert features["recompute"] is False
        assert features["recompute_plan"]["apply_modules"] == [f"{TEXT}.{{*}}"]

    def test_what_a_file_says_of_frozen_layers_stays(self, script: Path, edit: Edit) -> None:
        edit("      # every layer\n", "      - model.visual.blocks.{*}\n")
        text, _ = yaml_with_plan(form_plan(3), model_of(script), script.with_name("trainer.yaml"))
        named = yaml.safe_load(text)["features"]["recompute_plan"]["apply_modules"]
        assert named == ["model.visual.blocks.{*}", f"{TEXT}.{{0-2}}"]

    def test_parts_of_layers_give_way_and_that_is_told(self, script: Path, edit: Edit) -> None:
        edit("      # every layer\n", f"      - {TEXT}.{{*}}.mlp\n")
        _, told = yaml_with_plan(form_plan(3), model_of(script), script.with_name("trainer.yaml"))
        assert any(f"{TEXT}.{{*}}.mlp" in sentence for sentence in told)

    def test_replicas_of_experts_follow(self, script: Path, edit: Edit) -> None:
        edit("expert_parallel_size: 1", "expert_parallel_size: 4\n  expert_fully_shard_parallel_size: 4")
        text, _ = yaml_with_plan(form_plan(ep=8), model_of(script), script.with_name("trainer.yaml"))
        parallel = yaml.safe_load(text)["parallel"]
        assert (parallel["expert_parallel_size"], parallel["expert_fully_shard_parallel_size"]) == (8, 2)

    def test_copies_of_experts_whose_gradients_nobody_sums(self, script: Path, edit: Edit) -> None:
        edit("expert_parallel_size: 1", "expert_parallel_size: 4\n  expert_fully_shard_parallel_size: 2")
        with pytest.raises(PlanError, match="sums no gradients over further copies of experts"):
            read_plan_back(script, model_of(script))

    def test_whole_copies_are_no_shards(self, script: Path, edit: Edit) -> None:
        edit("size: auto", "size: 1")
        with pytest.raises(PlanError, match="whole copies in DDP"):
            read_plan_back(script, model_of(script))
        assert describe(script, model_config=CONFIG).search["shard"] == [0, 2, 4, 8]
        text, _ = yaml_with_plan(form_plan(), model_of(script), script.with_name("trainer.yaml"))
        assert yaml.safe_load(text)["parallel"]["fully_shard_parallel_size"] == "auto"

    def test_shards_that_do_not_divide(self, script: Path, edit: Edit) -> None:
        edit("size: auto", "size: 6")
        with pytest.raises(PlanError, match="fully_shard_parallel_size 6 must divide the 16 devices"):
            read_plan_back(script, model_of(script))

    @pytest.mark.parametrize(
        ("sizes", "reason"),
        [
            ({"pp": 2, "dp": 8}, "neither pipeline nor tensor parallelism"),
            ({"zero": 1}, "ZeRO 1"),
            ({"optimizer_offload": True}, "optimizer on the host"),
        ],
    )
    def test_what_the_trainer_cannot_run(self, script: Path, sizes: dict[str, Any], reason: str) -> None:
        with pytest.raises(PlanError, match=reason):
            yaml_with_plan(form_plan(**sizes), model_of(script), script.with_name("trainer.yaml"))

    def test_experts_that_are_not_named(self, script: Path, edit: Edit) -> None:
        edit(f"      - {TEXT}.{{*}}.mlp.experts\n", "      []\n")
        assert describe(script, model_config=CONFIG).search["ep"] == [1]
        with pytest.raises(PlanError, match="names no experts"):
            yaml_with_plan(form_plan(ep=8), model_of(script), script.with_name("trainer.yaml"))

    def test_a_file_that_is_there_is_replaced_on_request(self, script: Path, tmp_path: Path) -> None:
        model, plan = model_of(script), form_plan(mbs=1)
        with pytest.raises(JobError, match="is there already"):
            write_plan(plan, model, script, script.parent)
        done = write_plan(plan, model, script, script.parent, overwrite=True)
        assert read_plan_back(script, model) == plan
        assert not any("launch script names" in told for told in done.approximations)

    def test_another_number_of_devices_is_told(self, script: Path, tmp_path: Path) -> None:
        done = write_plan(form_plan(dp=32, batch=256), model_of(script), script, tmp_path)
        assert any("starts 16 devices and the plan is for 32" in told for told in done.approximations)


@pytest.mark.slow
def test_from_files_to_a_plan_and_back_into_files(script: Path, tmp_path: Path) -> None:
    described = describe(script, model_config=CONFIG)
    found = search(form_job(described), time_limit_s=60, num_workers=1)
    assert found.gap_fraction < 0.02
    model = model_of(script)
    done = write_plan(found.plan, model, script, tmp_path / "out")
    assert read_plan_back(done.files[0], model, 16) == found.plan


@pytest.mark.parametrize("marks", ["\ufeff", "\ufeff\ufeff\ufeff"])
def test_byte_order_marks_stay_where_they_are(script: Path, tmp_path: Path, marks: str) -> None:
    path = script.with_name("trainer.yaml")
    path.write_text(marks + path.read_text())
    (written,) = write_plan(form_plan(), model_of(script), script, tmp_path / "out").files
    text = written.read_text()
    assert text.startswith(marks + "# A YAML")
    assert text.count("\ufeff") == len(marks)
