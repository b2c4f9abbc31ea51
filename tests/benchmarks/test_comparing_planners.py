"""What the comparison with other planners asks, and how it scores; the planners themselves are not here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import compare_planners
import pytest
from others import calculon, galvatron, llm_analysis, simumax
from others.layout import Answer, Layout, Predict, Source, Unsaid, layout_of
from others.rules import RULES, rank
from others.score import Asked, ask, follow_rules, list_asked
from others.sources import SOURCES, Missing, fetch, folder_of, load

from mm_autoparallel.measurements.catalog import read_table

HEADER = (
    "name,model,device,global_batch_size,seq_length,pp,tp,dp,mbs,recompute,num_layers,hidden_size,ffn_size,num_heads,"
    "num_kv_groups,vocab_size,attention,sequence_parallel,measured_ms,out_of_memory,note"
)
SIZES = "4,1024,2816,8,4,32000"
RUNS = (
    # pp, tp, dp, mbs, recompute, sequence parallel, measured
    (1, 1, 8, 1, "none", "true", "100"),
    (1, 2, 4, 1, "none", "true", "120"),
    (1, 2, 4, 1, "none", "false", "130"),
    (2, 1, 4, 2, "none", "true", "110"),
    (2, 2, 2, 2, "full", "true", "150"),
    (1, 1, 8, 2, "none", "true", ""),
)
OTHER_DEVICE = f"h,llama,h100-80g,64,2048,1,1,8,1,none,{SIZES},flash,true,90,false,kernel flash_attention2"
ALONE = f"alone,llama,a100-80g,128,2048,1,1,8,1,none,{SIZES},flash,true,200,false,kernel flash_attention2"
"""Of another batch: nothing to choose among."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    lines = [HEADER]
    for pp, tp, dp, mbs, recompute, divided, measured in RUNS:
        outcome = f"{measured},{'false' if measured else 'true'}"
        sizes = f"64,2048,{pp},{tp},{dp},{mbs},{recompute},{SIZES}"
        lines.append(f"r,llama,a100-80g,{sizes},flash,{divided},{outcome},kernel flash_attention2")
    path = tmp_path / "table.csv"
    path.write_text("\n".join([*lines, OTHER_DEVICE, ALONE]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def asked(table: Path) -> list[Asked]:
    return list_asked(read_table(table)[0], "a100-80g")[0]


@pytest.fixture
def layouts(asked: list[Asked]) -> list[Layout]:
    return [layout for _, layout in asked]


def test_rows_that_pose_a_choice_are_asked(table: Path) -> None:
    found, left_out = list_asked(read_table(table)[0], "a100-80g")
    assert len(found) == len(RUNS)
    assert left_out == {"the device is not a100-80g": 1, "its job has fewer than 4 timed layouts": 1}


def test_recomputation_is_a_choice_whatever_it_covers(table: Path) -> None:
    lines = table.read_text(encoding="utf-8").splitlines()
    rows = [f"{line},github Aleph-Alpha/somewhere" for line in lines[1:]]
    table.write_text("\n".join([f"{lines[0]},source", *rows]) + "\n", encoding="utf-8")
    cases = read_table(table)[0]
    assert [case.job.workload.known_facts.recomputes_ends for case in cases[:6]] == [False] * 4 + [True, False]
    assert len(list_asked(cases, "a100-80g")[0]) == len(RUNS)


def test_a_row_in_plain_numbers(layouts: list[Layout]) -> None:
    last = layouts[4]
    assert (last.num_layers, last.hidden_size, last.ffn_size, last.gated, last.vocab_size) == (
        4,
        1024,
        2816,
        True,
        32000,
    )
    assert (last.num_heads, last.num_kv_groups, last.head_size) == (8, 4, 128)
    assert (last.pp, last.tp, last.dp, last.mbs, last.num_devices, last.num_micro_batches) == (2, 2, 2, 2, 8, 16)
    assert last.layers_per_stage == (2, 2)
    assert (last.flash, last.zero, last.gradient_bytes) == (True, 1, 4.0)
    assert [layout.recompute for layout in layouts] == [False] * 4 + [True, False]
    assert [layout.sequence_parallel for layout in layouts] == [False, True, False, False, True, False]


def test_what_a_row_leaves_out_is_a_fact_of_its_software(table: Path) -> None:
    case = read_table(table)[0][0]
    said = [layout_of(replace(case, software=name)) for name in ("aleph-alpha", "megatron-core")]
    assert [layout.fused_norm for layout in said] == [False, True]
    assert [layout.overlap_grad_reduce for layout in said] == [False, True]


def test_what_nobody_else_can_say_is_refused(table: Path) -> None:
    case = read_table(table)[0][4]
    for plan, what in (
        (replace(case.plan, strategy=replace(case.plan.strategy, cp=2)), "context parallelism"),
        (replace(case.plan, recompute={"text": (1, 2)}), "recomputation of some layers"),
        (replace(case.plan, modes={"text": {"offload": (1, 0)}}), "a mode of layers"),
    ):
        with pytest.raises(Unsaid, match=what):
            layout_of(replace(case, plan=plan))


def knowing(asked: list[Asked], change: Callable[[float], float] = float) -> Predict:
    """A planner that knows every outcome, its steps changed."""
    outcomes = {layout: case for case, layout in asked}

    def predict(layout: Layout) -> Answer:
        case = outcomes[layout]
        return Answer(change(case.measured_ms or 50.0), 1.0, fits=not case.out_of_memory)

    return predict


def test_who_knows_all_has_no_regret(asked: list[Asked]) -> None:
    found = ask("knowing", knowing(asked, lambda step_ms: 0.5 * step_ms), asked)
    assert found.total is not None
    assert (found.total.num_groups, found.total.mean_fraction, found.total.num_failed) == (1, 0.0, 0)
    assert found.error_fraction == pytest.approx(0.5)
    assert found.fitted_error_fraction == pytest.approx(0.0, abs=1e-12)
    assert (found.num_missed, found.num_out_of_memory, found.num_false, found.num_ran) == (0, 1, 0, 5)


def test_who_knows_nothing_of_memory_fails_first(asked: list[Asked]) -> None:
    def predict(layout: Layout) -> Answer:
        return Answer(100.0 / layout.mbs + 10.0 * layout.pp, 1.0, fits=layout.pp == 1)

    found = ask("careless", predict, asked)
    assert found.total is not None
    assert found.total.num_failed == 1  # PP 1 TP 1 MBS 2 is its fastest, and ran out
    assert found.total.mean_fraction == 0.0  # then PP 1 TP 1 MBS 1
    assert found.total.ran_mean_fraction == pytest.approx(0.1)  # of those that ran PP 2 MBS 2 is its fastest
    assert (found.num_missed, found.num_false) == (1, 2)


def test_crashes_and_what_cannot_be_said_are_counted_and_never_picked(asked: list[Asked]) -> None:
    honest = knowing(asked)

    def predict(layout: Layout) -> Answer:
        print("chatter")
        if layout.tp == 1 and layout.pp == 1:
            raise ZeroDivisionError("no ring of one")
        if layout.recompute:
            raise Unsaid("no recomputation here")
        if layout.tp == 2:
            return replace(honest(layout), step_ms=float("nan"))
        return honest(layout)

    found = ask("fragile", predict, asked)
    assert found.crashed == {"ZeroDivisionError: no ring of one": 2, "ArithmeticError: a step of nan ms": 2}
    assert found.unsaid == {"no recomputation here": 1}
    assert found.num_predicted == 1
    assert found.total is not None
    assert found.total.mean_fraction == pytest.approx(0.1)  # against the best of all, which it could not see


def test_nothing_that_others_print_is_printed(asked: list[Asked], capsys: pytest.CaptureFixture[str]) -> None:
    ask("chatty", lambda layout: Answer(float(len(str(print("chatter")))), 1.0, fits=True), asked)
    assert capsys.readouterr().out == ""


def test_rules_of_thumb_by_hand(asked: list[Asked], layouts: list[Layout]) -> None:
    least, divided, largest = (rank(dict(enumerate(layouts)), key) for key in RULES.values())
    assert sorted(range(6), key=lambda index: least[index]) == [0, 5, 3, 1, 2, 4]
    assert sorted(range(6), key=lambda index: divided[index]) == [5, 0, 1, 2, 3, 4]
    assert sorted(range(6), key=lambda index: largest[index]) == [5, 3, 4, 0, 1, 2]
    regrets = [row.total.mean_fraction for row in follow_rules(asked) if row.total]
    assert regrets == pytest.approx([0.0, 0.0, 0.1])  # the one that ran out is known to, and passed over


def test_layouts_in_the_options_of_others(layouts: list[Layout]) -> None:
    plain, divided, last = layouts[0], layouts[1], layouts[4]
    assert calculon.application(last) == {
        "hidden": 1024, "feedforward": 4224, "seq_size": 2048, "attn_heads": 8, "attn_size": 128, "num_blocks": 4,
    }  # fmt: skip
    assert calculon.application(replace(last, gated=False))["feedforward"] == 2816
    said = [calculon.execution(layout)["activation_recompute"] for layout in (plain, replace(plain, flash=False), last)]
    assert said == ["attn_only", "none", "full"]
    assert [calculon.execution(layout)["tensor_par_comm_type"] for layout in layouts[:3]] == ["ar", "rs_ag", "ar"]
    assert llm_analysis.model_config(last)["num_key_value_heads"] == 4
    strategy = simumax.strategy(last)
    assert (strategy["recompute_granularity"], strategy["recompute_layer_num"]) == ("full_block", 4)
    assert strategy["micro_batch_num"] == 16
    assert simumax.strategy(divided)["enable_sequence_parallel"]
    uneven = simumax.strategy(replace(last, layers_per_stage=(10, 11, 11, 8)))
    assert (uneven["num_layers_in_first_pipeline_stage"], uneven["num_layers_in_last_pipeline_stage"]) == (10, 8)
    assert "num_layers_in_first_pipeline_stage" not in simumax.strategy(replace(last, layers_per_stage=(4, 3, 2, 3)))
    with pytest.raises(Unsaid, match="ZeRO 3"):
        simumax.strategy(replace(last, zero=3))


def test_galvatrons_profile_scales_to_itself(layouts: list[Layout]) -> None:
    profiled = replace(
        layouts[0], hidden_size=4096, ffn_size=11008, num_heads=32, num_kv_groups=32, vocab_size=32000, seq_length=2048
    )
    profile = {
        "layer": galvatron.fit_times({"layertype_0_bsz1_seq2048": 5.0, "layertype_0_bsz3_seq2048": 3.0}, "layertype_0"),
        "head": galvatron.fit_times({"layertype_other_bsz1_x": 2.0, "layertype_other_bsz2_x": 2.0}, "layertype_other"),
        "kept": {1: 500.0, 2: 250.0, "checkpoint": 32.0},
        **{end: {"model_states": {1: 8.0}, "activation": {1: 4.0}} for end in ("whole", "first", "last")},
    }
    assert profile["layer"] == pytest.approx([2.0, 3.0])  # 5 and 9 ms for one and three samples
    same = galvatron.scaled(profile, profiled)
    assert same["tp_activation_per_bsz_dict"] == pytest.approx(profile["kept"])
    assert same["forward_computation_time"] == pytest.approx([2.0, 3.0])
    longer = galvatron.scaled(profile, replace(profiled, seq_length=8192, vocab_size=128000, flash=False))
    assert longer["other_memory_pp_off"] == {"model_states": {1: 32.0}, "activation": {1: 64.0}}
    assert longer["tp_activation_per_bsz_dict"][2] == pytest.approx(1000.0 + 5 * 32 * 8192**2 / 2**20 / 2)
    assert longer["tp_activation_per_bsz_dict"]["checkpoint"] == pytest.approx(128.0)


def repository(folder: Path) -> tuple[Path, str]:
    """A git repository with one commit, and that commit."""
    made = folder / "upstream" / "planner"
    for name in ("stand_in/planner.py", "pictures/large.py"):
        (made / name).parent.mkdir(parents=True)
        (made / name).write_text("STEP_MS = 5.0\n", encoding="utf-8")
    who = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(made), *command], check=True, timeout=60)
    told = subprocess.run(
        ["git", "-C", str(made), "rev-parse", "HEAD"], check=True, capture_output=True, text=True, timeout=60
    )
    return made, told.stdout.strip()


def load_stand_in(folder: Path) -> Mapping[str, Predict]:
    from stand_in import planner

    return {"stand-in": lambda layout: Answer(planner.STEP_MS, 1.0, fits=True)}


def test_a_source_is_cloned_at_its_commit_and_imported_from_there(tmp_path: Path) -> None:
    made, commit = repository(tmp_path)
    source = Source("stand-in", str(made), commit, ("stand_in",), ("nothing",), load_stand_in)
    with pytest.raises(Missing, match="no checkout at"):
        load(source, tmp_path / "sources")
    fetch(source, tmp_path / "sources")
    fetch(source, tmp_path / "sources")  # what is there stays
    assert folder_of(source, tmp_path / "sources") == tmp_path / "sources" / "planner"
    assert not (tmp_path / "sources" / "planner" / "pictures").exists()
    before = list(sys.path)
    assert list(load(source, tmp_path / "sources")) == ["stand-in"]
    assert sys.path == before
    with pytest.raises(Missing, match=f"is at {commit}, and its adapter was written for 0+; check that out"):
        load(replace(source, commit="0" * 40), tmp_path / "sources")
    with pytest.raises(Missing, match=r"failed: .*nowhere"):
        fetch(replace(source, repository=str(tmp_path / "nowhere")), tmp_path / "sources")


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    made, commit = repository(tmp_path)

    def load_without(folder: Path) -> Mapping[str, Predict]:
        raise ModuleNotFoundError("No module named 'fire'")

    source = Source("stand-in", str(made), commit, ("stand_in",), ("fire", "numpy"), load_without)
    with pytest.raises(Missing, match=r"No module named .fire.\. It needs pip install fire numpy"):
        load(source, made.parent)


def test_the_command_says_what_it_could_not_compare(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["compare_planners.py", "--sources", str(tmp_path / "none"), "--groups", "--tables", str(table)]
    monkeypatch.setattr(sys, "argv", command)
    assert compare_planners.main() == 2
    out, err = capsys.readouterr()
    assert "6 rows in 1 groups" in out
    assert "| mm_autoparallel, uncalibrated | " in out
    assert "| no recomputation, then least TP, least PP, least micro-batch | 0.0% / 0.0% | – |" in out
    assert [line.split(":")[1].strip() for line in err.splitlines()] == [source.name for source in SOURCES]


def test_the_command_refuses_a_table_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["x", "--sources", str(tmp_path), "--tables", str(tmp_path / "no.csv")])
    assert compare_planners.main() == 2
    assert "no.csv" in capsys.readouterr().err


def test_what_is_not_better_is_named(asked: list[Asked]) -> None:
    ours = ask("ours", knowing(asked, lambda step_ms: 0.9 * step_ms), asked)
    twin = ask("twin", knowing(asked, lambda step_ms: 0.95 * step_ms), asked)
    worse = ask("worse", lambda at: Answer(100.0 / (at.mbs * at.dp) - at.pp, 1.0, fits=True), asked)
    judge = compare_planners.judge
    assert judge(ours, [worse]) == "ours: less regret than each, no more failures than each, less error than each"
    assert judge(ours, [worse, twin]) == (
        "ours: no less regret than twin, no more failures than each, no less error than twin"
    )
    assert judge(worse, [ours, twin]) == (
        "worse: no less regret than ours; twin, more failures than ours; twin, no less error than ours; twin"
    )
