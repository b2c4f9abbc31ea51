"""Domains: how many devices the link of a node joins, and which levels of a cluster follow where it names none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_autoparallel.model.job.cluster import Device

_LARGEST_BOARD = 16
"""Devices that one node's own board ever joined (NVIDIA DGX-2); a link that joins more leaves the node."""


def domain_reason(device: Device, devices_per_node: int) -> str | None:
    """Why no node has so many of such devices; None where one may."""
    most = device.domain_devices
    if most is None or devices_per_node <= most:
        return None
    return (
        f"a node of {devices_per_node} devices is asked for, and the node link of {device.name} joins at most {most} "
        f"(its domain_devices); give nodes of at most {most}, or a device whose link joins more"
    )


def count_joined(device: Device, num_devices: int, node_span: int = 1) -> int:
    """Devices of one domain of `num_devices`, in whole nodes of `node_span`, where the node's link leaves the node: as

    many as divide the cluster evenly, 64 of 72; `node_span` where it does not.
    """
    most = device.domain_devices or 0
    if most <= _LARGEST_BOARD:
        return node_span
    sizes = range(node_span, min(most, num_devices) + 1, node_span)
    return max((size for size in sizes if num_devices % size == 0), default=node_span)


def list_default_levels(device: Device, node_span: int, num_devices: int) -> Iterator[dict[str, Any]]:
    """Fields of the node, of the domain where the node's link joins several nodes, and of the network, innermost first.

    Tensor parallel groups may span a domain (count_joined).
    """
    domain, spanned = count_joined(device, num_devices, node_span), 0
    for name, key, size in (
        ("node", "node_link", node_span),
        ("domain", "node_link", domain),
        ("cluster", "network_link", num_devices),
    ):
        if size > spanned:
            source, joined = device.sources.get(key, "job file"), name == "domain"
            more = {"source": source, "tensor_parallel": joined, "of_node_link": joined}
            yield {"name": name, "num_devices": size} | getattr(device, key).model_dump() | more
            spanned = size
