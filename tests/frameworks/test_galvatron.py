"""Galvatron: its cost model to 1e-9, its search beaten or equalled, its files read, written and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.api.jobs import read_job
from mm_autoparallel.cli.main import main
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.galvatron.configuration import Search, read_search
from mm_autoparallel.integrations.galvatron.cost import Batch
from mm_autoparallel.integrations.galvatron.plans import describe_launch, read_launch_plan
from mm_autoparallel.integrations.galvatron.score import Extensions, Planner, even_division
from mm_autoparallel.integrations.galvatron.search import Found, search
from mm_autoparallel.integrations.galvatron.step import step_s
from mm_autoparallel.integrations.galvatron.strategies import LayerStrategy
from mm_autoparallel.integrations.galvatron.strategy_file import format_strategy, read_strategy
from mm_autoparallel.integrations.galvatron.written_profiles import format_profiles
from mm_autoparallel.model.costs.stage import block_costs
from mm_autoparallel.model.job.strategy import Strategy

ROOT = Path(__file__).parents[2]
EXAMPLE, FIXTURES = ROOT / "examples" / "galvatron", ROOT / "tests" / "fixtures" / "galvatron"
SECTION = "search_engine"
MODEL = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32}
MODEL |= {"num_attention_heads": 32, "vocab_size": 50257, "max_position_embeddings": 2048, "hidden_act": "silu"}
MODEL |= {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "tie_word_embeddings": False}


def at(section: str, **values: object) -> list[str]:
    """Overrides of one section."""
    return [f"{SECTION}.{section}.{key}={value}" for key, value in values.items()]


CLIFF = [*at("batch_size_info", settle_bsz=8, settle_chunk=1)]
CASES: Mapping[str, tuple[Sequence[str], float, float]] = {
    "A": ([], 1.086046124294213, 1.0859518476905108),
    "B": (
        [*at("hardware_info", num_nodes=2), *at("batch_size_info", settle_bsz=32)],
        1.0983952055327784,
        1.096233389011087,
    ),
    "C": (
        [*at("model_info", model_size="gpt-6.7b"), *at("hardware_info", memory_constraint=40)],
        1.0109682304037964,
        1.0109682304037964,
    ),
    "cliff20": ([*CLIFF, *at("hardware_info", memory_constraint=20)], 0.6357397093034848, 0.6352765135970748),
    "cliff21": ([*CLIFF, *at("hardware_info", memory_constraint=21)], 0.6678175725523264, 0.6674682736488411),
    "cliff24": ([*CLIFF, *at("hardware_info", memory_constraint=24)], 0.6426468123569368, 0.6426468123569368),
}
"""Overrides of the example; the step that Galvatron's search finds, and the shortest of its space: by a brute force
over counts with PP 1 that is not in this repository, at 21 GB by Galvatron's own score of what is found here."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example, with the profiles that the cases need besides. Collectives of two nodes as of one, as for case B."""
    shutil.copytree(EXAMPLE, tmp_path / "galvatron")
    profiles = tmp_path / "galvatron" / "profiles"
    for path in FIXTURES.glob("*_gpt-6.7b_all.json"):
        shutil.copy(path, profiles)
    shutil.copy(profiles / "sp_time_1nodes_8gpus_per_node.json", profiles / "sp_time_2nodes_8gpus_per_node.json")
    return tmp_path / "galvatron"


NOTHING_MORE = Extensions()


def read(folder: Path, overrides: Sequence[str] = ()) -> Search:
    return read_search(folder / "search.yaml", overrides)


def run(folder: Path, overrides: Sequence[str] = (), extensions: Extensions = NOTHING_MORE) -> Found:
    return search(Planner(read(folder, overrides), extensions))


def test_every_figure_of_the_cost_model_is_galvatrons(folder: Path) -> None:
    cost, count = Planner(read(folder)).cost, 0
    for key, rows in json.loads((FIXTURES / "uniform_strategies.json").read_text()).items():
        batch = Batch(*map(int, key.split("_")))
        for name, dp_type, seconds, mib in rows:
            pp, degree, dp, *marks = name.split("-")
            width, is_sp = int(degree.strip("*")), "sp" in marks
            sizes = (1, width) if is_sp else (width, 1)
            strategy = LayerStrategy(int(pp), *sizes, int(dp.strip("f")), dp_type, "c" in marks)
            assert str(strategy) == name
            layer, ends, each = cost.layer(strategy, batch), cost.ends(strategy.of_ends, batch), 32 // int(pp)
            computing = [each * layer.compute_s + own for own in ends.compute_s]
            step = step_s(computing, [each * layer.synced_s] * int(pp), batch.chunks)
            assert step == pytest.approx(seconds, rel=1e-9), name
            found = [
                own + each * cost.layer_mib(strategy, batch, stage)
                for stage, own in enumerate(cost.ends_mib(strategy.of_ends, batch))
            ]
            assert found == pytest.approx(mib, rel=1e-9), name
            count += 1
    assert count == 114


@pytest.mark.parametrize("name", CASES)
def test_the_search_is_never_behind_galvatrons_and_its_plan_fits(folder: Path, name: str, tmp_path: Path) -> None:
    overrides, theirs_s, right_s = CASES[name]
    planner = Planner(read(folder, overrides))
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(json.loads((FIXTURES / "found_by_galvatron.json").read_text())[name]))
    theirs = planner.score(read_strategy(path, planner.num_devices, "pipedream_flush", "zero2"))
    # the fit of Galvatron's solver stops 1.6e-8 short of the line of C
    assert theirs.step_s == pytest.approx(theirs_s, rel=1e-8 if name == "C" else 1e-12)
    assert min(theirs.remaining_mib) >= 0
    found = search(planner)
    assert found.best is not None
    assert found.is_proven
    assert found.best.step_s == pytest.approx(right_s, rel=1e-8 if name == "C" else 1e-12)
    assert found.best.step_s <= theirs_s * (1 + 1e-12)
    assert min(found.best.remaining_mib) >= 0
    assert (found.best.step_s < theirs.step_s * (1 - 1e-6)) == (right_s < theirs_s)


def test_what_galvatron_had_left_of_memory_is_what_is_counted(folder: Path, tmp_path: Path) -> None:
    """As its search printed: 107, 247 and 33 MiB."""
    for name, left in (("A", 107), ("B", 247), ("C", 33)):
        planner = Planner(read(folder, CASES[name][0]))
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(json.loads((FIXTURES / "found_by_galvatron.json").read_text())[name]))
        score = planner.score(read_strategy(path, planner.num_devices, "pipedream_flush", "zero2"))
        assert score.remaining_mib == (left,), name


def test_more_memory_is_never_slower_without_the_reserve(folder: Path) -> None:
    steps = []
    for memory_gb in range(16, 41, 2):
        overrides = [*CLIFF, *at("hardware_info", memory_constraint=memory_gb)]
        best = run(folder, overrides, Extensions(reserve_fraction=0.0)).best
        steps.append(best.step_s if best else float("inf"))
    assert steps == sorted(steps, reverse=True)
    at_20, at_21 = (run(folder, CASES[f"cliff{gb}"][0]).best for gb in (20, 21))
    assert at_20 is not None
    assert at_21 is not None
    assert at_21.step_s > at_20.step_s  # more memory, and slower: Galvatron's rule
    assert (at_20.reserve_mib, at_21.reserve_mib) == (0, 4300)


def test_what_the_formula_leaves_out_is_told_and_may_be_searched(folder: Path) -> None:
    overrides = [*at("hardware_info", memory_constraint=30), *at("batch_size_info", settle_bsz=64)]
    by_formula, by_all = (
        run(folder, overrides, extensions).best
        for extensions in (Extensions(), Extensions(counts_every_stage=True, counts_resharding=True))
    )
    assert by_formula is not None
    assert by_all is not None
    assert by_formula.step_s < by_all.step_s
    assert by_all.whole_step_s < by_formula.whole_step_s * 0.95
    uneven = run(folder, overrides, Extensions(spread=1, counts_resharding=True))
    assert uneven.best is not None
    assert uneven.is_proven
    assert uneven.searched_s <= by_all.whole_step_s * (1 + 1e-12)
    assert uneven.searched_s == pytest.approx(uneven.best.whole_step_s, rel=1e-12)


def test_samples_that_are_not_counted_are_told(folder: Path) -> None:
    overrides = at("batch_size_info", settle_bsz=24, settle_chunk=8)
    loose, whole = (run(folder, overrides, Extensions(needs_whole_samples=each)).best for each in (False, True))
    assert loose is not None
    assert whole is not None
    assert loose.counted_fraction < 1
    assert whole.counted_fraction == 1
    assert loose.step_s < whole.step_s
    with pytest.raises(PlanError, match="for 8 devices, the configuration for 16"):
        Planner(read(folder, CASES["B"][0])).score(loose.plan)
    with pytest.raises(PlanError, match="no sample for each of"):
        Planner(read(folder)).score(replace(loose.plan, chunks=24))


def test_a_written_strategy_is_read_back(folder: Path, tmp_path: Path) -> None:
    for overrides in ([], [*at("hardware_info", memory_constraint=30), *at("batch_size_info", settle_bsz=64)]):
        best = run(folder, overrides).best
        assert best is not None
        path = tmp_path / "strategy.json"
        path.write_text(format_strategy(best.plan))
        assert read_strategy(path, 999, "gpipe", "ddp") == best.plan
        document = json.loads(path.read_text())
        keys = [*json.loads((FIXTURES / "found_by_galvatron.json").read_text())["A"], "vocab_sdp"]
        assert [*document] == keys
        assert document["vocab_sdp"] == document["embed_sdp"]
        dp = document["world_size"] // document["pp_deg"] // min(map(int, document["tp_sizes_enc"].split(",")))
        assert document["global_bsz"] % dp == 0  # the runtime asserts it


def test_spaces_can_be_switched_off(folder: Path) -> None:
    def best(**values: object) -> Any:
        return run(folder, at("search_space_info", **values)).best

    free = best()
    for switch, is_kept in {
        "disable_ckpt": lambda layer: not layer.checkpoint,
        "disable_fsdp": lambda layer: layer.dp_type != "zero3",
        "disable_tp": lambda layer: layer.tp == 1,
        "disable_dp": lambda layer: layer.dp == 1,
        "max_tp_deg": lambda layer: layer.tp <= 1,
    }.items():
        found = best(**{switch: 1})
        assert found is None or all(map(is_kept, found.plan.layers)), switch
        assert found is None or found.step_s >= free.step_s
    assert best(disable_embedding_lmhead_sp=1).plan.ends.sp == 1
    assert best(disable_pp=1).plan.ends.pp == 1


def test_one_strategy_for_all_layers_is_the_coarse_mode(folder: Path) -> None:
    best = run(folder, at("options_info", fine_grained_mode=0)).best
    assert best is not None
    assert len(set(best.plan.layers)) == 1
    assert best.plan.ends == best.plan.layers[0].of_ends
    rows = json.loads((FIXTURES / "uniform_strategies.json").read_text())
    fits = [row[2] for key in ("16_1", "16_2") for row in rows[key] if max(row[3]) <= best.limit_mib - 300]
    assert best.step_s <= min(fits)


def test_the_commands_write_score_and_refuse(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config, out = str(folder / "search.yaml"), str(tmp_path / "out" / "strategy.json")
    assert main(["galvatron-search", config, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "proven"
    assert Path(found["file"]) == folder / "configs" / "galvatron_config_llama2-7b_1nodes_8gpus_per_node_36GB_bf16.json"
    assert main(["galvatron-score", found["file"], config, "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert (score["step_s"], score["remaining_mib"]) == (found["step_s"], found["remaining_mib"])
    Path(found["file"]).write_text("{}")  # as its own search, which writes over an older strategy
    assert main(["galvatron-search", config]) == 0
    assert json.loads(Path(found["file"]).read_text())["pp_deg"] == 1
    capsys.readouterr()
    assert main(["galvatron-search", config, *CASES["cliff20"][0], "--out", out]) == 0
    said = capsys.readouterr().out
    assert "proven: no plan of this space is faster" in said
    assert "kept free" not in said
    assert main(["galvatron-search", config, *CASES["cliff21"][0], "--out", out]) == 2  # something else is there
    assert "is there already" in capsys.readouterr().err
    assert main(["galvatron-search", config, *CASES["cliff21"][0], "--out", out, "--overwrite"]) == 0
    assert "4300 MiB of each device are kept free" in capsys.readouterr().out
    assert main(["galvatron-search", config, *at("hardware_info", memory_constraint=2)]) == 3
    assert "no strategy fits" in capsys.readouterr().err
    assert main(["galvatron-search", config, *at("batch_size_info", settle_bsz=64), "--time-limit", "0.001"]) == 124


def change(path: Path, **values: object) -> None:
    document = json.loads(path.read_text())
    for key, value in values.items():
        if value is None:
            del document[key]
        else:
            document[key] = value
    path.write_text(json.dumps(document))


TIMES, MEMORY = "computation_profiling_bf16_llama2-7b_all.json", "memory_profiling_bf16_llama2-7b_all.json"
RINGS, MESSAGES = "allreduce_bandwidth_1nodes_8gpus_per_node.json", "sp_time_1nodes_8gpus_per_node.json"


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        (RINGS, {"allreduce_size_4_consec_0": None}, "allreduce_size_4_consec_0 is missing"),
        (RINGS, {"allreduce_size_8_consec_1": -3}, "allreduce_size_8_consec_1 is -3; a number above 0"),
        (RINGS, {"allreduce_size_8_consec_1": "fast"}, 'allreduce_size_8_consec_1 is "fast"'),
        (MESSAGES, {"allreduce_size_2_1MB_time": 0}, "allreduce_size_2_1MB_time is 0"),
        ("overlap_coefficient.json", {"overlap_coe": 0.5}, "at least 1 is expected"),
        (TIMES, {"layertype_0_bsz3_seq2048": True}, "layertype_0_bsz3_seq2048 is true"),
        (TIMES, {"layertype_1_bsz1_seq512": 1.0}, "several kinds of layers"),
        (MEMORY, {"layertype_0_sp": {}}, "layertype_0_sp has no seq_length 2048"),
        (MEMORY, {"layertype_0_sp": None, "layertype_0": {}}, "measured with sequence_parallel false"),
        (MEMORY, {"other_memory_pp_off_sp": 3}, "other_memory_pp_off_sp is 3; a mapping"),
    ],
)
def test_a_spoilt_profile_is_refused_with_file_and_key(
    folder: Path, name: str, values: dict[str, object], words: str
) -> None:
    change(folder / "profiles" / name, **values)
    with pytest.raises(JobError) as refused:
        run(folder)
    assert words in str(refused.value)
    assert name in refused.value.where


def test_raw_profiles_are_refused_with_the_step_that_is_missing(folder: Path) -> None:
    (folder / "profiles" / TIMES).write_text('{"layernum[2]_bsz1_seq2048": 15.1}')
    with pytest.raises(JobError, match="the processing step is missing"):
        run(folder)
    shutil.copy(EXAMPLE / "profiles" / TIMES, folder / "profiles" / TIMES)
    (folder / "profiles" / MEMORY).write_text('{"1_1_8_sp": {"layernum[1]_bsz8_seq2048_rank0_ms": 904.3}}')
    with pytest.raises(JobError, match="the processing step is missing"):
        run(folder)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (at("search_space_info", disable_cp=0), "disable_cp is 0"),
        (at("model_info", is_moe_model="true"), "is_moe_model is true"),
        (at("hardware_info", memory_constraint="lots"), "memory_constraint"),
        (at("batch_size_info", min_bsz=32), "batch_size_info gives 0 batch sizes"),
        (at("batch_size_info", settle_chunk=0), "at least 1"),
        (at("profiling_info", time_profile_mode="hybrid"), "time_profile_mode"),
        (at("profiling_info", sp_time_path="nowhere"), "profiling_info.sp_time_path"),
        (at("profiling_info", time_profile_mode="static"), "layertype_0 has 12 times"),
        (at("common_train_info", seq_length=4096), "at seq_length 4096"),
        (["search_engine.hardware_info"], "is not understood"),
        (["~search_engine"], "search_engine is missing"),
        (at("common_train_info", seq_length="${HERE}"), "${HERE} is not there"),
    ],
)
def test_a_configuration_that_cannot_be_searched_is_refused(folder: Path, overrides: Sequence[str], words: str) -> None:
    with pytest.raises(JobError) as refused:
        run(folder, overrides)
    assert words in str(refused.value)


def test_sizes_may_stand_in_another_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the configuration, where the command runs, or above: upstream's lies in scripts and is run from above."""
    (folder / "models").mkdir()
    (folder / "models" / "llama.yaml").write_text("model_size: llama2-7b\nhidden_size: 4096\nnum_layers: 30\n")
    sizes = [f"~{SECTION}.model_info.hidden_size", f"~{SECTION}.model_info.num_layers"]
    named = [*sizes, *at("model_info", model_config_path="models/llama.yaml")]
    assert read(folder, named).num_layers == 30
    (folder / "scripts").mkdir()
    shutil.move(folder / "search.yaml", folder / "scripts" / "search.yaml")
    assert read(folder / "scripts", named).num_layers == 30
    (folder / "config.json").write_text('{"hidden_size": 4096, "num_hidden_layers": 28}')
    there = [*sizes, *at("model_info", hf_model_name_or_path=folder)]
    assert read(folder / "scripts", there).num_layers == 28
    monkeypatch.chdir(folder)
    with pytest.raises(JobError, match="nothing is downloaded"):
        read(
            folder / "scripts", of_hub := [*sizes, *at("model_info", hf_model_name_or_path="meta-llama/Llama-2-7b-hf")]
        )
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    downloaded = folder / "models--meta-llama--Llama-2-7b-hf"
    (downloaded / "snapshots" / "c0").mkdir(parents=True)
    (downloaded / "refs").mkdir()
    (downloaded / "refs" / "main").write_text("c0")
    shutil.move(folder / "config.json", downloaded / "snapshots" / "c0" / "config.json")
    assert read(folder / "scripts", of_hub).num_layers == 28


def test_interpolations_and_unknown_keys(folder: Path) -> None:
    path = folder / "search.yaml"
    text = path.read_text().replace("memory_constraint: 36", "memory_constraint: ${MEMORY}\n    num_gpus: 4")
    path.write_text("MEMORY: 20\n" + text)
    found = read_search(path, CLIFF)
    assert found.configuration.hardware_info.memory_constraint == 20
    assert any("hardware_info.num_gpus is not known" in note for note in found.notes)
    assert read_search(path, ["MEMORY=24"]).configuration.hardware_info.memory_constraint == 24


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"use_sp": "0,0"}, "use_sp has 2 layers, tp_sizes_enc 32"),
        ({"checkpoint": ",".join(["2"] * 32)}, "checkpoint has a 2"),
        ({"pp_division": "30"}, "pp_division deals 30 layers"),
        ({"vtp": 3}, "vtp has a 3"),
        ({"tp_sizes_enc": None}, "tp_sizes_enc is missing"),
        ({"cp_sizes_enc": ",".join(["2"] * 32)}, "cp_sizes_enc has a 2"),
        ({"default_dp_type": "zero9"}, "default_dp_type"),
        ({"chunks": 0}, "chunks is 0"),
    ],
)
def test_a_strategy_that_does_not_add_up_is_refused(tmp_path: Path, values: dict[str, object], words: str) -> None:
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps(json.loads((FIXTURES / "found_by_galvatron.json").read_text())["A"]))
    change(path, **values)
    with pytest.raises(PlanError) as refused:
        read_strategy(path, 8, "pipedream_flush", "zero2")
    assert words in str(refused.value)
    assert str(path) in refused.value.where


def test_older_profiles_are_read(folder: Path, tmp_path: Path) -> None:
    """File names without `_all`, `layertype_other_0`, lists of lengths; then no level of the length at all."""
    right = run(folder).best
    profiles = folder / "profiles"
    times, memory = (json.loads((profiles / name).read_text()) for name in (TIMES, MEMORY))
    for name in (TIMES, MEMORY):
        (profiles / name).unlink()
    (profiles / TIMES.replace("_all", "")).write_text(
        json.dumps({key.replace("_other_", "_other_0_"): value for key, value in times.items()})
    )
    (profiles / MEMORY.replace("_all", "")).write_text(
        json.dumps({key: {f"[{seq}]": inner for seq, inner in value.items()} for key, value in memory.items()})
    )
    assert run(folder).best == right
    (profiles / TIMES.replace("_all", "_seqlen2048")).write_text(
        json.dumps({key.split("_seq")[0]: value for key, value in times.items()})
    )
    (profiles / MEMORY.replace("_all", "_seqlen2048")).write_text(
        json.dumps({key: value["2048"] for key, value in memory.items()})
    )
    for name in (TIMES, MEMORY):
        (profiles / name.replace("_all", "")).unlink()
    assert run(folder).best == right


def test_even_stages_leave_the_rest_to_the_last() -> None:
    assert even_division(32, 4) == (8, 8, 8, 8)
    assert even_division(30, 4) == (7, 7, 7, 9)


def test_other_sizes_of_a_profile_scale(folder: Path) -> None:
    """memory_profile_mode sequence takes the longest length by its tokens."""
    static = read(folder)
    longer = read(folder, [*at("profiling_info", memory_profile_mode="sequence")])
    assert longer.profile == static.profile
    doubled = replace(static.profile, checkpoint_mib=static.profile.checkpoint_mib * 2)
    path = folder / "profiles" / TIMES
    times = json.loads(path.read_text())
    times |= {key.replace("seq2048", "seq4096"): value * 2 for key, value in times.items()}
    path.write_text(json.dumps(times))
    scaled = read(
        folder, [*at("profiling_info", memory_profile_mode="sequence"), *at("common_train_info", seq_length=4096)]
    )
    assert scaled.profile.checkpoint_mib == pytest.approx(doubled.checkpoint_mib)
    assert scaled.profile.parameter_mib == static.profile.parameter_mib


def test_strategies_of_one_kind_are_plans(tmp_path: Path) -> None:
    """Exports are in test_every_exporter.py."""
    document = json.loads((FIXTURES / "found_by_galvatron.json").read_text())["C"]
    path, model = tmp_path / "strategy.json", tmp_path / "model.json"
    model.write_text(json.dumps(MODEL))
    path.write_text(json.dumps(document))
    given = Given(model, world_size=8, seq_length=2048)
    mixed = read_launch_plan(path, given)  # 31 layers of ZeRO 3, then one of ZeRO 2; embedding and head by Ulysses
    assert mixed.strategy.layout.name == "tp1_cp4_dp2_zero3"
    assert mixed.modes == {"text": {"tp1_dp8_zero3": (31,), "tp1_dp8_zero2": (1,)}}
    assert any("simulated in the order" in note for note in describe_launch(path, given).notes)
    to_and_fro = ["1"] * 5 + ["0"] + ["1"] * 26
    path.write_text(json.dumps(document | {"dp_types_enc": ",".join(to_and_fro)}))
    with pytest.raises(PlanError, match="change strategies to and fro") as refused:
        read_launch_plan(path, given)
    assert str(path) in refused.value.where
    path.write_text(json.dumps(document | {"dp_types_enc": ",".join(["1"] * 32)}))
    plan = read_launch_plan(path, given)
    assert (plan.strategy.zero, plan.strategy.dp, plan.strategy.mbs, plan.layers) == (3, 8, 2, {"text": (32,)})
    (note,) = [note for note in describe_launch(path, given).notes if "vocabulary" in note]
    assert "its vocabulary is 1-4*-2f-sp and its layers are 1-1-8f" in note
    alike = {"use_sp": 1, "tp_sizes_enc": 4, "dp_types_enc": 0}
    path.write_text(json.dumps(document | {key: ",".join([str(value)] * 32) for key, value in alike.items()}))
    ulysses = read_launch_plan(path, given)
    assert (ulysses.strategy.tp, ulysses.strategy.cp, ulysses.strategy.cp_kind) == (1, 4, "all_to_all")
    path.write_text(json.dumps({key: value for key, value in document.items() if key != "world_size"}))
    with pytest.raises(JobError, match="--world-size"):
        read_launch_plan(path, replace(given, world_size=None))


SIZES = {"num_layers": 8, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 4, "gated": True, "norm": "rms"}


def write_job(folder: Path, **changes: Any) -> Path:
    """A decoder on two nodes of four devices."""
    cluster = {"num_nodes": 2, "devices_per_node": 4, "device": "a100-80g"}
    job = {
        "model": {"name": "small", "text": {"vocab_size": 32000, "layers": SIZES}},
        "cluster": cluster | changes.pop("cluster", {}),
        "workload": {"global_batch_size": 16, "seq_length": 2048},
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job | changes))
    return path


def test_costs_of_a_job_are_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profiles"
    assert main(["galvatron-profiles", str(write_job(tmp_path)), "--out", str(out)]) == 0
    assert "galvatron-search" in capsys.readouterr().err
    read_back = read_search(out / "search.yaml", [])
    job = read_job(tmp_path / "job.json")
    costs = block_costs(job, Strategy(pp=1, tp=1, dp=8, mbs=4, zero=0))
    forward_ms, parameters = costs["text_layer"].forward_ms, costs["text_layer"].parameter_count
    assert read_back.profile.layer_ms.at(4) == pytest.approx(forward_ms, rel=0.05)
    assert read_back.profile.parameter_mib == parameters * 4 / 2**20
    assert read_back.profile.layer_degrees == {1, 2, 4}  # of four heads
    halves = block_costs(job, Strategy(pp=1, tp=2, dp=4, mbs=1, zero=0))
    assert read_back.profile.activation(2) == halves["text_layer"].activation_bytes / 2**20
    hardware = read_back.hardware
    assert hardware.hop_ms(2) == pytest.approx(hardware.hop_ms(4), rel=0.01)  # both cross the nodes
    assert hardware.ring_ms(4, False) > hardware.ring_ms(4, True)
    assert hardware.overlap_factor >= 1
    found = search(Planner(read_back))
    assert found.is_proven
    assert found.best is not None
    assert found.best.plan.num_devices == 8
    assert main(["galvatron-search", str(out / "search.yaml")]) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster": {"num_nodes": 3}}, "it has 12 devices"),
        ({"model": "EXPERTS"}, "dense decoders with alike layers"),
    ],
)
def test_jobs_that_galvatron_has_no_profiles_for(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    if changes.get("model"):
        experts = {"num_experts": 8, "top_k": 2, "ffn_size": 512}
        changes = {"model": {"name": "small", "text": {"vocab_size": 32000, "layers": SIZES | {"experts": experts}}}}
    with pytest.raises(JobError) as refused:
        format_profiles(read_job(write_job(tmp_path, **changes)))
    assert words in str(refused.value)
    assert "job.json" in refused.value.where
