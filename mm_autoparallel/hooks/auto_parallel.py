"""`auto_parallel` and `auto_tuning`: the one line of a pretrain script that hands over to the planner.

Started by a person with a flag that searches it profiles, searches, writes the results and exits; in a process that a
profile run has started it measures and exits; otherwise it returns, and the script goes on to train.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.hooks.flags import SWITCH, Flags, check_together, read_flags, read_layers
from mm_autoparallel.hooks.language import LanguageTraining
from mm_autoparallel.hooks.planner_process import check_planner, search_in
from mm_autoparallel.hooks.planning import check_writable, make_site, profile_job
from mm_autoparallel.hooks.pretraining import Pretraining
from mm_autoparallel.hooks.rendezvous import Rendezvous, check_port, join_rendezvous, open_rendezvous
from mm_autoparallel.hooks.runs import serve_tasks
from mm_autoparallel.hooks.tuning import check_work_dir, tune
from mm_autoparallel.hooks.tuning_flags import (
    Tuning,
    asked_switches,
    is_follower,
    read_tuning,
    store_of,
    with_tuning,
)
from mm_autoparallel.profilers.launch import TASK
from mm_autoparallel.reports.terminal import say
from mm_autoparallel.signals import INTERRUPTED, ignore_signals, interrupt_on_signal, interrupted_by_signals
from mm_autoparallel.streams import tell_from, tell_on_terminal

if TYPE_CHECKING:
    from mm_autoparallel.profilers.subject import Subject

CRASHED = 1

Describe = Callable[[int], Pretraining]
"""The training, to be planned for so many devices."""

Work = Callable[[Rendezvous | None], None]
"""What node 0 does, together with the others where there are any."""


def auto_parallel(arguments: argparse.Namespace, pretraining: Pretraining) -> None:
    """Take over where the flags (`add_arguments`) ask for it, and end the process; return at once where they do not.

    Exit codes: 0 done, 2 the input is wrong, 3 nothing feasible, 124 the time limit came before a plan, 130 interrupted
    before there was a result.
    """
    _take_over(arguments, pretraining.subject, lambda _: pretraining, None)


def auto_tuning(
    arguments: argparse.Namespace,
    subject: Subject,
    workload: Mapping[str, Any] | None = None,
    search: Mapping[str, Any] | None = None,
) -> None:
    """`auto_parallel` for a script that takes Megatron-LM's flags, which describe its model and its training.

    --auto-tuning and --auto-settings take over too (`add_tuning_arguments`). subject: how the model is built and
    stepped. workload, search: what the script's own code does otherwise than Megatron-LM, and the limits of what it can
    run, as in a job file.
    """
    training = LanguageTraining(subject, workload or {}, search or {})
    _take_over(arguments, subject, training.describe, training)


def _take_over(
    arguments: argparse.Namespace, subject: Subject, describe: Describe, training: LanguageTraining | None
) -> None:
    tell_on_terminal()
    if TASK in os.environ:
        from mm_autoparallel.hooks.measure import measure

        sys.exit(measure(subject, read_layers(arguments.auto_parallel_layers), store_of(arguments)))
    if asked_switches(arguments):
        interrupt_on_signal()
        code = _launch(arguments, describe, training)
        if code == INTERRUPTED:
            ignore_signals()
        sys.exit(code)


def _launch(arguments: argparse.Namespace, describe: Describe, training: LanguageTraining | None) -> int:
    try:
        tuning = read_tuning(arguments, sys.argv[1:])
        check_together(arguments, tuning.family.switch if tuning else SWITCH)
        if tuning and is_follower(arguments):
            return 0  # the first rank of this node searches for all of them
        from mm_autoparallel.profilers.device import count_devices, find_device_type

        flags = read_flags(arguments, count_devices(), on_cpu=find_device_type() == "cpu")
        if tuning:
            tell_from(tuning.log_level)
            flags = with_tuning(flags, tuning)
        flags = replace(flags, profiles=store_of(arguments))
        work = _work_of(flags, describe, training, tuning)
        with interrupted_by_signals():
            return _lead(arguments, flags, work) if flags.node_rank == 0 else _follow(arguments, flags)
    except PlannerError as error:
        tell_from("info")  # an error is told, whatever else is not
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted; what was profiled is kept, and the same command continues there")
        return INTERRUPTED


def _work_of(flags: Flags, describe: Describe, training: LanguageTraining | None, tuning: Tuning | None) -> Work:
    """What node 0 has to do."""
    if tuning is None:
        return lambda rendezvous: _plan(flags, describe, rendezvous)
    if training is None:
        raise JobError(
            f"{tuning.family.switch} reads a training from Megatron-LM's flags, and this script hands over its own "
            "description; call hooks.auto_tuning in the place of hooks.auto_parallel, or search by --auto-parallel-mm"
        )
    check_work_dir(tuning)
    return lambda rendezvous: tune(tuning, flags, training, rendezvous)


def _lead(arguments: argparse.Namespace, flags: Flags, work: Work) -> int:
    """Node 0, or the only one. The others end with the same exit code, and with the same words where it failed."""
    if flags.num_nodes == 1:
        if flags.master_port is not None:
            check_port(flags.master_addr, flags.master_port)
        work(None)
        return 0
    from mm_autoparallel.hooks.fingerprint import take_fingerprint

    assert flags.master_port is not None
    rendezvous = open_rendezvous(flags.master_addr, flags.master_port, flags.num_nodes)
    try:
        rendezvous.compare(take_fingerprint(arguments), flags.join_timeout_s)
        work(rendezvous)
    except PlannerError as error:
        rendezvous.adjourn(error.exit_code, str(error))
        raise
    except KeyboardInterrupt:
        rendezvous.adjourn(INTERRUPTED, "node 0 was interrupted")
        raise
    except BaseException as error:
        rendezvous.adjourn(CRASHED, f"node 0 crashed ({type(error).__name__}); its own output says where")
        raise
    rendezvous.adjourn(0, "")
    return 0


def _follow(arguments: argparse.Namespace, flags: Flags) -> int:
    """Any other node: do what node 0 says."""
    from mm_autoparallel.hooks.fingerprint import take_fingerprint

    assert flags.master_port is not None
    rendezvous = join_rendezvous(
        flags.master_addr, flags.master_port, flags.node_rank, flags.num_nodes, flags.join_timeout_s
    )
    rendezvous.compare(take_fingerprint(arguments), flags.join_timeout_s)
    code, message = serve_tasks(make_site(flags, rendezvous))
    if message:
        say(message)
    return code


def _plan(flags: Flags, describe: Describe, rendezvous: Rendezvous | None) -> None:
    """Profile what is missing, search, write the result file and print it."""
    from mm_autoparallel.planner.plan import RESULT_FILE

    result_path = Path(RESULT_FILE)
    check_writable(result_path)
    check_planner(flags.planner)
    pretraining = describe(flags.simulated_nodes * flags.simulated_per_node)
    job = profile_job(flags, pretraining, make_site(flags, rendezvous))
    search_in(flags.planner, job, flags.time_limit_s, result_path)
    say(f"wrote {result_path}")
