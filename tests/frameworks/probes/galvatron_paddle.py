"""Runs in an environment with scipy: scores strategies by the cost model of Galvatron for Paddle itself.

Standard input: {"folder": its checkout, "flags": of its profile parser, "sp_space", "plans": [{"file": what
fine_grained_config.json holds, "least": lowest degree of the space} …]}; standard output: [[step s, [MiB by stage],
[[dp, degree] of each mesh that its runtime forms]] …].
"""

import contextlib
import json
import math
import sys
import tempfile
from pathlib import Path
from types import ModuleType

_SIZES = ("pp_size", "vtp", "gradient_accumulation_steps", "global_batch_size")


def main() -> None:
    asked = json.load(sys.stdin)
    folder = Path(asked["folder"])
    for name in (
        "paddlenlp",
        "paddlenlp.experimental",
        "paddlenlp.experimental.galvatron.runtime",
    ):  # their own import Paddle
        bare = ModuleType(name)
        bare.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = bare
    with contextlib.redirect_stdout(sys.stderr):
        world = asked["flags"]["profile_gpu_num"]
        answers = [
            [*score(asked, plan["file"], plan["least"]), form_meshes(plan["file"], world)] for plan in asked["plans"]
        ]
    json.dump(answers, sys.stdout)


class ProcessMesh:
    """Stands in for Paddle's: ranks by data parallel group."""

    def __init__(self, ranks: list, dim_names: list) -> None:
        self.shape = [len(ranks), len(ranks[0])]
        self.dim_names = dim_names


def form_meshes(file: dict, world: int) -> list:
    """Shapes of the meshes of the vocabulary, every layer, and the head, as its runtime reads the file."""
    for name in ("paddle", "paddle.distributed", "paddle.distributed.auto_parallel"):
        sys.modules.setdefault(name, ModuleType(name))
    held = ModuleType("paddle.distributed.auto_parallel.process_mesh")
    held.ProcessMesh = sys.modules["paddle.distributed"].ProcessMesh = ProcessMesh
    sys.modules["paddle"].distributed = sys.modules["paddle.distributed"]
    sys.modules[held.__name__] = held
    from paddlenlp.experimental.galvatron.runtime.comm_group import generate_meshs_fine_grained

    with tempfile.NamedTemporaryFile("w", suffix=".json") as stream:
        json.dump(file, stream)
        stream.flush()
        meshes, *_ = generate_meshs_fine_grained(world, stream.name)
    return [mesh.shape for mesh in meshes]


def score(asked: dict, file: dict, least: int) -> list:
    """As `dynamic_programming.py` puts the parts together."""
    from paddlenlp.experimental.galvatron.cost_model import memory_cost_model as memory
    from paddlenlp.experimental.galvatron.cost_model import profile_data_parser as parsing
    from paddlenlp.experimental.galvatron.cost_model import time_cost_model as timing
    from paddlenlp.experimental.galvatron.utils import LayerWiseStrategy

    parsed = parsing.ProfileDataParser(parsing.ProfileDataParserArguments(**asked["flags"]))
    pp, vtp, chunks, batch = (file[key] for key in _SIZES)
    world = asked["flags"]["profile_gpu_num"]
    lists = (
        [int(word) for word in file[f"{name}_list"].split(",")]
        for name in ("tp_size", "usp_flag", "dp_size", "sharding_stage", "recompute", "pp_stage_idx")
    )
    layers, stages = [], []
    for degree, is_sp, dp, sharding, again, stage in zip(*lists, strict=True):
        layers.append(LayerWiseStrategy(pp, degree, is_sp, dp, sharding, again))
        stages.append(stage)
    common = {
        "hidden_size": parsed.hidden_size_list[0],
        "mixed_precision_type": "bf16",
        "allreduce_coe_dict": parsed.allreduce_coe,
        "bct_fct_coe": 2.0,
        "dp_overlap_coe": parsed.overlap_coe,
        "sp_space": asked["sp_space"],
        "allreduce_dict": parsed.sp_allreduce,
    }
    of_layers = common | {
        "seq_length": parsed.seqlen_list[0],
        "forward_computation_time": parsed.time_profiled_list[0],
        "parameter_memory": parsed.param_sizes[0],
        "bct_overlap_coe": parsed.overlap_coe,
        "p2p_coe_dict": parsed.p2p_coe,
        "all2all_dict": parsed.sp_all2all,
    }
    ends = {"other_memory_pp_off": parsed.other_memory_pp_off, "other_memory_pp_on": parsed.other_memory_pp_on}
    ranks = world // pp // least
    timed = timing.OtherTimeCostModel(
        timing.OtherTimeCostModelArguments(
            pp_size=pp,
            min_tp_size=least,
            max_tp_size=vtp,
            world_size=world,
            embed_sdp=file["embed_sdp"],
            micro_batch_size=(batch // ranks + chunks - 1) // chunks,
            sequence_length_list=parsed.seqlen_list,
            other_time_profiled=parsed.other_time_profiled_list[0],
            vocab_use_ulysees=file["vsp_flag"],
            **common,
            **ends,
        )
    )
    division = [stages.count(stage) for stage in range(pp)]
    step_s = timing.pipeline_costmodel(of_layers, layers, chunks, batch, division, timed.gen_result()[1][vtp])
    held = memory.OtherMemoryCostModel(
        memory.OtherMemoryCostModelArguments(
            min_tp_size=least,
            max_tp_size=vtp,
            world_size=world,
            pp_size=pp,
            sharding_stage=3,
            global_batch_size=batch,
            accumulation_steps=chunks,
            use_ulysses=file["vsp_flag"],
            **ends,
        )
    ).get_other_memory_cost()[vtp]
    mib = [math.ceil(each) for each in held]
    for layer, stage in zip(layers, stages, strict=True):
        cost = memory.MemoryCostModel(
            memory.MemoryCostModelArguments(
                strategy=layer,
                global_batch_size=batch,
                stage_idx=stage,
                accumulation_steps=chunks,
                parameter_memory=parsed.param_sizes[0],
                tp_activation_per_bsz_dict=parsed.act_sizes[0],
            )
        )
        mib[stage] += math.ceil(cost.get_memory_cost()["enc_total"])
    return [float(step_s), mib]


if __name__ == "__main__":
    main()
