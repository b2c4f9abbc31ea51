"""Runs in an environment where Galvatron's own code is: scores strategies and searches by its own engine.

Standard input: {"folder": its checkout, "cases": [{"config": what stands under search_engine, "name", "hidden_size",
"num_layers", "seq_length", "score": [strategy JSON …], "search": bool, "read": bool}]}; standard output: a list of
{"scores": [[step s, [MiB by stage]] …], "found": strategy JSON or null, "found_s": step s, "cpu_s": its time, "read":
[vocab_sdp as its runtime's reader takes it …]}.
"""

import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace

from galvatron_engine import answer_all, read_cases

_LISTS = ("tp_sizes_enc", "use_sp", "dp_types_enc", "checkpoint")


def main() -> None:
    cases = read_cases(("galvatron.core", "galvatron.core.runtime"))  # their own import what trains, which needs Triton
    answer_all(cases, make_engine, score, read)


def make_engine(case: dict, folder: str):
    from galvatron.core.search_engine.args_schema import GalvatronSearchArgs
    from galvatron.core.search_engine.search_engine import GalvatronSearchEngine

    args = GalvatronSearchArgs(**case["config"])
    args.options_info.log_dir = str(Path(folder) / "logs")
    args.options_info.output_config_path = folder
    args.model_info.hidden_size = case["hidden_size"]
    return GalvatronSearchEngine(args)


def score(engine, case: dict, strategy: dict) -> list:
    """As `search_engine.py` and `dynamic_programming.py` put their parts together, for one strategy of layers."""
    from galvatron.core.cost_model.components.embedding_lmhead_cost import (
        EmbeddingLMHeadMemoryCostModel,
        EmbeddingLMHeadTimeCostModel,
    )
    from galvatron.core.cost_model.components.layer_cost import MemoryCostModelBase
    from galvatron.core.cost_model.cost_model_handler import pipeline_costmodel
    from galvatron.utils.strategy_utils import DPType, EmbeddingLMHeadStrategy, LayerStrategy

    def numbers(key: str) -> list:
        return [int(word) for word in strategy[key].split(",")]

    pp, devices, chunks, batch = (strategy[key] for key in ("pp_deg", "world_size", "chunks", "global_bsz"))
    default = {"ddp": DPType.DDP, "zero2": DPType.ZERO2}[strategy["default_dp_type"]]

    def sizes(degree: int, is_sp: int, fully: int) -> dict:
        dp = devices // pp // degree
        kind = DPType.DDP if dp == 1 else DPType.ZERO3 if fully else default
        return {
            "pp_size": pp,
            "tp_size": 1 if is_sp else degree,
            "sp_size": degree if is_sp else 1,
            "dp_size": dp,
            "dp_type": kind,
        }

    layers = [
        LayerStrategy(**sizes(degree, is_sp, fully), checkpoint=bool(again))
        for degree, is_sp, fully, again in zip(*map(numbers, _LISTS), strict=True)
    ]
    ends = EmbeddingLMHeadStrategy(**sizes(strategy["vtp"], strategy["vsp"], strategy["embed_sdp"]))
    division = numbers("pp_division")
    of_model = {
        "model_args": engine.model_args_list[0],
        "train_args": engine.train_args_list[0],
        "parallel_args": engine.parallel_args_list[0],
        "profile_model_args": engine.profile_model_args_list[0],
    }
    timed = EmbeddingLMHeadTimeCostModel(
        ends,
        batch,
        chunks,
        None,
        [case["seq_length"]],
        **of_model,
        profile_hardware_args=engine.profile_hardware_args_list[0],
    )
    step_s = pipeline_costmodel(
        [len(layers)],
        *([part] for part in of_model.values()),
        engine.profile_hardware_args_list,
        layers,
        division,
        chunks,
        batch,
        pp,
        timed.gen_result()[1],
    )
    mib = [
        math.ceil(each)
        for each in EmbeddingLMHeadMemoryCostModel(ends, batch, chunks, None, **of_model).get_memory_cost()["enc_total"]
    ]
    start = 0
    for stage, held in enumerate(division):
        for layer in layers[start : start + held]:
            cost = MemoryCostModelBase(layer, batch, chunks, stage, None, **of_model)
            mib[stage] += math.ceil(cost.get_memory_cost()["enc_total"])
        start += held
    return [float(step_s), mib]


def read(case: dict, strategy: dict) -> int:
    """What the runtime's reader takes as `vocab_sdp`; raises where it refuses the file."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=strategy["world_size"], store=FakeStore())
    from galvatron.core.runtime.args_schema import GalvatronModelArgs, GalvatronParallelArgs
    from galvatron.core.runtime.hybrid_parallel_config import check_hp_config, get_hybrid_parallel_configs_api

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(strategy, file)
        file.flush()
        parallel = GalvatronParallelArgs(galvatron_config_path=file.name)
        args = SimpleNamespace(
            local_rank=1,
            parallel=parallel,
            model=GalvatronModelArgs(num_layers=case["num_layers"]),
            train=SimpleNamespace(chunks=0, global_batch_size=0),
            ckpt=SimpleNamespace(distributed_checkpoint=False, load=None, save=None),
        )
        configs = get_hybrid_parallel_configs_api(args)
    check_hp_config(configs, [case["num_layers"]])
    return parallel.vocab_sdp


if __name__ == "__main__":
    main()
