"""A language model's training described by the flags of Megatron-LM's pretrain_gpt.py that its script was given."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.hooks.pretraining import Pretraining
from mm_autoparallel.integrations.auto_tuning.flags import without_flags
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.dialect import MEGATRON, Dialect
from mm_autoparallel.integrations.megatron_core.launch import as_script, is_mindspeed
from mm_autoparallel.integrations.megatron_core.passed import Passed, read_passed
from mm_autoparallel.integrations.megatron_core.training import describe_training
from mm_autoparallel.integrations.mindspeed_llm.dialect import MINDSPEED
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.reports.terminal import warn

if TYPE_CHECKING:
    from mm_autoparallel.profilers.subject import Subject

MICRO_BATCHES = (1, 2)
"""Samples of a micro-batch that are tried beside the script's own: those of Auto Tuning."""


@dataclass(frozen=True)
class LanguageTraining:
    """A script that takes Megatron-LM's flags, in four parts; its model and workload are in the flags.

    subject: how the model is built and stepped. workload, search: what the script's own code does otherwise than the
    flags say, and the limits of what it can run, as in a job file. words: its arguments; None: those of this process.
    """

    subject: Subject
    workload: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)
    words: Sequence[str] | None = None

    @property
    def words_to_train(self) -> tuple[str, ...]:
        """Its arguments without those that search."""
        return without_flags(tuple(sys.argv[1:] if self.words is None else self.words))

    @property
    def passed(self) -> Passed:
        """The flags, as they are spelt."""
        return read_passed(as_script(Path(Path(sys.argv[0]).name), _list_passed(self.words_to_train)), None)

    @property
    def dialect(self) -> Dialect:
        """Whose flags they are."""
        return MINDSPEED if is_mindspeed(self.passed.script) else MEGATRON

    @property
    def framework(self) -> str:
        """What plans are exported to."""
        return "mindspeed-llm" if self.dialect is MINDSPEED else "megatron-core"

    @property
    def micro_batch_size(self) -> int:
        """That of the script itself; 1 where it says none."""
        return self.passed.number(flags.MICRO_BATCH) or 1

    def describe(self, num_devices: int) -> Pretraining:
        """The training, to be planned for `num_devices`. Raises JobError or PlanError naming the flag that is wrong."""
        passed = self.passed
        described = describe_training(passed, Given(world_size=num_devices), self.dialect, in_fp32=True)
        warn(described.notes)
        assert isinstance(described.model, Model)
        num_layers = described.model.text.layers.num_layers
        search: dict[str, Any] = {
            **described.search,
            "cp": None,
            "mbs": sorted({*MICRO_BATCHES, self.micro_batch_size}),
            "zero": [0, 1],
            "max_vpp": max(1, num_layers // 2),
        }
        return Pretraining(
            model=described.model,
            workload={**described.workload, "sequence_parallel": passed.has(flags.SEQUENCE_PARALLEL), **self.workload},
            subject=self.subject,
            search={**search, **self.search},
        )


def _list_passed(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words behind it, spelt with hyphens; words before the first flag are no flag's."""
    flag, behind = "", []  # type: tuple[str, list[str]]
    for word in words:
        if not word.startswith("--"):
            behind.append(word)
            continue
        if flag:
            yield flag, behind
        name, equals, value = word.partition("=")
        flag, behind = f"--{name[2:].replace('_', '-')}", [value] if equals else []
    if flag:
        yield flag, behind
