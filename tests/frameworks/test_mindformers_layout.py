"""Plan → YAML → plan is the identity, and lists mean what MindFormers makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from edited import format_layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.mindformers.layout import (
    Layout,
    layout_changes,
    read_layout,
    selected_counts,
    stale_offset_notes,
    stale_selections,
)
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, read_pretrain

FIXTURES = Path(__file__).parents[1] / "fixtures" / "mindformers"
NAMES = ("512_4k", "512_8k", "512_8k_swap", "768_4k_gp")
STYLES = (
    "offset: 0\n",
    "offset: [1, 2] # given\n",
    "offset:\n    -   - 0 # zero\n        - 1\n",
    "# no offset\n",
)


def write(tmp_path: Path, text: str) -> Pretrain:
    path = tmp_path / "pretrain.yaml"
    path.write_text(text, encoding="utf-8")
    return read_pretrain(path)


def small(num_layers: int, pp: int, vp: int, style: str = "offset: 0\n", recompute: str = "") -> str:
    return f"""# small
model:
  model_config:
    type: LlamaConfig
    num_layers: {num_layers} # layers
    pp_interleave_num: {vp}
    {style}
parallel_config: {{pipeline_stage: {pp}, micro_batch_num: {4 * pp}}}
parallel: {{pipeline_config: {{pipeline_interleave: True}}}}
{recompute}"""


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, Layout]:
    vp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(2, 5))
    rows = st.lists(st.integers(1, 6), min_size=pp, max_size=pp)
    layers = draw(st.lists(rows, min_size=vp, max_size=vp))
    recompute = [[draw(st.integers(0, held)) for held in row] for row in layers]
    selected = [[draw(st.integers(0, held)) for held in row] for row in layers]
    pattern = draw(st.sampled_from([r"add", r".*\.norm", r"feed_forward\.w1\.reshape", None]))
    grid = tuple(map(tuple, selected))
    kept = (("select_recompute", pattern, grid),) if pattern and any(map(any, selected)) else ()
    return vp, pp, Layout(tuple(map(tuple, layers)), tuple(map(tuple, recompute)), kept)


@pytest.mark.slow
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layouts(), st.sampled_from(STYLES), st.sampled_from(["", "recompute_config: True\n", "recompute_config:\n  x: 1\n"])
)
def test_plan_to_yaml_to_plan_is_the_identity(
    tmp_path: Path, drawn: tuple[int, int, Layout], style: str, recompute: str
) -> None:
    vp, pp, layout = drawn
    num_layers = sum(map(sum, layout.layers))
    pretrain = write(tmp_path, small(num_layers, pp, vp, style, recompute))
    written = write(tmp_path, format_layout(pretrain, layout))
    assert read_layout(written) == layout
    assert format_layout(written, layout) == written.text
    assert "# small" in written.text
    assert "# layers" in written.text


@pytest.mark.parametrize("name", NAMES)
def test_a_published_yaml_changes_in_nothing_but_its_lists(tmp_path: Path, name: str) -> None:
    pretrain = read_pretrain(FIXTURES / f"{name}.yaml")
    rows = [pretrain.base_layers] * pretrain.num_virtual_stages
    rows[0] += pretrain.num_layers - sum(rows)
    layers = tuple(tuple(rows[c * pretrain.pp : (c + 1) * pretrain.pp]) for c in range(pretrain.vp))
    layout = Layout(layers, tuple((1,) * pretrain.pp for _ in layers))
    written = write(tmp_path, format_layout(pretrain, layout))
    assert read_layout(written) == layout
    assert [line.split("#")[-1] for line in pretrain.text.splitlines() if "#" in line] == [
        line.split("#")[-1] for line in written.text.splitlines() if "#" in line
    ]
    before, after = yaml.safe_load(pretrain.text), yaml.safe_load(written.text)
    assert list(before) == list(after)
    for document in (before, after):
        del document["model"]["model_config"]["offset"], document["recompute_config"]["recompute"]
    assert before == after


def test_published_lists_hold_62_layers() -> None:
    for name in ("512_4k", "512_8k_swap", "768_4k_gp"):
        layout = read_layout(read_pretrain(FIXTURES / f"{name}.yaml"))
        assert sum(map(sum, layout.layers)) == 62
    assert read_layout(read_pretrain(FIXTURES / "768_4k_gp.yaml")).layers == ((11, 10, 10, 11, 11, 9),)


def test_recompute_is_expanded_as_mindformers_does(tmp_path: Path) -> None:
    for value, expected in (
        ("False", ((0, 0), (0, 0))),
        ("True", ((2, 2), (2, 2))),
        ("[3, 1]", ((2, 1), (1, 0))),
        ("[[9, 0], [0, 1]]", ((2, 0), (0, 1))),
        ("[True, 1]", ((2, 1), (2, 0))),
        ("[[True, 1], False]", ((2, 1), (0, 0))),
    ):
        text = small(8, 2, 2, recompute=f"recompute_config: {{recompute: {value}}}\n")
        assert read_layout(write(tmp_path, text)).recompute == expected


def test_operators_of_all_layers_count_beside_counts_of_exchanges(tmp_path: Path) -> None:
    """`true` is all layers of each chunk (LayerSetting._format_recompute_list); by itself it is no choice of layers."""
    both = "recompute_config: {recompute: False, select_recompute: True, select_comm_recompute: [[1, 0], [0, 1]]}"
    found = read_layout(write(tmp_path, small(8, 2, 2, recompute=both)))
    assert selected_counts(found, "select_recompute") == found.layers == ((2, 2), (2, 2))
    assert selected_counts(found, "select_comm_recompute") == ((1, 0), (0, 1))
    alone = "recompute_config: {recompute: False, select_recompute: True}"
    assert read_layout(write(tmp_path, small(8, 2, 2, recompute=alone))).selected == ()


def test_a_flat_offset_counts_for_every_chunk(tmp_path: Path) -> None:
    assert read_layout(write(tmp_path, small(8, 2, 2, "offset: [1, -1]"))).layers == ((3, 1), (3, 1))


def test_counts_of_operators_that_the_plan_does_not_recompute_become_zero(tmp_path: Path) -> None:
    section = (
        "recompute_config:\n  select_recompute:\n    add: &x [1, 2]\n    mul: *x\n  select_comm_recompute: ['a']\n"
    )
    pretrain = write(tmp_path, small(8, 2, 1, recompute=section))
    assert read_layout(pretrain).selected == (
        ("select_recompute", "add", ((1, 2),)),
        ("select_recompute", "mul", ((1, 2),)),
        ("select_comm_recompute", "", ((4, 4),)),  # in all layers
    )
    layout = Layout(((4, 4),), ((0, 0),))
    changes = layout_changes(pretrain, layout)
    assert stale_selections(pretrain, changes) == [
        "select_recompute: its counts are set to 0; recompute is planned for whole layers"
    ]
    written = write(tmp_path, format_layout(pretrain, layout))
    assert "add: &x [0, 0]" in written.text
    assert read_layout(written) == layout
    assert stale_selections(written, layout_changes(written, layout)) == []


@pytest.mark.parametrize(
    ("style", "words", "is_stale"),
    [
        ("offset: [1]", "has a list of 1 numbers; pipeline_stage is 2", True),
        ("offset: [[1, 0], [0]]", "has a list of 1 numbers", True),
        ("offset: [[1, 0], 0]", "lists of whole numbers", True),
        ("offset: [[1, 0], [1, 0]]", "makes 10 layers", True),
        ("offset: [1, x]", "lists of whole numbers", False),
        ("offset: abc", 'holds "abc"', False),
    ],
)
def test_an_offset_of_other_stages_is_told_and_one_of_no_numbers_refused(
    tmp_path: Path, style: str, words: str, is_stale: bool
) -> None:
    pretrain = write(tmp_path, small(9, 2, 2, style))
    with pytest.raises(PlanError, match=r"model\.model_config\.offset") as caught:
        read_layout(pretrain)
    assert words in str(caught.value)
    if is_stale:
        (note,) = stale_offset_notes(pretrain)
        assert words in note
        assert note.startswith("model.model_config.offset")
    else:
        with pytest.raises(PlanError, match="whole numbers"):
            stale_offset_notes(pretrain)


@pytest.mark.parametrize("style", ["offset: 0\n", "offset: [1, 0]\n", ""])
def test_an_offset_that_fits_or_says_nothing_is_not_told_of(tmp_path: Path, style: str) -> None:
    assert stale_offset_notes(write(tmp_path, small(9, 2, 1, style))) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (small(9, 2, 2), "9 layers do not divide evenly over 2 stages of 2 chunks"),
        (small(9, 2, 2, "offset: [[1, 0], [1, 0]]"), "makes 10 layers and the model has 9"),
        (small(8, 2, 2, "offset: [[-3, 1], [1, 1]]"), "chunk 0 of stage 0"),
        (small(8, 2, 2, "offset: [[0, 0]]"), "has 1 chunks; pp_interleave_num is 2"),
        (small(8, 2, 2, recompute="recompute_config: {recompute: 3}\n"), "is 3; true, false or a list"),
        (small(8, 2, 2, recompute="recompute_config: {recompute: [[-1, 0], [0, 0]]}\n"), "holds -1"),
        (small(8, 2, 2, recompute="recompute_config: {recompute: [1]}\n"), "pipeline_stage is 2"),
        (small(8, 2, 2, recompute="recompute_config: {recompute: [-1, 0]}\n"), "holds -1"),
        (small(8, 2, 2, recompute="recompute_config: {recompute: [[true], [0, 0]]}\n"), "pipeline_stage is 2"),
    ],
)
def test_lists_that_do_not_fit_the_model_are_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_layout(write(tmp_path, text))
    assert words in str(caught.value)


def test_a_layout_of_another_model_is_refused(tmp_path: Path) -> None:
    pretrain = write(tmp_path, small(8, 2, 1))
    with pytest.raises(PlanError, match="holds 7 layers"):
        format_layout(pretrain, Layout(((4, 3),), ((0, 0),)))
    with pytest.raises(PlanError, match="1 of 2"):
        format_layout(pretrain, Layout(((2, 2), (2, 2)), ((0, 0), (0, 0))))
