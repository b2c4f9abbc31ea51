"""Galvatron 2.4.0: figures that it gave, small spaces against all assignments, its flags and what they refuse."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.cli.main import main
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.galvatron.release_2_4_0 import OlderPlanner, list_parts, list_spaces, search_older
from mm_autoparallel.integrations.galvatron.release_2_4_0_flags import read_flags
from mm_autoparallel.integrations.galvatron.score import UPSTREAM, Extensions
from mm_autoparallel.integrations.galvatron.strategy_file import Assignment, format_strategy, parse_strategy

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "examples" / "galvatron" / "profiles"
SCORED = ROOT / "tests" / "fixtures" / "galvatron" / "scored_by_2_4_0.json"
PATHS = ("memory_profiling", "time_profiling", "allreduce_bandwidth_config", "p2p_bandwidth_config", "sp_time")


def flags_of(**values: Any) -> dict[str, Any]:
    """Of the example, with these values."""
    flags: dict[str, Any] = {f"{name}_path": str(PROFILES) for name in (*PATHS, "overlap_coe")}
    flags |= {"model_size": "llama2-7b", "set_model_config_manually": 1, "hidden_size": 4096, "num_hidden_layers": 32}
    flags |= {"seq_length": 2048, "time_profile_mode": "batch", "default_dp_type": "zero2", "sequence_parallel": True}
    return flags | {"pipeline_type": "pipedream_flush", "memory_constraint": 36, "settle_bsz": 16} | values


def planner_of(extensions: Extensions = UPSTREAM, **values: Any) -> OlderPlanner:
    return OlderPlanner(*read_flags(flags_of(**values)), extensions)


def words_of(**values: Any) -> list[str]:
    words = ["--cost-model", "2.4.0"]
    for name, value in flags_of(**values).items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def test_it_scores_as_galvatron_2_4_0_did() -> None:
    """24 strategies drawn layer by layer; memory is told without the buffer, which every stage has alike."""
    scored = json.loads(SCORED.read_text())
    for each in scored:
        plan = each["strategy"]
        planner = planner_of(sp_space=each["sp_space"], pipeline_type=plan["pipeline_type"], memory_constraint=4000)
        ours = planner.score(parse_strategy(plan, "it", 8, "gpipe", "ddp", is_older=True))
        assert ours.step_s == pytest.approx(each["step_s"], rel=1e-9)
        assert len({own - other for own, other in zip(ours.stage_mib, each["mib"], strict=True)}) == 1
        assert json.loads(format_strategy(ours.plan)) == plan
    assert len(scored) == 24
    assert any("0" in each["strategy"]["tp_consecutive_flags"] for each in scored)


@pytest.mark.parametrize("sp_space", ["tp", "tp+sp"])
def test_no_assignment_of_a_small_space_is_faster(sp_space: str) -> None:
    """Three layers, every one of them under every strategy, whatever the lowest degree."""
    small = {"num_hidden_layers": 3, "sp_space": sp_space, "settle_bsz": 8, "settle_chunk": 2, "memory_constraint": 5}
    planner = planner_of(max_pp_deg=2, max_tp_deg=4, disable_ckpt=1, **small)
    found = search_older(planner)
    best = None
    for space in list_spaces(planner):
        for part in list_parts(planner, space, Counter()):
            for layers in itertools.combinations_with_replacement(part.layers, 3) if space.pp == 1 else ():
                plan = Assignment(layers, part.ends, (3,), 8, 2, "pipedream_flush", "zero2")
                score = planner.score(plan)
                if min(score.remaining_mib) >= 0 and (best is None or score.step_s < best):
                    best = score.step_s
            for layers in itertools.product(part.layers, repeat=3) if space.pp == 2 and len(part.layers) < 6 else ():
                score = planner.score(Assignment(layers, part.ends, (1, 2), 8, 2, "pipedream_flush", "zero2"))
                if min(score.remaining_mib) >= 0 and (best is None or score.step_s < best):
                    best = score.step_s
    assert found.best is not None
    assert best is not None
    assert found.is_proven
    assert found.best.step_s <= best * (1 + 1e-12)
    if found.best.plan.ends.pp == 1:
        assert found.best.step_s == pytest.approx(best, rel=1e-12)


def test_strided_devices_are_searched_until_they_are_switched_off() -> None:
    both, near = (search_older(planner_of(sp_space="tp+sp", disable_tp_consec=off)).best for off in (0, 1))
    assert both is not None
    assert near is not None
    assert any(layer.strided for layer in both.plan.layers)
    assert not any(layer.strided for layer in near.plan.layers)
    assert both.step_s < near.step_s
    assert both.counted_fraction == 1.0


def test_stages_and_resharding_count_where_it_is_asked() -> None:
    plain = search_older(planner_of(settle_bsz=64, memory_constraint=20)).best
    more = search_older(
        planner_of(Extensions(counts_every_stage=True, counts_resharding=True), settle_bsz=64, memory_constraint=20)
    )
    assert plain is not None
    assert more.best is not None
    assert more.searched_s == pytest.approx(more.best.whole_step_s, rel=1e-12)
    assert more.best.whole_step_s <= plain.whole_step_s * (1 + 1e-12)


def test_the_command_writes_what_it_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert main(["galvatron-search", *words_of(), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "proven"
    assert main(["galvatron-score", str(out), *words_of(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == found["step_s"]
    # its parser's other spellings, and what no figure depends on
    words = ["-s" if word == "--seq_length" else word for word in words_of()]
    words += ["-a", "32", "--make-vocab-size-divisible-by", "128", "--max_predictions_per_seq", "20"]
    assert main(["galvatron-score", str(out), *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == found["step_s"]


def test_models_are_known_by_name_or_by_flags() -> None:
    known = {"set_model_config_manually": 0, "model_size": "llama-7b", "set_layernum_manually": 1}
    with pytest.raises(JobError, match=r"no computation_profiling_bf16_llama-7b_all\.json .*hidden4096_head32"):
        read_flags(flags_of(**known))  # the example's profile has another name
    with pytest.raises(JobError, match=r"--model_size is 'mine'; one of llama-0\.3b"):
        read_flags(flags_of(set_model_config_manually=0, model_size="mine"))
    _, search = read_flags(flags_of(disable_sdp=1, disable_tp_consec=1))
    assert search.notes == ()
    assert search.file_name == (
        "galvatron_config_llama2-7b_1nodes_8gpus_per_node_36GB_bf16_bsz16_[sdp_tpconsec_off].json"
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"search_space": "all"}, "--search_space is 'all'; one of full"),
        ({"sp_space": "sp"}, "--sp_space is 'sp'; one of tp, tp"),
        ({"use_pipeline_costmodel": 0}, "finds nothing"),
        ({"disable_dp": 1, "search_space": "dp+pp"}, "no way to divide samples"),
        ({"memory_constraint": 0}, "memory_constraint"),
        ({"disable_vtp": 2}, "--disable_vtp is 2; 0 or 1 is expected"),
    ],
)
def test_flags_that_mean_nothing_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        read_flags(flags_of(**values))


def test_a_factor_of_times_makes_layers_slower() -> None:
    once, twice = (
        search_older(planner_of(costmodel_coe=factor, search_space="sdp", memory_constraint=80)).best
        for factor in (1.0, 2.0)
    )
    assert once is not None
    assert twice is not None
    assert once.step_s * 1.5 < twice.step_s < once.step_s * 2


def test_a_size_that_it_does_not_look_at_is_told(tmp_path: Path) -> None:
    for file in PROFILES.iterdir():  # under the name that 2.4.0 looks for
        (tmp_path / file.name.replace("llama2-7b_all", "llama-7b")).write_bytes(file.read_bytes())
    paths = {name: str(tmp_path) for name in flags_of() if name.endswith("_path")}
    named = {"model_size": "llama-7b", "set_model_config_manually": 0, "set_layernum_manually": 1}
    _, search = read_flags(flags_of(**paths, **named, num_hidden_layers=8))
    assert (search.num_layers, search.hidden_size) == (8, 4096)
    assert [note.split()[0] for note in search.notes] == ["--hidden_size", "--seq_length"]


def test_flags_go_with_their_search_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["--model_size", "llama-7b"], "--model_size goes with --cost-model 2.4.0 alone"),
        (["search.yaml", "--cost-model", "2.4.0"], "takes flags alone"),
        (["--cost-model", "2.4.0", "--world_size", "8"], "--world_size goes with --paddle alone"),
        (["--cost-model", "2.4.0", "--paddle"], "a cost model of its own"),
    ):
        assert main(["galvatron-search", *words]) == 2
        assert told in " ".join(capsys.readouterr().err.split())


def test_a_batch_that_it_does_not_cut_so_is_refused() -> None:
    planner = planner_of()
    plan = json.loads(SCORED.read_text())[0]["strategy"]
    with pytest.raises(PlanError, match=r"is not cut so by Galvatron 2\.4\.0"):
        planner.score(parse_strategy(plan | {"global_bsz": 9, "chunks": 4}, "it", 8, "gpipe", "ddp", is_older=True))
    with pytest.raises(PlanError, match=r"tp_consecutive_flags has a 0; 1 is expected"):
        parse_strategy(plan | {"tp_consecutive_flags": ",".join("0" * 32)}, "it", 8, "gpipe", "ddp")
