"""Every reader on published rows: what they say arrives in job and plan, what they leave out is filled in as told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.measurements.case import MeasuredCase, Refused
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.pipeline_layout import read_layout
from mm_autoparallel.measurements.predict import predict
from mm_autoparallel.units import GB, GIB, MIB

PUBLISHED = Path(__file__).parents[2] / "examples" / "published_measurements"

Rows = list[dict[str, str]]
Published = Callable[[str], Rows]
WriteTable = Callable[..., Path]


def read(name: str) -> tuple[dict[int, MeasuredCase], dict[int, Refused]]:
    cases, refused = read_table(PUBLISHED / f"{name}.csv")
    return {case.row: case for case in cases}, {refusal.row: refusal for refusal in refused}


def read_one(path: Path) -> MeasuredCase:
    (case,), refused = read_table(path)
    assert not refused
    return case


@pytest.mark.parametrize(
    ("name", "num_cases", "num_refused"),
    [
        ("korthikanti2022", 8, 0),
        ("sc21", 5, 0),
        ("vtrain", 73, 0),
        ("vtrain_single", 1440, 0),
        ("simumax_b200", 16, 0),
        ("megatron_bridge", 6, 0),
        ("mindspeed_mm_ci", 3, 4),
        ("torchtitan", 16, 2),
    ],
)
def test_how_many_rows_are_read(name: str, num_cases: int, num_refused: int) -> None:
    cases, refused = read(name)
    assert (len(cases), len(refused)) == (num_cases, num_refused)
    assert sorted([*cases, *refused]) == list(range(num_cases + num_refused))
    assert all(case.source for case in cases.values())


def test_korthikanti() -> None:
    cases, _ = read("korthikanti2022")
    full, selective = cases[4], cases[5]
    text, workload = full.job.model.text, full.job.workload
    assert (text.layers.num_layers, text.layers.hidden_size, text.layers.ffn_size) == (105, 20480, 81920)
    assert (text.vocab_size, text.tied, text.num_positions, text.layers.rotary) == (51200, True, 2048, False)
    assert (full.measured_ms, full.job.cluster.device.name, full.job.cluster.num_devices) == (49050.0, "a100-80g", 280)
    assert full.plan.layers == {"text": (1,) * 105} == full.plan.recompute
    assert (full.plan.strategy.vpp, full.plan.strategy.schedule, full.plan.strategy.zero) == (3, "interleaved_1f1b", 0)
    assert workload.attention == "unfused"
    assert workload.attention_dropout
    assert workload.hidden_dropout
    assert workload.scatter_gather_p2p
    assert not workload.sequence_parallel
    assert selective.job.workload.recompute_operators == ("core_attn",)
    assert selective.job.workload.sequence_parallel
    assert not any(selective.plan.recompute["text"])


@pytest.mark.parametrize(("unit", "value"), [("s", "1.42"), ("ms", "1420"), ("us", "1420000")])
def test_times_are_read_in_the_unit_that_their_row_names(
    unit: str, value: str, published: Published, write_table: WriteTable
) -> None:
    row = published("korthikanti2022")[0] | {"unit": unit, "value": value}
    assert read_one(write_table([row])).measured_ms == pytest.approx(1420.0)


def test_a_peak_in_the_same_form(published: Published, write_table: WriteTable) -> None:
    row = published("korthikanti2022")[0] | {"metric": "peak_memory", "unit": "GiB", "value": "40"}
    case = read_one(write_table([row]))
    assert (case.measured_ms, case.measured_bytes) == (None, 40 * GIB)


def test_sc21_times_follow_from_throughputs() -> None:
    cases, _ = read("sc21")
    assert cases[2].measured_ms == 14453.0
    assert not cases[2].job.workload.sequence_parallel
    assert cases[4].plan.strategy.vpp == 3
    assert cases[4].job.cluster.num_devices == 2520


def test_sc21_without_a_derived_time(published: Published, write_table: WriteTable) -> None:
    row = {key: cell for key, cell in published("sc21")[2].items() if key != "derived_iter_s"}
    assert read_one(write_table([row])).measured_ms == pytest.approx(14453.0, rel=1e-4)


def test_vtrain_networks_and_vocabularies() -> None:
    cases, _ = read("vtrain")
    node, network = cases[0].job.cluster.levels
    assert (node.num_devices, network.num_devices) == (8, 64)
    assert network.bandwidth_bytes_per_s == 100e9 / 8  # 800 Gb/s for a node of eight
    wide = next(case for case in cases.values() if case.plan.strategy.tp == 16)
    assert wide.job.cluster.levels[1].tensor_parallel
    assert cases[0].job.model.text.vocab_size == 50304
    assert wide.job.model.text.vocab_size == 51200
    assert cases[0].job.workload.gradient_bytes == 2.0


def test_torchtitan_without_what_it_does_not_name(published: Published, write_table: WriteTable) -> None:
    first = published("torchtitan")[0] | {"gpu": "H100-80GB", "activation_ckpt": "full"}
    wide = first | {"n_gpus": "64", "parallel": "FSDP8 CP2 TP4", "activation_ckpt": "none", "tps_per_gpu": ""}
    (case, other), refused = read_table(write_table([first, wide]))
    assert not refused
    # two samples of 8192 tokens on each of eight devices, which pass 5762 tokens a second each
    assert case.measured_ms == pytest.approx(2 * 8192 / 5762 * 1e3)
    assert (case.measured_bytes, case.job.cluster.device.name) == (None, "h100-80g")
    assert "reserved" in case.remarks[0]
    strategy, workload = case.plan.strategy, case.job.workload
    assert (strategy.zero, strategy.dp, strategy.mbs, workload.global_batch_size) == (3, 8, 2, 16)
    assert case.plan.recompute == case.plan.layers == {"text": (32,)}
    assert (workload.stack, case.job.model.text.vocab_size) == ("transformers", 128256)
    assert (other.plan.strategy.tp, other.plan.strategy.cp, other.measured_ms) == (4, 2, None)
    assert not any(other.plan.recompute["text"])
    assert predict(case).step_ms > 0
    assert predict(other).calibration == "uncalibrated"


def test_simumax() -> None:
    cases, _ = read("simumax_b200")
    case = cases[3]
    layers, workload = case.job.model.text.layers, case.job.workload
    assert (layers.num_layers, layers.hidden_size, layers.ffn_size, layers.num_kv_groups) == (12, 8192, 28672, 8)
    assert case.job.model.text.vocab_size == 129024  # 128257 tokens to a multiple of 8 x 128
    assert (case.measured_ms, case.measured_bytes) == (280.9, 28.29 * GIB)
    assert (workload.global_batch_size, workload.cross_entropy, case.plan.strategy.zero) == (4, "fused", 1)
    assert cases[12].plan.strategy.cp == 4
    assert cases[12].job.workload.seq_length == 32768


@pytest.mark.parametrize(
    ("model", "more", "expected"),
    [
        ("llama3-405b", {"layers": "4"}, (4, 16384, 53248, 128, 16)),
        ("Llama3_70B", {"layers": "8"}, (8, 8192, 28672, 64, 8)),
        ("deepseekv2", {"layers": "4", "tp": "1", "dp": "8", "ep": "8"}, (4, 5120, 12288, 128, 128)),
        ("DeepSeek-V3", {"layers": "4", "tp": "1", "dp": "8", "ep": "8"}, (4, 7168, 18432, 128, 128)),
    ],
)
def test_other_models_of_the_same_table(
    model: str,
    more: dict[str, str],
    expected: tuple[int, ...],
    published: Published,
    write_table: WriteTable,
) -> None:
    row = published("simumax_b200")[3] | {"model": model} | more
    case = read_one(write_table([row], "another_name.csv"))
    layers = case.job.model.text.layers
    found = (layers.num_layers, layers.hidden_size, layers.ffn_size, layers.num_heads, layers.num_kv_groups)
    assert found == expected
    if layers.experts is not None:
        assert layers.experts.dense_layers == (0,)
        assert layers.latent is not None
    assert predict(case).step_ms > 0


@pytest.mark.parametrize("gpu", ["H100-80GB", "h200-141g", "B200", "Ascend 910B"])
def test_other_hardware_of_the_same_table(gpu: str, published: Published, write_table: WriteTable) -> None:
    row = published("korthikanti2022")[0]
    on_a100 = predict(read_one(write_table([row])))
    case = read_one(write_table([row | {"gpu": gpu}]))
    assert case.job.cluster.device.name != "a100-80g"
    assert predict(case).step_ms != on_a100.step_ms


def test_megatron_ci() -> None:
    cases, refused = read("megatron_ci")
    assert len(cases) + len(refused) == 417
    case = next(case for case in cases.values() if case.name.startswith("gpt/gpt3_mcore_te_tp2_pp2 "))
    text, workload = case.job.model.text, case.job.workload
    assert (text.layers.num_layers, text.layers.hidden_size, text.vocab_size) == (12, 512, 50432)
    assert (text.num_positions, workload.hidden_dropout, workload.attention) == (1024, True, "unfused")
    assert (workload.deterministic, workload.gradient_fusion, workload.stack) == (True, False, "megatron-te")
    assert list(case.measured_bytes) == [1]  # type: ignore[arg-type]
    assert case.unstated == ()
    assert case.remarks == ("its time repeats to 6 % only",)


def test_megatron_ci_arguments_without_a_column(published: Published, write_table: WriteTable) -> None:
    rows = {row["case"]: row for row in published("megatron_ci")}
    rope = read_one(write_table([rows["gpt/gpt3_mcore_te_tp1_pp2_rope_embeddings"]])).job.model.text
    assert rope.num_positions == 0
    assert rope.layers.rotary
    plain = read_one(write_table([rows["gpt/gpt3_mcore_te_tp1_pp4_disable_bias_linear"]])).job.model.text.layers
    assert not plain.mlp_bias
    assert not plain.qkv_bias
    uneven = read_one(write_table([rows["gpt/gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline"]])).plan
    assert uneven.layers == {"text": (2, 4, 4, 2)}
    chunks = read_one(write_table([rows["gpt/gpt3_mcore_te_tp1_pp4_vp1"]])).plan
    assert chunks.strategy.vpp == 3
    assert chunks.layers == {"text": (1,) * 12}
    latent = read_one(write_table([rows["gpt/gpt3_mcore_te_tp2_pp2_mla"]])).job.model.text.layers.latent
    assert latent is not None
    assert (latent.q_lora_rank, latent.kv_lora_rank) == (192, 64)
    experts = read_one(write_table([rows["moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_top2router"]]))
    assert experts.plan.strategy.ep == 2
    found = experts.job.model.text.layers.experts
    assert found is not None
    assert (found.num_experts, found.top_k) == (8, 2)


def test_megatron_ci_in_eight_bits_and_on_newer_devices(published: Published, write_table: WriteTable) -> None:
    """What the recipe of a case turns on is a fact of the row; a device without the units is refused by its law."""
    row = next(row for row in published("megatron_ci") if row["case"] == "gpt/gpt3_mcore_te_tp2_pp2")
    low = "gpt/gpt3_weekly_mcore_tp2_pp2_current_scaling_native_fp8_tp_pp_sp_tp_overlap"
    rows = [row | {"case": low, "hw": hw, "sequence-parallel": "true"} for hw in ("H100", "GB200", "A100")]
    (hopper, blackwell), (refused,) = read_table(write_table(rows))
    workload, facts = hopper.job.workload, hopper.job.workload.known_facts
    assert workload.precision == "fp8_current"
    assert (facts.low_parameters, facts.tp_overlap) == (True, "user_buffers")
    assert "precision fp8_current multiplies in FP8, and device a100-80g has no fp8_flops_per_s" in refused.reason
    cluster = blackwell.job.cluster
    assert (cluster.device.name, cluster.num_nodes, cluster.devices_per_node) == ("gb200-192g", 1, 8)
    assert predict(hopper).step_ms > 0
    many = read_one(write_table([row | {"hw": "GB200", "n_gpus": "64", "global-batch-size": "64"}])).job.cluster
    assert (many.num_nodes, many.devices_per_node) == (1, 64)


def test_megatron_ci_lays_layers_as_its_layout_says(published: Published, write_table: WriteTable) -> None:
    rows = {row["case"]: row for row in published("megatron_ci")}
    layouts = "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_selective_recompute_experimental"
    more = {"num-layers": "16", "num-experts": "8", "moe-router-topk": "2", "expert-model-parallel-size": "4"}
    more |= {"expert-tensor-parallel-size": "1", "sequence-parallel": "true", "recompute-granularity": "selective"}
    more |= {"swiglu": "true", "multi-latent-attention": "true"}
    case = read_one(write_table([rows["gpt/gpt3_mcore_te_tp2_pp2_mla"] | more | {"case": layouts}]))
    assert case.plan.layers == {"text": (3, 2, 2, 2, 2, 2, 2, 1)}
    assert (case.plan.strategy.pp, case.plan.strategy.vpp, case.job.model.text.num_mtp) == (2, 4, 1)
    assert case.job.workload.recompute_operators == ("layernorm", "mla_up_proj", "mlp", "moe_act")
    ends = "moe/gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_no_mtp_no_a2a_ovlp_fine_grained_offloading"
    assert read_layout("Et*3|(tt|)*6L") == (3, 2, 2, 2, 2, 2, 2, 0)
    other = rows["gpt/gpt3_mcore_te_tp2_pp2_mla"] | more | {"case": ends}
    _, (refused,) = read_table(write_table([other]))
    assert "which is not represented" in refused.reason


def test_megatron_fsdp_is_zero_by_what_it_shards(published: Published, write_table: WriteTable) -> None:
    row = next(
        row for row in published("megatron_ci") if row["case"] == "gpt/gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor"
    )
    column = "data-parallel-sharding-strategy"
    rows = [row | {column: sharded} for sharded in ("optim_grads_params", "optim_grads", "optim", "", "all of it")]
    cases, (refused,) = read_table(write_table(rows))
    assert [case.plan.strategy.zero for case in cases] == [3, 2, 1, 0]
    assert "the data parallel sharding strategy 'all of it' is not understood; known are no_shard" in refused.reason
    # Megatron-LM's own run of ZeRO 3: weights, gradients and states in shards, one layer's gathered at a time
    (measured_bytes,) = cases[0].measured_bytes.values()  # type: ignore[union-attr]
    assert predict(cases[0]).peak_allocated_bytes[0] == pytest.approx(measured_bytes, rel=0.03)


def test_a_case_of_no_known_name_has_megatrons_defaults(published: Published, write_table: WriteTable) -> None:
    row = next(row for row in published("megatron_ci") if row["case"] == "gpt/gpt3_mcore_te_tp2_pp2")
    known, new = read_one(write_table([row])), read_one(write_table([row | {"case": "gpt/somebodys_own"}]))
    assert new.job.model.text == known.job.model.text
    assert (known.job.workload.gradient_fusion, new.job.workload.gradient_fusion) == (False, True)


def test_a_blank_attention_backend_is_told_and_both_readings_are_given() -> None:
    cases, _ = read("megatron_ci")
    name = "gpt/gpt3_mcore_te_tp2_pp2_resume_torch_dist "
    same = [case for case in cases.values() if case.name.startswith(name)]
    assert all(case.unstated == ("attention backend",) for case in same)
    low, high = predict(same[0]).peak_interval_bytes[1]
    assert low < high
    measured = [case.measured_bytes[1] for case in same]  # type: ignore[index]
    assert max(measured) / min(measured) > 1.3  # both have run there
    assert low * 0.97 < min(measured)
    assert max(measured) < high * 1.03


def test_families_that_no_model_can_be_are_refused_with_their_reason() -> None:
    _, refused = read("megatron_ci")
    reasons = " ".join({refusal.reason for refusal in refused.values()})
    for words in ("cross attention", "state-space layers", "global-batch-size is blank"):
        assert words in reasons


def test_mindspeed_mm_ranks_become_stages() -> None:
    cases, refused = read("mindspeed_mm_ci")
    case = cases[5]
    assert case.measured_bytes == {0: 10843.0 * MIB, 1: 27212.0 * MIB, 2: 27212.0 * MIB, 3: 27008.0 * MIB}
    assert case.plan.layers == {"vision": (32, 0, 0, 0), "text": (1, 10, 10, 7)}
    vision = case.job.model.encoders[0]
    assert vision.freeze
    assert vision.projector.freeze
    assert not case.job.model.text.freeze
    assert case.job.workload.stack == "mindspeed"
    assert case.unstated == ("tokens of a sample",)
    assert "adapters" in refused[6].reason
    assert "diffusion" in refused[3].reason


def test_megatron_bridge_outcomes(published: Published, write_table: WriteTable) -> None:
    cases, _ = read("megatron_bridge")
    case = cases[5]
    assert case.job.workload.recompute_operators == ("layernorm", "moe_act")
    assert (case.measured_bytes, case.out_of_memory) == (35.949 * GB, False)
    assert (case.plan.strategy.ep, case.plan.strategy.expert_tp) == (8, 1)
    row = published("megatron_bridge")[0] | {"outcome": "OOM in iteration 1", "step_ms": "", "peak_alloc_GB": ""}
    out = read_one(write_table([row]))
    assert (out.out_of_memory, out.measured_ms, out.measured_bytes) == (True, None, None)


def test_bert_has_the_vocabulary_of_its_paper_and_a_masked_head() -> None:
    cases, _ = read("megatron_ci")
    text = next(case for case in cases.values() if case.name.startswith("bert/bert_mcore_tp2_pp2 ")).job.model.text
    assert (text.vocab_size, text.causal, text.masked) == (30720, False, True)
    local = next(case for case in cases.values() if case.name.startswith("bert/bert_mcore_tp2_pp2_local_spec "))
    assert local.job.workload.stack == "megatron-local"
