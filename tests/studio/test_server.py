"""The server, as its page and as those who should be refused see it."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from forked_cli import ForkedCli
from running_studio import COMMAND, Running

from mm_autoparallel.cli import studio
from mm_autoparallel.cli.main import main
from mm_autoparallel.studio.moments import FOLDER

pytestmark = pytest.mark.slow

Start = Callable[..., Running]
RunCli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def running(start: Start) -> Running:
    return start("job.yaml")


def revision(running: Running) -> int:
    number: int = running.ask("/status").document["revision"]
    return number


# ---------------------------------------------------------------------------------------------------------- who may ask


def test_the_address_gives_the_cookie_that_the_page_needs(running: Running) -> None:
    answer = running.ask(f"/?token={running.token}", headers={"Authorization": ""})
    assert answer.status == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    page = running.ask("/", headers={"Authorization": "", "Cookie": cookie.split(";")[0]})
    assert page.status == 200
    assert b"allow it for this address" in page.body  # where JavaScript is off
    for name in ("page.js", "page.css"):
        assert running.ask(f"/{name}", headers={"Authorization": "", "Cookie": cookie.split(";")[0]}).status == 200


@pytest.mark.parametrize("path", ["/", "/state", "/status", "/catalog", "/files/plan.json", "/page.js"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": ""},
        {"Authorization": "Bearer x"},
        {"Authorization": "", "Cookie": "mm_autoparallel_studio_1=x"},
        {"Authorization": "Bearer \u00e9"},
    ],
)
def test_nothing_without_the_token(running: Running, path: str, headers: dict[str, str]) -> None:
    answer = running.ask(path, headers=headers)
    assert answer.status == 401
    assert "the address that its terminal printed" in answer.document["error"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},  # a name that was let point at 127.0.0.1
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1:1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_sites_are_refused(running: Running, headers: dict[str, str]) -> None:
    before = revision(running)
    body = {"revision": before, "action": {"kind": "pin", "name": "theirs"}}
    assert running.ask("/do", body, headers).status == 403
    assert running.ask("/state", headers=headers).status == 403
    assert revision(running) == before


def test_forms_of_other_sites_are_refused(running: Running) -> None:
    body = json.dumps({"revision": revision(running), "action": {"kind": "pin", "name": "theirs"}}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert running.ask("/do", body, {"Content-Type": kind}).status == 415


def test_pages_may_run_their_own_script_alone(running: Running) -> None:
    for path in ("/", "/state", "/files/report.html", "/no-such"):
        policy = running.ask(path).headers.get("content-security-policy", "")
        if path != "/no-such":
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
    assert b"<script>" not in running.ask("/").body


def test_only_this_machine_is_listened_to(running: Running) -> None:
    port = int(running.base.rsplit(":", 1)[1])
    with socket.socket() as other:  # all of 127/8 is this machine, and the server has but one address of it
        other.settimeout(2)
        assert other.connect_ex(("127.0.0.2", port)) != 0


# ---------------------------------------------------------------------------------------------------- what they may say


def test_bodies_are_bounded_and_read_strictly(running: Running) -> None:
    long = running.ask("/do", b"[" * 1_000_001)
    assert long.status == 413
    for body, told in (
        (b"[" * 900_000, "the request"),
        (b"{", "Invalid JSON"),
        (b'{"revision": 0}', "action is missing"),
        (b'{"revision": 0, "action": {"kind": "run"}}', "action.kind"),
        (b'{"revision": NaN, "action": {"kind": "undo"}}', "revision"),
        (b'{"revision": 0, "action": {"kind": "undo", "path": "/etc"}}', "path"),
        (b"\xff", "the request"),
    ):
        answer = running.ask("/do", body)
        assert answer.status == 422, body[:40]
        assert told in answer.document["error"]
        assert len(answer.body) < 10_000


@pytest.mark.parametrize("name", ["..%2f..%2fetc%2fpasswd", "job_72b.json", ".mm-autoparallel-studio", "%00"])
def test_only_the_listed_files_are_given(running: Running, name: str) -> None:
    assert running.ask(f"/files/{name}").status == 404


def test_every_file_that_is_offered_is_given(running: Running, tmp_path: Path, run_cli: RunCli) -> None:
    for offer in running.ask("/state").document["files"]:
        answer = running.ask(f"/files/{offer['name']}")
        assert answer.status == 200
        assert answer.headers["content-disposition"] == f'attachment; filename="{offer["name"]}"'
        (tmp_path / offer["name"]).write_bytes(answer.body)
    (tmp_path / "model_72b.json").write_bytes((running.folder / "model_72b.json").read_bytes())
    done = run_cli("simulate", "job.yaml", "--config", "plan.json", "--json")
    assert done.returncode == 0, done.stderr
    state = running.ask("/state").document
    assert json.loads(done.stdout)["e2e_time"] == state["report"]["plans"][0]["step_ms"]


# ----------------------------------------------------------------------------------------------------- two pages, kills


def test_two_pages_do_not_undo_each_other(running: Running) -> None:
    seen = revision(running)
    answers = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(running.do(seen, kind="pin", name=f"page {n}").status))
        for n in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [200, 409, 409, 409, 409]
    state = running.ask("/state").document
    assert state["revision"] == seen + 1
    assert len(state["pins"]) == 1
    assert running.do(state["revision"], kind="unpin", name=state["pins"][0]).status == 200


@pytest.mark.nightly
def test_a_killed_server_has_all_of_it_again(start: Start, tmp_path: Path, folder: Path) -> None:
    for name in ("job.yaml", "model_72b.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    first = start("job.yaml", where=tmp_path)
    state = first.do(revision(first), kind="move", modality="text", source=0, target=1, count=1).document
    first.process.kill()
    first.process.wait()
    port = first.base.rsplit(":", 1)[1]
    again = start("--port", port, where=tmp_path)
    assert (again.base, again.token) == (first.base, first.token)  # the page that is open goes on
    kept = again.ask("/state").document
    told = {"message": "", "change": None}  # of the last action, which the new process has not seen
    assert kept | told == state | told
    busy = subprocess.run(
        [*COMMAND, "studio", "--port", port],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert busy.returncode == 2
    assert "in use" in busy.stderr or "runs already" in busy.stderr
    second = subprocess.run(
        [*COMMAND, "studio", "--port", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 2
    assert "a studio runs already in" in second.stderr
    assert again.end() == 0


def test_only_its_own_folder_is_written(start: Start, tmp_path: Path, folder: Path) -> None:
    for name in ("job.yaml", "model_72b.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    running = start("job.yaml", where=tmp_path)
    running.do(revision(running), kind="pin", name="../../x")
    running.do(
        revision(running),
        kind="job",
        model="qwen2-7b",
        device="h100-80g",
        num_nodes=1,
        global_batch_size=8,
        seq_length=512,
    )
    assert running.end() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml", "model_72b.json", FOLDER}
    assert (tmp_path / FOLDER).stat().st_mode & 0o077 == 0


def test_a_folder_that_leads_elsewhere_is_refused(tmp_path: Path, forked_cli: ForkedCli) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / FOLDER).symlink_to(tmp_path / "elsewhere")
    done = forked_cli.run(["studio", "--port", "0"], tmp_path / "here", 60)
    assert done.returncode == 2
    assert "is a link" in done.stderr
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "here" / FOLDER).unlink()
    (tmp_path / "here" / FOLDER).mkdir(mode=0o755)  # as a clone of somebody's folder has it, token and all
    done = forked_cli.run(["studio", "--port", "0"], tmp_path / "here", 60)
    assert done.returncode == 2
    assert "not this user's alone" in done.stderr


def test_pages_cannot_have_files_read_from_elsewhere(start: Start, tmp_path: Path, repository: Path) -> None:
    config = repository / "tests" / "fixtures" / "huggingface" / "qwen2_vl_2b.json"
    (tmp_path / "here").mkdir()
    (tmp_path / "outside.json").write_bytes(config.read_bytes())
    (tmp_path / "here" / "inside.json").write_bytes(config.read_bytes())
    (tmp_path / "here" / "link.json").symlink_to(tmp_path / "outside.json")
    running = start(where=tmp_path / "here")
    job = {"device": "h100-80g", "num_nodes": 1, "global_batch_size": 8, "seq_length": 2048}
    for model in ("../outside.json", str(tmp_path / "outside.json"), "link.json", "/etc/passwd"):
        refused = running.do(revision(running), kind="job", model=model, **job)
        assert refused.status == 422, model
        assert "vocab" not in refused.body.decode()
    assert running.do(revision(running), kind="job", model="inside.json", **job).status == 200
    assert "link.json" not in running.ask("/catalog").document["configs"]


# ------------------------------------------------------------------------------------------------------------- searches


def test_a_search_ends_cancelled_with_what_it_found(running: Running) -> None:
    began = revision(running)
    assert running.ask("/optimise", {"revision": began, "scope": "space", "limit_s": 300.0}).status == 202
    assert running.ask("/why-not", {"revision": began, "wish": "PP=8", "limit_s": 5.0}).status == 422  # one at a time
    moved = running.do(began, kind="move", modality="text", source=0, target=1, count=1)
    assert moved.status == 200  # a page goes on while it runs
    until = time.monotonic() + 120
    while time.monotonic() < until:
        work = running.ask("/status").document["work"]
        if work is None or work["best_ms"] is not None:
            break
        time.sleep(0.1)
    running.ask("/cancel", b"")
    running.wait()
    state = running.ask("/state").document
    assert state["answers"][-1]["question"] == "the best plan of the space"
    assert state["bound"]["lower_bound_ms"] is not None
    space = running.ask("/space").document
    assert space["search_revision"] == state["search_revision"]
    assert len(space["strategies"]["status"]) == 330
    page = running.do(state["revision"], kind="move", modality="text", source=0, target=1, count=1).document
    assert page["bound"]["lower_bound_ms"] is not None  # the bound still holds, and is not sought again
    assert page["bound"]["gap_fraction"] > state["bound"]["gap_fraction"]


def test_why_not_is_answered(running: Running) -> None:
    asked = {"revision": revision(running), "wish": "PP=8,TP=8", "limit_s": 20.0}
    assert running.ask("/why-not", asked).status == 202
    running.wait()
    answer = running.ask("/state").document["answers"][-1]
    assert answer["question"] == "why not PP 8 TP 8"
    assert any("takes" in line or "memory" in line or "over" in line for line in answer["words"])
    assert (
        "knows PP"
        in running.ask("/why-not", {**asked, "revision": revision(running), "wish": "XX=1"}).document["error"]
    )


def test_a_drag_is_simulated_and_certified_at_once(start: Start, tmp_path: Path) -> None:
    """16 stages and 256 micro-batches: the time that an action takes, server included, is printed."""
    (tmp_path / "job.yaml").write_text(
        "model: {name: m, text: {vocab_size: 128000, layers: {num_layers: 128, hidden_size: 8192, ffn_size: 28672, "
        "num_heads: 64, norm: rms}}}\n"
        "cluster: {num_nodes: 16, devices_per_node: 8, device: h100-80g}\n"
        "workload: {global_batch_size: 256, seq_length: 4096}\nsearch: {pp: [16], tp: [8], mbs: [1]}\n"
    )
    running = start("job.yaml", where=tmp_path)
    running.ask("/optimise", {"revision": revision(running), "scope": "space", "limit_s": 20.0})
    running.wait()
    took = []
    for number in range(15):
        state = revision(running)
        began = time.perf_counter()
        answer = running.do(state, kind="move", modality="text", source=number, target=number + 1, count=1)
        took.append(time.perf_counter() - began)
        assert answer.status == 200
        assert answer.document["bound"]["lower_bound_ms"] is not None
        assert running.do(answer.document["revision"], kind="undo").status == 200
    assert answer.document["report"]["plans"][0]["timeline"]["start"]["count"] == 16 * 256 * 2
    print(f"an action: median {np.median(took) * 1e3:.0f} ms, most {max(took) * 1e3:.0f} ms")


# ------------------------------------------------------------------------------------------------------------ bad input


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(studio, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert main(["studio"]) == 2
    assert 'pip install "mm-autoparallel[studio]"' in capsys.readouterr().err


def test_what_was_kept_and_spoilt_is_named_and_stays(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / FOLDER).mkdir(mode=0o700)
    kept = tmp_path / FOLDER / "session.json"
    for text in ("{", '{"revision": 1, "cursor": 7}', '{"moments": 1}'):
        kept.write_text(text)
        done = run_cli("studio", "--port", "0")
        assert done.returncode == 2
        assert "session.json" in done.stderr
        assert kept.read_text() == text
