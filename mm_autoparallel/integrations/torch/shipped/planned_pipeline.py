"""Trains a model under the plan in planned.json, on torch.distributed.pipelining. Needs torch alone.

planned.json says what each virtual stage holds, schedule.csv beside it where these lie and what runs in which order:
F forward, B backward, or in its place I, the gradient of a stage's input, and W, that of its weights. Under torchrun,
with the process group initialised:

    from planned_pipeline import PlannedTraining, parts_of

    parts = {"text": parts_of(model, before=["embed"], layers="layers", after=["norm", "head"])}
    training = PlannedTraining(parts, device, loss_fn)
    optimizer = training.make_optimizer(torch.optim.AdamW, lr=1e-4)
    loss = training.step(tokens, target=labels)        # the samples of this rank's replica; a number on the last stage
    optimizer.step()

A part is called with what the part before it gave, the first one with what `step` was given, and with those keywords of
`step` that its forward names. It gives a tensor or a tuple of tensors. A parameter that several parts
share stays one: its gradients are summed over stages. Functions that make parts name it, `weight.shared_as = "table"`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).resolve().parent
PLAN = json.loads((HERE / "planned.json").read_text(encoding="utf-8"))
SCHEDULE = HERE / "schedule.csv"

SIZES = PLAN["parallel_config"]
PP, TP, DP, VPP, ZERO = (SIZES[key] for key in ("PP", "TP", "DP", "VPP", "ZERO"))
MICRO_BATCHES = PLAN["global_batch_size"] // (DP * SIZES["MBS"])
ROWS = SCHEDULE.read_text(encoding="utf-8").split() if PP > 1 else ["0F0,0B0"]
PARTED = any("I" in row for row in ROWS)
_KEYS = {"vision": "vit", "text": "llm"}
_BUCKET = 25_000_000
"""Elements that are exchanged at once, and one gradient more."""

Part = nn.Module | Callable[[], nn.Module]
"""A module, or what makes it: then only the ranks that hold it do."""
Divide = Callable[[nn.Module, str, DeviceMesh], None]
"""Divides a part, given with its modality, among the ranks of a mesh of tensor parallelism, in place."""


@dataclass(frozen=True)
class Parts:
    """A modality's parts as data flows. before: on the stage of its first layer; after: on that of its last."""

    layers: Sequence[Part]
    before: Sequence[Part] = ()
    after: Sequence[Part] = ()


def parts_of(model: nn.Module, layers: str, before: Sequence[str] = (), after: Sequence[str] = ()) -> Parts:
    """Parts of `model` by their names in it; layers: that of a ModuleList, or of another module with children."""
    find = model.get_submodule
    return Parts([*find(layers).children()], [find(name) for name in before], [find(name) for name in after])


def list_counts(section: str, modality: str) -> list[int]:
    """Of the plan's lists, that of `modality`: a number for each virtual stage, chunk x PP + stage."""
    rows = PLAN[section][f"{_KEYS.get(modality, modality)}_{section}"]
    return [count for row in rows for count in (row if isinstance(row, list) else [row])]


def list_held(parts: Mapping[str, Parts], virtual_stage: int) -> Iterator[tuple[str, Part, bool]]:
    """What `virtual_stage` holds, as data flows: modality, part, and whether it runs again in the backward."""
    for modality in PLAN["chain"]:
        counts, again = list_counts("layer_placement", modality), list_counts("layer_recompute", modality)
        layers = parts[modality].layers
        if sum(counts) != len(layers):
            raise ValueError(f"the plan places {sum(counts)} {modality} layers, and {len(layers)} are given")
        holding = [stage for stage, count in enumerate(counts) if count]
        first = sum(counts[:virtual_stage])
        if virtual_stage == holding[0]:
            yield from ((modality, part, False) for part in parts[modality].before)
        for index in range(counts[virtual_stage]):
            yield modality, layers[first + index], index < again[virtual_stage]
        if virtual_stage == holding[-1]:
            yield from ((modality, part, False) for part in parts[modality].after)


class Stage(nn.Module):
    """Parts one after the other, some of which run again in the backward."""

    def __init__(self, held: Sequence[tuple[nn.Module, bool]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part for part, _ in held)
        self._again = [again for _, again in held]
        self._wanted = [_keywords(part) for part, _ in held]

    def forward(self, *state: Any, **inputs: Any) -> Any:
        """What the last part gives. state: of the stage before; inputs: keywords of `step`."""
        for part, again, wanted in zip(self.parts, self._again, self._wanted, strict=True):
            named = inputs if wanted is None else {key: inputs[key] for key in wanted if key in inputs}
            if again and torch.is_grad_enabled():
                given = checkpoint(part, *state, use_reentrant=False, **named)
            else:
                given = part(*state, **named)
            state = given if isinstance(given, tuple) else (given,)
        return state[0] if len(state) == 1 else state


def _keywords(part: nn.Module) -> tuple[str, ...] | None:
    """Keywords that the part's forward names; None where it takes any."""
    found = inspect.signature(part.forward).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in found):
        return None
    return tuple(each.name for each in found if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD))


def stages_on(rank: int) -> list[int]:
    """The virtual stages of a pipeline rank, in the order data flows, as its row has them."""
    return sorted({int(stage) for stage in re.findall(r"([0-9]+)F[0-9]+", ROWS[rank])})


def make_mesh(device: torch.device) -> DeviceMesh:
    """Ranks of the plan; `replicate` x `shard` are those of data parallelism."""
    shard = (SIZES.get("SHARD") or DP) if ZERO == 3 else 1
    data = {"replicate": DP // shard, "shard": shard}
    outside = PLAN.get("rank_order") == "tp-cp-ep-pp-dp"
    sizes = {**data, "pp": PP, "tp": TP} if outside else {"pp": PP, **data, "tp": TP}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


class PlannedTraining:
    """This rank's share of the training. stages: its virtual stages, replicated or sharded as they train.

    loss_fn: of the last part's output and the target; None: that output is the loss. divide: for TP above 1. The model
    is built once for all ranks: give every rank the same weights.
    """

    def __init__(
        self,
        parts: Mapping[str, Parts],
        device: torch.device,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        divide: Divide | None = None,
    ) -> None:
        if TP > 1 and divide is None:
            raise ValueError(f"the plan has TP {TP}: give divide, such as divide_usual_names")
        self.mesh = make_mesh(device)
        self._rank = self.mesh.get_local_rank("pp")
        loss_of = loss_fn or (lambda output, _: output)
        self._loss_fn: Callable[[Any, Any], Tensor] = lambda output, target: loss_of(output, target) / MICRO_BATCHES
        self._numbers = stages_on(self._rank)
        self._shared = SharedParameters(parts, self.mesh)
        held = [
            [(name, self._shared.add(part, number).to(device), again) for name, part, again in list_held(parts, number)]
            for number in self._numbers
        ]
        if divide is not None and TP > 1:
            for modality, module, _ in chain(*held):
                divide(module, modality, self.mesh["tp"])
        self._shared.connect()
        self.stages = [self._build([(module, again) for _, module, again in of_stage]) for of_stage in held]
        self.holds_loss = self._numbers[-1] == PP * VPP - 1
        self._schedule = self._make_schedule(device) if PP > 1 else None

    def _build(self, held: Sequence[tuple[nn.Module, bool]]) -> nn.Module:
        stage = Stage(held)
        if ZERO == 3:
            mesh = self.mesh["replicate", "shard"] if self.mesh["replicate"].size() > 1 else self.mesh["shard"]
            # I finds no weights that were given back after the forward, and W then gives no gradients
            reshard = SIZES.get("RESHARD", True) and not PARTED
            # FSDP2 has each parameter in one group: those of several parts lie in that of the whole stage
            holders = Counter(each for part in stage.parts for each in part.parameters())
            alone = [part for part in stage.parts if all(holders[each] == 1 for each in part.parameters())]
            for module in [*alone, stage]:
                if any(True for _ in module.parameters()):
                    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        return stage

    def _make_schedule(self, device: torch.device) -> _PipelineScheduleRuntime:
        group = self.mesh.get_group("pp")
        if PARTED:
            self._check_parted(group)
        stages = [
            PipelineStage(stage, number, PP * VPP, device, group=group)
            for number, stage in zip(self._numbers, self.stages, strict=True)
        ]
        # torch would scale gradients stage by stage: twice what chunks of a rank share, and what earlier steps added up
        options: dict[str, Any] = {"loss_fn": self._loss_fn, "scale_grads": False}
        schedule = _PipelineScheduleRuntime(stages, MICRO_BATCHES, **options)  # type: ignore[no-untyped-call]
        schedule._load_csv(str(SCHEDULE), format="compute_only")
        self._no_outputs: dict[str, Any] = {"return_outputs": False}
        if "return_outputs" not in inspect.signature(schedule.step).parameters:  # torch 2.7 puts them together
            if ZERO == 3:
                raise RuntimeError(
                    f"torch {torch.__version__} trains ZeRO 3 beside a pipeline otherwise than by itself; 2.13 does not"
                )
            self._no_outputs = {}
            schedule._merge_outputs = lambda *_: None  # type: ignore[method-assign]
        return schedule

    def _check_parted(self, group: dist.ProcessGroup) -> None:
        """Raises ValueError where torch would compute no gradients of weights: W of the first stage that trains behind
        frozen ones, whose input needs no gradient."""
        mine = [
            number
            for number, stage in zip(self._numbers, self.stages, strict=True)
            if any(each.requires_grad for each in stage.parameters())
        ]
        training: list[list[int]] = [[] for _ in range(PP)]
        dist.all_gather_object(training, mine, group=group)
        first = min(number for numbers in training for number in numbers)
        if first and any(re.search(rf"\b{first}I", row) for row in ROWS):
            raise ValueError(
                f"virtual stage {first} is the first that trains, and schedule.csv parts its backwards: there W gives "
                f"no gradients; write the schedule with --frozen-stages {first}"
            )

    def step(self, *inputs: Tensor, target: Tensor | None = None, **keywords: Any) -> float | None:
        """Adds up gradients of the mean loss over the micro-batches; that loss where this rank has the last stage.

        inputs, target, keywords: the samples of this replica, GBS / DP of them along the first dimension.
        """
        losses: list[Tensor] = []
        earlier = self._shared.set_aside()
        if self._schedule is None:
            self._accumulate(inputs, target, keywords, losses)
        else:
            inputs = inputs if self._rank == 0 else ()
            self._schedule.step(*inputs, target=target, losses=losses, **self._no_outputs, **keywords)
        if DP > 1 and ZERO != 3:  # FSDP2 averages its own
            gradients = [each.grad for each in self.parameters() if each.grad is not None]
            _all_reduce(gradients, self.mesh.get_group("replicate"), DP)
        self._shared.add_up(earlier)
        return float(torch.stack([loss.detach() for loss in losses]).sum()) if losses else None

    def _accumulate(
        self, inputs: Sequence[Tensor], target: Tensor | None, keywords: dict[str, Any], losses: list[Tensor]
    ) -> None:
        """The only stage: one micro-batch after the other, gradients exchanged with the last one."""
        (stage,) = self.stages
        chunks = [each.chunk(MICRO_BATCHES) for each in inputs]
        named = {key: each.chunk(MICRO_BATCHES) for key, each in keywords.items() if isinstance(each, Tensor)}
        targets = target.chunk(MICRO_BATCHES) if target is not None else [None] * MICRO_BATCHES
        for index in range(MICRO_BATCHES):
            if ZERO == 3:
                stage.set_requires_gradient_sync(index == MICRO_BATCHES - 1)  # type: ignore[operator]
            of_batch = keywords | {key: each[index] for key, each in named.items()}
            output = stage(*(each[index] for each in chunks), **of_batch)
            losses.append(self._loss_fn(output, targets[index]))
            losses[-1].backward()  # type: ignore[no-untyped-call]

    def parameters(self) -> list[nn.Parameter]:
        """What this rank trains, each once."""
        return list(dict.fromkeys(each for stage in self.stages for each in stage.parameters() if each.requires_grad))

    def make_optimizer(self, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        """An optimizer of this rank's parameters; with ZeRO 1 its states are divided among the replicas."""
        if ZERO == 1 and DP > 1:
            return ZeroRedundancyOptimizer(
                self.parameters(), optimizer_class=kind, process_group=self.mesh.get_group("replicate"), **options
            )
        return kind(self.parameters(), **options)


class SharedParameters:
    """Parameters that several parts share, such as a head's table. Stages that hold one have copies, which stay alike:
    all get the sum of their gradients."""

    def __init__(self, parts: Mapping[str, Parts], mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._places: dict[str, list[tuple[int, nn.Module, str]]] = {}
        self._groups: dict[dist.ProcessGroup, list[tuple[nn.Module, str]]] = {}
        holders: dict[nn.Parameter, list[str]] = {}
        for modality, role in product(PLAN["chain"], ("before", "layers", "after")):
            for index, part in enumerate(getattr(parts[modality], role)):
                for name, each in part.named_parameters() if isinstance(part, nn.Module) else ():
                    holders.setdefault(each, []).append(f"{modality}.{role}[{index}].{name}")
        self._names = {each: " = ".join(names) for each, names in holders.items() if len(names) > 1}

    def add(self, given: Part, virtual_stage: int) -> nn.Module:
        """The part, before it is divided and sharded."""
        part = given if isinstance(given, nn.Module) else given()
        for path, each in [*part.named_parameters(remove_duplicate=False)]:
            name = self._names.get(each) or getattr(each, "shared_as", None)
            if name is not None:
                owner, last = part.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
                places = self._places.setdefault(name, [])
                if places:  # functions may each have made one
                    setattr(owner, last, getattr(*places[0][1:]))
                places.append((virtual_stage, owner, last))
        return part

    def connect(self) -> None:
        """Finds who holds each, divided and not yet sharded. Raises ValueError where copies could not stay alike."""
        mine: dict[str, tuple[list[int], list[str]]] = {}
        for name, places in self._places.items():
            copies = dict.fromkeys(getattr(owner, last) for _, owner, last in places)
            layouts = [f"{[*each.shape]} {each.dtype} {getattr(each, 'placements', 'whole')}" for each in copies]
            trains = ["" if each.requires_grad else " frozen" for each in copies]
            mine[name] = sorted({stage for stage, *_ in places}), [*map("".join, zip(layouts, trains, strict=True))]
        told = [mine] * PP
        dist.all_gather_object(told, mine, group=self._mesh.get_group("pp"))
        rows = self._mesh.mesh.movedim((self._mesh.mesh_dim_names or ()).index("pp"), -1).reshape(-1, PP).tolist()
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for name in sorted({name for each in told for name in each}):
            of_ranks = {rank: each[name] for rank, each in enumerate(told) if name in each}
            chunks = next((stages for stages, _ in of_ranks.values() if len(stages) > 1), None)
            layouts = [layout for _, of_rank in of_ranks.values() for layout in of_rank]
            if ZERO == 3 and chunks:
                raise ValueError(
                    f"{name} is one parameter of virtual stages {chunks} of a rank, and FSDP2 shards each stage by "
                    "itself: plan with ZeRO 0 or 1, or with another schedule"
                )
            if len(layouts) > len(of_ranks) or len(set(layouts)) > 1:
                raise ValueError(
                    f"{name} is one parameter, and was divided into copies that differ, {', '.join(layouts)}: leave it "
                    "whole, or divide it alike on all stages and in one part of each"
                )
            ranks = tuple(of_ranks)
            if len(ranks) > 1 and ranks not in groups:  # all ranks make all groups, in one order
                made = [(row, dist.new_group([row[rank] for rank in ranks])) for row in rows]
                groups[ranks] = next(group for row, group in made if dist.get_rank() in row)
            if len(ranks) > 1 and name in mine:
                place, group = self._places[name][0][1:], groups[ranks]
                copy, is_first = getattr(*place), dist.get_rank() == dist.get_global_rank(group, 0)
                dist.all_reduce(_local(copy.detach()).mul_(float(is_first)), group=group)  # all take the first one's
                if copy.requires_grad:
                    self._groups.setdefault(group, []).append(place)
        self._names, self._places = {}, {}

    @cached_property
    def _copies(self) -> dict[dist.ProcessGroup, list[nn.Parameter]]:
        return {group: [getattr(*place) for place in places] for group, places in self._groups.items()}

    def set_aside(self) -> dict[nn.Parameter, Tensor | None]:
        """Gradients of earlier steps, which are sums already."""
        earlier = {each: each.grad for copies in self._copies.values() for each in copies}
        for each in earlier:
            each.grad = None
        return earlier

    def add_up(self, earlier: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Gradients become the sums over the stages that hold a parameter, and over `earlier` ones."""
        for group, copies in self._copies.items():
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in copies]
            _all_reduce(gradients, group)
            for each, gradient in zip(copies, gradients, strict=True):
                each.grad = gradient if (before := earlier[each]) is None else before.add_(gradient)


def _all_reduce(gradients: Sequence[Tensor], group: dist.ProcessGroup, divisor: int = 1) -> None:
    """Sums of the ranks of a group over `divisor`, in buckets."""
    bucket, size = list[Tensor](), 0
    gradients = [_local(each) for each in gradients]
    for index, gradient in enumerate(gradients):
        bucket.append(gradient)
        size += gradient.numel()
        following = gradients[index + 1] if index + 1 < len(gradients) else None
        if following is None or size > _BUCKET or following.dtype != gradient.dtype:
            flat = torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(flat, group=group)
            flat /= divisor
            for each, part in zip(bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True):
                each.copy_(part.view_as(each))
            bucket, size = [], 0


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is divided; else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divide_usual_names(part: nn.Module, modality: str, mesh: DeviceMesh) -> None:
    """Divides a decoder layer whose matrices have Hugging Face's usual names, by heads and by columns of the inner
    width; parts without such matrices stay whole. Raises ValueError where only some are there."""
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    def find(*ends: str) -> list[str]:
        return [name for name, _ in part.named_modules() if name.rpartition(".")[2] in ends]

    columns, rows = find("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), find("o_proj", "down_proj")
    if bool(columns) != bool(rows):
        raise ValueError(f"a part of {modality} has {columns + rows}, which is not a layer of the usual names")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in rows}
    if plan:
        parallelize_module(part, mesh, plan)
