"""A client of the SDK and a real server: what an assistant does with plans, and what it is refused."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

pytest.importorskip("mcp", reason="comes with the extra `mcp`")

from mcp.shared.exceptions import MCPError
from mcp_session import SMALL, Session

pytestmark = pytest.mark.slow

BEST = "auto_parallel_search_optimal_config.json"


@pytest.fixture(scope="module")
def planned(session: Session) -> dict[str, Any]:
    """The 72B job, planned."""
    return session.call("plan", job="job.yaml", time_limit_s=60, top_k=2)


@pytest.fixture(scope="module")
def moved(session: Session, planned: dict[str, Any]) -> dict[str, Any]:
    """Its plan with two layers moved."""
    return session.call(
        "edit", job="job.yaml", plan=BEST, out="moved.json", moves=[{"layers": 2, "from_stage": 0, "to_stage": 1}]
    )


def test_it_plans_the_72b(session: Session, planned: dict[str, Any]) -> None:
    best = planned["best"]
    written = json.loads((session.folder / BEST).read_text())
    assert planned["file"] == BEST
    assert best["step_ms"] == written["e2e_time"]
    assert planned["lower_bound_ms"] == written["lower_bound_ms"]
    assert 0 < planned["gap_fraction"] < 0.01
    assert best["fits"]
    assert best["low_step_ms"] < best["step_ms"] < best["high_step_ms"]
    assert sum(stage["layers"]["text"][0] for stage in best["stages"]) == 80
    assert all(stage["peak_memory_bytes"] < stage["memory_limit_bytes"] for stage in best["stages"])
    assert len(planned["runners_up"]) == 1
    assert len(planned["text"].split()) < 400
    assert best["strategy"] in planned["text"]
    assert f"wrote {BEST}" in planned["text"]


def test_it_moves_two_layers_and_simulates_again(
    session: Session, planned: dict[str, Any], moved: dict[str, Any]
) -> None:
    before, after = (one["stages"] for one in (planned["best"], moved["plan"]))
    assert after[0]["layers"]["text"][0] == before[0]["layers"]["text"][0] - 2
    assert after[1]["layers"]["text"][0] == before[1]["layers"]["text"][0] + 2
    assert moved["change"].startswith("step 89.08 s, +")
    assert moved["before_step_ms"] == planned["best"]["step_ms"] < moved["plan"]["step_ms"]
    again = session.call("simulate", job="job.yaml", plan="moved.json", out="moved_figures.json")
    assert again["plan"] == moved["plan"]
    assert json.loads((session.folder / "moved_figures.json").read_text())["step_ms"] == again["plan"]["step_ms"]


def test_it_takes_other_sizes_and_other_jobs(session: Session, planned: dict[str, Any]) -> None:
    four = session.call(
        "edit", job="job.yaml", plan=BEST, out="four.json", sizes="PP=4", modes=[{"stage": 0, "layers": 1}]
    )
    assert four["plan"]["strategy"].startswith("PP 4, TP 8, DP 4, ")
    assert four["plan"]["stages"][0]["recompute"]["text"] == [1]
    assert four["change"].startswith("step ")
    assert "ms (+" in four["change"]
    more = session.call("simulate", job="job.yaml", plan=BEST, changes={"workload.global_batch_size": 1024})
    assert more["plan"]["step_ms"] > 1.9 * planned["best"]["step_ms"]
    told = session.refusal("simulate", job="job.yaml", plan=BEST, changes={"workload.batch": 1024})
    assert "workload.batch is not a key known here" in told


def test_it_says_why_not_pp_8(session: Session, moved: dict[str, Any]) -> None:
    why = session.call("why_not", job="job.yaml", plan="moved.json", wish="PP=8", time_limit_s=5)
    assert why["asked"] == {"pp": 8}
    assert why["step_ms"] == moved["plan"]["step_ms"]
    assert why["status"] in ("solved", "dominated", "unfinished", "infeasible")
    assert why["sentences"][0].startswith("why not PP 8: ")
    assert why["text"].startswith("why not PP 8: ")
    if why["other_step_ms"] is not None:
        sums = [sum(one[side] for one in why["causes"]) for side in ("plan_ms", "other_ms")]
        assert sums == pytest.approx([why["step_ms"], why["other_step_ms"]])


def test_it_explains(session: Session, moved: dict[str, Any]) -> None:
    why = session.call("explain", job="job.yaml", plan="moved.json", against=[BEST], time_limit_s=2, out="why.json")
    whole = json.loads((session.folder / "why.json").read_text())
    assert why["step_ms"] == moved["plan"]["step_ms"] == whole["plans"][0]["step_ms"]
    assert [one.split(": ")[:2] for one in why["plans"]] == [["plan 1", "moved.json"], ["plan 2", BEST]]
    assert 0 < len(why["sources"]) <= 5
    assert all(0 <= one["share_fraction"] <= 1 for one in why["sources"])
    assert len(why["memory"]["left_bytes"]) == len(moved["plan"]["stages"])
    assert len(why["text"].split()) < 500


def test_it_writes_the_report(session: Session, moved: dict[str, Any]) -> None:
    page = session.call("report", job="job.yaml", plans=["moved.json", BEST], search=False)
    assert page["file"] == "plan.html"
    assert len(page["plans"]) == 2
    assert page["plans"][0].startswith("moved.json: PP 2, ")
    assert (session.folder / "plan.html").read_text().startswith("<!doctype html>")


def test_it_begins_a_job(session: Session) -> None:
    job = session.call(
        "init",
        model="llama3-8b",
        device="h100-80g",
        global_batch_size=64,
        seq_length=4096,
        more={"search": {"pp": [1, 2]}, "workload": {"stack": "megatron-te"}},
        out="new/llama.yaml",
    )
    assert job["parts"] == {"text": 32}
    assert "pp: [1, 2]" in (session.folder / "new" / "llama.yaml").read_text()
    assert "8 are assumed" in job["text"]


def test_it_reads_a_launch_and_writes_a_plan_into_it(session: Session) -> None:
    read = session.call("import_launch", file="train.sh", device="h100-80g")
    assert read["files"] == ["imported/job.yaml", "imported/plan.json"]
    assert read["plan"]["strategy"].startswith("PP 4, TP 2, DP 2, ")
    script = session.folder / "train.sh"
    before = script.read_text()
    whole: dict[str, Any] = {"plan": "imported/plan.json", "job": "imported/job.yaml", "framework": "megatron-core"}
    written = session.call("export_plan", **whole, into=["train.sh"], out="planned")
    assert written["files"] == ["planned/train.sh"]
    assert written["predicted"][0].startswith("Predicted of these files by themselves: ")
    assert script.read_text() == before
    assert "overwrite: true" in session.refusal("export_plan", **whole, into=["train.sh"])
    assert session.call("export_plan", **whole, out="new")["files"] == ["new/megatron_args.txt", "new/launch.sh"]
    assert os.access(session.folder / "new" / "launch.sh", os.X_OK)
    assert "no framework that plans are written for" in session.refusal("export_plan", **(whole | {"framework": "x"}))


def test_it_lints_a_launch(session: Session) -> None:
    found = session.call("lint", files=["train.sh"], device="h100-80g", out="found.json", sarif=True)
    assert found["errors"] == 0
    assert [one["rule"] for one in found["findings"]] == ["needless-recompute", "stage-imbalance"]
    assert found["findings"][0]["place"] == "train.sh:49"
    document = json.loads((session.folder / "found.json").read_text())
    assert document["version"] == "2.1.0"
    assert document["runs"][0]["results"][0]["ruleId"] == "needless-recompute"
    assert "is no file that starts a training" in session.refusal("lint", files=["problem.json"], device="h100-80g")
    assert "goes up by `..`" in session.refusal("lint", files=["../train.sh"])


def test_it_places_and_verifies(session: Session) -> None:
    placed = session.call("place", problem="problem.json", out="certificate.json")
    assert placed["status"] == "optimal"
    confirmed = session.call("verify", certificate="certificate.json")
    assert confirmed["step_ms"] == placed["step_ms"]
    certificate = session.folder / "certificate.json"
    certificate.write_text(certificate.read_text().replace('"lower_bound_ms": ', '"lower_bound_ms": 1'))
    told = session.refusal("verify", certificate="certificate.json")
    assert told.startswith("certificate certificate.json: lower_bound_ms is 1")


def test_progress_arrives_and_cancel_ends_a_search_with_what_it_found(session: Session) -> None:
    call = session.start("plan", job="job_vpp4.yaml", out="cancelled.json", time_limit_s=300)
    waited_s = time.monotonic() + 120
    while not any("best so far" in told for told in session.told):
        assert time.monotonic() < waited_s
        status = session.portal.call(session.client.call_tool, "status", {}).structured_content  # meanwhile it answers
        time.sleep(0.2)
    running = status["calls"][0]
    assert (running["tool"], running["state"]) == ("plan", "runs")
    told = next(told for told in session.told if "best so far" in told)
    assert "strategies" in told
    assert "gap" in told
    call.cancel()
    while True:
        (ended, *_) = session.call("status")["calls"]
        if ended["state"] != "runs":
            break
        assert time.monotonic() < waited_s
        time.sleep(0.1)
    assert ended["state"] == "cancelled"
    assert "step" in ended["words"]
    assert "wrote cancelled.json" in ended["words"]
    simulated = session.call("simulate", job="job_vpp4.yaml", plan="cancelled.json")
    assert simulated["plan"]["fits"]


@pytest.mark.nightly
def test_stop_ends_a_search_that_then_answers(session: Session) -> None:
    call = session.start("plan", job="job_vpp4.yaml", out="stopped.json", time_limit_s=300)
    waited_s = time.monotonic() + 120
    while not any("best so far" in told for told in session.told):
        assert time.monotonic() < waited_s
        time.sleep(0.1)
    session.portal.call(session.client.call_tool, "stop", {})
    result = call.result(timeout=60)
    assert not result.is_error
    assert result.structured_content["stopped"] == "interrupted"
    assert result.structured_content["file"] == "stopped.json"


def test_schemas_are_strict_and_name_units(session: Session) -> None:
    tools = {tool.name: tool for tool in session.portal.call(session.client.list_tools).tools}
    assert list(tools) == [
        *("plan", "simulate", "edit", "explain", "why_not", "report", "init"),
        *("export_plan", "import_launch", "lint", "place", "verify", "doctor", "status", "stop"),
    ]
    for tool in tools.values():
        assert tool.input_schema["additionalProperties"] is False
        for name, one in tool.input_schema.get("properties", {}).items():
            assert one["description"], name
            if one.get("type") == "string":
                assert one["maxLength"] <= 500, name
            if one.get("type") == "array":
                assert one["maxItems"] <= 1000, name
        assert len(tool.description or "") < 400
    floats = [
        name
        for tool in tools.values()
        for record in (tool.output_schema, *tool.output_schema.get("$defs", {}).values())
        for name, one in record.get("properties", {}).items()
        if one.get("type") == "number"
    ]
    assert floats
    units = ("_ms", "_s", "_bytes", "_fraction", "_probability")
    assert [name for name in floats if not name.endswith(units)] == []
    assert tools["simulate"].annotations.open_world_hint is False
    assert tools["status"].annotations.read_only_hint is True


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("plan", {}, "job is missing; a text is expected"),
        (
            "plan",
            {"job": "small.json", "time_limt_s": 3},
            'time_limt_s is not a key known here (did you mean "time_limit_s"?)',
        ),
        ("plan", {"job": "small.json", "time_limit_s": "9"}, 'time_limit_s is "9"; a number is expected'),
        ("plan", {"job": "small.json", "time_limit_s": 1e9}, "it must be at most 3,600"),
        ("plan", {"job": "small.json", "top_k": True}, "top_k is true; a whole number is expected"),
        ("plan", {"job": "small.json", "out": "plan.txt"}, "out is plan.txt; name it with the ending .json"),
        ("plan", {"job": "small.json", "out": ".hidden/plan.json"}, "names that begin with a dot are not written here"),
        ("plan", {"job": "small.json", "out": "small.json", "overwrite": True}, "which this call reads"),
        ("plan", {"job": "small.json", "out": "problem.json"}, "problem.json is there already and stays as it is"),
        ("plan", {"job": "small.json", "out": "../plan.json"}, "goes up by `..`"),
        ("plan", {"job": "../job.yaml"}, "../job.yaml goes up by `..`"),
        ("plan", {"job": "/etc/passwd"}, "/etc/passwd lies outside the folder that is served"),
        ("plan", {"job": ".env", "out": "a.json"}, ".env begins with a dot, and what is hidden is not opened here"),
        ("plan", {"job": "a\nb"}, "has characters that no file's name has here"),
        ("plan", {"job": "a" * 501}, "job is"),
        ("plan", {"job": "small.json", "out": "a" * 300 + ".json"}, "cannot be written: File name too long"),
        ("plan", {"job": "small.json", "out": "small.json/plan.json"}, "small.json is a link or no folder"),
        ("plan", {"job": "none.yaml", "out": "none.json"}, "there is no such file"),
        ("simulate", {"job": "small.json", "plan": "/dev/zero"}, "lies outside"),
        ("edit", {"job": "small.json", "plan": "none.json", "out": "b.json"}, "nothing to change"),
        (
            "edit",
            {"job": "small.json", "plan": "none.json", "out": "b.json", "moves": [{"layers": 0}]},
            "moves[0].layers is 0",
        ),
        ("why_not", {"job": "job.yaml", "plan": BEST, "wish": "PQ=8"}, "names no size of a strategy"),
        ("report", {"job": "job.yaml", "search": False, "out": "a.html"}, "leaves nothing to show"),
        (
            "init",
            {"model": "llama9", "device": "h100-80g", "global_batch_size": 1, "seq_length": 8, "out": "l.yaml"},
            "is not known",
        ),
        ("status", {"x": 1}, "x is not a key known here"),
    ],
)
def test_what_is_refused_is_refused_in_a_sentence(
    session: Session, planned: dict[str, Any], tool: str, arguments: dict[str, Any], words: str
) -> None:
    before = sorted(session.folder.iterdir())
    told = session.refusal(tool, **arguments)
    assert words in told
    assert "\n" not in told
    assert len(told) < 1500
    assert sorted(session.folder.iterdir()) == before


def test_links_and_pipes_are_refused(session: Session) -> None:
    outside = session.folder.parent / "secret.json"
    outside.write_text(json.dumps(SMALL | {"secret": 1}))
    (session.folder / "link.json").symlink_to(outside)
    (session.folder / "way").symlink_to(session.folder.parent)
    os.mkfifo(session.folder / "pipe.json")
    for name in ("link.json", "way/secret.json"):
        told = session.refusal("plan", job=name, out="linked.json")
        assert "is a link, and links are not followed here" in told
        assert "secret is" not in told
    assert "it is a named pipe" in session.refusal("plan", job="pipe.json", out="linked.json")
    assert "is a link" in session.refusal("plan", job="small.json", out="way/linked.json")
    assert "is a link" in session.refusal("plan", job="small.json", out="link.json", overwrite=True)
    assert not (session.folder.parent / "linked.json").exists()
    assert json.loads(outside.read_text())["secret"] == 1


@pytest.mark.parametrize(
    "named",
    [
        {"model": "../secret.json"},
        {"model": "/etc/passwd"},
        {"model": "named_link.json"},
        {"profiles": ["../"]},
        {"calibration": "../secret.json"},
    ],
)
def test_a_job_names_no_file_outside(session: Session, named: dict[str, Any]) -> None:
    (session.folder.parent / "secret.json").write_text(json.dumps(SMALL["model"]))
    if not (session.folder / "named_link.json").is_symlink():
        (session.folder / "named_link.json").symlink_to(session.folder.parent / "secret.json")
    (session.folder / "naming.json").write_text(json.dumps(SMALL | named))
    told = session.refusal("plan", job="naming.json", out="named.json")
    assert "outside" in told or "there is no file so called" in told or "nor the file" in told
    assert not (session.folder / "named.json").exists()


def test_huge_arguments_are_refused_and_the_server_lives_on(session: Session) -> None:
    assert "at most 100,000 are taken" in session.refusal("plan", job="small.json", out="x" * 2_000_000)
    lists = {"text": [1] * 40_000}
    assert "at most 100,000 are taken" in session.refusal(
        "edit", job="small.json", plan=BEST, out="b.json", layers=lists
    )
    assert session.call("status")["folder"] == str(session.folder)


def test_unknown_tools_are_refused(session: Session) -> None:
    with pytest.raises(MCPError, match="there is no tool 'calibrate'; there are plan, simulate"):
        session.start("calibrate").result(timeout=60)


def test_overwrite_replaces_the_file_that_out_names(session: Session, moved: dict[str, Any]) -> None:
    arguments = {"job": "job.yaml", "plan": "moved.json", "out": "moved.json"}
    back = [{"layers": 2, "from_stage": 1, "to_stage": 0}]
    assert "is there already" in session.refusal("edit", **arguments, moves=back)
    session.call("edit", job="job.yaml", plan="moved.json", out="copy.json", moves=back)
    again = session.call(
        "edit",
        **(arguments | {"plan": "copy.json", "out": "copy.json"}),
        overwrite=True,
        modes=[{"stage": 0, "layers": 1}],
    )
    assert again["plan"]["stages"][0]["recompute"]["text"] == [1]


def test_texts_are_cleaned(session: Session) -> None:
    """Names may hold what a terminal obeys or what reverses text."""
    model = SMALL["model"] | {"name": "evil\x1b[2J\u202e"}
    (session.folder / "evil.json").write_text(json.dumps(SMALL | {"model": model}))
    (session.folder / "evil_plan.json").write_text(
        json.dumps(
            {
                "parallel_config": {"PP": 2, "TP": 1, "DP": 2, "MBS": 1},
                "layer_placement": {"llm_layer_placement": [1, 1]},
                "layer_recompute": {"llm_layer_recompute": [0, 0]},
            }
        )
    )
    told = session.refusal("simulate", job="evil.json", plan="evil_plan.json")
    assert r"evil\x1b[2J\u202e has 8 text layers" in told
