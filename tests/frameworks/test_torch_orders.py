"""Orders as torch's CSV: read back, taken by torch, wrong ones named, whole backwards where nothing trains before."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from drawn_orders import draw_order

from mm_autoparallel.cli.main import main
from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.torch.schedule_csv import join_recomputed, join_untrained
from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, INPUT, PAIRED, WEIGHT, parse_order
from mm_autoparallel.pipeline.schedules.orders import find_deadlock
from mm_autoparallel.pipeline.schedules.torch_csv import Orders, read_csv, write_rows
from mm_autoparallel.pipeline.schedules.virtual_stages import virtual_stage

PROBLEM = Path(__file__).parents[2] / "examples" / "place" / "problem.json"


def drawn(number: int) -> list[Orders]:
    """Orders of all shapes: one chunk and several, V-shaped, forwards paired with the whole backward that follows."""
    rng, found = random.Random(11), []
    while len(found) < number:
        num_stages, num_microbatches = rng.randint(2, 5), rng.randint(1, 6)
        v_shaped = rng.random() < 0.4
        num_chunks = 2 if v_shaped else rng.randint(1, 3)
        stages = draw_order(rng, num_stages, num_chunks, num_microbatches, v_shaped)
        for order in stages:
            pairs = (order[:-1, 0] == FORWARD) & (order[1:, 0] == BACKWARD) & (order[:-1, 1:] != order[1:, 1:]).any(1)
            for place in np.flatnonzero(pairs):
                order[place, 0] = PAIRED if rng.random() < 0.5 else FORWARD
        if not find_deadlock(stages, num_chunks, v_shaped):  # a pair waits for what both of it wait for
            found.append(Orders(stages, num_chunks, num_microbatches, v_shaped))
    return found


def test_orders_are_read_back() -> None:
    for orders in drawn(150):
        found = read_csv(write_rows(orders.stages, orders.v_shaped), len(orders.stages))
        assert found.texts == orders.texts
        assert (found.num_chunks, found.num_microbatches, found.v_shaped) == (
            orders.num_chunks,
            orders.num_microbatches,
            orders.v_shaped,
        )


def test_torch_takes_them() -> None:
    """Its own checks and its simulator of messages find nothing, and it reads off where stages lie."""
    pytest.importorskip("torch")
    from torch.distributed.pipelining import schedules

    for orders in drawn(60):
        num_stages, num_virtual = len(orders.stages), len(orders.stages) * orders.num_chunks
        rows = [row.split(",") for row in write_rows(orders.stages, orders.v_shaped).splitlines()]
        order = {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
        ranks = schedules._validate_schedule(order, num_stages, num_virtual, orders.num_microbatches)
        assert ranks == {
            virtual_stage(chunk, stage, num_stages, orders.v_shaped): stage
            for chunk in range(orders.num_chunks)
            for stage in range(num_stages)
        }
        sent = schedules._add_send_recv(order, ranks.__getitem__, num_virtual)
        if not any("(" in text for text in orders.texts):  # the simulator knows no pairs
            schedules._simulate_comms_compute(sent, ranks.__getitem__, num_virtual)


def test_blanks_and_empty_lines_are_passed_over() -> None:
    assert read_csv("0F0,,0F1, 0B0,0B1,\r\n1F0,1I0,1F1,1W0,1B1\r\n\n").texts == (
        "0F0 1F0 0B0 1B0",
        "0F0 0I0 1F0 0W0 1B0",
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no rows"),
        ("0F0,0B0\n", "1 rows, and 2 pipeline ranks"),
        ("0F0,0B0\n\n1F0,1B0\n", "line 2: it has no actions"),
        ("0F0,0B0\n1F0,1X0\n", "line 2, cell 2: '1X0' is no action"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "line 1, cell 2: 0SEND_F0 is a message"),
        ("0F0,(0B0;0F1)OVERLAP_F_B,0B1\n1F0,1B0\n", "line 1, cell 2: (0B0;0F1)OVERLAP_F_B is no forward and whole"),
        ("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n", "then line 1, cell 2: stage 1 would lie on rank 1"),
        ("0F0,0B0\n1F0\n", "line 2 has no 0B0 or an I and a W"),
        ("0F0,0I0\n1F0,1B0\n", "line 1 has no 0W0"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n", "line 2 has no 1F0"),
        ("0F0,0B0,0W0\n1F0,1B0\n", "line 1 has 0W0 with no 0I0 before it"),
        ("0F0,0B0,0B0\n1F0,1B0\n", "line 1 has 0B0 twice"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "stage 0 waits with 0B0 for 0B0 of stage 1, stage 1 waits with 1F0"),
        ("0F0,0B0\n999999999F0,1B0\n", "wrong number"),
        ("0F999999999,0B0\n1F0,1B0\n", "wrong number"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str, told: str) -> None:
    with pytest.raises(PlanError) as error:
        read_csv(text, 2 if text.count("\n") < 3 and text else None)
    assert told in str(error.value)


def test_the_first_stage_that_trains_runs_whole_backwards() -> None:
    """It and those before it, and nothing else changes; the order ends, and torch finds no fault with it."""
    rng = random.Random(3)
    for orders in drawn(150):
        num_stages = len(orders.stages)
        num_frozen = rng.randrange(num_stages * orders.num_chunks)
        joined, told = join_untrained(orders, num_frozen)
        assert find_deadlock(joined.stages, joined.num_chunks, joined.v_shaped) == ""
        assert read_csv(write_rows(joined.stages, joined.v_shaped)).texts == joined.texts
        changed = []
        for stage, (before, after) in enumerate(zip(orders.stages, joined.stages, strict=True)):
            early = {
                chunk
                for chunk in range(orders.num_chunks)
                if virtual_stage(chunk, stage, num_stages, orders.v_shaped) <= num_frozen
            }
            assert not {kind for kind, chunk, _ in after.tolist() if chunk in early} & {INPUT, WEIGHT}
            changed += [row for row in before.tolist() if row[1] in early and row[0] == INPUT]
            others = [
                [row for row in order.tolist() if row[1] not in early or row[0] not in (INPUT, WEIGHT, BACKWARD)]
                for order in (before, after)
            ]
            assert others[0] == others[1]
        assert bool(told) == bool(changed)


def test_a_joined_backward_stands_where_nothing_is_delayed() -> None:
    """At the place of W; but where a frozen stage goes on only after its own, at the place of I."""
    orders = [parse_order(text) for text in ("0F0 0I0 1F0 0W0 1I0 1W0", "0F0 0I0 1F0 0W0 1I0 1W0")]
    late, told = join_untrained(Orders(tuple(orders), 1, 2, v_shaped=False), 0)
    assert late.texts == ("0F0 1F0 0B0 1B0", "0F0 0I0 1F0 0W0 1I0 1W0")
    assert told.startswith("virtual stage 0: each I and W is written as one B, because ")
    early, told = join_untrained(Orders(tuple(orders), 1, 2, v_shaped=False), 1)
    assert early.texts == ("0F0 1F0 0B0 1B0", "0F0 1F0 0B0 1B0")
    assert told.startswith("virtual stages 0, 1: ")
    frozen = tuple(parse_order(text) for text in ("0F0 0B0 1F0 1B0", "0F0 0I0 1F0 0W0 1I0 1W0"))
    assert join_untrained(Orders(frozen, 1, 2, v_shaped=False), 1)[0].texts == ("0F0 0B0 1F0 1B0", "0F0 0B0 1F0 1B0")


def test_recomputed_stages_run_whole_backwards_where_their_inputs_gradients_were_due() -> None:
    orders = tuple(parse_order(text) for text in ("0F0 1F0 0B0 1B0", "0F0 0I0 1F0 0W0 1I0 1W0"))
    joined, told = join_recomputed(Orders(orders, 1, 2, v_shaped=False), [0, 1])
    assert joined.texts == ("0F0 1F0 0B0 1B0", "0F0 0B0 1F0 1B0")
    assert told.startswith("virtual stage 1: each I and W is written as one B, because torch's W would run")


# ----------------------------------------------------------------------------------------------------- the command line


def test_a_named_schedule_goes_out_and_comes_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, sizes = tmp_path / "order.csv", ["--stages", "2", "--chunks", "2", "--micro-batches", "2"]
    assert main(["schedules", "export", "interleaved_1f1b", "--to", "torch", *sizes, "--out", str(out)]) == 0
    assert out.read_text() == "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n"
    assert main(["schedules", "import", str(out)]) == 0
    assert capsys.readouterr().out == "0F0 1F0 0F1 1F1 0B1 1B1 0B0 1B0\n0F0 1F0 0F1 0B1 1F1 1B1 0B0 1B0\n"
    assert main(["schedules", "import", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["num_chunks"], document["num_microbatches"], document["v_shaped"]) == (2, 2, False)


def problem(tmp_path: Path, **changes: object) -> Path:
    block = {"count": 2, "forward_ms": 1.0, "static_bytes": 1.0, "activation_bytes": 1.0}
    document = {
        "num_stages": 2,
        "num_microbatches": 2,
        "schedule": "given",
        "orders": ["0F0 1F0 0B0 1B0", "0F0 0I0 1F0 0W0 1I0 1W0"],
        "chain": [
            block | {"name": "vision", "modality": "vision", "backward_ms": 0.0},
            block | {"name": "text", "modality": "text", "backward_ms": 2.0, "backward_weight_ms": 1.0},
        ],
        "memory_limit_bytes": 100,
    }
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(document | changes))
    return path


def placement(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "placed.json"
    layers = {"vision": [2, 0], "text": [0, 2]}
    path.write_text(json.dumps({"schema": "mm-autoparallel/placement/1", "layers": layers} | changes))
    return path


def test_a_problem_and_its_placement_say_what_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first stage holds frozen layers alone, so the second one, the first that trains, runs whole backwards."""
    given, placed = problem(tmp_path), placement(tmp_path)
    export = ["schedules", "export", str(given), "--to", "torch"]
    assert main(export) == 2
    assert "'vision' has no backward, and which virtual stages" in capsys.readouterr().err
    assert main([*export, "--placed", str(placed)]) == 0
    result = capsys.readouterr()
    assert result.out == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert "virtual stage 1: each I and W is written as one B" in result.err
    assert main([*export, "--frozen-stages", "0"]) == 0
    result = capsys.readouterr()
    assert result.out == "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1W0,1I1,1W1\n"
    assert result.err == ""
    placement(tmp_path, layers={"vision": [1, 1], "text": [0, 2]})
    assert main([*export, "--placed", str(placed)]) == 0
    assert "virtual stage 1:" in capsys.readouterr().err


def test_an_order_that_was_found_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [["0F0", "1F0", "0I0", "0W0", "1I0", "1W0"], ["0F0", "0I0", "0W0", "1F0", "1I0", "1W0"]]
    free = problem(tmp_path, schedule="free", orders=[])
    placed = placement(tmp_path, order=words)
    for source in ([str(free), "--placed", str(placed)], [str(placed), "--frozen-stages", "1"]):
        assert main(["schedules", "export", *source, "--to", "torch"]) == 0
        assert capsys.readouterr().out == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    placement(tmp_path, order=words[:1])
    assert main(["schedules", "export", str(free), "--placed", str(placed), "--to", "torch"]) == 2
    assert "its order is of other stages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("export 1f1b --stages 2 --micro-batches 2", "--to is missing"),
        ("export 1f1b --to torch --stages 2", "the number of micro-batches is missing"),
        ("export 1f2b --to torch --stages 2 --micro-batches 2", "did you mean 1f1b"),
        ("export seq_1f1b_2 --to torch --stages 2 --micro-batches 2", "runs pieces of sequences"),
        ("export 1f1b --to torch --stages 2 --micro-batches 2 --frozen-stages 2", "so nothing trains"),
        ("export 1f1b --to torch --stages 2 --micro-batches 2 --frozen-stages -1", "below 0"),
        ("export 1f1b --to torch --stages 64 --micro-batches 999999", "more than 2,000,000 actions"),
        ("export PROBLEM --to torch --stages 2", "the number of stages goes with a schedule's name"),
        ("import FILE --stages 2", "--stages goes with export"),
        ("import FILE", "schedule FILE: it never ends: stage 0 waits with 0B0 for 0B0 of stage 1"),
    ],
)  # fmt: skip
def test_what_the_command_is_not_told_is_named(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "order.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    names = {"FILE": str(file), "PROBLEM": str(PROBLEM)}
    assert main(["schedules", *(names.get(word, word) for word in words.split())]) == 2
    assert told.replace("FILE", str(file)) in capsys.readouterr().err
