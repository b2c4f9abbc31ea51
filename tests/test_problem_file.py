"""PROBLEM.json: what is accepted, what it means, and how a mistake is told."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.problem import Mode
from mm_autoparallel.pipeline.problem_file import problem_document, read_problem

# The example of the format, shortened to two stages.
EXAMPLE: dict[str, Any] = {
    "schema": "mm-autoparallel/problem/1",
    "num_stages": 2,
    "num_chunks": 1,
    "num_microbatches": 64,
    "schedule": "1f1b",
    "p2p_ms": 0.0,
    "memory_limit_bytes": [51913000000, 52914000000],
    "stage_static_bytes": [0, 0],
    "max_layers_per_chunk": 20,
    "chain": [
        {
            "name": "dense",
            "modality": "text",
            "count": 3,
            "forward_ms": 0.397,
            "backward_ms": 0.730083,
            "static_bytes": 866000000,
            "activation_bytes": 479000000,
            "recompute": {"extra_backward_ms": 0.397, "activation_bytes": 30000000},
        },
        {
            "name": "head",
            "modality": "text",
            "count": 1,
            "pinned": "last",
            "layer": False,
            "forward_ms": 1.5,
            "backward_ms": 2.7585,
            "static_bytes": 0,
            "activation_bytes": 0,
            "recompute": None,
        },
    ],
}

Edit = Callable[[dict[str, Any]], object]

MODES = [
    {"name": "activation", "extra_forward_ms": 0.01, "extra_backward_ms": 0.1, "activation_bytes": 379000000},
    {"name": "offload", "activation_bytes": 30000000, "restored_bytes": 1000, "host_bytes": 479000000},
]


def with_modes(edit: Edit = lambda document: None) -> Edit:
    """The example with two modes of its first block, then `edit`."""

    def edit_modes(document: dict[str, Any]) -> None:
        del document["chain"][0]["recompute"]
        document["chain"][0]["modes"] = copy.deepcopy(MODES)
        document["chain"][0].update(host_static_bytes=1000, step_bytes=5, step_once_bytes=7, step_shard_bytes=0)
        document.update(host_ms_per_byte=2e-8, stage_time_factor=[1, 1.5], host_limit_bytes=[1e12, 2e12])
        edit(document)

    return edit_modes


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes the example with `edit` done to it."""

    def write_edited(edit: Edit = lambda document: None) -> Path:
        document = copy.deepcopy(EXAMPLE)
        edit(document)
        path = tmp_path / "problem.json"
        path.write_text(json.dumps(document))
        return path

    return write_edited


def test_the_example_of_the_format_reads(write: Callable[..., Path]) -> None:
    problem = read_problem(write())
    assert (problem.num_stages, problem.num_chunks, problem.num_microbatches) == (2, 1, 64)
    assert problem.memory_limit_bytes == (51913000000.0, 52914000000.0)
    assert problem.p2p_ms == (0.0,)
    assert problem.max_layers_per_chunk == 20
    dense, head = problem.chain
    assert dense.recompute == Mode(
        "recompute", extra_backward_ms=0.397, activation_bytes=30000000.0, restored_bytes=0.0
    )
    assert (head.pinned, head.layer, head.recompute) == ("last", False, None)
    assert problem.num_layers == 3


def test_defaults_and_numbers_for_lists(write: Callable[..., Path]) -> None:
    def edit(document: dict[str, Any]) -> None:
        for key in ("schema", "p2p_ms", "stage_static_bytes", "max_layers_per_chunk", "num_chunks"):
            del document[key]
        document["memory_limit_bytes"] = 5e10

    problem = read_problem(write(edit))
    assert problem.memory_limit_bytes == (5e10, 5e10)
    assert problem.stage_static_bytes == (0.0, 0.0)
    assert problem.stage_tail_ms == (0.0, 0.0)
    assert problem.max_layers_per_chunk is None


def test_a_hop_lies_between_every_two_virtual_stages(write: Callable[..., Path]) -> None:
    problem = read_problem(
        write(lambda d: d.update(num_chunks=3, num_microbatches=4, schedule="interleaved_1f1b", p2p_ms=0.5))
    )
    assert problem.p2p_ms == (0.5,) * 5


def test_optional_keys_of_a_block(write: Callable[..., Path]) -> None:
    def edit(document: dict[str, Any]) -> None:
        document["chain"][0].update(transient_bytes=7, attach="next", tail_ms=0.25, output_bytes=11)
        document["chain"][0]["recompute"]["restored_bytes"] = 13

    block = read_problem(write(edit)).chain[0]
    assert (block.transient_bytes, block.attach, block.tail_ms, block.output_bytes) == (7, "next", 0.25, 11)
    assert block.recompute is not None
    assert block.recompute.restored_bytes == 13


def test_comments_are_left_alone_at_every_level(write: Callable[..., Path]) -> None:
    def edit(document: dict[str, Any]) -> None:
        document.update(known={"best_step_ms": 3.0}, note="from a paper", _aside=[1, {"a": None}])
        document["chain"][0].update(source="measured", _n=3)

    assert read_problem(write(edit)) == read_problem(write())


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: None,
        lambda d: d.update(num_stages=1, memory_limit_bytes=7.5, stage_static_bytes=0, p2p_ms=[]),
        lambda d: d.update(
            num_chunks=2, schedule="interleaved_1f1b", p2p_ms=[0.1, 0.2, 0.3], max_layers_per_chunk=None
        ),
        lambda d: d["chain"][0].update(attach="next", microbatch_scale=[1.0, 0.5] * 32, sends_gradient=False),
    ],
)
def test_what_is_written_reads_back_as_the_same_problem(write: Callable[..., Path], tmp_path: Path, edit: Edit) -> None:
    problem = read_problem(write(edit))
    again = tmp_path / "again.json"
    again.write_text(json.dumps(problem_document(problem)))
    assert read_problem(again) == problem


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(schedule="2f2b"), r"schedule '2f2b' is not known.*interleaved_1f1b"),
        (lambda d: d.update(num_chunks=2), r"1f1b runs one chunk a stage and num_chunks is 2"),
        (lambda d: d.update(num_chunks=2, schedule="gpipe"), r"gpipe runs one chunk a stage"),
        (lambda d: d.update(num_stages=0), r"num_stages is 0; it must be at least 1"),
        (lambda d: d.update(num_stages=2.0), r"num_stages is 2\.0; a whole number"),
        (lambda d: d.update(num_stages=True), r"num_stages is true; a whole number"),
        (lambda d: d.pop("num_stages"), r"num_stages is missing"),
        (lambda d: d.update(num_stagez=2), r'num_stagez is not a key known here \(did you mean "num_stages"'),
        (lambda d: d.update(memory_limit_bytes=[1, 2, 3]), r"memory_limit_bytes has 3 entries; num_stages is 2"),
        (lambda d: d.update(memory_limit_bytes=[1, "2"]), r'memory_limit_bytes\[1\] is "2"; a number'),
        (
            lambda d: d.update(memory_limit_bytes=-5),
            r"memory_limit_bytes is -5; it must be at least 0",
        ),
        (lambda d: d.update(p2p_ms=[1, 2]), r"p2p_ms has 2 entries; there are 1 hops"),
        (lambda d: d.update(chain=[]), r"chain is empty"),
        (lambda d: d["chain"][0].update(forward_ms=-1), r"chain\[0\]\.forward_ms is -1; it must be at least 0"),
        (lambda d: d["chain"][0].update(forward_ms=float("nan")), r"NaN; every number must be finite"),
        (lambda d: d["chain"][0].update(count=0), r"chain\[0\]\.count is 0; it must be at least 1"),
        (
            lambda d: d["chain"][0].update(pinned="middle"),
            r"chain\[0\]\.pinned is \"middle\"; one of 'first' or 'last'",
        ),
        (lambda d: d["chain"][0]["recompute"].update(static=1), r"chain\[0\]\.recompute\.static is not a key"),
        (lambda d: d["chain"][1].update(name="dense"), r'two blocks called "dense"'),
        (lambda d: d["chain"][0].update(modes=MODES), r'block "dense" has both recompute and modes'),
        (with_modes(lambda d: d["chain"][0]["modes"][1].update(size=1)), r"chain\[0\]\.modes\[1\]\.size is not a key"),
        (with_modes(lambda d: d["chain"][0]["modes"][1].pop("name")), r"chain\[0\]\.modes\[1\]\.name is missing"),
        (
            with_modes(lambda d: d["chain"][0]["modes"][1].update(name="activation")),
            r'block "dense": two of its modes are called "activation"',
        ),
        (
            with_modes(lambda d: d.pop("host_ms_per_byte")),
            r'block "dense": mode "offload" moves 4\.79e\+08 bytes .* host_ms_per_byte does not say',
        ),
        (with_modes(lambda d: d.update(host_ms_per_byte=[1e-8])), r"host_ms_per_byte has 1 entries; num_stages is 2"),
        (with_modes(lambda d: d.update(host_ms_per_byte=-1)), r"host_ms_per_byte is -1; it must be at least 0"),
        (lambda d: d.update(stage_time_factor=[1, 0]), r"stage_time_factor\[1\] is 0; it must be above 0"),
        (
            with_modes(
                lambda d: [
                    d["chain"][0].update(recompute_group="all"),
                    d["chain"][1].update(recompute_group="all", modes=[{"name": "offload"}]),
                ]
            ),
            r'blocks "dense" and "head" are of one recompute_group, "all", .* activation, offload and offload',
        ),
        (
            lambda d: d["chain"][0].update(forward_ms=1e-320),
            r"chain\[0\]\.forward_ms is 1e-320; a number from 1e-12 to 1e\+15 is expected",
        ),
        (lambda d: d["chain"][0].update(forward_ms=1e100), r"chain\[0\]\.forward_ms is 1e\+100; it must be at most"),
        (lambda d: d.update(memory_limit_bytes=1e-300), r"memory_limit_bytes is 1e-300; a number from 1e-06 to"),
        (
            lambda d: d.update(stage_time_factor=[1e-320, 1]),
            r"stage_time_factor\[0\] is 1e-320; a number from 1e-06 to",
        ),
        (lambda d: d["chain"][1].update(microbatch_scale=[1.0]), r"chain\[1\]\.microbatch_scale has 1 entries"),
        (lambda d: d.update(num_microbatches=10**9), r"makes 4,000,000,000 forwards and backwards"),
        (lambda d: d.update(schema="mm-autoparallel/problem/2"), r"schema is \"mm-autoparallel/problem/2\""),
    ],
)
def test_a_mistake_is_told_by_file_key_and_value(write: Callable[..., Path], edit: Edit, message: str) -> None:
    path = write(edit)
    with pytest.raises(JobError, match=message) as raised:
        read_problem(path)
    assert str(raised.value).startswith(f"problem file {path}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no valid JSON"),
        (b'{"num_stages": 2', "no valid JSON"),
        (b'{"num_stages": 2, "num_stages": 3}', 'the key "num_stages" stands twice'),
        (b"\x00\x01\x02", "binary"),
        (b"[1, 2]", "a mapping of keys to values is expected"),
    ],
)
def test_what_is_no_document_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "problem.json"
    path.write_bytes(content)
    with pytest.raises(JobError, match=message):
        read_problem(path)


def test_modes_links_and_factors_come_back_as_they_were(write: Callable[..., Path], tmp_path: Path) -> None:
    problem = read_problem(write(with_modes()))
    dense = problem.chain[0]
    assert dense.modes == (
        Mode("activation", 0.01, 0.1, 379e6),
        Mode("offload", activation_bytes=30e6, restored_bytes=1000.0, host_bytes=479e6),
    )
    assert dense.recompute is None
    assert problem.host_ms_per_byte == (2e-8, 2e-8)
    assert problem.stage_time_factor == (1.0, 1.5)
    assert problem.host_limit_bytes == (1e12, 2e12)
    assert dense.host_static_bytes == 1000.0
    document = problem_document(problem)
    assert document["chain"][0]["modes"] == MODES
    assert (document["host_ms_per_byte"], document["stage_time_factor"]) == (2e-8, [1.0, 1.5])
    path = tmp_path / "again.json"
    path.write_text(json.dumps(document))
    assert read_problem(path) == problem


def test_one_mode_called_recompute_is_the_short_form(write: Callable[..., Path]) -> None:
    short = read_problem(write())
    assert {"modes", "host_ms_per_byte", "stage_time_factor"}.isdisjoint(problem_document(short))
    assert "modes" not in problem_document(short)["chain"][0]

    def write_long(document: dict[str, Any]) -> None:
        recompute = document["chain"][0].pop("recompute")
        document["chain"][0]["modes"] = [{"name": "recompute", **recompute}]

    assert read_problem(write(write_long)) == short
