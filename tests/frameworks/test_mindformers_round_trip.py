"""Placement → YAML → placement is the identity, for one, two and four chunks a stage and every kind of recompute."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from edited import format_layout
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.mindformers.layout import read_layout
from mm_autoparallel.integrations.mindformers.memory_figures import LayerMemory, MemoryFigures, OtherRecompute
from mm_autoparallel.integrations.mindformers.pipeline_problem import (
    Ratios,
    build_pipeline_problem,
    layout_of,
    placement_of,
)
from mm_autoparallel.integrations.mindformers.pretrain_yaml import read_pretrain
from mm_autoparallel.integrations.mindformers.recompute_kinds import BOTH, COMM, SELECT
from mm_autoparallel.pipeline.modalities import placement_from_modalities
from mm_autoparallel.pipeline.problem import Placement

YAML = """model:
  model_config:
    type: DeepseekV3Config
    num_layers: {num_layers}
    mtp_depth: 1
    pp_interleave_num: {vp}
moe_config: {{expert_num: 4, first_k_dense_replace: 2}}
parallel_config: {{pipeline_stage: {pp}, micro_batch_num: {batches}}}
parallel: {{pipeline_config: {{pipeline_interleave: True}}}}
recompute_config:
  recompute: False
  {selected}
"""
SELECTED = (
    "select_comm_recompute: False",
    "select_recompute: {add: *x, mul: *x}",
    "select_recompute: [0, 0]",
    r"select_recompute: ['feed_forward\.mul', attention]",
    "select_comm_recompute: True\n  mp_comm_recompute: False\n  parallel_optimizer_comm_recompute: True",
)


@st.composite
def chunks(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int, int]], str]:
    """vp, pp and of each chunk its layers, and those recomputed whole, both ways and in one of the two alone."""
    vp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(2, 4))
    counts = []
    for _ in range(vp * pp):
        layers = draw(st.integers(1, 6))
        full = draw(st.integers(0, layers))
        both = draw(st.integers(0, layers - full))
        counts.append((layers, full, both, draw(st.integers(0, layers - full - both))))
    if sum(layers for layers, *_ in counts) < 4:
        counts[0] = (4, *counts[0][1:])
    return vp, pp, counts, draw(st.sampled_from([SELECT, COMM]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks(), st.sampled_from(SELECTED))
@example((1, 2, [(4, 0, 0, 0), (1, 0, 0, 1)], SELECT), SELECTED[-1])
def test_placement_to_yaml_to_placement(
    tmp_path: Path, drawn: tuple[int, int, list[tuple[int, int, int, int]], str], selected: str
) -> None:
    vp, pp, counts, alone = drawn
    num_layers = sum(layers for layers, *_ in counts) - 1
    grid = [[0] * pp for _ in range(vp)]
    selected = selected.replace("*x", "&x " + str(grid), 1).replace("[0, 0]", str(grid))
    path = tmp_path / "pretrain.yaml"
    path.write_text(YAML.format(num_layers=num_layers, vp=vp, pp=pp, batches=2 * pp, selected=selected))
    pretrain = read_pretrain(path)
    others = ((BOTH, 1.0), (SELECT, 2.0), (COMM, 3.0))
    memory = LayerMemory(1.0, 4.0, 0.0, tuple(OtherRecompute(*other) for other in others))
    figures = MemoryFigures(memory, memory, (0.0,) * 3, (1e12,) * 3, "test")
    problem = build_pipeline_problem(pretrain, Ratios(0.5, 2.0, 1.0, 0.3, 0.04), figures, "default")
    layers, full, both, some = ([row[i] for row in counts] for i in range(4))
    placement: Placement = placement_from_modalities(
        problem, {"text": layers}, {"text": full}, {"text": {BOTH: both, alone: some}}
    )
    path.write_text(format_layout(pretrain, layout_of(problem, placement)))
    written = read_pretrain(path)
    assert placement_of(problem, read_layout(written)) == placement
    assert format_layout(written, layout_of(problem, placement)) == written.text
    assert written.num_layers == num_layers + 1


def test_patterns_with_counts_of_their_own_are_no_placement(tmp_path: Path) -> None:
    path = tmp_path / "pretrain.yaml"
    counts = "select_recompute: {add: [1, 1], mul: [2, 1]}"
    path.write_text(YAML.format(num_layers=3, vp=1, pp=2, batches=4, selected=counts))
    pretrain = read_pretrain(path)
    assert yaml.safe_load(pretrain.text)["recompute_config"]["select_recompute"]["mul"] == [2, 1]
    memory = LayerMemory(1.0, 1.0, 0.0, (OtherRecompute(SELECT, 0.5),))
    figures = MemoryFigures(memory, memory, (0.0,) * 3, (1e12,) * 3, "test")
    problem = build_pipeline_problem(pretrain, Ratios(0.5, 2.0, 1.0, 0.3), figures, "default")
    with pytest.raises(PlanError, match="its patterns have different counts"):
        placement_of(problem, read_layout(pretrain))
