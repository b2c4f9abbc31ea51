"""Galvatron for Paddle: its answer, its files, its flags, and small spaces against all assignments."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from featured_plans import PLANS as FEATURED

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.cli.main import main
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.galvatron.paddle import (
    PaddlePlanner,
    format_fine_grained,
    list_parts,
    list_spaces,
    map_to_trainer,
    read_fine_grained,
    read_flags,
    search_paddle,
)
from mm_autoparallel.integrations.galvatron.score import UPSTREAM, Extensions
from mm_autoparallel.integrations.galvatron.strategy_file import Assignment

FIXTURES = Path(__file__).parents[1] / "fixtures" / "galvatron" / "paddle"
ANSWER_SAMPLES_PER_S = 14.972619371427674
FILES = {"time_profile_data": "comp", "memory_profile_data": "mem", "overlap_coe": "ov", "allreduce_coe": "ar"}
FILES |= {"p2p_coe": "p2p", "sp_time": "sp"}


def flags_of(folder: Path = FIXTURES, **values: object) -> dict[str, Any]:
    """Of the answer's search, with these values."""
    flags: dict[str, Any] = {f"{name}_path": folder / f"{file}.json" for name, file in FILES.items()}
    flags |= {"time_profile_mode": "batch", "memory_profile_mode": "static", "search_granularity": "fine-grained"}
    flags |= {"hidden_size_list": 4096, "layernum_list": 32, "layernum": 32, "seqlen_list": 2048, "sp_space": "tp"}
    return flags | {"min_bsz": 16, "max_bsz": 16, "memory_upper_limit": 40} | values


def planner_of(is_as_is: bool = True, extensions: Extensions = UPSTREAM, **values: Any) -> PaddlePlanner:
    return PaddlePlanner(read_flags(flags_of(**values)), is_as_is, extensions)


def words_of(**values: object) -> list[str]:
    return [word for name, value in flags_of(**values).items() for word in (f"--{name}", str(value))]


def test_its_own_answer_is_scored_and_never_beaten_by_less() -> None:
    planner = planner_of()
    theirs = planner.score(read_fine_grained(FIXTURES / "fine_grained_config.json", 8))
    assert theirs.samples_per_s == pytest.approx(ANSWER_SAMPLES_PER_S, rel=1e-12)
    assert theirs.reserve_mib == int(40 * 1024 * 0.3)
    found = search_paddle(planner)
    assert found.best is not None
    assert found.is_proven
    assert found.best.samples_per_s == pytest.approx(ANSWER_SAMPLES_PER_S, rel=1e-12)
    assert min(found.best.remaining_mib) >= 0
    with_ulysses = search_paddle(planner_of(sp_space="tp+sp")).best
    assert with_ulysses is not None
    assert with_ulysses.samples_per_s > ANSWER_SAMPLES_PER_S * 1.005


def test_uneven_stages_and_what_the_formula_leaves_out_are_searched() -> None:
    values: dict[str, Any] = {"layernum": 7, "layernum_list": 7, "memory_upper_limit": 6, "max_tp_size": 2}
    every = PaddlePlanner(read_flags(flags_of(**values)), False, Extensions(counts_every_stage=True))
    uneven = PaddlePlanner(read_flags(flags_of(**values)), False, Extensions(spread=3))
    even, best = search_paddle(every), search_paddle(uneven)
    assert even.best is not None
    assert best.best is not None
    assert best.is_proven
    assert best.searched_s / best.best.plan.num_samples <= even.searched_s / even.best.plan.num_samples * (1 + 1e-12)
    resharded = search_paddle(planner_of(extensions=Extensions(counts_every_stage=True, counts_resharding=True)))
    assert resharded.best is not None
    assert resharded.searched_s == pytest.approx(resharded.best.whole_step_s, rel=1e-12)


def test_mended_slips_cost_what_they_left_out() -> None:
    """Checkpointed layers in plain tensor parallelism send half as much again."""
    plan = Assignment(
        tuple(layer for layer in tensor_parallel_layers()),
        tensor_parallel_ends(),
        (32,),
        16,
        1,
        "pipedream_flush",
        "zero2",
    )
    as_is, mended = (planner_of(is_as_is).score(plan).step_s for is_as_is in (True, False))
    assert mended > as_is * 1.01


def tensor_parallel_parts() -> Any:
    planner = planner_of()
    space = next(space for space in list_spaces(planner.flags) if space.pp == 1)
    return next(part for part in list_parts(planner, space, Counter()) if part.ends.tp == 2)


def tensor_parallel_layers() -> Sequence[Any]:
    part = tensor_parallel_parts()
    return [next(layer for layer in part.layers if layer.tp == 4 and layer.checkpoint)] * 32


def tensor_parallel_ends() -> Any:
    return tensor_parallel_parts().ends


def test_degree_1_alone_without_vocabulary_parallelism() -> None:
    """As its own search: 13.660857847761473 samples a second at 24 GB."""
    best = search_paddle(planner_of(disable_vtp=1, memory_upper_limit=24)).best
    assert best is not None
    assert {layer.degree for layer in best.plan.layers} | {best.plan.ends.degree} == {1}
    assert best.samples_per_s == pytest.approx(13.660857847761473, rel=1e-9)


def test_batches_are_cut_into_whole_samples() -> None:
    for batch in (12, 20, 24):
        best = search_paddle(planner_of(min_bsz=batch, max_bsz=batch)).best
        assert best is not None
        assert all(batch % (best.plan.chunks * layer.dp) == 0 for layer in best.plan.layers)
    plan = read_fine_grained(FIXTURES / "fine_grained_config.json", 8)
    with pytest.raises(PlanError, match="no multiple of 3 accumulation steps x DP 8"):
        planner_of().score(replace(plan, chunks=3))


def test_files_come_back(tmp_path: Path) -> None:
    for sp_space, batch in (("tp", 16), ("tp+sp", 16), ("tp+sp", 64)):
        best = search_paddle(planner_of(sp_space=sp_space, min_bsz=batch, max_bsz=batch)).best
        assert best is not None
        path = tmp_path / "fine_grained_config.json"
        path.write_text(format_fine_grained(best.plan))
        assert read_fine_grained(path, 8) == best.plan
        assert [*json.loads(path.read_text())] == [*json.loads((FIXTURES / "fine_grained_config.json").read_text())]
        trainer, notes = map_to_trainer(best.plan)
        assert trainer["sharding_parallel_degree"] == best.plan.layers[0].dp
        assert bool(notes) == (best.plan.ends.degree != best.plan.layers[0].degree)


@pytest.mark.parametrize(
    ("num_layers", "sp_space", "memory_gb"),
    [(2, "tp", 12), pytest.param(3, "tp+sp", 10, marks=pytest.mark.nightly), (3, "tp", 5)],
)
def test_small_spaces_against_all_assignments(num_layers: int, sp_space: str, memory_gb: int) -> None:
    sizes = {"layernum": num_layers, "layernum_list": num_layers, "world_size": 4, "profile_gpu_num": 4}
    planner = planner_of(
        sp_space=sp_space, memory_upper_limit=memory_gb, min_bsz=8, max_bsz=8, max_tp_size=2, max_pp_size=2, **sizes
    )
    right = float("inf")
    for space in list_spaces(planner.flags):
        parts = [*list_parts(planner, space, Counter())]
        for part in parts:
            for layers in itertools.product(part.layers, repeat=num_layers):
                batch = space.batch
                plan = Assignment(
                    layers, part.ends, part.mixing.layers, batch.samples, batch.chunks, "pipedream_flush", "zero2"
                )
                score = planner.score(plan)
                if min(score.remaining_mib) >= 0:
                    right = min(right, score.step_s)
    best = search_paddle(planner).best
    assert (best.step_s if best else float("inf")) == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"profile_gpu_num": 16}, "--profile_gpu_num is 16 and --world_size 8"),
        ({"layernum_list": 30}, "--layernum_list is 30 and --layernum 32"),
        ({"num_layertype": 2}, "--num_layertype is 2"),
        ({"search_granularity": "coarse-grained"}, "fine-grained is searched"),
        ({"sp_space": "sp"}, "one of tp, tp+sp"),
        ({"time_profile_mode": "hybrid"}, "one of static, batch, sequence"),
        ({"world_size": 0}, "--world_size is 0"),
        ({"sp_time_path": None}, "--sp_time_path is missing"),
        ({"min_bsz": 64}, "0 batch sizes"),
    ],
)
def test_flags_that_cannot_be_searched_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(JobError) as refused:
        read_flags(flags_of(**values))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"recompute_list": "1,0"}, "recompute_list has 2 layers"),
        ({"pp_stage_idx_list": ",".join(["1"] * 32)}, "does not hold the stages 0 to 0"),
        ({"sharding_stage_list": ",".join(["1"] * 32)}, "sharding_stage_list has a 1; 0 or 2 or 3"),
        ({"usp_flag_list": ",".join(["2"] * 32)}, "usp_flag_list has a 2"),
        ({"pp_size": 10**9}, "does not hold the stages 0 to 999999999"),
        ({"dp_size_list": ",".join(["4"] * 32)}, "which are not 8 devices"),
        ({"vsp_flag": "x"}, 'vsp_flag is "x"'),
        ({"vtp": 3}, "vtp is 3, which does not divide the 8 devices"),
        ({"tp_size_list": "a,b"}, "tp_size_list is"),
    ],
)
def test_files_that_do_not_add_up_are_refused(tmp_path: Path, values: dict[str, object], words: str) -> None:
    path = tmp_path / "fine_grained_config.json"
    path.write_text(json.dumps(json.loads((FIXTURES / "fine_grained_config.json").read_text()) | values))
    with pytest.raises(PlanError) as refused:
        read_fine_grained(path, 8)
    assert words in str(refused.value)
    assert str(path) in refused.value.where


def test_the_commands_take_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["galvatron-search", "--paddle", *words_of(sp_space="tp+sp")]) == 0
    told = capsys.readouterr()
    assert "for the trainer: sharding_parallel_degree 8" in told.out
    assert "takes its own degrees from the vocabulary's" in told.err
    path = tmp_path / "configs" / "fine_grained_config.json"
    assert main(["galvatron-score", str(path), "--paddle", "--as-is", *words_of(sp_space="tp+sp"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples_per_s"] > ANSWER_SAMPLES_PER_S
    for wrong, words in (
        (["config.yaml", "--paddle", *words_of()], "stands beside --paddle"),
        (["--world_size", "8"], "--world_size goes with --paddle alone"),
        (["--as-is"], "--as-is goes with --paddle alone"),
        ([], "CONFIG.yaml is missing"),
        (["--paddle", "--whole-samples", *words_of()], "cut into whole samples always"),
    ):
        assert main(["galvatron-search", *wrong]) == 2
        assert words in capsys.readouterr().err
    assert main(["galvatron-search", "--paddle", *words_of(memory_upper_limit=1)]) == 3


def test_a_spoilt_profile_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "paddle"
    shutil.copytree(FIXTURES, folder)
    document = json.loads((folder / "ar.json").read_text())
    (folder / "ar.json").write_text(json.dumps({key: value for key, value in document.items() if "_4" not in key}))
    with pytest.raises(JobError, match="allreduce_size_4") as refused:
        PaddlePlanner(read_flags(flags_of(folder)), is_as_is=True)
    assert "ar.json" in refused.value.where


def test_a_plan_by_layer_is_a_strategy_of_its_trainer(tmp_path: Path) -> None:
    """Each layer's ZeRO stage stands as it is; the vocabulary's is 0 or 3 where layers have strategies of their own."""
    plan = replace(FEATURED["layer_strategies"], strategy=replace(FEATURED["layer_strategies"].strategy, zero=3))
    out = tmp_path / "by_layer"
    export_plan(plan, None, "galvatron", out=out, version="paddle")
    document = json.loads((out / "fine_grained_config.json").read_text())
    layouts = {layout.name for layout in plan.strategy.layouts}
    assert layouts
    stages, degrees = (document[name].split(",") for name in ("sharding_stage_list", "tp_size_list"))
    assert len(stages) == sum(plan.layers["text"])
    assert len({*zip(stages, degrees, strict=True)}) == 1 + len(layouts)
    again = read_fine_grained(out / "fine_grained_config.json", plan.strategy.world_size)
    assert again.ends.dp_type == "zero3"
    flags = (out / "trainer_flags.txt").read_text()
    assert f"--pipeline_parallel_degree {plan.strategy.pp}\n" in flags
    for strategy, told in (
        (replace(plan.strategy, zero=2), "vocabulary has ZeRO 0 or 3"),
        (replace(plan.strategy, schedule="gpipe"), "runs 1f1b"),
    ):
        with pytest.raises(PlanError, match=told):
            export_plan(replace(plan, strategy=strategy), None, "galvatron", out=tmp_path / "no", version="paddle")
    assert not (tmp_path / "no").exists()
