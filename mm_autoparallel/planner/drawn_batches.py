"""Global batches that are drawn for a job whose samples differ, and what their samples take.

Samples are drawn one by one, each as likely as any other, and dealt in the order in which they come (`arrival`), as
Megatron-LM's samplers deal them: micro-batch by micro-batch, of each to one replica after another. All plans are judged
by the same draws (common random numbers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.sample_loads import Scarcity, relative_loads, relative_sizes
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.sample_source import Packing
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.samples.table import SampleTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_SCARCE = 32
"""Samples of a micro-batch up to which it may be of too few images. Assumed: the most that encoders take at once."""
POLICY = "arrival"
"""How samples are dealt to replicas and micro-batches."""


def _is_usual(_modality: str, _mbs: int) -> float:
    return 1.0


@dataclass(frozen=True, eq=False)
class DrawnBatches:
    """Of one job. load_factor: modality → [n] loads of its samples over that of the mean sample; size_factor: the same
    of tokens, which memory goes by. batches: [S, B] numbers of the samples in each global batch, in the order in which
    they come. Where samples are packed, all that is of sequences, and `packing` says how; else it is empty. scarcity:
    of a modality and an MBS (costs/sample_loads.py).
    """

    load_factor: dict[str, Floats]
    size_factor: dict[str, Floats]
    batches: Ints
    packing: str = ""
    scarcity: Callable[[str, int], float] = _is_usual

    def factors(self, modality: str, mbs: int) -> Floats:
        """[n] on the times of a micro-batch of so many samples, of each of which they are the mean."""
        found: Floats = self.load_factor[modality] / self.scarcity(modality, mbs)
        return found

    @property
    def mean_factor(self) -> dict[str, float]:
        """Modality → what every position expects, of whatever MBS the least."""
        scarcest = {
            name: max(self.scarcity(name, mbs) for mbs in range(1, MOST_SCARCE + 1)) for name in self.load_factor
        }
        return {name: float(np.mean(loads)) / scarcest[name] for name, loads in self.load_factor.items()}

    def longest(self, strategy: Strategy) -> dict[str, float]:
        """Modality → how many times the mean's tokens the micro-batch with most of them has, of all drawn batches."""
        dealt = self.batches.reshape(-1, strategy.mbs)
        return {name: float(sizes[dealt].mean(axis=1).max()) for name, sizes in self.size_factor.items()}

    def deal(self, batch: int, modalities: tuple[str, ...], strategy: Strategy) -> Floats:
        """[DP, modalities, M] factors on the times of each micro-batch of each replica in one batch."""
        dealt = (-1, strategy.dp, strategy.mbs)
        return np.stack([self.mean_load(batch, name, dealt).T for name in modalities], axis=1)

    @property
    def at_mean(self) -> DrawnBatches:
        """One batch, of samples that are what every position expects."""
        mean = {name: np.array([np.mean(loads)]) for name, loads in self.load_factor.items()}
        return DrawnBatches(mean, mean, np.zeros((1, self.batches.shape[1]), dtype=np.int64), scarcity=self.scarcity)

    def mean_load(self, batch: int, modality: str, shape: tuple[int, ...]) -> Floats:
        """Of one batch's samples, in the order in which they come and in such a shape, the mean over the last axis."""
        loads: Floats = self.factors(modality, shape[-1])[self.batches[batch].reshape(shape)].mean(axis=-1)
        return loads


_DRAWN: WeakKeyDictionary[SampleTable, list[tuple[Model, Workload, str, DrawnBatches]]] = WeakKeyDictionary()
"""By a job's samples: for which model, workload and calibration."""


def draw_batches(job: Job | CostModel) -> DrawnBatches:
    """The batches of a job with samples; worked out once for each model, workload and calibration."""
    known = CostModel.of(job)
    job, samples = known.job, known.job.samples
    source = job.workload.samples
    assert samples is not None
    assert source is not None
    of_table, calibration = _DRAWN.setdefault(samples, []), known.calibration.description
    for model, workload, name, drawn in of_table:
        if model is job.model and workload is job.workload and name == calibration:
            return drawn
    sizes = (source.batches, job.workload.global_batch_size)
    batches = np.random.default_rng(source.seed).integers(samples.num_sequences, size=sizes)
    loads, lengths = relative_loads(known, samples), relative_sizes(known, samples)
    packing, scarcity = _describe_packing(job.model, source.packing, samples), Scarcity(known, samples)
    drawn = DrawnBatches(loads, lengths, batches, packing, scarcity)
    of_table.append((job.model, job.workload, calibration, drawn))
    return drawn


def _describe_packing(model: Model, packing: Packing | None, samples: SampleTable) -> str:
    """`in_order up to 8192 tokens, 3.4 samples a sequence, 93 % full, padded`."""
    if packing is None:
        return ""
    full = samples.num_tokens(model.merge_tokens, model.audio_tokens_per_s).sum() / packing.tokens
    return (
        f"{packing.rule} up to {packing.tokens} tokens, {len(samples) / samples.num_sequences:.1f} samples a sequence, "
        f"{100 * full / samples.num_sequences:.0f} % full{', padded' if packing.padded else ''}"
    )
