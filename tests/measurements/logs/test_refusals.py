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


class TestImpossible:
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
