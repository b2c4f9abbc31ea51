"""The columns of a row that say what its network carries and in which precision it computed."""

from __future__ import annotations

from typing import Any

from mm_autoparallel.measurements.table import Row, Unrepresentable
from mm_autoparallel.model.job.cluster import Link
from mm_autoparallel.model.job.devices import DEVICES

NETWORK = ("node_bytes_per_s", "network_bytes_per_s")
"""What one device sends one way: to others of its node, and beyond it."""

_PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}


def list_levels(row: Row, device: str, num_devices: int, devices_per_node: int, tp: int) -> dict[str, Any]:
    """The cluster's key `levels`: the catalog's links with the bandwidths of the columns NETWORK.

    Empty where the row says nothing of its network and no tensor parallel group is wider than a node: the cluster then
    has the catalog's. Raises TableError where a bandwidth is none.
    """
    wide = tp > devices_per_node
    if not wide and not any(row.has(column) for column in NETWORK):
        return {}
    catalogued = DEVICES[device]
    per_node = min(devices_per_node, num_devices)
    node = _level(row, "node", catalogued.node_link, "node_bytes_per_s", catalogued.sources.get("node_link", ""))
    levels = [node | {"num_devices": per_node}]
    if num_devices > per_node:
        source = catalogued.sources.get("network_link", "")
        network = _level(row, "cluster", catalogued.network_link, "network_bytes_per_s", source)
        levels.append(network | {"num_devices": num_devices, "tensor_parallel": wide})
    return {"levels": levels}


def _level(row: Row, name: str, link: Link, column: str, source: str) -> dict[str, Any]:
    """The catalog's link, with the row's bandwidth where it has one; pairs of devices keep their part of it."""
    level = {"name": name, **link.model_dump(), "source": source}
    stated = row.optional_positive(column)
    if stated is None:
        return level
    pair_bytes_per_s = link.pair_bandwidth_bytes_per_s
    scaled = pair_bytes_per_s and pair_bytes_per_s * stated / link.bandwidth_bytes_per_s
    return level | {
        "bandwidth_bytes_per_s": stated,
        "pair_bandwidth_bytes_per_s": scaled,
        "source": f"{row.path.name}: {column}",
    }


def precision_of(row: Row) -> str:
    """`bf16` or `fp16`, which have one peak and one size. Raises Unrepresentable for any other."""
    text = row.text("precision", "bf16")
    if text.lower() not in _PRECISIONS:
        raise Unrepresentable(f"the precision {text!r} is not represented; known are bf16 and fp16")
    return _PRECISIONS[text.lower()]
