"""planned.json: the decision that `export --to torch` wrote, with the model that a person names.

It has the keys of a result file, and says the order of modalities beside them. schedule.csv, where it lies beside, must
be the schedule that planned.json names: an order of one's own is not planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import PlanError, PlannerError
from mm_autoparallel.files import is_there, read_document, read_text
from mm_autoparallel.integrations.config_files import describe_config, need, read_totals
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.torch.schedule_csv import write_csv
from mm_autoparallel.model.job.cluster import USUAL_DEVICES_PER_NODE
from mm_autoparallel.planner.bare_plan import parse_bare_plan
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.plan_lists import list_key

SCHEMA = "mm-autoparallel/torch/1"
PLANNED, SCHEDULE = "planned.json", "schedule.csv"


def is_planned(path: Path) -> bool:
    """Whether the file at `path` is such a decision."""
    try:
        return path.suffix == ".json" and read_document(path, "plan").get("schema") == SCHEMA
    except PlannerError:
        return False


def find_devices(path: Path) -> tuple[int | None, int | None]:
    """A decision says for how many devices it is, and not how many a node has: as many as divide them, and are usual at
    most."""
    world_size = _read(path).strategy.world_size
    per_node = next(each for each in range(USUAL_DEVICES_PER_NODE, 0, -1) if world_size % each == 0)
    return world_size // per_node, per_node


def describe_launch(path: Path, given: Given) -> Described:
    """What the code beside the decision at `path` trains. Raises JobError or PlanError as `read_launch_plan`."""
    return describe_config(path, given, "transformers", read_launch_plan(path, given), {})


def read_launch_plan(path: Path, given: Given) -> Plan:
    """The plan that the files at `path` run. Raises JobError naming what nobody says, PlanError naming what contradicts
    the model, the devices or the schedule beside it."""
    plan, totals = _read(path), dict(read_totals(path, given))
    held = {modality: sum(counts) for modality, counts in plan.layers.items()}
    if held != totals:
        raise PlanError(f"{path}: it places {held} layers, and the model has {totals}")
    world_size = need(given.world_size or plan.strategy.world_size, path, "--world-size")
    if world_size != plan.strategy.world_size:
        raise PlanError(f"{path}: its sizes are for {plan.strategy.world_size} devices, and {world_size} are said")
    return plan


def _read(path: Path) -> Plan:
    plan = read_planned(read_document(path, "plan", PlanError), str(path))
    schedule = path.parent / SCHEDULE
    if is_there(schedule) and read_text(schedule, "schedule", "CSV").split() != write_csv(plan).split():
        raise PlanError(f"{schedule}: it is another order than {plan.strategy.schedule}, which {path} names")
    return plan


def read_planned(document: Mapping[str, Any], where: str) -> Plan:
    """The plan of a decision's content. Raises PlanError."""
    chain, lists = document.get("chain"), document.get("layer_placement")
    if isinstance(chain, list) and isinstance(lists, Mapping):  # the file of a plan has vision first, whatever flows
        keys = [list_key(name, "placement") for name in chain if isinstance(name, str)]
        placed = sorted(lists, key=lambda key: keys.index(key) if key in keys else len(keys))
        document = {**document, "layer_placement": {key: lists[key] for key in placed}}
    plan = parse_bare_plan(dict(document), where)
    if chain != [*plan.layers]:
        raise PlanError(f"{where}: chain is {chain}, and layers are placed of {[*plan.layers]}")
    return plan
