"""Runs where the numeric packages of Galvatron 2.4.0's search are: scores strategies and searches by its own engine.

Standard input: {"folder": its sources, "cases": [{"flags": of search_dist.py, "name", "hidden_size", "num_layers",
"seq_length", "score": [strategy JSON …], "search": bool}]}; standard output: a list of {"scores": [[[step s, [MiB by
stage]] by lowest degree] …], "found": strategy JSON or null, "found_s": step s, "cpu_s": its time}.
"""

import argparse
import math
import sys

from galvatron_engine import answer_all, read_cases


def main() -> None:
    cases = read_cases(("galvatron", "galvatron.core", "galvatron.utils"))  # their own import torch and what trains
    from galvatron.utils import config_utils, strategy_utils

    for module in (config_utils, strategy_utils):
        vars(sys.modules["galvatron.utils"]).update(vars(module))
    answer_all(cases, make_engine, score)


def make_engine(case: dict, folder: str):
    from galvatron.core.search_engine.arguments import galvatron_search_args
    from galvatron.core.search_engine.search_engine import GalvatronSearchEngine

    args = galvatron_search_args(argparse.ArgumentParser()).parse_args([])
    vars(args).update(case["flags"], hidden_size=case["hidden_size"], output_config_path=folder, log_dir=folder)
    return GalvatronSearchEngine(args)


def score(engine, case: dict, plan: dict) -> list:
    """As `search_engine.py` and `dynamic_programming.py` put their parts together, for every lowest degree that its
    search would take the plan with."""
    from galvatron.core.search_engine.cost_model import (
        MemoryCostModel,
        OtherTimeCostModel,
        TimeCostModel,
        pipeline_costmodel,
    )

    def numbers(key: str) -> list:
        return [int(word) for word in plan[key].split(",")]

    args, samples, chunks, pp = engine.args, plan["global_bsz"], plan["chunks"], plan["pp_deg"]
    devices, division = args.gpu_num // pp, numbers("pp_division")
    layers = []
    for degree, near, fully, is_sp, again in zip(
        *map(numbers, ("tp_sizes_enc", "tp_consecutive_flags", "dp_types_enc", "use_sp", "checkpoint")), strict=True
    ):
        told = {}
        if 1 < degree < devices:
            told["tp"] = near
        if degree < devices:
            told["fsdp"] = fully
        if degree > 1:
            told["sp"] = is_sp
        if again:
            told["cpt"] = 1
        layers.append([pp, degree, devices // degree, told])
    parts = {
        "model_args": engine.model_args_list[0],
        "train_args": engine.train_args_list[0],
        "parallel_args": engine.parallel_args_list[0],
        "profile_model_args": engine.profile_model_args_list[0],
    }
    degrees = [plan["vtp"], *numbers("tp_sizes_enc")]
    hardware, highest, found, lowest = engine.profile_hardware_args_list[0], max(degrees), [], 1
    while lowest <= min(degrees):
        ranks = devices // lowest
        each = (samples // ranks + chunks - 1) // chunks
        if samples % ranks == 0 and chunks <= samples // ranks and chunks == (samples // ranks + each - 1) // each:
            ends = OtherTimeCostModel(
                each,
                pp,
                args.gpu_num,
                plan["vsp"],
                plan["embed_sdp"],
                lowest,
                highest,
                engine.seqlen_list,
                **parts,
                profile_hardware_args=hardware,
            ).gen_result()
            step_s = pipeline_costmodel(
                TimeCostModel,
                engine.layernum_list,
                *([part] for part in parts.values()),
                [hardware],
                layers,
                division,
                [engine.optimal_chunk_func(samples * lowest // devices, [pp, lowest, devices], each, lowest)],
                samples,
                lowest,
                ends[1][plan["vtp"]],
            )
            held = {"vsp": plan["vsp"], "embed_sdp": plan["embed_sdp"]} | parts
            mib, start = [], 0
            for stage, count in enumerate(division):
                costs = [
                    MemoryCostModel(
                        layer, samples, mbsz=each, min_tp=lowest, max_tp=highest, stage_idx=stage, **held
                    ).get_memory_cost()
                    for layer in layers[start : start + count]
                ]
                mib.append(math.ceil(costs[0]["other"][plan["vtp"]][stage]))
                mib[-1] += sum(math.ceil(cost["enc_total"]) for cost in costs)
                start += count
            found.append([float(step_s), mib])
        lowest *= 2
    return found


if __name__ == "__main__":
    main()
