"""What one block holds of its stage's memory: terms of Problem's memory rule, once for whoever writes rows of it."""

from __future__ import annotations

from typing import NamedTuple

from mm_autoparallel.pipeline.problem import ChainBlock, Mode


class Held(NamedTuple):
    """Bytes that one block holds in one of its modes, or in none.

    always_bytes: through the whole step, and while a layer in that mode is restored. kept_bytes: for each micro-batch
    in flight; pending_bytes: for each whose weight gradient alone is left. host_always_bytes, host_kept_bytes: the same
    on the host. What passes, transients and the optimizer's step, is a largest over the stage's blocks and no sum of
    theirs.
    """

    always_bytes: float
    kept_bytes: float
    host_always_bytes: float
    host_kept_bytes: float
    pending_bytes: float

    def at_work(self, in_flight: float, pending: float = 0.0) -> float:
        """On the device, with so many micro-batches in flight, and pending."""
        return self.always_bytes + in_flight * self.kept_bytes + pending * self.pending_bytes

    def on_host(self, in_flight: float, _pending: float = 0.0) -> float:
        """On the host, which what is pending has left."""
        return self.host_always_bytes + in_flight * self.host_kept_bytes


def held_by(block: ChainBlock, mode: Mode | None = None) -> Held:
    """What one of `block` holds in `mode`; None: in none."""
    if mode is None:
        return Held(block.static_bytes, block.activation_bytes, block.host_static_bytes, 0.0, block.pending_bytes)
    always_bytes = block.static_bytes + mode.restored_bytes
    return Held(always_bytes, mode.activation_bytes, block.host_static_bytes, mode.host_bytes, block.pending_bytes)
