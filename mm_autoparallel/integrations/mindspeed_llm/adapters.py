"""LoRA in MindSpeed-LLM: which adapters a script's flags add, as far as they can be planned.

peft freezes the whole model and puts adapters beside the matrices that --lora-target-modules names, without dropout
(mindspeed_llm/training/training.py, get_model_wrapper).
"""

from __future__ import annotations

from collections.abc import Mapping

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.passed import Passed

TARGETS, RANK = flags.ADAPTED, "--lora-r"
DEFAULT_RANK = 16
"""features_manager/finetune/lora.py."""
_MATRICES = {"linear_qkv": "qkv", "linear_proj": "proj", "linear_fc1": "fc1", "linear_fc2": "fc2"}
"""Megatron's names of a layer's matrices → those of a job (model/job/model.py)."""
_OTHERWISE = {
    "--lora-modules-to-save": "trains further weights whole",
    "--lu-lora-final-layer-index": "trains only the last layers' adapters",
}


def find_adapters(passed: Passed) -> Mapping[str, object] | None:
    """`adapters` of a job for what is `passed`; None where whole weights train. Raises PlanError for other adapters."""
    names = passed.list(TARGETS)
    if not names:
        return None
    for flag, what in _OTHERWISE.items():
        if passed.has(flag):
            raise PlanError(f"{passed.where}: {flag} {what}, which is not planned; take it out")
    unknown = [name for name in names if name not in _MATRICES]
    if unknown:
        raise PlanError(f"{passed.where}: {TARGETS} names {', '.join(unknown)}; known are {', '.join(_MATRICES)}")
    return {"rank": passed.number(RANK) or DEFAULT_RANK, "targets": [_MATRICES[name] for name in dict.fromkeys(names)]}
