"""The hook for a MindSpeed-MM checkout: search and plans where `training.pretrain` branches on --auto-parallel-mm.

Either the first line of the script,

    import mm_autoparallel.hooks.mindspeed_mm as planner; planner.install()

or no change at all: `python -m mm_autoparallel.hooks.mindspeed_mm pretrain_vlm.py …` (behind torchrun: `-m` likewise).
It has to come before MindSpeed is imported, which patches Megatron by what the command line says.
"""

from __future__ import annotations

import argparse
import functools
import importlib.abc
import importlib.machinery
import operator
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from mm_autoparallel import hooks
from mm_autoparallel.errors import JobError, PlanError, PlannerError
from mm_autoparallel.files import read_document, write_text_atomically
from mm_autoparallel.hooks.arrival import Arrival
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.mindspeed_mm.arguments import (
    decoder_settings,
    find_argument,
    find_switch,
    planned_arguments,
    profile_arguments,
)
from mm_autoparallel.integrations.mindspeed_mm.checkout import (
    MINDSPEED,
    counts_chunks,
    divides_any_attention,
    find_package,
    tells_parts,
)
from mm_autoparallel.integrations.mindspeed_mm.flags import DISPATCHER, MODEL
from mm_autoparallel.integrations.mindspeed_mm.launch import describe_arguments
from mm_autoparallel.integrations.mindspeed_mm.live_config import cut_model, recompute_of_stage
from mm_autoparallel.integrations.mindspeed_mm.model_json import SECTIONS, read_model_json
from mm_autoparallel.integrations.mindspeed_mm.plan_files import model_json_with_plan
from mm_autoparallel.integrations.mindspeed_mm.plan_law import check_plan, has_frozen_stage
from mm_autoparallel.integrations.mindspeed_mm.refusals import (
    SUPPORTED,
    check_dispatcher,
    check_entry,
    check_flags,
)
from mm_autoparallel.integrations.mindspeed_mm.search_space import IMPLEMENTATION, LOCAL
from mm_autoparallel.model.job.mindspeed_mm_law import older_reasons
from mm_autoparallel.model.job.model import Adapters, Model
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.profilers.launch import TASK
from mm_autoparallel.reports.terminal import say, warn, writing
from mm_autoparallel.streams import tell_on_terminal

OLDER_PARTS = "a checkout of 2.0 or 2.1 does not tell a model's parts of --sequence-parallel, as blocks are measured"

TRAINING = "mindspeed_mm.training"
"""The module whose `pretrain` a script calls."""

Pretrain = Callable[..., None]


@dataclass(frozen=True)
class Request:
    """What the command line asks of the planner, and what is left of it for Megatron."""

    flags: argparse.Namespace
    rest: tuple[str, ...]

    @property
    def concerns_planner(self) -> bool:
        """Whether a model is measured or a plan searched in this process, in place of training."""
        return bool(TASK in os.environ or self.flags.auto_parallel_mm)


def install() -> None:
    """Have `mindspeed_mm.training.pretrain` ask the planner first, and put a plan that is given on the command line.

    Where the command line or the plan is wrong, the process ends: one paragraph, exit code 2.
    """
    tell_on_terminal()
    try:
        request = read_request(sys.argv[1:])
        if request.concerns_planner or request.flags.auto_parallel_config is not None:
            check_entry(sys.argv[0])
        if TASK in os.environ:
            sys.argv[1:] = profile_arguments(request.rest, int(os.environ["WORLD_SIZE"]))
        elif request.flags.auto_parallel_config is not None and not request.flags.auto_parallel_mm:
            sys.argv[1:] = arguments_under_plan(request)
    except PlannerError as error:
        if os.environ.get("RANK", "0") == "0":
            say(str(error))
        sys.exit(error.exit_code)
    if TRAINING in sys.modules:
        raise RuntimeError(f"{TRAINING} is imported already; call install() in the first line of the script")
    arrival = Arrival(Path(sys.argv[0]).name, f"{TRAINING}.pretrain", SUPPORTED)
    if request.concerns_planner:
        arrival.watch()
    sys.meta_path.insert(0, _Finder(lambda pretrain: take_over(pretrain, request, arrival.arrive)))


def read_request(arguments: Sequence[str]) -> Request:
    """What of a script's `arguments` is the planner's. Raises SystemExit where one of those is malformed."""
    parser = argparse.ArgumentParser(prog=Path(sys.argv[0]).name, allow_abbrev=False, add_help=False)
    hooks.add_arguments(parser)
    group = parser.add_argument_group("MindSpeed-MM")
    for name in ("image-tokens", "images"):
        spellings = (f"--auto-parallel-{name}", f"--auto_parallel_{name.replace('-', '_')}")
        group.add_argument(*spellings, type=int, metavar="N", help=f"{name.replace('-', ' ')} of a sample")
    spellings = ("--auto-parallel-max-vpp", "--auto_parallel_max_vpp")
    group.add_argument(*spellings, type=int, metavar="N", help="chunks of a stage that are tried, at most")
    flags, rest = parser.parse_known_args(list(arguments))
    flags.script_arguments = tuple(rest)  # nodes compare these as well
    return Request(flags, tuple(rest))


def take_over(pretrain: Pretrain, request: Request, arrive: Callable[[], None] = lambda: None) -> Pretrain:
    """`training.pretrain` that measures or searches where the request says so, and else trains, each stage recomputing
    what a plan in model.json gives it. arrive: called first."""

    @functools.wraps(pretrain)
    def ask_first(
        datasets: Any,
        model_provider: Any,
        model_type: Any,
        forward_step: Any,
        process_non_loss_data_func: Any = None,
        extra_args_provider: Any = None,
        args_defaults: Any = None,
    ) -> None:
        arrive()
        if request.concerns_planner:
            from mm_autoparallel.profilers.mindspeed_mm.subject import make_subject

            subject = make_subject(model_provider, forward_step, cut_model, extra_args_provider, args_defaults)
            hooks.auto_parallel(request.flags, _pretraining_or_exit(request, subject))
        pretrain(
            datasets,
            with_recompute(model_provider),
            model_type,
            forward_step,
            process_non_loss_data_func=process_non_loss_data_func,
            extra_args_provider=extra_args_provider,
            args_defaults=args_defaults,
        )

    return ask_first


def with_recompute(model_provider: Callable[..., Any]) -> Callable[..., Any]:
    """The model provider, each chunk built to recompute what the plan in model.json says of it."""

    @functools.wraps(model_provider)
    def provide(*args: Any, **options: Any) -> Any:
        from mm_autoparallel.profilers.mindspeed_mm import runtime

        with recompute_of_stage(runtime.running_arguments().mm.model, *runtime.stage_and_chunk()):
            return model_provider(*args, **options)

    return provide


def describe_pretraining(request: Request, subject: Any) -> hooks.Pretraining:
    """The model, workload and search space of a script's arguments. Raises JobError where one is missing."""
    rest, flags = request.rest, request.flags
    check_flags(lambda flag: find_switch(rest, flag), find_argument(rest, "--ai-framework"), "the command line")
    given = Given(
        image_tokens=flags.auto_parallel_image_tokens,
        images=flags.auto_parallel_images,
        max_vpp=flags.auto_parallel_max_vpp,
    )
    described = describe_arguments(rest, given)
    if not tells_parts(find_package()):
        only = f"TP above 1 ({OLDER_PARTS})"
        described = replace(
            described, search={**described.search, "tp": (1,)}, not_searched=(*described.not_searched, only)
        )
    if os.environ.get("RANK", "0") == "0":
        warn(described.notes)
        if flags.auto_parallel_mm and TASK not in os.environ:
            say(f"not searched: {'; '.join(described.not_searched)}")
    return hooks.Pretraining(
        model=described.model,
        workload=dict(described.workload),
        subject=subject,
        search=described.search,
        adapters=described.adapters,
    )


def arguments_under_plan(request: Request) -> list[str]:
    """The arguments of training under --auto-parallel-config. Writes the model.json that has the plan's layers.

    It lies beside the plan; every process writes the same. Raises PlannerError where the plan does not fit model,
    processes or MindSpeed-MM, JobError where it cannot be written.
    """
    plan_path: Path = request.flags.auto_parallel_config
    described = describe_pretraining(request, subject=None)
    # Read as a plan of MindSpeed's: what MindSpeed-MM asks for is told below, by the checkout that is there.
    assert isinstance(described.workload, dict)
    described.workload.update(stack="mindspeed", context_parallel="ring")
    applied = hooks.applied_plan(request.flags, described)
    assert applied is not None
    if os.environ.get("RANK", "0") == "0":
        warn(applied.plan.warnings)
    path, model = _read_model(request)
    if described.adapters:
        model = model.model_copy(update={"adapters": Adapters.model_validate(dict(described.adapters))})
    document = read_document(path, "model file")
    check_plan(applied.plan, model, path, counts_chunks(find_package()))
    for reason in _checkout_reasons(request.rest, applied.plan, model, document):
        raise PlanError(f"plan: {reason}")
    check_dispatcher(document, find_argument(request.rest, DISPATCHER), applied.plan.strategy)
    target = plan_path.with_name(f"{plan_path.stem}.{path.stem}.json")
    with writing(target):
        write_text_atomically(target, model_json_with_plan(applied.plan, path))
    return planned_arguments(request.rest, applied.plan, target, has_frozen_stage(applied.plan, model))


def _checkout_reasons(arguments: Sequence[str], plan: Plan, model: Model, document: dict[str, Any]) -> Iterator[str]:
    """What the checkout that is there cannot run of `plan`, and others can."""
    if not tells_parts(find_package()):
        parts = [functools.reduce(operator.getitem, SECTIONS[one.name], document) for one in model.modalities]
        divide = all(part.get("sequence_parallel") is True for part in parts)
        yield from older_reasons(model, plan.strategy, plan.recompute, divide)
    is_local = find_argument(arguments, IMPLEMENTATION) == LOCAL
    if plan.strategy.cp > 1 and not is_local and not divides_any_attention(find_package(MINDSPEED)):
        yield (
            f"it has CP {plan.strategy.cp}, and without {IMPLEMENTATION} {LOCAL} this MindSpeed leaves attention to "
            f"each rank's own tokens; give the script {IMPLEMENTATION} {LOCAL}, or plan with CP 1"
        )


def main() -> None:
    """`python -m mm_autoparallel.hooks.mindspeed_mm SCRIPT ARGUMENTS`: the script, with the hook in place."""
    tell_on_terminal()
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        say("give the script that trains: python -m mm_autoparallel.hooks.mindspeed_mm pretrain_vlm.py ARGUMENTS")
        sys.exit(2)
    del sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the current folder, which `python -m` puts there
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")


def _pretraining_or_exit(request: Request, subject: Any) -> hooks.Pretraining:
    try:
        return describe_pretraining(request, subject)
    except PlannerError as error:
        say(str(error))
        sys.exit(error.exit_code)


def _read_model(request: Request) -> tuple[Path, Model]:
    named = find_argument(request.rest, MODEL)
    if named is None:
        raise JobError(f"{MODEL} is missing; the path of a model.json is expected among the script's arguments")
    path = Path(named)
    return path, read_model_json(path, decoder_settings(request.rest))


class _Finder(importlib.abc.MetaPathFinder):
    """Replaces `pretrain` in MindSpeed-MM's training module as soon as that is imported, before anyone takes it."""

    def __init__(self, replace: Callable[[Pretrain], Pretrain]) -> None:
        self._replace = replace

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, its loader followed by the replacement; None for all other modules."""
        if name != TRAINING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_replace(module: ModuleType) -> None:
                load(module)
                module.pretrain = self._replace(module.pretrain)  # type: ignore[attr-defined]

            spec.loader.exec_module = load_and_replace  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    main()
