"""Rendezvous: the nodes of one launch, joined through a key-value store that node 0 serves on the master port.

Node 0 leads. It compares what the nodes run, then tells each one step after the other (`step/0/NODE`, `step/1/NODE` and
so on), the last of which is the end with an exit code; the others do each step and say how it went. A node that is no
more heard from, or a lost connection, is an error on every other node. Whoever reaches the port can read and write the
store, so what is not sealed with the launch's token (documents.py) is followed by nobody.
"""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from mm_autoparallel.errors import BackendError, JobError
from mm_autoparallel.hooks import documents
from mm_autoparallel.hooks.fingerprint import Fingerprint, describe_difference
from mm_autoparallel.hooks.launch_token import HOW, launch_token
from mm_autoparallel.reports.terminal import say

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

POLL_S = 0.1
BEAT_S = 1.0
SILENCE_S = 60.0
"""Assumed: a node that works says so every second; a minute of silence is no longer a busy machine."""

LAST_WORD_S = 5.0
"""Assumed: how long node 0 stays for the others to hear the end."""


class Rendezvous:
    """The nodes' side of the store. One instance a node; `node_rank` 0 is the one that leads."""

    def __init__(self, store: TCPStore, node_rank: int, num_nodes: int, token: bytes) -> None:
        self._store, self.node_rank, self.num_nodes, self._token = store, node_rank, num_nodes, token
        self._nonce = secrets.token_hex(16)
        self._seals: dict[
            int, documents.Seal
        ] = {}  # with each other node; for other nodes than node 0, with node 0 alone
        self._doubted: set[int] = set()
        self._beaten_s, self._num_beats = 0.0, 0
        self._beats: dict[int, tuple[int, float]] = {}
        self._step = -1

    # ------------------------------------------------------------------------------------------------- keys and values

    def _read(self, key: str) -> bytes | None:
        """What stands under `key`, whoever wrote it; None where nothing does."""
        with _connected(self):
            return bytes(self._store.get(key)) if self._store.check([key]) else None

    def _put(self, key: str, other: int, document: BaseModel) -> None:
        """Tell node `other` something."""
        with _connected(self):
            self._store.set(key, self._seals[other].close(key, document))

    def _get(self, key: str, other: int, kind: type[documents.Document]) -> documents.Document | None:
        """What node `other` tells under `key`; None where it has not yet.

        Raises BackendError where somebody else wrote there.
        """
        text = self._read(key)
        if text is None:
            return None
        document = self._seals[other].open(key, text, kind)
        if document is None:
            raise BackendError(
                f"what node {self.node_rank} found as {key} was not written by node {other} of this launch: some other "
                "program writes to the port where nodes meet, and nothing that it says is followed; keep it away, or "
                "take another --master-port, and start all nodes again: what was profiled is kept"
            )
        return document

    def beat(self) -> None:
        """Say that this node is there; on node 0, look whether the others are. Raises BackendError where one is not."""
        now_s = time.monotonic()
        if now_s - self._beaten_s < BEAT_S:
            return
        self._beaten_s = now_s
        if self.node_rank:
            self._num_beats += 1
            self._put(f"beat/{self.node_rank}", 0, documents.Beat(count=self._num_beats))
            return
        for node in self._seals:
            beat = self._get(f"beat/{node}", node, documents.Beat)
            count = beat.count if beat else 0
            known, since_s = self._beats.get(node, (-1, now_s))
            self._beats[node] = (count, now_s) if count > known else (known, since_s)
            if now_s - self._beats[node][1] > SILENCE_S:
                raise BackendError(
                    f"node {node} has not been heard for {SILENCE_S:g} s; look there whether its launcher still runs, "
                    "then start all nodes again: what was profiled is kept"
                )

    # ----------------------------------------------------------------------------------------------------- the protocol

    def compare(self, mine: Fingerprint, timeout_s: float) -> None:
        """On node 0: wait for all nodes and compare what they run with `mine`; on others: show it.

        Raises JobError where a node has not come within `timeout_s`, has another token, or runs something else.
        """
        if self.node_rank:
            self._introduce(mine, timeout_s)
            return
        opening = documents.Seal(self._token, "opening").close("opening", documents.Opening(nonce=self._nonce))
        with _connected(self):
            self._store.set("opening", opening)
        ends_s = time.monotonic() + timeout_s
        hellos: dict[int, documents.Hello] = {}
        while len(hellos) < self.num_nodes - 1:
            missing = [node for node in range(1, self.num_nodes) if node not in hellos]
            hellos |= {node: hello for node in missing if (hello := self._meet(node))}
            if len(hellos) < self.num_nodes - 1 and time.monotonic() > ends_s:
                words = "node " + ", ".join(str(node) for node in missing if node not in hellos)
                raise JobError(
                    f"{words} of --nnodes {self.num_nodes} did not join within {timeout_s:g} s "
                    "(--auto-parallel-join-timeout); start the same command there with its own --node-rank"
                )
            time.sleep(POLL_S if len(hellos) < self.num_nodes - 1 else 0.0)
        for node, hello in sorted(hellos.items()):
            difference = describe_difference(mine, hello.model_dump(exclude={"nonce"}), node)
            if difference:
                raise JobError(difference)

    def _introduce(self, mine: Fingerprint, timeout_s: float) -> None:
        """On other nodes: make sure that node 0 knows the token, and show it that this node does."""
        ends_s = time.monotonic() + timeout_s
        while (text := self._read("opening")) is None:
            if time.monotonic() > ends_s:
                raise JobError(
                    f"what node {self.node_rank} reached as node 0 did not begin within {timeout_s:g} s "
                    "(--auto-parallel-join-timeout); check --master-addr and --master-port"
                )
            time.sleep(POLL_S)
        opening = documents.Seal(self._token, "opening").open("opening", text, documents.Opening)
        if opening is None:
            raise JobError(
                f"node {self.node_rank} has another launch token than node 0, so neither can trust the other: they "
                f"share no home folder; {HOW}"
            )
        pair, key = (opening.nonce, str(self.node_rank)), f"hello/{self.node_rank}"
        hello = documents.Seal(self._token, "hello", *pair).close(key, documents.Hello(nonce=self._nonce, **mine))
        with _connected(self):
            self._store.set(key, hello)
        self._seals[0] = documents.Seal(self._token, "pair", *pair, self._nonce)

    def _meet(self, node: int) -> documents.Hello | None:
        """On node 0: what `node` shows, once it does. What is not sealed for this launch is no node's: a message."""
        key, pair = f"hello/{node}", (self._nonce, str(node))
        text = self._read(key)
        if text is None:
            return None
        hello = documents.Seal(self._token, "hello", *pair).open(key, text, documents.Hello)
        if hello is not None:
            self._seals[node] = documents.Seal(self._token, "pair", *pair, hello.nonce)
        elif node not in self._doubted:
            self._doubted.add(node)
            say(f"warning: somebody without this launch's token says to be node {node}, and is not let in")
        return hello

    def lead(self, step: documents.TaskStep | documents.EndStep) -> None:
        """On node 0: tell the others the next step."""
        self._step += 1
        for node in self._seals:
            self._put(f"step/{self._step}/{node}", node, documents.Step(step=step))

    def follow(self) -> documents.TaskStep | documents.EndStep:
        """On other nodes: wait for the next step."""
        self._step += 1
        while (told := self._get(f"step/{self._step}/{self.node_rank}", 0, documents.Step)) is None:
            self.beat()
            time.sleep(POLL_S)
        return told.step

    def is_over(self) -> bool:
        """On other nodes: whether node 0 has gone on to the next step, so that the one at hand is void."""
        self.beat()
        return self._get(f"step/{self._step + 1}/{self.node_rank}", 0, documents.Step) is not None

    def say_done(self, outcome: documents.Outcome) -> None:
        """On other nodes: how the step at hand went."""
        self._put(f"done/{self._step}/{self.node_rank}", 0, outcome)

    def outcomes(self) -> dict[int, documents.Outcome]:
        """On node 0: node → how the step at hand went there, of those that have ended it."""
        told = {node: self._get(f"done/{self._step}/{node}", node, documents.Outcome) for node in self._seals}
        return {node: outcome for node, outcome in told.items() if outcome is not None}

    def adjourn(self, code: int, message: str) -> None:
        """On node 0: tell the others the end, and stay until they have heard it. Those that are gone are not missed."""
        try:
            self.lead(documents.EndStep(code=code, message=message))
            ends_s = time.monotonic() + LAST_WORD_S
            while time.monotonic() < ends_s and any(
                self._get(f"bye/{node}", node, documents.Bye) is None for node in self._seals
            ):
                time.sleep(POLL_S)
        except BackendError:
            return  # the store itself is gone, and with it the last way to reach them

    def leave(self) -> None:
        """On other nodes: say that the end was heard."""
        self._put(f"bye/{self.node_rank}", 0, documents.Bye())


class _connected:  # noqa: N801  (used as a statement)
    """Around calls of the store: a lost connection is an error for a person."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):  # all errors of torch.distributed's store are
            raise BackendError(
                f"node {self._rendezvous.node_rank} lost its connection to node 0 "
                f"({str(error).splitlines()[0][:200]}); look there for the reason, then start all nodes again: what "
                "was profiled is kept"
            ) from None


# ------------------------------------------------------------------------------------------------------------- joining


def open_rendezvous(host: str, port: int, num_nodes: int) -> Rendezvous:
    """On node 0: serve the store on `port`. Raises JobError where the port is taken or the address is none."""
    from mm_autoparallel.profilers.torch_releases import serve_store

    token = launch_token()
    listener = _listen(host, port)
    # A connection that was made waits for answers at most this long; waiting for other nodes is done by asking again.
    patience = timedelta(seconds=SILENCE_S)
    store = serve_store(host, listener, patience)
    return Rendezvous(store, 0, num_nodes, token)


def join_rendezvous(host: str, port: int, node_rank: int, num_nodes: int, timeout_s: float) -> Rendezvous:
    """On other nodes: connect to node 0. Raises JobError where it is not there within `timeout_s`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    ends_s, token = time.monotonic() + timeout_s, launch_token()
    resolve(host)
    while not _answers(host, port):
        if time.monotonic() > ends_s:
            raise JobError(
                f"node {node_rank} found no node 0 at {host}:{port} within {timeout_s:g} s "
                "(--auto-parallel-join-timeout); start the same command with --node-rank 0 there, and check "
                "--master-addr and --master-port"
            )
        time.sleep(POLL_S)
    try:
        patience = timedelta(seconds=min(SILENCE_S, max(1.0, timeout_s)))
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
    except RuntimeError as error:
        raise JobError(
            f"node {node_rank} reached {host}:{port}, but what answers there is no node 0 of this launch "
            f"({str(error).splitlines()[0][:200]}); check --master-addr and --master-port, or take another port"
        ) from None
    store.set_timeout(timedelta(seconds=SILENCE_S))
    return Rendezvous(store, node_rank, num_nodes, token)


def check_port(host: str, port: int) -> None:
    """Raises JobError where `port` of this machine is taken."""
    _listen(host, port).close()


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by itself, which no other can reach."""
    return ipaddress.ip_address(resolve(host)).is_loopback


def resolve(host: str) -> str:
    """The address of `host`. Raises JobError where it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]).split("%")[0]
    except OSError as error:
        raise JobError(
            f"--master-addr {host} is no address that this machine can find ({error.strerror or error}); give the "
            "name or address of node 0"
        ) from None


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `port`: of loopback where the master is addressed so, else of all interfaces."""
    address = resolve(host)
    loopback = ipaddress.ip_address(address).is_loopback
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Connections of an earlier launch that are still closing do not hold the port; one that listens does.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address if loopback else "", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror or error})"
        raise JobError(
            f"port {port} of node 0 {reason}; give another one with --master-port, the same on all nodes, or end the "
            "program that holds it"
        ) from None
    return listener


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False
