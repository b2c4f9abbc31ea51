"""Encoder work in a decoder's bubbles against phases and an even chain, and what a cap on passes ahead costs.

`python tests/benchmarks/encoder_bubbles.py [--caps 1,2,4]` prints the tables of docs/guide/bubbles.md. Figures are made
up: decoder stages of 20 and 40 ms, hops of 1 ms, one encoder a device.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.encoders import EncodedProblem, deal_pipelines
from mm_autoparallel.pipeline.placement.bubbles.compare import compare
from mm_autoparallel.pipeline.placement.bubbles.run import place_encoded
from mm_autoparallel.pipeline.problem import ChainBlock, Problem

CASES = ((4, 8, 12.0, 24.0), (8, 16, 16.0, 32.0), (8, 16, 16.0, 0.0), (8, 32, 16.0, 32.0))


def make(num_stages: int, num_microbatches: int, forward_ms: float, backward_ms: float) -> EncodedProblem:
    block = ChainBlock("text", "text", num_stages, 20.0, 40.0)
    zeros, hops = (0.0,) * num_stages, (1.0,) * (num_stages - 1)
    decoder = Problem(num_stages, 1, num_microbatches, "1f1b", (block,), zeros, zeros, zeros, hops, (0.0,) * len(hops))
    pipelines = deal_pipelines(num_stages, 1)
    held = (0.0,)
    encoder = Encoder(
        "vision", (forward_ms,), (backward_ms,), pipelines, feed_ms=1.0, static_bytes=held, activation_bytes=held
    )
    return EncodedProblem(decoder, (encoder,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--caps", default="", help="passes ahead of the decoder, apart by commas")
    arguments = parser.parse_args()
    caps = [int(cap) for cap in arguments.caps.split(",") if cap]
    for case in CASES:
        problem = make(*case)
        began = time.process_time()
        result = place_encoded(problem)
        took_s = time.process_time() - began
        assert result.placement is not None
        others = compare(problem, result.placement)
        print(
            f"{case}: decoder {others.decoder_ms:g}, phases {others.phases_ms:g}, chain {others.chain_ms:g}, bubbles "
            f"{result.step_ms:g} ({result.status}, bound {result.lower_bound_ms:g}), {took_s:.2f} CPU s",
            flush=True,
        )
        for cap in caps:
            (encoder,) = problem.encoders
            found = place_encoded(replace(problem, encoders=(replace(encoder, most_ahead=cap),)))
            print(f"  {cap} ahead: {found.step_ms:g} (bound {found.lower_bound_ms:g}, {found.status})", flush=True)


if __name__ == "__main__":
    main()
