"""The generated parts of the documentation, each made from what the program itself is made of.

Meanings of keys are the words of docstrings: in `name, other: what it is.` a sentence's beginning names fields.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, get_args

from doc_house import assistant_tools, export_features, floors, heavy_packages, lint_rules, registered_frameworks
from doc_models import model_types
from doc_tables import escaped, table
from pydantic import BaseModel

from mm_autoparallel import errors
from mm_autoparallel.cli.parser import build_parser
from mm_autoparallel.hooks import add_tuning_arguments, flags
from mm_autoparallel.model.job.cluster import Cluster, Device, Level, Link, NodeGroup, SlowDevice
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import SearchSpace
from mm_autoparallel.model.job.layer_modes import LAYER_MODES
from mm_autoparallel.model.job.model import Adapters, Decoder, Encoder, Images, MelFrames, Model, Patches, Projector
from mm_autoparallel.model.job.overlaps import OVERLAPS, Overlaps
from mm_autoparallel.model.job.precision import PRECISIONS
from mm_autoparallel.model.job.sample_source import Distribution, SampleSource
from mm_autoparallel.model.job.schedule_law import ALL, RUNS, Runs
from mm_autoparallel.model.job.stacks import FACT_SOURCES, StackFacts, software_of
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Stack, Workload
from mm_autoparallel.model.profiles.calibration import shipped_calibrations
from mm_autoparallel.model.readers.job_file import JobFile
from mm_autoparallel.pipeline.schedules.catalog import OF_JOBS, SCHEDULES
from mm_autoparallel.planner.plan import Figures, Plan, parallel_config, plan_document
from mm_autoparallel.units import GIB

# ------------------------------------------------------------------------------------------------- the command line


def _verbs() -> dict[str, argparse.ArgumentParser]:
    actions = build_parser()._actions
    (verbs,) = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    return dict(verbs.choices)


def _takes(action: argparse.Action) -> str:
    """What follows an option: ` N`, ` local|ray`, ` N...`; nothing of a flag."""
    if action.nargs == 0:
        return ""
    words = "|".join(map(str, action.choices)) if action.choices else str(action.metavar or action.dest.upper())
    several = action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction) or words.endswith("...")
    return f" {words.rstrip('.,')}{'...' if several else ''}"


def _synopsis(name: str, verb: argparse.ArgumentParser) -> str:
    """One line: the verb, what it needs, and in brackets what it may be given."""
    words = [f"mm-autoparallel {name}"]
    for action in verb._actions:
        if action.dest == "help":
            continue
        long = [option for option in action.option_strings if option.startswith("--")]
        word = f"{long[0]}{_takes(action)}" if long else _takes(action).strip()
        words.append(word if action.required and action.nargs not in ("*", "?") else f"[{word}]")
    return " ".join(words)


def synopsis() -> str:
    """Every verb with every option, a line each."""
    return "```text\n" + "\n".join(_synopsis(name, verb) for name, verb in _verbs().items()) + "\n```"


def _options(actions: list[argparse.Action]) -> str:
    rows = []
    for action in actions:
        if action.dest == "help" or action.help is argparse.SUPPRESS:
            continue
        spelled = ", ".join(action.option_strings) or str(action.metavar)
        text = (action.help or "") % {"default": action.default} if action.help else ""
        if action.required and action.option_strings:
            text = f"{text} (required)"
        elif action.default not in (None, False, argparse.SUPPRESS) and "default" not in text:
            default = " ".join(map(str, action.default)) if isinstance(action.default, tuple) else action.default
            text = f"{text} (default: {default})"
        rows.append((f"`{spelled}{_takes(action) if action.option_strings else ''}`", escaped(text.strip())))
    return table(("argument", "meaning"), rows)


def verbs() -> str:
    """A section for each verb: what it does, and its options."""
    sections = []
    for name, verb in _verbs().items():
        description = escaped(" ".join((verb.description or "").split()))
        sections.append(f"## {name}\n\n{description}\n\n{_options(verb._actions)}")
    return "\n\n".join(sections)


def script_flags() -> str:
    """The flags that hooks add to a pretrain script."""
    return _added(flags.add_arguments)


def tuning_flags() -> str:
    """The flags of Auto Tuning and Auto Settings that hooks add to one."""
    return _added(add_tuning_arguments)


def _added(add: Callable[[argparse.ArgumentParser], None]) -> str:
    """What `add` adds to a parser, by the spelling with hyphens."""
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    for action in parser._actions:
        action.option_strings = [option for option in action.option_strings if "_" not in option]
    return _options(parser._actions)


def exit_codes() -> str:
    """Every error that a caller may expect, with its exit code."""
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.PlannerError)]
    rows = [(f"`{kind.__name__}`", str(kind.exit_code), escaped(inspect.getdoc(kind) or "")) for kind in kinds]
    return table(("error", "exit code", "meaning"), rows)


# ------------------------------------------------------------------------------------------------- files


_BEGINS = re.compile(r"(?:^|(?<=[.:;] )|(?<=\.\) ))(`?[a-z]\w*`?(?:,(?: and)? `?[a-z]\w*`?)*): ")
"""Where a docstring begins to say what the fields are that it names."""


def _paragraphs(of: type, names: tuple[str, ...]) -> Iterator[tuple[str, list[re.Match[str]]]]:
    """The paragraphs of a docstring, each in one line, and where they begin to speak of fields among `names`."""
    for paragraph in (inspect.getdoc(of) or "").split("\n\n"):
        text = " ".join(re.sub(r"(?<=\w)([-/])\n\s*(?=\w)", r"\1", paragraph).split())
        yield text, [hit for hit in _BEGINS.finditer(text) if {*_names_in(hit[1])} <= {*names}]


def meanings(of: type, names: tuple[str, ...]) -> dict[str, str]:
    """Field → what the docstring of `of` says it is; fields of which it says nothing are left out."""
    found: dict[str, str] = {}
    for text, hits in _paragraphs(of, names):
        for hit, following in zip_longest(hits, hits[1:]):
            words = text[hit.end() : following.start() if following else len(text)].strip().rstrip(";")
            found |= dict.fromkeys(_names_in(hit[1]), words)
    return found


def introduction(of: type, names: tuple[str, ...]) -> str:
    """What the docstring of `of` says before it says what single fields are, paragraph by paragraph."""
    kept = (text[: hits[0].start()] if hits else text for text, hits in _paragraphs(of, names))
    return "\n\n".join(escaped(text.strip()) for text in kept if text.strip())


def _names_in(words: str) -> list[str]:
    return re.findall(r"\w+", words.replace(", and", ","))


def _kind(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words: `whole number ≥ 1`, `list of true or false`, a link to another section."""
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [_kind(one) for one in schema.get("anyOf") or schema["oneOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})" if name in _SECTIONS else f"`{name}`"
    if "allOf" in schema:
        return _kind(schema["allOf"][0])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"] if word)
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_kind(schema['items'])}" if "items" in schema else "list"
    if kind == "object":
        more = schema.get("additionalProperties")
        return f"mapping to {_kind(more)}" if isinstance(more, dict) and more else "mapping"
    if kind in ("integer", "number"):
        return ("whole number" if kind == "integer" else "number") + _range(schema)
    return {"boolean": "true or false", "string": "text"}.get(str(kind), "any")


def _range(schema: Mapping[str, Any]) -> str:
    for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">")):
        if key in schema:
            return f" {sign} {schema[key]:g}" + (f", ≤ {schema['maximum']:g}" if schema.get("maximum") == 1 else "")
    return ""


def _default(schema: Mapping[str, Any], required: bool) -> str:
    if required:
        return "**required**"
    value = schema.get("default")
    if value is None or value == "" or isinstance(value, dict):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`[{', '.join(str(item).lower() if isinstance(item, bool) else str(item) for item in value)}]`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _record(of: type[BaseModel]) -> str:
    """A table of the keys of `of`."""
    schema = of.model_json_schema()
    names = tuple(schema["properties"])
    said = meanings(of, names)
    rows = [
        (
            f"`{name}`",
            _kind(field),
            _default(field, name in schema.get("required", ())),
            escaped(said.get(name, "")),
        )
        for name, field in schema["properties"].items()
    ]
    return table(("key", "value", "default", "meaning"), rows)


_CLUSTER_RECORDS = (Cluster, Device, Link, Level, NodeGroup, SlowDevice)
_JOB_RECORDS = (JobFile, *_CLUSTER_RECORDS, Workload, SampleSource, Distribution, StackFacts, SearchSpace)
_MODEL_RECORDS = (Model, Encoder, Decoder, Patches, MelFrames, Images, Projector, Adapters)
_SECTIONS = {record.__name__ for record in (*_JOB_RECORDS, *_MODEL_RECORDS)}


def _sections(records: tuple[type[BaseModel], ...]) -> str:
    texts = []
    for record in records:
        names = tuple(record.model_fields)
        texts.append(f"### {record.__name__}\n\n{introduction(record, names)}\n\n{_record(record)}")
    return "\n\n".join(texts)


def job_keys() -> str:
    """Every key of a job file."""
    return _sections(_JOB_RECORDS)


def model_keys() -> str:
    """Every key of a model that stands in a job by its sizes."""
    return _sections(_MODEL_RECORDS)


def devices() -> str:
    """The catalog of devices."""
    rows = []
    for name, device in DEVICES.items():
        peaks = (device.bf16_flops_per_s, device.fp8_flops_per_s, device.fp4_flops_per_s)
        told = [f"{peak / 1e12:,.0f}" if peak else "–" for peak in peaks]
        bandwidths = (device.memory_bytes_per_s, device.node_link.bandwidth_bytes_per_s)
        rates = [f"{bandwidth / 1e9:,.0f}" for bandwidth in (*bandwidths, device.network_link.bandwidth_bytes_per_s)]
        rows.append((f"`{name}`", f"{device.memory_bytes / GIB:.1f}", *told, *rates))
    head = ("device", "memory, GiB", "BF16, TFLOP/s", "FP8", "FP4", "memory, GB/s", "node link, GB/s", "network, GB/s")
    return table(head, rows)


def stacks() -> str:
    """The stacks that a workload may name, where their facts were read, and which schedules they run."""
    facts = [
        (f"`{stack}`", f"`{software_of(stack)}`", escaped(FACT_SOURCES.get(software_of(stack), "")))
        for stack in get_args(Stack)
    ]
    runs: dict[Runs, list[str]] = {}
    for stack in get_args(Stack):
        runs.setdefault(RUNS[stack], []).append(f"`{stack}`")
    orders = [
        (", ".join(of), ", ".join(f"`{name}`" for name in each.schedules), escaped(each.source))
        for each, of in runs.items()
    ]
    return "\n\n".join(
        [
            table(("`workload.stack`", "facts of", "where they were read"), facts),
            table(("`workload.stack`", "schedules that it runs", "where that was read"), orders),
        ]
    )


def words() -> str:
    """What may be named: schedules, modes, precisions."""
    named = (("schedules", (*OF_JOBS, ALL)), ("modes of a layer", LAYER_MODES), ("precisions", PRECISIONS))
    return table(("of", "names"), [(what, ", ".join(f"`{name}`" for name in names)) for what, names in named])


def calibrations() -> str:
    """The calibrations that come with the package."""
    rows = [
        (f"`{name}`", found.device, f"`{found.software}`", escaped(found.note))
        for name, found in sorted(shipped_calibrations().items())
    ]
    return table(("name", "device", "software", "what it was fitted to"), rows)


def schedules() -> str:
    """Every schedule, by its docstring's first paragraph."""
    rows = []
    for name, schedule in SCHEDULES.items():
        order: Any = getattr(schedule.order, "func", schedule.order)
        first = (inspect.getdoc(order) or "").split("\n\n")[0]
        rows.append((f"`{name}`", "several" if schedule.interleaved else "one", escaped(first)))
    return table(("schedule", "chunks a stage", "order"), rows)


_STRATEGY = Strategy(
    pp=2,
    tp=2,
    dp=1,
    mbs=1,
    vpp=2,
    etp=1,
    shard=1,
    reshard=False,
    cp_kind="ring",
    optimizer_offload=True,
    rank_order="tp-cp-ep-pp-dp",
    sequence_parallel=False,
    dispatcher="alltoall",
    graphs="none",
    overlap_all_to_all="none",
    precision="bf16",
    tp_overlap="none",
    overlaps=Overlaps(False, False, False),
)
"""One whose every choice is written into a result file."""

_RESULT_WORDS = {
    "parallel_config": "the strategy: see below",
    "layer_placement": "`vit_layer_placement` and `llm_layer_placement` (other parts under their own names): how many "
    "layers each stage holds; with several chunks nested `[chunk][stage]`",
    "layer_recompute": "the same of the layers that recompute; no more than the stage holds",
    "layer_modes": "mode → part → how many layers run in it, where a layer runs in another mode than recompute",
    "e2e_time": "the simulated step, ms",
    "throughput": "text tokens per second and device",
    "schema": "of this file",
    "schedule": "the order of forwards and backwards",
    "rank_order": "where it is not the usual one",
    "num_microbatches": "of one step, on each data parallel replica",
    "global_batch_size": "samples of one step",
    "world_size": "devices that the plan uses",
    "gap_fraction": "how far the bound lies below what the plan was ranked by",
    "proven": "whether the gap is at most 0.1 %",
    "memory_limit_bytes": "what a device may hold",
}
"""Keys of which no docstring speaks."""


def result_keys() -> str:
    """Every key of a result file, in the order in which they are written."""
    layers = {"vision": (1, 0, 0, 0), "text": (1, 1, 1, 1)}
    modes = {"text": {"offload": (0, 1, 0, 0)}}
    plan = Plan(_STRATEGY, layers, {"vision": (0,) * 4, "text": (0,) * 4}, 1, modes=modes)
    known = (1.0, 1.0, 1.0, 0.0, (1.0, 1.0), 1.0, 0.0, {}, "")
    figures = Figures(
        *known,
        host_bytes=(1.0, 1.0),
        host_limit_bytes=1.0,
        objective={"price": 0.0},
        step_over_batches={"mean_ms": 1.0},
    )
    said = meanings(Figures, tuple(field.name for field in dataclasses.fields(Figures))) | _RESULT_WORDS
    rows = [(f"`{key}`", escaped(said[key])) for key in plan_document(plan, figures)]
    return table(("key", "meaning"), rows)


def strategy_keys() -> str:
    """Every key of `parallel_config`."""
    said = meanings(Strategy, tuple(field.name for field in dataclasses.fields(Strategy)))
    said |= meanings(Overlaps, OVERLAPS)
    rows = [(f"`{key}`", escaped(said[key.lower()])) for key in parallel_config(_STRATEGY)]
    return table(("key", "meaning"), rows)


def _list_parts() -> Iterator[tuple[str, Callable[[], str]]]:
    yield from (("synopsis", synopsis), ("verbs", verbs), ("script-flags", script_flags), ("exit-codes", exit_codes))
    yield "tuning-flags", tuning_flags
    yield from (("job-keys", job_keys), ("model-keys", model_keys), ("devices", devices), ("stacks", stacks))
    yield from (("words", words), ("calibrations", calibrations), ("model-types", model_types))
    yield from (("schedules", schedules), ("result-keys", result_keys), ("strategy-keys", strategy_keys))
    yield from (("floors", floors), ("heavy-packages", heavy_packages), ("frameworks", registered_frameworks))
    yield from (("assistant-tools", assistant_tools), ("export-features", export_features), ("lint-rules", lint_rules))


PARTS: dict[str, Callable[[], str]] = dict(_list_parts())
"""Name of a generated part → what makes its text."""
