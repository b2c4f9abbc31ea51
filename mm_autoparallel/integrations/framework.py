"""Framework: what a training framework can do with a plan, as an entry point registers it (model/readers/registry.py).

Every field but the title is called, or read, when somebody asks for it: a framework's module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from mm_autoparallel.integrations.features import Handling
from mm_autoparallel.model.readers.registry import FrameworkModels

if TYPE_CHECKING:
    from mm_autoparallel.integrations.described import Described, Given
    from mm_autoparallel.integrations.export import Export
    from mm_autoparallel.integrations.findings import Linter
    from mm_autoparallel.model.job.job import Job
    from mm_autoparallel.model.job.model import Model
    from mm_autoparallel.model.job.workload import Workload
    from mm_autoparallel.planner.plan import Plan
    from mm_autoparallel.profilers.subject import Subject


@dataclass(frozen=True)
class LaunchKind:
    """A kind of file that starts a training, as `plan --script FILE` takes it.

    is_one: whether the file at a path is of this kind. find_devices: nodes and devices a node that it asks for, None
    where only the machine knows. describe: what it trains. read_plan: the plan that it trains under by itself; raises
    PlannerError where that is not known. planned_files: what writing a plan into a folder will write. write_plan:
    (plan, file, folder, what a person said beside the file, overwrite) → what was written. asked_last: `is_one` goes by
    the file's ending alone, so that other kinds are asked first. takes: which of Given's fields `beside`, `entry`,
    `seq_length`, `global_batch_size` and `micro_batch_size` it reads; `import` refuses the others.
    """

    title: str
    is_one: Callable[[Path], bool]
    find_devices: Callable[[Path], tuple[int | None, int | None]]
    describe: Callable[[Path, Given], Described]
    read_plan: Callable[[Path, Given], Plan]
    planned_files: Callable[[Path, Path, Given], tuple[Path, ...]]
    write_plan: Callable[[Plan, Path, Path, Given, bool], Export]
    asked_last: bool = False
    takes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Exported:
    """A plan as a framework's files say it, before they are written.

    texts: path → whole content of each: below the folder that is written to, or a person's own file. plan: what the
    files run by themselves, the plan itself where nothing was rounded. approximations: a sentence for each thing that
    was, always to the side that keeps less memory. checked, unchecked: what was looked at before, and what could not
    be. notes: what a person must set beside them. executable: those of the files that are started.
    """

    texts: Mapping[Path, str]
    plan: Plan
    approximations: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    executable: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Target:
    """What a plan is written for.

    version: of the framework. job: what the plan was made for, whose laws are checked and whose workload's choices are
    written too; None: only what the plan's file says. describe: lines of the files' header, on the plan that they run.
    out: the folder that a person's files with the plan in them go to; None: they stay where they are.
    """

    version: str
    job: Job | None
    describe: Callable[[Plan], Sequence[str]]
    out: Path | None = None


@dataclass(frozen=True)
class Exporter:
    """How plans are written for a framework, and read back before anything is on the disk.

    versions: of the framework, that are known; the first is meant where nobody says. read_back: that of the new files
    which `import` reads. write: new files; None where a plan goes into a person's files alone. patch: a person's own
    files with the plan in them; None where the framework takes none that a plan could be written into. Both raise
    PlanError naming what the framework cannot run. rounded, refused: which features of plans (integrations/features.py)
    are; all others are written. by_layer: files say how each layer is shared; elsewhere plans with layer_strategies are
    refused. by_module: the version whose files say layouts but the chain; elsewhere plans with such are refused.
    """

    versions: tuple[str, ...]
    read_back: str
    write: Callable[[Plan, Target], Exported] | None
    patch: Callable[[Plan, Target, Sequence[Path]], Exported] | None = None
    rounded: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    by_layer: bool = False
    by_module: str = ""

    def handling(self, feature: str) -> Handling:
        """What becomes of plans that have `feature`."""
        if (feature == "layer_strategies" and not self.by_layer) or (feature == "layout" and not self.by_module):
            return "refused"
        return "refused" if feature in self.refused else "rounded" if feature in self.rounded else "written"


@dataclass(frozen=True)
class PlanFiles:
    """A training that two files describe: the model, and the script that launches it.

    model_file: what the first is called. write_plan: (plan, model file, launch script, folder to write to, overwrite) →
    what was written. read_plan: (model file, launch script, world size where the script leaves it to the machine) → the
    plan they run.
    """

    model_file: str
    write_plan: Callable[[Plan, Path, Path, Path, bool], Export]
    read_plan: Callable[[Path, Path, int | None], Plan]


@dataclass(frozen=True)
class LiveModels:
    """How live models are built from a framework's model files, where torch is: what `profile` and `trace` measure.

    make_subject: (file's content, its model, workload, path) → the Subject, with the layout by which it is cut into
    blocks; raises ProfileError where it cannot be built. scale_workload: (content, workload, sequence length) → the
    workload with samples of that length. describe_code: whose code builds it, for the record.
    """

    make_subject: Callable[[Mapping[str, Any], Model, Workload, Path], Subject]
    scale_workload: Callable[[Mapping[str, Any], Workload, int], Workload]
    describe_code: Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class Framework(FrameworkModels):
    """A training framework: `title` and `models` (FrameworkModels), and what else it can do.

    launches: gives the kinds of files that start a training. plan_files: gives its two files, where it has such.
    live_models: gives how the models of its model files are built; called where torch is. exporter: gives how `export`
    writes a plan for it. linter: gives its own rules of `lint`. verbs: verbs of the command line that are for it alone;
    they lie in cli/. switches: flags of training scripts by which it takes over; they lie in hooks/.
    """

    launches: Callable[[], Sequence[LaunchKind]] = tuple
    plan_files: Callable[[], PlanFiles] | None = None
    live_models: Callable[[], LiveModels] | None = None
    exporter: Callable[[], Exporter] | None = None
    linter: Callable[[], Linter] | None = None
    verbs: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


def deferred(name: str) -> Callable[[], Any]:
    """What gives `name`, `module:object` below integrations/, and imports it when it is called."""
    return partial(resolve_name, f"{__package__}.{name}")
