"""The table of devices of a decoder with encoders: what each holds and runs, its idle time, its peak and limit."""

from __future__ import annotations

import numpy as np
from rich.table import Table

from mm_autoparallel.pipeline.placement.bubbles.run import EncodedResult
from mm_autoparallel.reports.tables import plain_table
from mm_autoparallel.units import GIB, format_percent


def device_table(result: EncodedResult) -> Table:
    """One row a device, those of the decoder's stages first, then own ones of encoders. Of each encoder the passes are
    counted, forwards and backwards."""
    tasks, placement, problem = result.tasks, result.placement, result.problem
    if tasks is None or placement is None:
        raise ValueError("nothing was placed")
    decoder = problem.decoder
    names = [block.name for block in decoder.chain]
    passes = [encoder.name for encoder in problem.encoders if encoder.run != "cached"]
    owners = [owner for owner, encoder in enumerate(problem.encoders) if encoder.run != "cached"]
    headings = [*names, *(f"{name}, passes" for name in passes), "decoder, ms", "encoders, ms", "bubble"]
    table = plain_table("device", *headings, "peak, GiB", "limit, GiB", "used")
    lengths = tasks.length_ms
    for device in range(problem.num_devices):
        mine = tasks.lane == device
        decoder_ms = float(lengths[mine & (tasks.owner < 0)].sum())
        encoders_ms = float(lengths[mine & (tasks.owner >= 0)].sum())
        idle_ms = max(0.0, result.step_ms - decoder_ms - encoders_ms - float(tasks.tails_ms[device]))
        peak, limit = result.peak_bytes[device], float(tasks.limit_bytes[device])
        held = [""] * len(names)
        if device < decoder.num_stages:
            of_chunks = [placement.layers[k] for k in decoder.virtual_stages[device]]
            held = [" + ".join(str(chunk[e]) for chunk in of_chunks) for e in range(len(names))]
        table.add_row(
            str(device),
            *held,
            *(str(int(np.sum(mine & (tasks.owner == owner)))) for owner in owners),
            f"{decoder_ms:,.2f}",
            f"{encoders_ms:,.2f}",
            format_percent(idle_ms / result.step_ms if result.step_ms else 0.0),
            f"{peak / GIB:.2f}",
            f"{limit / GIB:.2f}" if np.isfinite(limit) else "-",
            format_percent(peak / limit) if np.isfinite(limit) and limit else "-",
        )
    return table
