"""A plan as files for Megatron-LM: new ones, or a person's own launch script with the plan in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.export import only, patched_launch
from mm_autoparallel.integrations.framework import Exported, Exporter, Target
from mm_autoparallel.integrations.launch_script import find_devices
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.decided import TEXT, Decided, decide
from mm_autoparallel.integrations.megatron_core.dialect import MEGATRON, Dialect
from mm_autoparallel.integrations.megatron_core.launch import (
    ENTRY,
    check_patchable,
    describe_launch,
    is_launch,
    patch_launch,
    read_launch_plan,
    read_training,
)
from mm_autoparallel.integrations.megatron_core.passed import read_passed
from mm_autoparallel.integrations.megatron_core.read import check_read_back
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER
from mm_autoparallel.planner.plan import Plan

ARGUMENTS = "megatron_args.txt"
LAUNCH = "launch.sh"
BY_STAGE = "recompute_by_stage.sh"
"""Beside them where stages recompute different numbers of layers, which one flag does not say."""

_CHECKED = ("read back: the flags as written give the plan that they are said to run",)


def export_new(plan: Plan, target: Target) -> Exported:
    """`megatron_args.txt`, a flag a line, and `launch.sh`, which starts pretrain_gpt.py with them.

    Raises PlanError as `decide` does.
    """
    return export_flags(plan, target, MEGATRON)


def export_flags(plan: Plan, target: Target, dialect: Dialect) -> Exported:
    """Both files for a code that spells Megatron-LM's flags by `dialect`. Raises PlanError as `decide` and it do."""
    job = target.job
    decided = dialect.write(decide(plan, job, allows=dialect.allows))
    lines = list(flags.list_passed({**decided.values, **decided.usual}))
    launch = _format_launch(decided, lines, (*_list_header(dialect, decided), *target.describe(decided.plan)), job)
    script = LaunchScript(Path(LAUNCH), launch)
    check_read_back(dialect.read(read_passed(script, plan.strategy.world_size)), decided.plan, job)
    texts = {Path(ARGUMENTS): "".join(f"{line}\n" for line in lines), script.path: launch}
    low = job.workload.precision if job else "bf16"
    notes: tuple[str, ...] = (
        () if low == "bf16" else (f"the workload multiplies in {low}: pass --fp8-format and its like to {LAUNCH}",)
    )
    notes += (f"{LAUNCH} takes the flags of model, data and optimizer behind its name: bash {LAUNCH} --num-layers …",)
    executable = [script.path]
    if by_stage := _format_by_stage(plan, decided):
        texts[Path(BY_STAGE)] = by_stage
        executable.append(Path(BY_STAGE))
        notes += (
            f"{BY_STAGE} starts each rank with the number of its own stage: torchrun --no-python … bash {BY_STAGE} "
            f"python {ENTRY} …, with the flags that {LAUNCH} passes",
        )
    return Exported(texts, decided.plan, decided.approximations, _CHECKED, decided.unchecked, notes, (*executable,))


def _format_by_stage(plan: Plan, decided: Decided) -> str:
    """A script that runs what follows its name with its stage's own number, behind the number for all; empty where that
    one is right. Nothing in Megatron-LM compares the number between ranks."""
    strategy, pp = plan.strategy, plan.strategy.pp
    counts = [max(plan.recompute[TEXT][stage::pp]) for stage in range(pp)]
    if decided.values.get(flags.RECOMPUTED) is None or len({*counts}) == 1:
        return ""
    inner = strategy.tp * strategy.cp * (strategy.dp if strategy.rank_order == DEFAULT_RANK_ORDER else 1)
    chunks = "# Of a stage's chunks the largest number counts.\n" if strategy.vpp > 1 else ""
    return (
        "#!/bin/bash\n"
        "# Recomputes each stage's own number of layers. Start it on every rank, in the place of the training itself:\n"
        f"#   torchrun --no-python ... bash {BY_STAGE} python {ENTRY} ...\n"
        f"{chunks}"
        "set -euo pipefail\n\n"
        f"LAYERS_BY_STAGE=({' '.join(map(str, counts))})\n"
        f"stage=$((RANK / {inner} % {pp}))\n"
        f'exec "$@" {flags.RECOMPUTED} "${{LAYERS_BY_STAGE[$stage]}}"\n'
    )


def _list_header(dialect: Dialect, decided: Decided) -> tuple[str, ...]:
    return (
        f"Starts {dialect.title}'s {ENTRY} ({dialect.release}) under a plan. Flags of model, data and optimizer follow",
        f"its name: bash {LAUNCH} --num-layers {sum(decided.plan.layers[TEXT])} --hidden-size ...",
    )


def _format_launch(decided: Decided, lines: Sequence[str], header: Sequence[str], job: Job | None) -> str:
    """A script that holds the flags itself, so that it can be read again by itself."""
    strategy = decided.plan.strategy
    nodes, per_node = _count_nodes(strategy.world_size, job)
    quoted = "".join(f"    {_quote(line)}\n" for line in lines)
    workload = "".join(f"    {line}\n" for line in _list_workload(job)) if job else ""
    passed = f"WORKLOAD_ARGS=(\n{workload})\n\n" if job else ""
    arguments = '"${WORKLOAD_ARGS[@]}" "${PLAN_ARGS[@]}"' if job else '"${PLAN_ARGS[@]}"'
    told = "".join(f"# {line}\n" for line in (*header, *decided.approximations, *decided.unchecked))
    connections = f"unset {flags.CONNECTIONS}" if strategy.zero > 1 else f"export {flags.CONNECTIONS}=1"
    return (
        "#!/bin/bash\n"
        f"{told}"
        "set -euo pipefail\n\n"
        f"{connections}\n"
        f"NNODES={nodes}\n"
        f"GPUS_PER_NODE={per_node}\n\n"
        "DISTRIBUTED_ARGS=(\n"
        "    --nnodes $NNODES\n"
        "    --nproc_per_node $GPUS_PER_NODE\n"
        '    --node_rank "${NODE_RANK:-0}"\n'
        '    --master_addr "${MASTER_ADDR:-localhost}"\n'
        '    --master_port "${MASTER_PORT:-6000}"\n'
        ")\n\n"
        f"{passed}PLAN_ARGS=(\n{quoted})\n\n"
        f'torchrun "${{DISTRIBUTED_ARGS[@]}}" {ENTRY} {arguments} "$@"\n'
    )


def _list_workload(job: Job) -> list[str]:
    """What a step is of, where Megatron-LM's defaults are others; what is passed behind the script's name comes last,
    and so counts."""
    workload = job.workload
    dropouts = {"hidden": workload.hidden_dropout, "attention": workload.attention_dropout}
    is_bf16 = workload.precision == "bf16" and workload.weight_bytes < 4  # with four, it trains in fp32
    lines = [f"--seq-length {workload.seq_length}", *([flags.BF16] if is_bf16 else [])]
    return lines + [f"--{name}-dropout 0.0" for name, drops in dropouts.items() if not drops]


def _quote(line: str) -> str:
    flag, _, words = line.partition(" ")
    return f"{flag} '{words}'" if "|" in words else line


def _count_nodes(world_size: int, job: Job | None) -> tuple[int, int]:
    """Nodes, and devices a node: those of the job's cluster, else 8 a node where that goes (assumed)."""
    per_node = job.cluster.devices_per_node if job else 8
    if world_size < per_node or world_size % per_node:
        return 1, world_size
    return world_size // per_node, per_node


def export_patch(plan: Plan, target: Target, paths: Sequence[Path]) -> Exported:
    """The script at the one of `paths` with `plan` in it. Raises JobError or PlanError as `patch_launch` does."""
    (path,) = only(paths, "Megatron-LM", "a launch script")
    script, decided, notes = patch_launch(path, plan, target.job)
    return Exported({path: script.text}, decided.plan, decided.approximations, _CHECKED, decided.unchecked, notes)


def planned_files(path: Path, out: Path, _: Given) -> tuple[Path, ...]:
    """What `plan --script` will write. Raises JobError where it could not, before a search is made for it."""
    check_patchable(path)
    return (out / path.name,)


ROUNDED = frozenset({"recompute_stages", "selective_some"})
REFUSED = frozenset(
    (
        *("partial_group", "encoder_first", "encoder_stages", "gpipe", "pieces", "low_memory_chunks"),
        *("split_backwards", "zero_2_pipeline", "zero_3_pipeline", "kept_weights", "shards", "activation", "offload"),
        *("swap_attention", "swap_some", "recompute_offload", "precision", "graphs", "fused_products"),
    )
)
EXPORTER = Exporter(("0.16",), LAUNCH, export_new, export_patch, ROUNDED, REFUSED)
LAUNCHES = (
    patched_launch(
        "a launch script of Megatron-LM's pretrain_gpt.py (.sh), or MODEL_ARGS in YAML",
        is_launch,
        describe_launch,
        read_launch_plan,
        EXPORTER,
        lambda path: find_devices(read_training(path)),
        planned_files,
    ),
)
