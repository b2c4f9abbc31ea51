"""What Tinker's search leaves: a folder with results.csv, a log, and the ten best as launch scripts."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.launch_script import read_launch_script
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.integrations.tinker.cost import Cluster, Score
from mm_autoparallel.integrations.tinker.profiles import Folder

RESULTS, CONFIGS, BEST = "results.csv", "configs", 10
HEADER = (
    "tp,sp,ep,mbs,dp,pp,recompute,dist_opt,num_layers_list,time_costs,mem_costs,time_cost,mem_cost,"
    "tokens_per_npu_per_sec"
)
_THOUSAND = 1000.0
_SIZES = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--expert-model-parallel-size": "ep",
}
_DROPPED = (
    "--recompute-method --recompute-granularity --recompute-num-layers --num-layer-list --context-parallel-size "
    "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank --pipeline-model-parallel-layout "
    "--pipeline-num-transformer-layers --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers "
    "--context-parallel-algo --ulysses-degree-in-cp --cp-attention-mask-type --use-cp-send-recv-overlap "
    "--kv-head-repeat-before-uly-alltoall --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather"
)
"""What a result decides, or what goes with no result, of MindSpeed-LLM's flags."""
_SWITCHES = (
    "--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--use-cp-send-recv-overlap --kv-head-repeat-before-uly-alltoall"
)


def format_results(scores: Sequence[Score]) -> str:
    """results.csv, its lists quoted: read by Tinker's header, and by every reader of CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER.split(","))
    for score in scores:
        config, choice = score.choice.config, score.choice
        sizes = (config.tp, config.sp, config.ep, config.mbs, score.dp, choice.pp)
        times = [_thousands(us) for us in _step_times(score)]
        memory = [_thousands(mib) for mib in score.stage_mib]
        lists = [f"[{','.join(words)}]" for words in (map(str, score.layers), times, memory)]
        figures = (_thousands(score.step_us), _thousands(score.peak_mib), f"{score.tokens_per_device_s:.1f}")
        writer.writerow((*sizes, int(choice.recompute), int(choice.dist_opt), *lists, *figures))
    return text.getvalue()


def _step_times(score: Score) -> list[float]:
    """Of each stage, the step if it were the slowest."""
    total, batches = math.fsum(score.stage_us), score.choice.global_batch_size // (score.dp * score.choice.config.mbs)
    return [total + (batches - 1) * us for us in score.stage_us]


def _thousands(figure: float) -> str:
    return f"{figure / _THOUSAND:.3f}"


def name_folder(folder: Folder, batch: int, memory_limit: int, cluster: Cluster, when: str) -> str:
    """The folder of one search. when: YYYY-mm-dd-HH-MM-SS."""
    size = f"{cluster.num_nodes}nodes{cluster.devices_per_node}npus"
    return f"{folder.model_name}-{folder.model_size}-gbs{batch}-{memory_limit}-{size}-{when}"


def name_script(folder: Folder, rank: int, score: Score) -> str:
    """A result's launch script, as Tinker names it."""
    config, choice = score.choice.config, score.choice
    layers = "_".join(map(str, score.layers))
    return (
        f"{folder.model_name}-{folder.model_size}-rank{rank}_seq{folder.seq_length}_tp{config.tp}_pp{choice.pp}"
        f"_sp{config.sp}_distopt{int(choice.dist_opt)}_mbs{config.mbs}_gbs{choice.global_batch_size}_L{layers}"
        f"_rc{int(choice.recompute)}_time{score.step_us / _THOUSAND:.3f}_mem{score.peak_mib:.2f}.sh"
    )


def patch_script(path: Path, score: Score) -> str:
    """The launch script at `path` with the result in it: decided flags where they stand, the others as they are.

    Raises JobError where a flag's value cannot be changed, or nothing shows where flags are passed.
    """
    script = read_launch_script(path)
    config, choice = score.choice.config, score.choice
    anchor = next((flag for flag in (*_SIZES, "--micro-batch-size", "--num-layers") if script.has_flag(flag)), None)
    if anchor is None:
        raise JobError(f"{path}: it passes none of {', '.join(_SIZES)}, beside which a result is written")
    numbers = {flag: getattr(config, name, choice.pp) for flag, name in _SIZES.items()}
    numbers |= {"--micro-batch-size": config.mbs, "--global-batch-size": choice.global_batch_size}
    added = []
    for flag, number in numbers.items():
        if script.has_flag(flag):
            script = script.set_flag(flag, number, {})
        elif number > 1 or flag in ("--micro-batch-size", "--global-batch-size"):
            added.append(f"{flag} {number}")
    for flag in _DROPPED.split():
        if script.has_flag(flag):
            script = script.remove_flag(flag, 0 if flag in _SWITCHES.split() else 1)
    added += ["--overlap-grad-reduce"]
    added += [f"--num-layer-list {','.join(map(str, score.layers))}"] if choice.pp > 1 else []
    added += ["--sequence-parallel"] if config.sp else []
    added += ["--use-distributed-optimizer"] if choice.dist_opt else []
    if choice.recompute:
        added += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    anchor = next((flag for flag in (anchor, "--num-layers", *numbers) if script.has_flag(flag)), anchor)
    script = script.add_flags(added, behind=anchor)
    _check(script, score, numbers)
    return script.text


def _check(script: LaunchScript, score: Score, numbers: dict[str, int]) -> None:
    """Raises PlanError where the script does not say what was written into it."""
    for flag, number in numbers.items():
        said = script.evaluate(script.values(flag)[-1].text) if script.has_flag(flag) else 1
        if said != number:
            raise PlanError(f"{script.path}: {flag} was to be {number}, and the script written says {said}")
    layers = ",".join(map(str, score.layers))
    if score.choice.pp > 1 and [word.text for word in script.values("--num-layer-list")] != [layers]:
        raise PlanError(f"{script.path}: --num-layer-list {layers} was written and does not come back")
