"""Their space: every configuration that Auto Tuning tries for a cluster, by its laws alone.

Found in MindSpeed 2.1.0_core_r0.8.0 (mindspeed/auto_tuning): tensor parallel sizes by device, context parallel where
enough of a sequence is left, stages that divide the layers, at least two micro-batches for each stage and replica,
virtual stages of equal depth, micro-batches of one or two samples, ZeRO 1 where optimizer states can be divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mm_autoparallel.errors import JobError

MICRO_BATCHES = (1, 2)
"""Samples of a micro-batch that are tried, whatever the script says."""


@dataclass(frozen=True)
class Laws:
    """What depends on the device.

    tensor_parallel: sizes that are tried. least_tokens: of a sequence, that a context parallel rank is left with.
    profiled_again: the tensor parallel size that is measured beside 8 (profile_runs.py).
    """

    tensor_parallel: tuple[int, ...]
    least_tokens: int
    profiled_again: int


_LAWS = {"910B": Laws((1, 8), 8192, 4), "910_9": Laws((1, 2, 4, 8), 4096, 16)}
"""By what stands behind `Ascend` in a device's name."""


def laws_of(device: str) -> Laws:
    """The laws of a device by its name, `Ascend910B1` or `Ascend910_9391`. Raises JobError where none are known."""
    for mark, laws in _LAWS.items():
        if device.lower().startswith(f"ascend{mark.lower()}"):
            return laws
    raise JobError(f"Auto Tuning knows Ascend910B and Ascend910_9 devices, and this one is {device}")


@dataclass(frozen=True)
class Network:
    """What of a training its laws ask for.

    num_experts: 1 without experts. num_samples: of a step, over the micro-batch size of the script.
    """

    num_layers: int
    seq_length: int
    num_samples: int
    num_experts: int = 1


@dataclass(frozen=True, order=True)
class Configuration:
    """One entry of the space. chunk_layers: of a virtual stage; None without virtual stages."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    chunk_layers: int | None
    mbs: int
    zero: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """TP, CP, PP and DP."""
        return self.tp, self.cp, self.pp, self.dp


def list_configurations(network: Network, num_ranks: int, laws: Laws) -> Iterator[Configuration]:
    """All that the laws leave for `num_ranks` devices, sizes in the order TP, CP, PP, EP, chunks, micro-batch, ZeRO."""
    for tp in laws.tensor_parallel:
        for cp in _powers(num_ranks):
            if cp > 1 and network.seq_length / cp < laws.least_tokens:
                continue
            for pp in _divisors(network.num_layers):
                dp, rest = divmod(num_ranks, tp * cp * pp)
                if dp and not rest and _has_micro_batches(network.num_samples, pp, dp):
                    yield from _vary(network, tp, cp, pp, dp)


def _vary(network: Network, tp: int, cp: int, pp: int, dp: int) -> Iterator[Configuration]:
    """What is tried beside the four sizes."""
    depth = network.num_layers // pp
    chunks = [None, *(count for count in _divisors(depth) if count < depth)] if pp > 1 else [None]
    for ep in _divisors(network.num_experts):
        if cp * dp % ep:
            continue
        for chunk_layers in chunks:
            for mbs in MICRO_BATCHES:
                for zero in (0, 1) if cp * dp > 1 else (0,):
                    yield Configuration(tp, cp, pp, dp, ep, chunk_layers, mbs, zero)


def _has_micro_batches(num_samples: int, pp: int, dp: int) -> bool:
    return num_samples % dp == 0 and num_samples // (pp * dp) > 1


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
