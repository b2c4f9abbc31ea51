"""What nodes compare: versions, code and flags; which node it is makes no difference."""

from __future__ import annotations

import argparse

import pytest

from mm_autoparallel.hooks.fingerprint import describe_difference, take_fingerprint


def test_equal_nodes_do_not_differ() -> None:
    pytest.importorskip("torch")
    here = take_fingerprint(argparse.Namespace(nnodes=2, node_rank=0, master_addr="localhost", lr=0.1))
    there = take_fingerprint(argparse.Namespace(nnodes=2, node_rank=1, master_addr="node0", lr=0.1))
    assert describe_difference(here, there, 1) == ""


def test_each_difference_is_named() -> None:
    mine = {
        "versions": {"torch": "2.13.0"},
        "files": {"pretrain.py": "aa", "data.py": "bb"},
        "flags": {"seq_length": "32"},
    }
    other = {
        "versions": {"torch": "2.12.0"},
        "files": {"pretrain.py": "aa", "data.py": "cc"},
        "flags": {"seq_length": "64"},
    }
    told = describe_difference(mine, other, 3)
    assert "torch is 2.13.0 on node 0 and 2.12.0 on node 3" in told
    assert "the code of data.py differs" in told
    assert "--seq-length is 32 on node 0 and 64 on node 3" in told
    assert "pretrain.py" not in told
