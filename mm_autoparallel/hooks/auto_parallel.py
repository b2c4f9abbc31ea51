"""`auto_parallel`: the one line of a pretrain script that hands over to the planner.

Started by a person with --auto-parallel-mm it profiles, searches, writes the result and exits; in a process that a
profile run has started it measures and exits; otherwise it returns, and the script goes on to train.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.hooks.flags import Flags, check_together, read_flags, read_layers
from mm_autoparallel.hooks.planner_process import check_planner, search_in
from mm_autoparallel.hooks.pretraining import Pretraining, build_job
from mm_autoparallel.hooks.rendezvous import Rendezvous, check_port, join_rendezvous, open_rendezvous
from mm_autoparallel.hooks.runs import Site, serve_tasks
from mm_autoparallel.profilers.launch import TASK
from mm_autoparallel.reports.terminal import say, warn, writing
from mm_autoparallel.signals import INTERRUPTED, ignore_signals, interrupt_on_signal, interrupted_by_signals
from mm_autoparallel.streams import tell_on_terminal

CRASHED = 1


def auto_parallel(arguments: argparse.Namespace, pretraining: Pretraining) -> None:
    """Take over where the flags (`add_arguments`) ask for it, and end the process; return at once where they do not.

    Exit codes: 0 done, 2 the input is wrong, 3 nothing feasible, 124 the time limit came before a plan, 130 interrupted
    before there was a result.
    """
    tell_on_terminal()
    if TASK in os.environ:
        from mm_autoparallel.hooks.measure import measure

        layers = read_layers(arguments.auto_parallel_layers)
        sys.exit(measure(pretraining.subject, layers, arguments.auto_parallel_profiles))
    if arguments.auto_parallel_mm:
        interrupt_on_signal()
        code = _launch(arguments, pretraining)
        if code == INTERRUPTED:
            ignore_signals()
        sys.exit(code)


def _launch(arguments: argparse.Namespace, pretraining: Pretraining) -> int:
    try:
        check_together(arguments)
        from mm_autoparallel.profilers.device import count_devices, find_device_type

        flags = read_flags(arguments, count_devices(), on_cpu=find_device_type() == "cpu")
        with interrupted_by_signals():
            return _lead(arguments, flags, pretraining) if flags.node_rank == 0 else _follow(arguments, flags)
    except PlannerError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted; what was profiled is kept, and the same command continues there")
        return INTERRUPTED


def _lead(arguments: argparse.Namespace, flags: Flags, pretraining: Pretraining) -> int:
    """Node 0, or the only one. The others end with the same exit code, and with the same words where it failed."""
    if flags.num_nodes == 1:
        if flags.master_port is not None:
            check_port(flags.master_addr, flags.master_port)
        _plan(flags, pretraining, None)
        return 0
    from mm_autoparallel.hooks.fingerprint import take_fingerprint

    assert flags.master_port is not None
    rendezvous = open_rendezvous(flags.master_addr, flags.master_port, flags.num_nodes)
    try:
        rendezvous.compare(take_fingerprint(arguments), flags.join_timeout_s)
        _plan(flags, pretraining, rendezvous)
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
    code, message = serve_tasks(_site(flags, rendezvous))
    if message:
        say(message)
    return code


def _plan(flags: Flags, pretraining: Pretraining, rendezvous: Rendezvous | None) -> None:
    """Profile what is missing, search, write the result file and print it."""
    from mm_autoparallel.hooks.profiling import (
        describe_carried,
        list_divisions,
        list_tasks,
        profile_missing,
        profile_paths,
        shipped_paths,
    )
    from mm_autoparallel.hooks.stored_device import stored_device
    from mm_autoparallel.planner.plan import RESULT_FILE

    result_path = Path(RESULT_FILE)
    check_writable(result_path)
    check_planner(flags.planner)
    device = stored_device(flags.profiles)
    job = build_job(pretraining, flags.simulated_nodes, flags.simulated_per_node, device)
    warn(job.warnings)
    if carried := describe_carried(job):
        say(carried)
    bare = replace(job, model=job.model.model_copy(update={"adapters": None}))  # what the script's subject builds
    divisions, site = list_divisions(job), _site(flags, rendezvous)
    shipped = shipped_paths(bare, divisions, site) if list_tasks(bare, divisions, site) else ()
    source = "shipped" if shipped else "measured now" if profile_missing(bare, divisions, site) else "measured before"
    job = replace(job, profiles=shipped or profile_paths(bare, flags.profiles))
    say(f"costs: {source}, in {', '.join(map(str, job.profiles))}")
    search_in(flags.planner, job, flags.time_limit_s, result_path)
    say(f"wrote {result_path}")


def _site(flags: Flags, rendezvous: Rendezvous | None) -> Site:
    from mm_autoparallel.profilers.device import find_device_type

    return Site(
        program=(sys.executable, *sys.orig_argv[1:]),
        processes_per_node=flags.processes_per_node,
        on_cpu=find_device_type() == "cpu",
        root=flags.profiles,
        host=flags.master_addr,
        port=flags.master_port if rendezvous is None else None,
        rendezvous=rendezvous,
    )


def check_writable(path: Path) -> None:
    """Raises JobError where `path` could not be written: better told before an hour of profiling than after."""
    with writing(path), tempfile.TemporaryFile(dir=path.parent):
        return
