"""`--model module:name`: the user's own way to build a model, found by name.

    # in my_model.py
    def make_subject(workload: Workload) -> Subject:
        return Subject(build_model, forward_step, build_optimizer, layout, sequence_parallel)

The name is a Subject (profilers/subject.py), or a function that gives one, of no argument or of the workload, whose
`weight_bytes` and `attention` it then follows. To be traced a model keeps to this:

- `build_model(build)` makes `build.depth` layers of each modality on `build.device`, and divides them over
  `build.tp_mesh` where that is given. It runs under FakeTensorMode: nothing in it may read numbers of a tensor.
- `forward_step(model, num_samples, workload)` makes its batch for real: what must be known to run (lengths, grids,
  positions) are integer tensors of the batch. It returns the loss, one number, and calls no backward.
- `build_optimizer` is not called.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.profilers.subject import Subject

SubjectMaker = Callable[[Workload], Subject]


def find_maker(name: str) -> tuple[SubjectMaker, bool]:
    """What makes the Subject for a workload, by `module:name`, and whether it looks at the workload.

    Modules are found as Python finds them, and else in the current folder. Raises JobError where there is none.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise JobError(f"--model is {name!r}; give MODULE:NAME, such as my_model:make_subject")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a file beside the job must not be imported in the place of a library
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as failure:
        if failure.name and (module_name == failure.name or module_name.startswith(f"{failure.name}.")):
            raise JobError(f"--model {name}: there is no module {failure.name} here, nor is one installed") from None
        raise
    found = getattr(module, attribute, None)
    if isinstance(found, Subject):
        subject = found
        return lambda _: subject, False
    if not callable(found):
        raise JobError(
            f"--model {name}: {module_name} has no function or Subject called {attribute}; it has "
            f"{', '.join(key for key in vars(module) if not key.startswith('_')) or 'nothing'}"
        )
    takes_workload = bool(inspect.signature(found).parameters)

    def make(workload: Workload) -> Subject:
        made = found(workload) if takes_workload else found()
        if not isinstance(made, Subject):
            raise JobError(
                f"--model {name}: {attribute} gave a {type(made).__name__}; it must give a "
                "mm_autoparallel.profilers.subject.Subject"
            )
        return made

    return make, takes_workload
