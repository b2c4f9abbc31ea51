"""Several modes a kind, host links and stages of unequal speed: bounds, path cuts, and what is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.mindformers.program import build_program
from mm_autoparallel.pipeline.certify.certificate import read_certificate, write_certificate
from mm_autoparallel.pipeline.certify.verify import verify
from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.placement.bounds.step import bound_step, work_bound_ms
from mm_autoparallel.pipeline.placement.patterns.mode_choices import undominated_rows
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Placement, Problem, counts_in_mode
from mm_autoparallel.pipeline.simulate.step import simulate

KINDS = (
    Mode("activation", 0.0, 0.2, 6.0),
    Mode("recompute", 0.0, 1.0, 1.0),
    Mode("offload", 0.0, 0.0, 2.0, 0.0, host_bytes=8.0),
)


def four_stages(link_ms: float, **more: object) -> Problem:
    """16 layers that keep 10 bytes each; the first stage would hold 160 bytes of activations and has room for 90."""
    layer = ChainBlock("layer", "text", 16, 1.0, 2.0, 0.0, 10.0, KINDS)
    problem = Problem(
        4, 1, 16, "1f1b", (layer,), (90.0,) * 4, (0.0,) * 4, (0.0,) * 4, (0.0,) * 3, (0.0,) * 3,
        host_ms_per_byte=(link_ms,) * 4,
    )  # fmt: skip
    return replace(problem, **more)  # type: ignore[arg-type]


def in_modes(problem: Problem, placement: Placement) -> dict[str, int]:
    return {mode.name: sum(map(sum, counts_in_mode(problem, placement, mode.name))) for mode in KINDS}


def test_offload_is_used_exactly_where_the_host_link_hides_it() -> None:
    """One stage computes 16 ms forth and must free 64 bytes: eight layers offloaded, of 8 bytes each. Up to 0.25 ms a
    byte the link hides all of them, and the step is that of no limit; a slower one hides 16 / (8 · link) of them, and
    the activation mode (4 bytes for 0.2 ms) frees the rest; beyond 2 ms a byte it hides none. Where there is memory,
    nothing moves, however fast the link."""
    layer = ChainBlock("layer", "text", 16, 1.0, 2.0, 0.0, 10.0, KINDS)
    for link_ms in (0.01, 0.1, 0.25, 0.3, 0.5, 1.0, 2.0, 2.5, 10.0):
        problem = Problem(
            1, 1, 8, "1f1b", (layer,), (96.0,), (0.0,), (0.0,), (), (), host_ms_per_byte=(link_ms,)
        )  # fmt: skip
        result = place(problem)
        assert result.status == "optimal"
        assert result.placement is not None
        hidden = min(8, int(16 / (8 * link_ms)))
        others = 2 * (8 - hidden)
        assert in_modes(problem, result.placement) == {"activation": others, "recompute": 0, "offload": hidden}
        assert result.step_ms == pytest.approx(8 * (48 + 0.2 * others))
        enough = place(replace(problem, memory_limit_bytes=(160.0,)))
        assert enough.placement is not None
        assert enough.placement.modes == (((0, 0, 0),),)


def test_a_slow_stage_holds_less() -> None:
    chain = (ChainBlock("layer", "text", 12, 1.0, 2.0),)
    problem = four_stages(0.0, chain=chain, num_microbatches=64, host_ms_per_byte=())
    even = place(problem)
    slow = place(replace(problem, stage_time_factor=(1.0, 3.0, 1.0, 1.0)))
    assert even.placement is not None
    assert slow.placement is not None
    assert [row[0] for row in even.placement.layers] == [3, 3, 3, 3]
    assert slow.placement.layers[1] == (1,)
    assert slow.status == "optimal"
    assert work_bound_ms(slow_problem := replace(problem, stage_time_factor=(1.0, 3.0, 1.0, 1.0))) == pytest.approx(
        64 * 36 / (3 + 1 / 3)
    )
    assert bound_step(slow_problem).step_ms <= slow.step_ms


def test_a_corrupted_certificate_of_modes_is_refused(tmp_path: Path) -> None:
    problem = four_stages(0.2)
    result = place(problem)
    assert result.placement is not None
    write_certificate(tmp_path / "c.json", problem, result)
    certificate = read_certificate(tmp_path / "c.json")
    assert verify(certificate).step_ms == result.step_ms
    none = Placement(result.placement.layers, (((0, 0, 0),),) * 4)
    with pytest.raises(PlanError, match="GB and its limit is"):
        verify(replace(certificate, placement=none))
    faster = replace(problem, host_ms_per_byte=(0.01,) * 4)
    with pytest.raises(PlanError, match=r"step_ms is|another placement takes .* offload \["):
        verify(replace(certificate, problem=faster))
    too_high_ms = result.step_ms * (1 + 1e-4)
    slowed = replace(problem, host_ms_per_byte=(2.0,) * 4)  # the same placement waits for its link: no optimum
    worse_ms = simulate(slowed, result.placement).step_ms
    assert worse_ms > too_high_ms
    for method in ("tree", "cuts"):
        claim = replace(certificate, problem=slowed, step_ms=worse_ms, lower_bound_ms=worse_ms, gap_fraction=0.0)
        cuts = {"cuts": (result.placement,)} if method == "cuts" else {}
        with pytest.raises(PlanError, match=r"another placement takes|its cuts do not prove it"):
            verify(replace(claim, method=method, **cuts))  # type: ignore[arg-type]
    text = (tmp_path / "c.json").read_text()
    (tmp_path / "c.json").write_text(text.replace('"offload": [', '"swap": [', 1))
    with pytest.raises(PlanError, match=r"swap|offload"):
        read_certificate(tmp_path / "c.json")


def test_the_linear_program_refuses_what_it_does_not_know() -> None:
    head = ChainBlock("head", "text", 1, 1.0, 2.0, layer=False, pinned="last")
    layer = ChainBlock("layer", "text", 8, 1.0, 2.0, 0.0, 10.0, KINDS[1:2])
    for changes, words in (
        ({"chain": (replace(layer, modes=(replace(KINDS[1], host_bytes=1.0),)), head)}, "traffic to the host"),
        ({"chain": (layer, head), "stage_time_factor": (1.0, 2.0, 1.0, 1.0)}, "unequal speed"),
    ):
        with pytest.raises(JobError, match=words):
            build_program(four_stages(1.0, **changes))


@pytest.mark.parametrize("num_columns", [1, 2, 3, 4, 5])
def test_rows_that_another_undercuts_are_left_out(num_columns: int) -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 5, (300, num_columns)) * np.array([1.0, 1e9, 1e-3, 7.0, 0.5])[:num_columns]
    kept, num_left = undominated_rows(values)
    assert num_left > 0
    assert undominated_rows(values, 100)[1] == -1
    for i, row in enumerate(values):
        rivals = [j for j in kept.tolist() if np.all(values[j] <= row)]
        assert rivals == [i] if i in kept else rivals
