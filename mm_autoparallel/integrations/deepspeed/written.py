"""A plan as ds_config.json and planned_layers.py: sizes and ZeRO in the first, stages and recompute in the second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import BYTE_ORDER_MARK, read_document
from mm_autoparallel.integrations.accounting import check_decided
from mm_autoparallel.integrations.config_files import totals_of
from mm_autoparallel.integrations.deepspeed.read import (
    BATCH,
    CONFIG,
    LAYERS,
    MICRO_BATCH,
    MICRO_BATCHES,
    SEQUENCE,
    TENSOR,
    ZERO,
    describe_launch,
    is_config,
    read_launch_plan,
    read_plan,
)
from mm_autoparallel.integrations.export import only, patched_launch, read_exactly
from mm_autoparallel.integrations.features import refuse_features
from mm_autoparallel.integrations.framework import Exported, Exporter, Target
from mm_autoparallel.integrations.json_text import set_json_value
from mm_autoparallel.integrations.python_text import format_plan
from mm_autoparallel.planner.plan import Plan

_CHUNKS = "DeepSpeed's PipelineModule gives a rank one stage; plan with search.max_vpp 1"
_SCHEDULE = "DeepSpeed's pipeline engine runs 1f1b (TrainSchedule); plan with search.schedule left out"
_ENCODER = "PipelineModule takes one sequence of layers; plan with search.pp [1], or export --to torch"
_ENGINE = "DeepSpeed's pipeline engine asserts ZeRO 0 or 1; plan with search.zero [0, 1], or search.pp [1]"
_RING = "sequence_parallel_size is Ulysses; plan with search.cp_kind [all_to_all]"
_EXPERTS = "deepspeed.moe.layer.MoE takes ep_size in the model's code and no configuration says it; plan with EP 1"
_MODE = "checkpoints here run whole layers again; plan with search.modes [recompute]"
_COPIES = "ds_config.json has no plain key for it; plan with ZeRO 3 as usual"
_NO_KEY = "ds_config.json has no key for it; plan without it"

REFUSED = (
    dict.fromkeys(("chunks", "uneven_chunks", "partial_group"), _CHUNKS)
    | dict.fromkeys(("gpipe", "low_memory_chunks", "split_backwards", "pieces"), _SCHEDULE)
    | dict.fromkeys(("encoder_first", "encoder_stages"), _ENCODER)
    | dict.fromkeys(("zero_2_pipeline", "zero_3_pipeline"), _ENGINE)
    | dict.fromkeys(("ring", "all_gather", "hierarchical"), _RING)
    | dict.fromkeys(("experts", "whole_experts", "dispatcher", "token_overlap"), _EXPERTS)
    | dict.fromkeys(("selective_all", "selective_some", "activation", "offload", "recompute_offload"), _MODE)
    | dict.fromkeys(("swap_attention", "swap_some"), _MODE)
    | dict.fromkeys(("kept_weights", "shards"), _COPIES)
    | dict.fromkeys(("rank_order", "precision", "graphs", "fused_products", "user_buffers", "overlaps"), _NO_KEY)
    | {"tensor": "AutoTP divides no sequences; plan with search.sequence_parallel [false]"}
)
_BESIDE_PIPELINE = {
    "whole_sequences": "AutoTP beside PipelineModule is not documented; plan with TP 1, or search.pp [1]",
    "all_to_all": "Ulysses beside PipelineModule is not documented; plan with CP 1, or search.pp [1]",
}
_CHECKED = ("read back: both files as written give the plan that they are said to run",)

_CODE = '''

def recomputed(modality="text"):
    """Indices of the layers that run again in the backward: the first ones of every stage."""
    found, start = set(), 0
    for held, again in zip(PLAN[modality]["layers"], PLAN[modality]["recompute"]):
        found |= set(range(start, start + again))
        start += held
    return found


'''
_ONE_STAGE = '''def checkpoint_layers(layers, modality="text"):
    """Makes the planned ones of a model's list of layers run again in the backward; call it before
    deepspeed.initialize."""
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    for index in sorted(recomputed(modality)):
        layers[index].forward = partial(checkpoint, layers[index].forward, use_reentrant=False)
'''
_PIPELINE = '''from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint


class PlannedPipelineModule(PipelineModule):
    """A PipelineModule that is cut as planned.

    layers: what PipelineModule takes. first_layer: how many entries stand before the first planned layer (the
    embedding); what follows the last is on the last stage.
    """

    def __init__(self, layers, first_layer=1, **more):
        self._first_layer = first_layer
        more.setdefault("num_stages", len(PLAN["text"]["layers"]))
        more.setdefault("activation_checkpoint_func", non_reentrant_checkpoint)
        super().__init__(layers=layers, activation_checkpoint_interval=1 if recomputed() else 0, **more)

    def _partition_layers(self, method="uniform"):
        bounds = [0]
        for held in PLAN["text"]["layers"]:
            bounds.append(bounds[-1] + held)
        parts = [bound + self._first_layer for bound in bounds]
        if parts[-1] > len(self._layer_specs):
            raise ValueError(f"the plan places {bounds[-1]} layers, and {len(self._layer_specs)} entries are there")
        self.parts = [0, *parts[1:-1], len(self._layer_specs)]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def _is_checkpointable(self, funcs):
        index = next(i for i, func in enumerate(self.forward_funcs) if func is funcs[0])
        return self._local_start + index - self._first_layer in recomputed()
'''


def export_new(plan: Plan, target: Target) -> Exported:
    """`ds_config.json` and `planned_layers.py`. Raises PlanError naming what DeepSpeed cannot run."""
    values = _decide(plan, target)
    document: dict[str, Any] = {}
    for path, value in values.items():
        section = document
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = value
    text = json.dumps({**document, "bf16": {"enabled": True}}, indent=2) + "\n"
    return _export(plan, target, text, Path(CONFIG), Path(LAYERS))


def export_patch(plan: Plan, target: Target, paths: Sequence[Path]) -> Exported:
    """The configuration at the one of `paths` with `plan` in it, and planned_layers.py beside it."""
    (path,) = only(paths, "DeepSpeed", "its configuration")
    values, before = _decide(plan, target), read_document(path, "configuration")
    text = read_exactly(path, "configuration", "JSON file")
    for keys, value in values.items():
        section: Any = before
        for depth, key in enumerate(keys[:-1]):
            if key not in section:
                text = set_json_value(text, keys[: depth + 1], {}, after=next(iter(section)))
                section[key] = {}
            section = section[key]
            if not isinstance(section, dict):
                raise JobError(f"configuration {path}: {'.'.join(keys[:-1])} is no mapping; give it its keys first")
        if section:
            text = set_json_value(text, keys, value, after=next(iter(section)))
        else:
            text = set_json_value(text, keys[:-1], {keys[-1]: value}, after="")
        section[keys[-1]] = value
    return _export(plan, target, text, path, path.parent / LAYERS)


def _export(plan: Plan, target: Target, text: str, config: Path, beside: Path) -> Exported:
    header, is_pipeline = target.describe(plan), plan.strategy.pp > 1
    told = "".join(f"# {line}\n" for line in ("Layers of a plan, beside DeepSpeed's configuration.", *header))
    code = told + "\n" + format_plan(plan) + _CODE + (_PIPELINE if is_pipeline else _ONE_STAGE)
    strategy = plan.strategy
    lists = plan.layers, plan.recompute
    again = read_plan(json.loads(text.lstrip(BYTE_ORDER_MARK)), CONFIG, totals_of(plan), lists, strategy.world_size)
    check_decided(again, plan, target.job)
    built, cut = "build the model as planned_layers.PlannedPipelineModule(layers, loss_fn=...)", "call planned_layers."
    build = built if is_pipeline else f"{cut}checkpoint_layers(the model's layers) before deepspeed.initialize"
    unchecked = () if target.job else ("without --job: heads and vocabulary are not held against the sizes",)
    return Exported(
        {config: text, beside: code}, plan, (), _CHECKED, unchecked, (f"{build}, on {strategy.world_size} devices",)
    )


def decide_values(plan: Plan, target: Target) -> dict[str, Any]:
    """The keys that the plan decides, and the lists of planned_layers.py. Raises PlanError."""
    lists = {f"{LAYERS}.{modality}.recompute": [*plan.recompute[modality]] for modality in plan.layers}
    layers = {f"{LAYERS}.{modality}.layers": [*counts] for modality, counts in plan.layers.items()}
    return {".".join(path): value for path, value in _decide(plan, target).items()} | layers | lists


def _decide(plan: Plan, target: Target) -> dict[tuple[str, ...], Any]:
    """Keys down to a value, and the values that the plan decides."""
    refuse_features(plan, target.job, REFUSED)
    strategy = plan.strategy
    if strategy.pp > 1:
        refuse_features(plan, target.job, _BESIDE_PIPELINE)
        if set(plan.layers) != {"text"}:
            raise PlanError(f"plan: it places {', '.join(plan.layers)} layers on PP {strategy.pp}, and {_ENCODER}")
    if strategy.optimizer_offload and strategy.zero == 0:
        raise PlanError("plan: its optimizer lies on the host with ZeRO 0, and ZeRO-Offload needs 1 at least")
    offload = {"device": "cpu"} if strategy.optimizer_offload else {"device": "none"}
    return {
        (BATCH,): plan.global_batch_size,
        (MICRO_BATCH,): strategy.mbs,
        (MICRO_BATCHES,): plan.num_microbatches,
        (ZERO, "stage"): strategy.zero,
        (ZERO, "offload_optimizer"): offload,
        **({(TENSOR, "autotp_size"): strategy.tp} if strategy.tp > 1 else {}),
        **({(SEQUENCE,): strategy.cp} if strategy.cp > 1 else {}),
    }


EXPORTER = Exporter(("0.19",), CONFIG, export_new, export_patch, refused=frozenset(REFUSED))
LAUNCHES = (
    patched_launch(
        "a configuration of DeepSpeed (JSON)",
        is_config,
        describe_launch,
        read_launch_plan,
        EXPORTER,
        takes=("beside", "seq_length", "global_batch_size", "micro_batch_size"),
    ),
)
