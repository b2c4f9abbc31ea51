"""Logs of each framework become cases: layout, sizes, precision, steady step, peaks; by what stands in them alone."""

from __future__ import annotations

from pathlib import Path

import made_logs
import pytest

from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.fingerprint import read_memory
from mm_autoparallel.measurements.logs.catalog import find_reader, read_cases
from mm_autoparallel.measurements.logs.facts import parse_facts
from mm_autoparallel.measurements.logs.log import parse_log
from mm_autoparallel.measurements.logs.steady import Steady, find_steady
from mm_autoparallel.units import MIB


def read(tmp_path: Path, text: str, *facts: str, device: str = "h100-80g") -> MeasuredCase:
    path = tmp_path / "run.log"
    path.write_text(text, encoding="utf-8")
    return read_cases([path], device, parse_facts(facts))[0]


class TestSteady:
    def test_warm_up_and_a_checkpoint_are_dropped(self) -> None:
        found = find_steady(made_logs.STEPS_MS)
        assert isinstance(found, Steady)
        assert (found.median_ms, found.num_warmup, found.num_outliers, found.num_kept) == (1200.5, 1, 1, 8)
        assert found.spread_fraction == pytest.approx(1.4826 * 1.0 / 1200.5)

    def test_the_first_entry_is_warm_up_even_where_it_is_alike(self) -> None:
        found = find_steady([100.0] * 5)
        assert isinstance(found, Steady)
        assert (found.num_warmup, found.num_kept, found.spread_fraction) == (1, 4, 0.0)

    def test_a_slow_start_is_left_out(self) -> None:
        found = find_steady([900.0, 500.0, 300.0, *[200.0, 201.0, 199.0] * 5])
        assert isinstance(found, Steady)
        assert (found.median_ms, found.num_warmup) == (200.0, 3)

    @pytest.mark.parametrize(
        ("times_ms", "words"),
        [
            ([], "it tells 0 step times"),
            ([100.0, 100.0, 100.0], "at least 4 are needed"),
            ([100.0, 10.0, 1000.0, 20.0, 2000.0, 30.0, 3000.0, 15.0], "not steady"),
            ([100.0, *[100.0, 125.0, 75.0, 140.0, 60.0] * 4], "spread by"),
        ],
    )
    def test_what_never_settles_is_refused(self, times_ms: list[float], words: str) -> None:
        found = find_steady(times_ms)
        assert isinstance(found, str)
        assert words in found


class TestMegatron:
    def test_its_arguments_make_the_run(self, tmp_path: Path) -> None:
        case = read(tmp_path, made_logs.megatron(peaks={0: 20000.0, 4: 18000.0, 7: 18500.0}))
        strategy, workload, text = case.plan.strategy, case.job.workload, case.job.model.text
        assert (strategy.pp, strategy.tp, strategy.dp, strategy.mbs, strategy.zero) == (2, 2, 2, 1, 1)
        assert (workload.global_batch_size, workload.seq_length, workload.stack) == (16, 2048, "megatron-te")
        assert (workload.sequence_parallel, workload.attention, workload.overlap_grad_reduce) == (True, "flash", True)
        assert (text.vocab_size, text.layers.num_layers, text.layers.gated, text.tied) == (32000, 8, True, False)
        assert case.plan.layers == {"text": (4, 4)}
        assert (case.measured_ms, case.software, case.out_of_memory) == (1200.5, "megatron-core", False)
        assert case.measured_bytes == {0: 20000.0 * MIB, 1: 18500.0 * MIB}
        assert case.resting_bytes == {0: 100.0 * MIB, 1: 100.0 * MIB}
        assert read_memory(case) is None  # of so little, what is not counted is too large a part
        assert not case.first_step
        assert "1 of warm-up and 1 outliers dropped" in case.remarks[0]

    def test_memory_between_steps_contradicts_what_is_printed(self, tmp_path: Path) -> None:
        """So small a model takes no 8 GiB, however wide its gradients are."""
        text = made_logs.megatron(peaks={0: 20000.0, 4: 18000.0}).replace("allocated: 100.0", "allocated: 8192.0")
        found = read_memory(read(tmp_path, text))
        assert found is not None
        assert found.contradicted
        assert {reading.gradient_bytes for reading in found.readings} == {2.0, 4.0}
        assert "8.0 GiB on stage" in found.words

    def test_switches_that_are_printed_are_facts_of_the_run(self, tmp_path: Path) -> None:
        case = read(tmp_path, made_logs.megatron(bias_swiglu_fusion=True, apply_rope_fusion=False))
        facts = case.job.workload.known_facts
        assert (facts.elementwise, facts.writes_gradients, facts.hides_sums) == ("operators", False, True)
        local = {"transformer_impl": "local", "use_flash_attn": False, "masked_softmax_fusion": True}
        unfused = read(tmp_path, made_logs.megatron(gradient_accumulation_fusion=False, **local)).job.workload
        assert (unfused.attention, unfused.known_facts.attention) == ("unfused", "fused-softmax")
        assert unfused.known_facts.writes_gradients

    def test_products_in_eight_bits(self, tmp_path: Path) -> None:
        flags = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True, "tp_comm_overlap": True}
        workload = read(tmp_path, made_logs.megatron(**flags)).job.workload
        assert workload.precision == "fp8_current"
        assert (workload.known_facts.low_parameters, workload.known_facts.tp_overlap) == (True, "user_buffers")

    @pytest.mark.parametrize(
        ("changed", "expected"),
        [
            ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, (4, 4)),
            ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}, (3, 3)),
            ({"recompute_granularity": "selective"}, (0, 0)),
        ],
    )
    def test_recompute(self, tmp_path: Path, changed: dict[str, object], expected: tuple[int, int]) -> None:
        case = read(tmp_path, made_logs.megatron(**changed))
        assert case.plan.recompute == {"text": expected}
        selective = changed["recompute_granularity"] == "selective"
        assert case.job.workload.recompute_operators == (("core_attn",) if selective else ())

    @pytest.mark.parametrize(
        ("changed", "gradient_bytes"),
        [
            ({}, 4.0),
            ({"accumulate_allreduce_grads_in_fp32": True}, 4.0),
            ({"accumulate_allreduce_grads_in_fp32": False}, 2.0),
            ({"bf16": False, "fp16": True}, 2.0),
            ({"bf16": False, "fp16": True, "accumulate_allreduce_grads_in_fp32": True}, 4.0),
        ],
    )
    def test_bytes_of_gradients(self, tmp_path: Path, changed: dict[str, object], gradient_bytes: float) -> None:
        assert read(tmp_path, made_logs.megatron(**changed)).job.workload.gradient_bytes == gradient_bytes

    def test_chunks_and_uneven_ends(self, tmp_path: Path) -> None:
        chunks = read(tmp_path, made_logs.megatron(virtual_pipeline_model_parallel_size=2))
        assert (chunks.plan.strategy.vpp, chunks.plan.layers) == (2, {"text": (2, 2, 2, 2)})
        ends = read(tmp_path, made_logs.megatron(decoder_first_pipeline_num_layers=3))
        assert ends.plan.layers == {"text": (3, 5)}

    def test_lines_of_launchers_and_of_other_processes(self, tmp_path: Path) -> None:
        noisy = "\n".join(f"3: [default0]:{line}\x1b[0m" for line in made_logs.megatron().splitlines())
        noisy = noisy.replace("seq_length .", "ult0]:  seq_length .").replace("1024\x1b", "1024 [WARNING] async_io\x1b")
        assert read(tmp_path, noisy).measured_ms == 1200.5

    def test_a_ramp_of_the_batch_and_skipped_steps_do_not_count(self, tmp_path: Path) -> None:
        ramp = [made_logs.iteration_line(number, 300.0, 8) for number in range(1, 9)]
        skipped = made_logs.iteration_line(9, 700.0, 16).replace("skipped iterations:   0", "skipped iterations:   1")
        case = read(tmp_path, made_logs.megatron(more=[*ramp, skipped]))
        assert case.measured_ms == 1200.5

    def test_memory_after_one_step_lacks_moments(self, tmp_path: Path) -> None:
        text = made_logs.megatron(peaks={0: 20000.0}).replace("(after 2 iterations)", "(after 1 iterations)")
        assert read(tmp_path, text).first_step

    def test_a_run_that_ran_out_of_memory_is_an_outcome(self, tmp_path: Path) -> None:
        text = made_logs.megatron(steps_ms=()) + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
        case = read(tmp_path, text)
        assert (case.out_of_memory, case.measured_ms, case.measured_bytes) == (True, None, None)

    def test_parameters_by_its_own_count_agree(self, tmp_path: Path) -> None:
        layer = 4 * 1024 * 1024 // 2 + 3 * 1024 * 4096 // 2 + 2 * 1024
        table = 32000 // 2 * 1024
        line = " > number of parameters on (tensor, pipeline) model parallel rank (0, {}): {}"
        counts = [line.format(0, 4 * layer + table), line.format(1, 4 * layer + table + 1024)]
        assert read(tmp_path, made_logs.megatron(more=counts)).measured_ms == 1200.5


class TestOthers:
    def test_megatron_deepspeed(self, tmp_path: Path) -> None:
        case = read(tmp_path, made_logs.megatron_deepspeed(), device="a100-80g")
        layers = case.job.model.text.layers
        assert (case.software, case.job.workload.stack) == ("megatron-deepspeed", "megatron-deepspeed")
        assert (layers.num_kv_groups, layers.norm, layers.rotary) == (4, "rms", True)
        assert (case.plan.strategy.zero, case.job.workload.attention) == (1, "flash")
        assert (case.job.workload.gradient_bytes, case.measured_ms) == (2.0, 1200.5)

    def test_deepspeeds_own_configuration_decides(self, tmp_path: Path) -> None:
        text = made_logs.megatron_deepspeed(pipeline_model_parallel_size=1, data_parallel_size=4)
        text += "node-1: [config.py:1000:print]   zero_optimization_stage ...... 2\n"
        assert read(tmp_path, text, device="a100-80g").plan.strategy.zero == 2

    def test_mindspeed_llm(self, tmp_path: Path) -> None:
        case = read(tmp_path, made_logs.mindspeed_llm(num_layer_list="3,5"), device="ascend-910b-64g")
        assert (case.software, case.job.workload.stack) == ("mindspeed-llm", "mindspeed")
        assert case.job.workload.optimizer_bytes == 10.0
        assert case.plan.layers == {"text": (3, 5)}

    def test_mindspeed_mm_with_its_model_json(self, tmp_path: Path) -> None:
        model = Path(__file__).parents[2] / "fixtures" / "mindspeed_mm_models" / "qwen2vl_7b.json"
        text = made_logs.mindspeed_llm(
            mm_model="/somewhere/qwen2vl_7b.json", variable_seq_lengths=True, tensor_model_parallel_size=1,
            pipeline_model_parallel_size=4, sequence_parallel=False, peaks={0: 20000.0, 6: 30000.0},
        )  # fmt: skip
        case = read(
            tmp_path,
            text,
            *(f"model={model}", "tokens_per_sample=1024", "image_tokens_per_sample=576"),
            device="ascend-910b-64g",
        )
        assert (case.software, case.job.workload.stack) == ("mindspeed-mm", "mindspeed-mm")
        assert (case.job.workload.seq_length, case.job.workload.image_tokens_per_sample) == (1024, 576)
        assert case.job.model.text.layers.hidden_size == 3584
        assert {name: len(counts) for name, counts in case.plan.layers.items()} == {"vision": 4, "text": 4}
        assert case.measured_bytes == {0: 20000.0 * MIB, 3: 30000.0 * MIB}

    def test_torchtitan(self, tmp_path: Path) -> None:
        case = read(tmp_path, made_logs.torchtitan(ranks=(2, 5)))
        layers, strategy = case.job.model.text.layers, case.plan.strategy
        assert (layers.hidden_size, layers.ffn_size, layers.num_kv_groups) == (1024, 2816, 4)
        assert (strategy.dp, strategy.mbs, strategy.zero, case.software) == (8, 2, 3, "torchtitan")
        assert case.measured_ms == pytest.approx(16 * 2048 / 8 / 9000 * 1e3)
        assert case.measured_bytes is None

    def test_torchtitan_of_today_in_other_words(self, tmp_path: Path) -> None:
        mesh = "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1"
        batch = "4096 tokens per DP rank, 16384 tokens per train step, gradient accumulation steps 1, maximum context "
        case = read(
            tmp_path,
            made_logs.torchtitan(
                mesh=mesh,
                batch=batch + "length 2048",
                model="Building llama3 8B",
                rates=[500, 5000, 5000, 5000, 5000],
                more=["Applied full activation checkpointing to the model"],
            ),
        )
        assert case.job.model.text.layers.hidden_size == 4096
        assert (case.plan.strategy.tp, case.plan.strategy.dp, case.plan.strategy.mbs) == (2, 4, 2)
        assert case.plan.recompute == case.plan.layers

    def test_torchtitan_says_what_its_run_turned_on(self, tmp_path: Path) -> None:
        """Words of train.py, components/quantization and distributed/compile.py; the same facts as a table's row."""
        plain = read(tmp_path, made_logs.torchtitan()).job.workload
        assert (plain.stack, plain.context_parallel, plain.precision) == ("transformers", "all_gather", "bf16")
        assert not plain.known_facts.compiled
        said = [
            "Running with args: {'activation_checkpoint': {'mode': 'selective', 'selective_ac_option': 'op'}}",
            "Float8 tensorwise scaled training active",
            "Async TP is enabled",
            "Applied selective activation checkpointing to the model",
            "Compiling each TransformerBlock with torch.compile",
        ]
        mesh = "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1"
        batch = "local batch size 2, global batch size 8, gradient accumulation steps 1, sequence length 2048"
        divided = read(tmp_path, made_logs.torchtitan(mesh=mesh, batch=batch, more=said)).job.workload
        assert (divided.precision, divided.recompute_operators) == ("fp8_current", ("second_products",))
        facts = divided.facts
        assert facts is not None
        assert (facts.compiled, facts.tp_overlap) == (True, "asynchronous")
        alone = read(tmp_path, made_logs.torchtitan(more=[*said[2:3], "Float8 training active with recipe rowwise"]))
        assert (alone.job.workload.precision, alone.job.workload.known_facts.tp_overlap) == ("fp8_rowwise", "")

    def test_torchtitans_configuration_of_a_model(self, tmp_path: Path) -> None:
        document = """Building llama3 toy with {
  "dim": 512, "vocab_size": 32000,
  "layers": [{"attention": {"n_heads": 8, "n_kv_heads": null}, "feed_forward": {"w1": {"out_features": 1536}}}]
}"""
        text = made_logs.torchtitan(model="MODEL", rates=[900, 90000, 90000, 90000, 90000])
        whole = document.replace("\n", "\n[rank0]:")
        case = read(tmp_path, text.replace("MODEL", whole))
        layers = case.job.model.text.layers
        assert (layers.num_layers, layers.hidden_size, layers.ffn_size, layers.num_heads) == (1, 512, 1536, 8)

    def test_llm_foundry(self, tmp_path: Path) -> None:
        case = read(tmp_path, made_logs.llm_foundry(), device="a100-80g")
        text, strategy = case.job.model.text, case.plan.strategy
        assert (text.layers.hidden_size, text.layers.ffn_size, text.layers.mlp_bias) == (1024, 4096, False)
        assert (text.tied, text.num_positions, text.vocab_size) == (True, 0, 50368)
        assert (strategy.dp, strategy.mbs, strategy.zero, strategy.reshard) == (8, 4, 3, True)
        assert case.plan.recompute == case.plan.layers
        assert (case.measured_ms, case.measured_bytes) == (2000.0, 21.5e9)
        assert case.job.workload.gradient_bytes == 2.0
        assert case.job.workload.known_facts.attention == "flash-2"

    def test_each_is_told_by_what_stands_in_it(self) -> None:
        for text, name in (
            (made_logs.megatron(), "Megatron-LM"),
            (made_logs.megatron_deepspeed(), "Megatron-DeepSpeed"),
            (made_logs.mindspeed_llm(), "MindSpeed-LLM and MindSpeed-MM"),
            (made_logs.torchtitan(), "torchtitan"),
            (made_logs.llm_foundry(), "LLM Foundry"),
        ):
            assert find_reader(parse_log(text, Path("a.log"))).name == name
