"""The class that transformers has for a config.json, built whole and without memory: its tensors hold no numbers.

No code but that of the installed transformers is ever run, and nothing is fetched.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.profilers.trace.fakes import FAKES, interruptible
from mm_autoparallel.profilers.transformers_releases import no_init_weights, read_config
from mm_autoparallel.validation import nearest

_MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
)
"""Of transformers 5, the richest first: one model type may be in several."""


def model_types(*mappings: str) -> dict[str, str]:
    """model_type → class, of `mappings` (all that are looked through)."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for mapping in mappings or _MAPPINGS:
        for model_type, named in getattr(modeling_auto, mapping, {}).items():
            found.setdefault(model_type, named if isinstance(named, str) else named[0])
    return found


def build_class(document: Mapping[str, Any], path: Path, dtype: torch.dtype, attention: str) -> tuple[nn.Module, str]:
    """The model of the config.json `document`, in training mode, and the name of its class.

    attention: `sdpa` or `eager`; a class that has no fused attention is built with its own. Raises ProfileError where
    transformers has no class for it or cannot build it, with what it said.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # whatever a class would fetch beside its weights
    import transformers
    from transformers import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    model_type, name = str(document.get("model_type")), ""
    known = model_types()
    if model_type in CONFIG_MAPPING:
        name = known.get(model_type, "")
    if not name:
        remote = "; its auto_map names code of its own, which is never run here" if document.get("auto_map") else ""
        near = nearest(model_type, list(known))
        raise ProfileError(
            f"model file {path}: model_type is {model_type!r}, and transformers {transformers.__version__} has no "
            f"model of images and text, of several modalities, of speech, or of text so called{near}{remote}; mend it, "
            "install the release of transformers that has it, or trace your own code with `mm-autoparallel trace "
            "--model`"
        )
    try:
        make = getattr(transformers, name)
        config = _own_config(make, read_config(document))
        with interruptible(), torch.device("meta"), no_init_weights():
            live = _make(make, config, dtype, attention)
    except Exception as failure:  # noqa: BLE001 — whatever trips over a value first, in any of 300 classes
        reason = " ".join(str(failure).split())[:300]
        raise ProfileError(
            f"model file {path}: transformers {transformers.__version__} builds no {name} from it: "
            f"{type(failure).__name__}: {reason}; give the whole config.json that was published with the model's "
            "weights, or install what is missing"
        ) from None
    live.tie_weights()
    _keep_all_layers(live)
    _fill(live, dtype)
    trained: nn.Module = live.train()
    return trained, name


def _keep_all_layers(live: nn.Module) -> None:
    """No step leaves a layer out at random (LayerDrop, arXiv:1909.11556): what is read of a model is every layer."""
    for module in live.modules():
        for holder in (module, getattr(module, "config", None)):
            own = getattr(holder, "__dict__", {})
            chances = [name for name in own if name.endswith("layerdrop") and isinstance(own[name], float)]
            own.update(dict.fromkeys(chances, 0.0))


def _own_config(make: Any, config: Any) -> Any:
    """`config`, or the part of it that `make` is the class of: of music, the decoder's."""
    own = getattr(make, "config_class", None)
    if own is None or isinstance(config, own):
        return config
    return next((part for part in vars(config).values() if isinstance(part, own)), config)


def _make(make: Any, config: Any, dtype: torch.dtype, attention: str) -> Any:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        try:
            return make._from_config(copy.deepcopy(config), attn_implementation=attention)
        except (ValueError, ImportError):  # of classes without fused attention
            return make._from_config(copy.deepcopy(config), attn_implementation="eager")
    finally:
        torch.set_default_dtype(before)


def _fill(live: nn.Module, dtype: torch.dtype) -> None:
    """Fake tensors in the place of meta ones: of the CPU, which real integers may meet. Tied ones stay tied.

    Parameters that old constructors made real and fp32 whatever the defaults are (`torch.FloatTensor`) get `dtype` too.
    """
    filled: dict[Tensor, Tensor] = {}  # by identity, which is how tensors hash

    def fill(tensor: Tensor) -> Tensor:
        if tensor not in filled:
            own = dtype if tensor.is_floating_point() and not tensor.is_meta else tensor.dtype
            with interruptible(), FAKES:
                new = torch.empty(tensor.shape, dtype=own)
            filled[tensor] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        return filled[tensor]

    for module in live.modules():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for held in places:
            for name, tensor in list(held.items()):
                if isinstance(tensor, Tensor) and (tensor.is_meta or isinstance(tensor, nn.Parameter)):
                    held[name] = fill(tensor)
