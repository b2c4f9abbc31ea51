"""Nodes take orders from each other alone: whoever else reaches the port where they meet is not obeyed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("told_on_terminal")

torch = pytest.importorskip("torch")

from mm_autoparallel.errors import BackendError, JobError  # noqa: E402
from mm_autoparallel.hooks.documents import Bye, EndStep, Hello, Opening, Outcome, Seal, Step  # noqa: E402
from mm_autoparallel.hooks.launch_token import TOKEN, launch_token  # noqa: E402
from mm_autoparallel.hooks.rendezvous import Rendezvous, join_rendezvous, open_rendezvous  # noqa: E402

SECRET = "0123456789abcdef"
RUNS = {"versions": {"torch": "2"}, "files": {}, "flags": {}}
NONCE = "0" * 32


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, SECRET)


def stranger_s_store(port: int) -> Any:
    return torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def put(store: Any, key: str, text: str | bytes) -> None:
    """Set it, and wait until it is there: the store answers other connections before it has heard of this one."""
    store.set(key, text)
    store.get(key)


@pytest.fixture
def met(free_port: int) -> tuple[Rendezvous, Rendezvous, Any]:
    """Node 0 and node 1 of a launch, which have compared what they run, and a stranger who has reached their port."""
    first = open_rendezvous("127.0.0.1", free_port, 2)
    second = join_rendezvous("127.0.0.1", free_port, 1, 2, 5.0)
    joining = threading.Thread(target=second.compare, args=(RUNS, 5.0))
    joining.start()
    first.compare(RUNS, 5.0)
    joining.join()
    return first, second, stranger_s_store(free_port)


def test_steps_and_outcomes(met: tuple[Rendezvous, Rendezvous, Any]) -> None:
    first, second, _ = met
    first.lead(EndStep(code=3, message="nothing fits \udc80"))
    assert second.follow() == EndStep(code=3, message="nothing fits \\udc80")
    second.say_done(Outcome(failure="x" * 200_000, told=True))
    while not (outcomes := first.outcomes()):
        time.sleep(0.01)
    assert outcomes[1].told
    assert not second.is_over()
    second.beat()
    first.beat()


END = {"kind": "end", "code": 0, "message": "\x1b]0;owned\x07"}


@pytest.mark.parametrize(
    "forged",
    [
        json.dumps(END),
        json.dumps({"step": END}),
        "[1]",
        "x{",
        "[" * 200_000,
        "",
        "\x00\xff",
        Seal(b"f" * 16, "pair", NONCE, "1", NONCE).close("step/0/1", Step(step=EndStep(**END))),
        "0" * 64 + " " + json.dumps({"step": END}),
    ],
    ids=range(9),
)
def test_what_a_stranger_says_is_not_followed(met: tuple[Rendezvous, Rendezvous, Any], forged: str) -> None:
    first, second, stranger = met
    put(stranger, "step/0/1", forged)
    with pytest.raises(BackendError, match=r"found as step/0/1 was not written by node 0 of this launch"):
        second.follow()
    first.lead(EndStep(code=0, message=""))
    put(stranger, "done/0/1", forged)
    with pytest.raises(BackendError, match=r"found as done/0/1 was not written by node 1 of this launch"):
        first.outcomes()


def test_nothing_that_was_said_can_be_said_again_elsewhere(met: tuple[Rendezvous, Rendezvous, Any]) -> None:
    first, second, stranger = met
    first.lead(EndStep(code=0, message=""))
    assert isinstance(second.follow(), EndStep)
    for key in ("step/1/1", "bye/1", "done/0/1"):
        put(stranger, key, stranger.get("step/0/1"))
    with pytest.raises(BackendError, match="step/1/1"):
        second.is_over()
    with pytest.raises(BackendError, match="done/0/1"):
        first.outcomes()


def test_nothing_of_an_earlier_launch_fits(free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A false node 0 that has recorded one knows the token's seal on its opening, and gets no further."""
    earlier = Seal(SECRET.encode(), "opening").close("opening", Opening(nonce=NONCE))
    step = Seal(SECRET.encode(), "pair", NONCE, "1", NONCE).close("step/0/1", Step(step=EndStep(code=0, message="")))
    hello = Seal(SECRET.encode(), "hello", NONCE, "1").close("hello/1", Hello(nonce=NONCE, **RUNS))
    false = torch.distributed.TCPStore("127.0.0.1", free_port, is_master=True, wait_for_workers=False)
    put(false, "opening", earlier)
    put(false, "step/0/1", step)
    node = join_rendezvous("127.0.0.1", free_port, 1, 2, 5.0)
    node.compare(RUNS, 5.0)
    with pytest.raises(BackendError, match="was not written by node 0 of this launch"):
        node.follow()
    put(false, "hello/1", hello)
    leader = Rendezvous(false, 0, 2, SECRET.encode())
    with pytest.raises(JobError, match=r"node 1 of --nnodes 2 did not join within 0\.3 s"):
        leader.compare(RUNS, 0.3)
    assert capsys.readouterr().err.count("somebody without this launch's token says to be node 1") == 1


def test_a_node_that_a_stranger_was_before_still_comes_in(free_port: int) -> None:
    first = open_rendezvous("127.0.0.1", free_port, 2)
    put(stranger_s_store(free_port), "hello/1", "x{")
    leading = threading.Thread(target=first.compare, args=(RUNS, 5.0))
    leading.start()
    second = join_rendezvous("127.0.0.1", free_port, 1, 2, 5.0)
    second.compare(RUNS, 5.0)
    leading.join()
    first.lead(EndStep(code=0, message=""))
    assert isinstance(second.follow(), EndStep)


def test_another_token_is_told_at_once(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_rendezvous("127.0.0.1", free_port, 2)
    with pytest.raises(JobError, match="node 1 of --nnodes 2 did not join"):
        first.compare(RUNS, 0.1)
    monkeypatch.setenv(TOKEN, "fedcba9876543210")
    second = join_rendezvous("127.0.0.1", free_port, 1, 2, 5.0)
    with pytest.raises(JobError, match=r"another launch token than node 0.* MM_AUTOPARALLEL_TOKEN in their"):
        second.compare(RUNS, 5.0)


def test_a_sealed_document_of_another_version() -> None:
    seal = Seal(SECRET.encode())
    with pytest.raises(BackendError, match=r"the document step/0/1 .* \(step: .*same version"):
        seal.open("step/0/1", seal.close("step/0/1", Bye()).encode(), Step)
    assert seal.open("bye/1", seal.close("bye/1", Bye()).encode() + b" " * 10_000_000, Bye) is None


# --------------------------------------------------------------------------------------------------------- where from


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(TOKEN)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mm-autoparallel" / "launch-token"


def test_launchers_of_one_home_share_a_token_that_only_its_user_reads(home: Path) -> None:
    tokens: list[bytes] = []
    launchers = [threading.Thread(target=lambda: tokens.append(launch_token())) for _ in range(8)]
    for launcher in launchers:
        launcher.start()
    for launcher in launchers:
        launcher.join()
    assert len(tokens) == 8
    assert len(set(tokens)) == 1
    assert len(tokens[0]) == 64
    assert home.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in home.parent.iterdir()] == ["launch-token"]


def readable(path: Path) -> None:
    path.chmod(0o640)


def short(path: Path) -> None:
    path.write_text("abc\n")


def linked(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


@pytest.mark.parametrize("spoil", [readable, short, linked], ids=lambda spoil: spoil.__name__)
def test_a_file_that_cannot_be_trusted(home: Path, spoil: Callable[[Path], None]) -> None:
    launch_token()
    spoil(home)
    with pytest.raises(JobError, match=f"launch token {home}: "):
        launch_token()


@pytest.mark.parametrize("given", ["", "short", "€" * 20, "\x1b" * 20])
def test_a_token_that_others_could_guess(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(TOKEN, given)
    with pytest.raises(JobError, match=r"launch token \$MM_AUTOPARALLEL_TOKEN: it has .*openssl rand -hex 16"):
        launch_token()
