"""What a log lacks, contradicts or cannot be ends in one paragraph that says what to do."""

from __future__ import annotations

from pathlib import Path

import made_logs
import pytest

from mm_autoparallel.errors import JobError, TableError
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.logs.catalog import read_cases
from mm_autoparallel.measurements.logs.facts import parse_facts


def read(tmp_path: Path, text: str, *facts: str, device: str = "h100-80g") -> MeasuredCase:
    path = tmp_path / "run.log"
    path.write_text(text, encoding="utf-8")
    return read_cases([path], device, parse_facts(facts))[0]


class TestMissing:
    def test_the_vocabulary_names_its_fact_and_takes_it(self, tmp_path: Path) -> None:
        text = made_logs.megatron(padded=None)
        with pytest.raises(TableError, match=r"run\.log: it does not tell vocab_size .*--fact vocab_size="):
            read(tmp_path, text)
        assert read(tmp_path, text, "vocab_size=31000").job.model.text.vocab_size == 31232  # 256 on two ranks

    def test_the_devices_of_a_node_beyond_one(self, tmp_path: Path) -> None:
        text = made_logs.megatron(world_size=16, data_parallel_size=4)
        with pytest.raises(TableError, match=r"--fact devices_per_node=N"):
            read(tmp_path, text)
        case = read(tmp_path, text, "devices_per_node=4")
        assert (case.job.cluster.num_nodes, case.job.cluster.devices_per_node) == (4, 4)
        launched = "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py\n" + text
        assert read(tmp_path, launched).job.cluster.num_nodes == 2

    def test_the_network_may_be_told(self, tmp_path: Path) -> None:
        text = made_logs.megatron(world_size=16, data_parallel_size=4)
        case = read(tmp_path, text, "devices_per_node=8", "network_bytes_per_s=6.25e9")
        assert case.job.cluster.levels[-1].bandwidth_bytes_per_s == 6.25e9

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("nothing of the kind\n", "it has neither the arguments nor the steps of a framework"),
            (made_logs.iteration_line(1, 100.0, 8), "neither the arguments"),
            (made_logs.megatron().split("----- end of")[0], "neither the arguments"),
            (made_logs.megatron(seq_length=...), "seq_length is missing among the arguments"),
            (made_logs.megatron(steps_ms=()), "it tells 0 step times"),
            (made_logs.torchtitan(mesh="x"), "it does not tell the device mesh"),
            (made_logs.torchtitan(batch="x"), "it does not tell batch and length"),
            (made_logs.torchtitan(model="Building qwen9 1B"), "the model qwen9-1b, whose sizes are not known"),
            (made_logs.torchtitan(model=""), "it does not tell its model"),
            (made_logs.llm_foundry().replace("Logging config", ""), "it does not tell its configuration"),
            (made_logs.llm_foundry(config="n_gpus: 8\n"), "model is missing in the configuration"),
        ],
    )
    def test_what_is_not_there(self, tmp_path: Path, text: str, words: str) -> None:
        with pytest.raises(TableError, match=words):
            read(tmp_path, text)

    def test_a_model_of_mindspeed_mm_is_asked_for(self, tmp_path: Path) -> None:
        with pytest.raises(TableError, match=r"--fact model=model\.json"):
            read(tmp_path, made_logs.mindspeed_llm(mm_model="/data/model.json"), device="ascend-910b-64g")


class TestContradictions:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (made_logs.megatron(world_size=12), "world_size 12 and .* leave DP 3, and data_parallel_size is 2"),
            (made_logs.megatron(world_size=9), "world_size is 9, which PP 2 x TP 2 x CP 1 does not divide"),
            (made_logs.megatron(fp16=True), "bf16 and fp16 are both True"),
            (made_logs.megatron(bf16=False), "in fp32"),
            (made_logs.megatron(fp8="hybrid", fp8_recipe="custom"), "fp8_recipe is 'custom', which is not represented"),
            (made_logs.megatron(fp8_format="e5m2"), "fp8_format is 'e5m2'; one of e4m3, hybrid is expected"),
            (made_logs.megatron(optimizer="sgd"), "another optimizer"),
            (made_logs.megatron() + made_logs.megatron(hidden_size=2048), "hidden_size is 1024 .* two jobs in one log"),
            (made_logs.megatron(num_layers=9, encoder_num_layers=9), "do not lie evenly"),
            (made_logs.megatron(global_batch_size=15), "no multiple of DP 2"),
            (made_logs.megatron(peaks={8: 1000.0}), "memory of rank 8, and there are 8 ranks"),
            (
                made_logs.megatron(steps_ms=[9000.0, *[1200.0] * 6])
                + made_logs.megatron(steps_ms=[9000.0, *[900.0] * 5]),
                "started 2 times",
            ),
            (made_logs.megatron(recompute_granularity="full", recompute_num_layers="2x"), "recompute_num_layers is 2x"),
            (
                made_logs.megatron(recompute_granularity="full", recompute_method="block", recompute_num_layers=-2),
                "recompute_num_layers is -2 among the arguments; a whole number of at least 1 is expected",
            ),
            (
                made_logs.megatron(recompute_granularity="full", recompute_method="some", recompute_num_layers=2),
                "recompute_method is some; uniform and block are understood",
            ),
            (made_logs.megatron(virtual_pipeline_model_parallel_size="two"), "parallel_size is two among"),
            (made_logs.megatron(num_layers_per_virtual_pipeline_stage=0), "virtual_pipeline_stage is 0 among"),
            (made_logs.megatron(decoder_first_pipeline_num_layers=0), "decoder_first_pipeline_num_layers is 0"),
            (made_logs.megatron(decoder_last_pipeline_num_layers="all"), "decoder_last_pipeline_num_layers is all"),
            (made_logs.megatron(hidden_dropout="some"), "hidden_dropout is some .* a number from 0 to 1 is expected"),
            (made_logs.megatron(attention_dropout=1.5), "attention_dropout is 1.5 among the arguments"),
            (made_logs.megatron(num_experts=8, expert_tensor_parallel_size="x"), "expert_tensor_parallel_size is x"),
            (made_logs.megatron_deepspeed(zero_stage="one"), "zero_stage is one among the arguments"),
            (made_logs.torchtitan() + made_logs.torchtitan(device="NVIDIA H200"), "two jobs in one log"),
            (made_logs.llm_foundry(per_node=4), "n_gpus is 8, and num_nodes 1 x num_gpus_per_node 4 are 4"),
            (made_logs.llm_foundry(config=made_logs.FOUNDRY.replace(": 64", ": 63")), "no multiple of 8 devices"),
            (made_logs.llm_foundry(config=made_logs.FOUNDRY.replace("size: 4", "size: auto")), "`auto` changes"),
        ],
    )
    def test_said_in_words(self, tmp_path: Path, text: str, words: str) -> None:
        with pytest.raises(TableError, match=words):
            read(tmp_path, text)

    def test_the_world_size_that_is_used(self, tmp_path: Path) -> None:
        text = made_logs.megatron().replace("using world size: 8", "using world size: 16")
        with pytest.raises(TableError, match="world_size is 8 among the arguments, and `using world size` says 16"):
            read(tmp_path, text)

    def test_time_and_throughput_of_one_line(self, tmp_path: Path) -> None:
        text = made_logs.megatron().replace("| learning rate", "| samples per second: 99.0 | learning rate")
        with pytest.raises(TableError, match=r"\(line \d+\): the step takes .* the two contradict"):
            read(tmp_path, text)

    def test_another_device(self, tmp_path: Path) -> None:
        with pytest.raises(TableError, match="ran on NVIDIA H100, and --device is a100-80g"):
            read(tmp_path, made_logs.torchtitan(), device="a100-80g")

    def test_a_fact_that_the_log_tells_otherwise(self, tmp_path: Path) -> None:
        with pytest.raises(TableError, match="it tells seq_length 2048, and --fact seq_length=4096 contradicts"):
            read(tmp_path, made_logs.llm_foundry(), "seq_length=4096", device="a100-80g")

    def test_parameters_of_another_model(self, tmp_path: Path) -> None:
        line = " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 99000000"
        with pytest.raises(TableError, match="pipeline rank 0 has 99,000,000 parameters by its own count"):
            read(tmp_path, made_logs.megatron(more=[line]))
        with pytest.raises(TableError, match="it has 7,000,000,000 parameters by its own count"):
            read(tmp_path, made_logs.torchtitan(more=["Model llama3 toy size: 7,000,000,000 total parameters"]))


class TestNumbers:
    """Digits up to a comma are another number, so nothing is read of it."""

    @pytest.mark.parametrize("told", ["1,203.0", "1203,0", "1.203,0", "nan", "inf", "1e400", "-1203.0", "0.0", "3ms"])
    def test_a_step(self, told: str, tmp_path: Path) -> None:
        with pytest.raises(TableError, match=r"\(line \d+\): the step takes .* a number above zero is expected"):
            read(tmp_path, made_logs.megatron().replace("1203.0 |", f"{told} |"))

    def test_what_another_process_writes_behind_it(self, tmp_path: Path) -> None:
        plain = read(tmp_path, made_logs.megatron())
        assert read(tmp_path, made_logs.megatron().replace("1203.0 |", "1203.0[Rank 3] |")).content == plain.content

    def test_a_unit(self, tmp_path: Path) -> None:
        with pytest.raises(TableError, match=r"the step is told in min; ms and s are understood"):
            read(tmp_path, made_logs.megatron().replace("iteration (ms)", "iteration (min)"))

    @pytest.mark.parametrize("told", ["20,000.0", "-20000.0", "nan"])
    def test_a_peak(self, told: str, tmp_path: Path) -> None:
        text = made_logs.megatron(peaks={0: 20000.0})
        with pytest.raises(TableError, match=r"\(line \d+\): the peak is .* a number above zero is expected"):
            read(tmp_path, text.replace("max allocated: 20000.0", f"max allocated: {told}"))

    @pytest.mark.parametrize("told", ["9.010", "9,0100", "90,10", "1.2e4", "nan", "0"])
    def test_a_rate_of_torchtitan(self, told: str, tmp_path: Path) -> None:
        text = made_logs.torchtitan()
        assert "tps: 9,010" in text
        with pytest.raises(TableError, match=r"tokens per second; a whole number above zero"):
            read(tmp_path, text.replace("tps: 9,010", f"tps: {told}"))

    @pytest.mark.parametrize("told", ["0,4980", "nan", "fast"])
    def test_a_rate_of_llm_foundry(self, told: str, tmp_path: Path) -> None:
        text = made_logs.llm_foundry().replace("batches_per_sec: 0.4980", f"batches_per_sec: {told}")
        with pytest.raises(TableError, match=r"throughput/batches_per_sec is .* a number with a point is expected"):
            read(tmp_path, text, device="a100-80g")


class TestImpossible:
    def test_a_step_in_a_smaller_unit(self, tmp_path: Path) -> None:
        with pytest.raises(TableError, match=r"a step of 1\.2e\+06 ms is of something else: each of 8 devices"):
            read(tmp_path, made_logs.megatron(steps_ms=[4.1e6, *[1.2e6] * 6]))

    def test_a_peak_above_the_memory(self, tmp_path: Path) -> None:
        with pytest.raises(TableError, match=r"a peak of 104\.9 GB is impossible: h100-80g has 85\.02 GB"):
            read(tmp_path, made_logs.megatron(peaks={0: 100000.0}))

    def test_a_step_above_the_peak(self, tmp_path: Path) -> None:
        with pytest.raises(TableError, match="is impossible: by matrix products alone"):
            read(tmp_path, made_logs.megatron(steps_ms=[5.0, *[0.5] * 6]))

    def test_a_throughput_above_the_peak(self, tmp_path: Path) -> None:
        rate = "| throughput per GPU (TFLOP/s/GPU): 1200.0 | learning rate"
        with pytest.raises(TableError, match="it counts 1200 TFLOP/s a device, and h100-80g has 989"):
            read(tmp_path, made_logs.megatron().replace("| learning rate", rate))

    def test_an_mfu_above_one(self, tmp_path: Path) -> None:
        with pytest.raises(TableError, match=r"an MFU of 200\.00 %"):
            read(tmp_path, made_logs.torchtitan().replace("mfu: 2.00%", "mfu: 200.00%"))
        with pytest.raises(TableError, match="mfu is above 1"):
            read(tmp_path, made_logs.llm_foundry().replace("mfu: 0.1", "mfu: 1.1"), device="a100-80g")


class TestNotDescribed:
    @pytest.mark.parametrize(
        ("said", "words"),
        [
            ("Applied selective activation checkpointing to the model", "selective activation checkpointing"),
            ("Float8 training active with recipe rowwise_with_gw_hp", "rowwise_with_gw_hp of FP8 is not represented"),
            ("Converted Linear layers to NVFP4Linear", "a recipe that is not represented"),
            ("Float8 tensorwise scaled training active\nConverted Linear layers to MXFP8Linear", "two jobs in one log"),
            ("Applied CPU Offloading to the model", "weights offloaded to the host"),
        ],
    )
    def test_of_torchtitan(self, tmp_path: Path, said: str, words: str) -> None:
        with pytest.raises(TableError, match=words):
            read(tmp_path, made_logs.torchtitan(more=said.split("\n")))

    def test_rowwise_scales_under_tensor_parallelism(self, tmp_path: Path) -> None:
        mesh = "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1"
        batch = "local batch size 2, global batch size 8, gradient accumulation steps 1, sequence length 2048"
        said = ["Float8 training active with recipe rowwise"]
        with pytest.raises(TableError, match="a known problem of that release"):
            read(tmp_path, made_logs.torchtitan(mesh=mesh, batch=batch, more=said))


class TestFacts:
    @pytest.mark.parametrize(
        ("fact", "words"),
        [
            ("vocabsize=3", "is no fact of a run .*vocab_size"),
            ("vocab_size", "vocab_size=VALUE is expected"),
            ("vocab_size=", "vocab_size=VALUE is expected"),
        ],
    )
    def test_malformed(self, fact: str, words: str) -> None:
        with pytest.raises(JobError, match=words):
            parse_facts([fact])

    def test_given_twice(self) -> None:
        with pytest.raises(JobError, match="given as 3 and as 4"):
            parse_facts(["vocab_size=3", "vocab_size=4"])

    def test_no_number(self, tmp_path: Path) -> None:
        with pytest.raises(JobError, match="a whole number from 1"):
            read(tmp_path, made_logs.megatron(padded=None), "vocab_size=many")

    def test_one_that_no_log_leaves_open(self, tmp_path: Path) -> None:
        with pytest.raises(JobError, match="--fact images_per_sample: none of these logs leaves that open"):
            read(tmp_path, made_logs.megatron(), "images_per_sample=2")
