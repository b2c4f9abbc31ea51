"""Plans that some checkouts cannot run, refused by the hook from what lies in the checkout; nothing of it is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.errors import PlanError
from mm_autoparallel.hooks.mindspeed_mm import arguments_under_plan, describe_pretraining, read_request
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Figures, Plan, plan_document

pytestmark = pytest.mark.usefixtures("told_on_terminal")  # the hook makes it so, and would leave it to other tests

FLAGS = (
    *("--seq-length", "32", "--global-batch-size", "8", "--micro-batch-size", "1"),
    *("--auto-parallel-image-tokens", "8", "--use-distributed-optimizer"),
)

Apply = Callable[..., list[str]]


@pytest.fixture
def apply(tmp_path: Path, model_json: Path, tiny_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Apply:
    """Puts plan and checkout in place: the tiny plan with other sizes, and what two files of a checkout say."""

    def run(
        strategy: Strategy,
        recompute: Sequence[int] = (0, 0),
        parts: str = "get_args()",
        context: str = "",
        more: Sequence[str] = (),
    ) -> list[str]:
        for name, text in (
            ("mindspeed_mm/utils/transformer_model_config.py", parts),
            ("mindspeed/features_manager/context_parallel/context_parallel_feature.py", context),
        ):
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("WORLD_SIZE", str(strategy.world_size))
        layers, text_again = {"vision": (6, 0), "text": (4, 6)}, (4, 1)
        plan = Plan(strategy, layers, {"vision": tuple(recompute), "text": text_again}, 8)
        figures = Figures(1.0, 1.0, 1.0, 0.0, (0.0,) * strategy.pp, 1.0, 0.0, {}, "")
        (tmp_path / "plan.json").write_text(json.dumps(plan_document(plan, figures)))
        given = ("--mm-model", str(model_json), "--auto-parallel-config", str(tmp_path / "plan.json"))
        return arguments_under_plan(read_request([*FLAGS, *given, *more]))

    return run


@pytest.fixture
def strategy(tiny_plan: Plan) -> Strategy:
    return replace(tiny_plan.strategy, tp=1, dp=1, mbs=1)


def unfreeze(path: Path, **text: object) -> None:
    """Vision trains, and every part has the keys of `text`."""
    document = json.loads(path.read_text())
    for part in (*document["image_encoder"].values(), document["text_decoder"]):
        part |= {"freeze": False, **text}
    path.write_text(json.dumps(document))


def test_what_runs_everywhere_runs(apply: Apply, strategy: Strategy) -> None:
    for parts in ("get_args()", "config.to_dict()"):
        assert "--variable-seq-lengths" in apply(strategy, parts=parts)


def test_parts_of_older_checkouts_are_told_by_model_json_alone(
    apply: Apply, strategy: Strategy, model_json: Path
) -> None:
    divided = replace(strategy, tp=2)
    assert "--sequence-parallel" in apply(divided)
    with pytest.raises(PlanError, match=r"TP 2 with sequence parallel.*\(2\.0 or 2\.1\).*\"SEQUENCE_PARALLEL\": false"):
        apply(divided, parts="config.to_dict()")
    assert "--sequence-parallel" not in apply(replace(divided, sequence_parallel=False), parts="config.to_dict()")
    unfreeze(model_json, sequence_parallel=True)
    assert "--sequence-parallel" in apply(divided, parts="config.to_dict()")


def test_older_checkouts_recompute_no_layer_of_a_qwen_tower(apply: Apply, strategy: Strategy, model_json: Path) -> None:
    unfreeze(model_json)
    apply(strategy, recompute=(2, 0))
    with pytest.raises(PlanError, match=r"it recomputes 2 vision layers.*rotary angles"):
        apply(strategy, recompute=(2, 0), parts="config.to_dict()")


def test_context_parallel_needs_what_divides_heads(apply: Apply, strategy: Strategy) -> None:
    ulysses, local = ("--context-parallel-algo", "ulysses_cp_algo"), ("--transformer-impl", "local")
    divided, newer = replace(strategy, cp=2), "args.transformer_impl"
    with pytest.raises(PlanError, match="CP 2, and without --transformer-impl local"):
        apply(divided, context=newer, more=ulysses)
    for context, more in ((newer, (*ulysses, *local)), ("", ulysses)):
        arguments = apply(divided, context=context, more=more)
        assert arguments[arguments.index("--context-parallel-size") + 1] == "2"


def test_blocks_of_older_checkouts_are_measured_whole(apply: Apply, strategy: Strategy, model_json: Path) -> None:
    """Parts of two ranks are measured under sequence parallel, which they are not told of."""
    request = read_request([*FLAGS, "--mm-model", str(model_json), "--auto-parallel-mm"])
    for parts, is_limited in (("get_args()", False), ("config.to_dict()", True)):
        apply(strategy, parts=parts)
        found = describe_pretraining(request, subject=None)
        assert (dict(found.search).get("tp") == (1,)) is is_limited
