"""A pretrain YAML as a launch: what it trains, the plan that it runs under, a plan written into it.

Of DeepSeek V3's config class `offset` counts multi-token prediction modules as layers, which stand behind the last one;
a plan counts decoder layers alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from mm_autoparallel.errors import JobError, PlanError, PlannerError
from mm_autoparallel.files import describe_value, read_document
from mm_autoparallel.integrations.accounting import Lost, check_decided
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.export import only, patched_launch
from mm_autoparallel.integrations.features import refuse_features
from mm_autoparallel.integrations.framework import Exported, Exporter, Target
from mm_autoparallel.integrations.mindformers.divided_yaml import format_divided
from mm_autoparallel.integrations.mindformers.layout import Grid, Layout, read_layout
from mm_autoparallel.integrations.mindformers.memory_keys import deals_whole_experts
from mm_autoparallel.integrations.mindformers.model_job import DEVICES_PER_NODE, build_job, describe_job, strategy_of
from mm_autoparallel.integrations.mindformers.model_section import WHAT
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, read_pretrain, recompute_config
from mm_autoparallel.integrations.mindformers.selected_operators import SELECT_KEYS
from mm_autoparallel.integrations.mindformers.yaml_keys import PRETRAIN, TEMPLATE_V2, YamlKeys
from mm_autoparallel.integrations.yaml_text import KeyPath, set_yaml_values
from mm_autoparallel.model.job.workload import ContextParallel
from mm_autoparallel.planner.plan import Plan

TEXT = "text"
ALGORITHM: KeyPath = ("parallel_config", "context_parallel_algo")
ALGORITHMS: Mapping[ContextParallel, str] = {"ring": "colossalai_cp", "all_to_all": "ulysses_cp"}
"""How context parallel ranks share attention, by MindFormers' names; the first where nothing is said."""

_SCHEDULE = "MindFormers runs 1f1b and its interleaved form; plan with search.schedule left out"
_MODE = "a plan's lists say whole layers; plan with search.modes [recompute]"
_ZERO = "enable_parallel_optimizer divides the optimizer alone; plan with search.zero [0, 1]"
_NO_KEY = "MindFormers' YAML has no key for it; plan without it"
REFUSED = (
    dict.fromkeys(("gpipe", "low_memory_chunks", "split_backwards"), _SCHEDULE)
    | dict.fromkeys(("encoder_first", "encoder_stages"), "MindFormers cuts decoders alone; plan with search.pp [1]")
    | dict.fromkeys(("all_gather", "hierarchical"), "MindFormers shares attention by ring or all_to_all")
    | dict.fromkeys(("zero_2", "zero_3", "zero_2_pipeline", "zero_3_pipeline", "kept_weights", "shards"), _ZERO)
    | dict.fromkeys(("selective_all", "selective_some", "activation", "offload", "recompute_offload"), _MODE)
    | dict.fromkeys(("swap_attention", "swap_some"), _MODE)
    | dict.fromkeys(
        ("whole_sequences", "rank_order", "optimizer_offload", "precision", "graphs", "dispatcher", "token_overlap"),
        _NO_KEY,
    )
    | dict.fromkeys(("fused_products", "user_buffers", "overlaps"), _NO_KEY)
)
_CHECKED = ("read back: offset, recompute and sizes as written give the plan that they are said to run",)


def is_launch(path: Path) -> bool:
    """Whether the file at `path` is a pretrain YAML of MindFormers."""
    if path.suffix not in (".yaml", ".yml"):
        return False
    try:
        document = read_document(path, WHAT)
    except PlannerError:
        return False
    if "distribute_parallel_config" in document:
        return "model_config" in document
    return isinstance(document.get("parallel_config"), dict) and isinstance(document.get("model"), dict)


def find_devices(path: Path) -> tuple[int | None, int | None]:
    """Nodes of eight, and devices a node, that the sizes multiply to; None where one is no number."""
    document = read_document(path, WHAT)
    keys = TEMPLATE_V2 if "distribute_parallel_config" in document else PRETRAIN
    sizes = [_at(document, each) for each in (keys.dp, keys.tp, keys.pp, keys.cp)]
    numbers = [1 if size is None else size for size in sizes]
    if not all(type(size) is int and 0 < size < 1_000_000 for size in numbers):
        return None, None
    world_size = math.prod(numbers)
    per_node = math.gcd(world_size, DEVICES_PER_NODE)
    return world_size // per_node, per_node


def _at(document: Mapping[str, Any], path: KeyPath) -> Any:
    node: Any = document
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def describe_launch(path: Path, given: Given) -> Described:
    """What the YAML at `path` trains. Raises JobError or PlanError naming the key that is not planned."""
    if given.image_tokens is not None or given.images is not None:
        raise JobError(f"{WHAT} {path}: it trains a decoder alone, whose samples have no images; leave them out")
    pretrain = read_pretrain(path, given.model_config)
    job = build_job(pretrain)
    experts, world_size = job.model.text.layers.experts, job.cluster.num_devices
    search: dict[str, object] = {"max_vpp": given.max_vpp or 1}
    if experts:
        most = min(experts.num_experts, world_size)
        search["ep"] = [2**k for k in range(most.bit_length()) if experts.num_experts % 2**k == 0 and 2**k <= most]
    workload = describe_job(pretrain)["workload"] | _kind_of(pretrain)
    notes = list(pretrain.notes)
    names = " and ".join(key for key in SELECT_KEYS if recompute_config(pretrain).get(key))
    if names:
        notes.append(f"{names} run operators again; the peak that is told keeps what they give")
    return Described(job.model, workload, search, world_size=world_size, notes=tuple(notes))


def _kind_of(pretrain: Pretrain) -> dict[str, ContextParallel]:
    """How its context parallel ranks share attention, as a workload says it. Raises PlanError for another way."""
    if pretrain.cp == 1:
        return {}
    said = _at(pretrain.document, ALGORITHM) or ALGORITHMS["ring"]
    kind = next((kind for kind, word in ALGORITHMS.items() if word == said), None)
    if kind is None:
        raise PlanError(f"{WHAT} {pretrain.path}: {'.'.join(map(str, ALGORITHM))} is {describe_value(said)}; planned "
                        f"are {', '.join(ALGORITHMS.values())}")  # fmt: skip
    return {"context_parallel": kind}


def read_launch_plan(path: Path, given: Given) -> Plan:
    """The plan that the YAML at `path` runs under. Raises JobError or PlanError naming key and value."""
    pretrain = read_pretrain(path, given.model_config)
    held = pretrain.dp * pretrain.tp * pretrain.pp * pretrain.cp
    if given.world_size not in (None, held):
        raise PlanError(f"{WHAT} {path}: its sizes are those of {held} devices, and {given.world_size} are meant")
    return plan_of(pretrain)


def plan_of(pretrain: Pretrain) -> Plan:
    """The plan that `pretrain` says. Raises PlanError where it says what no plan does."""
    for key, value in (
        ("micro_batch_interleave_num", pretrain.interleave_num),
        ("runner_config.gradient_accumulation_steps", pretrain.gradient_accumulation_steps),
    ):
        if value > 1:
            raise PlanError(f"{WHAT} {pretrain.path}: {key} is {value}, which no plan says; set it to 1")
    layout = read_layout(pretrain)
    layers, recompute = ([count for row in grid for count in row] for grid in (layout.layers, layout.recompute))
    if layers[-1] < pretrain.mtp_depth:
        raise PlanError(f"{WHAT} {pretrain.path}: the last chunk holds {layers[-1]} layers, and {pretrain.mtp_depth} "
                        "multi-token prediction modules stand there")  # fmt: skip
    layers[-1] -= pretrain.mtp_depth
    recompute[-1] = min(recompute[-1], layers[-1])
    if 0 in layers:
        raise PlanError(f"{WHAT} {pretrain.path}: virtual stage {layers.index(0)} holds no decoder layer")
    pieces = pretrain.seq_split_num
    schedule = f"seq_1f1b_{pieces}" if pieces > 1 else "interleaved_1f1b" if pretrain.vp > 1 else "1f1b"
    kind: Any = _kind_of(pretrain).get("context_parallel", "")
    strategy = replace(strategy_of(pretrain), schedule=schedule, cp_kind=kind)
    batch = pretrain.mbs * pretrain.dp * pretrain.num_microbatches
    return Plan(strategy, {TEXT: tuple(layers)}, {TEXT: tuple(recompute)}, batch)


# ------------------------------------------------------------------------------------------------------------- writing


def export_patch(plan: Plan, target: Target, paths: Sequence[Path]) -> Exported:
    """The YAML at the one of `paths` with `plan` in it. Raises JobError where the text cannot be changed, PlanError
    naming what MindFormers cannot run or what its YAML does not say."""
    (path,) = only(paths, "MindFormers", "a pretrain YAML")
    refuse_features(plan, target.job, REFUSED)
    pretrain = read_pretrain(path)
    text = _write(pretrain, plan)
    again = plan_of(read_pretrain(path, text=text))
    try:
        check_decided(again, plan, None)
    except Lost as lost:
        raise PlanError(
            f"{WHAT} {path}: the plan is in it and does not come back ({lost}); change that key by hand, or plan with "
            "what it says"
        ) from None
    unchecked = () if target.job else ("without --job: heads, vocabulary and experts are not held against the sizes",)
    notes = [f"start it on {plan.strategy.world_size} devices", *pretrain.notes]
    return Exported({path: text}, plan, (), _CHECKED, unchecked, tuple(notes))


def _write(pretrain: Pretrain, plan: Plan) -> str:
    strategy, mtp = plan.strategy, pretrain.mtp_depth
    placed = sum(plan.layers.get(TEXT, ()))
    if placed != pretrain.num_layers - mtp:
        raise PlanError(f"{WHAT} {pretrain.path}: it has {pretrain.num_layers - mtp} decoder layers, and the plan "
                        f"places {placed}; give the YAML of the model that it was made for")  # fmt: skip
    counts = list(plan.layers[TEXT])
    counts[-1] += mtp
    ep = strategy.ep
    if deals_whole_experts(pretrain):
        if ep % strategy.tp:
            raise PlanError(f"plan: EP {ep} is no multiple of TP {strategy.tp}, over which this model deals experts")
        ep //= strategy.tp
    divided = replace(
        pretrain,
        dp=strategy.dp,
        tp=strategy.tp,
        pp=strategy.pp,
        ep=ep,
        cp=strategy.cp,
        vp=strategy.vpp,
        mbs=strategy.mbs,
        num_microbatches=plan.num_microbatches,
        optimizer_parallel=strategy.zero == 1,
    )
    layout = Layout(_grid(counts, strategy.pp), _grid(plan.recompute[TEXT], strategy.pp))
    text = format_divided(pretrain, divided, layout)
    return _write_context(text, pretrain.keys, strategy.cp, strategy.cp_kind)


def _grid(counts: Sequence[int], pp: int) -> Grid:
    return tuple(tuple(counts[start : start + pp]) for start in range(0, len(counts), pp))


def _write_context(text: str, keys: YamlKeys, cp: int, kind: ContextParallel | Literal[""]) -> str:
    if cp == 1 or not kind:
        return text
    if keys is TEMPLATE_V2:
        raise PlanError(f"plan: CP {cp}, which is not written into YAMLs of the experimental trainer; plan with CP 1")
    return set_yaml_values(text, {ALGORITHM: ALGORITHMS[kind]})


EXPORTER = Exporter(("1.x",), "pretrain.yaml", None, export_patch, refused=frozenset(REFUSED))
LAUNCHES = (
    patched_launch(
        "a pretrain YAML of MindFormers", is_launch, describe_launch, read_launch_plan, EXPORTER, find_devices
    ),
)
