"""How every model type of the installed transformers that takes images or sounds is read.

    python tests/profilers/trace/model_types_census.py [--only TYPE... | --missing]

Of each type the class is built from its default config (with what publishers' files say where the default contradicts
itself, published_sizes.py), without memory. A type that a reader of this package describes is read by it, any other is
taken apart, and either way the parameters are counted against those of the class. Each type's record is kept in
tests/fixtures/model_types.json as soon as it is there, beside how many types the release has; what is made of it,
docs/reference/model-types.md, says both. Ends with 1 where a type that was read whole is so no more, or a reader's
parameters are not those of the class. `make nightly` runs it; every_type.py goes on to plans.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.files import write_text_atomically
from mm_autoparallel.integrations.huggingface.config import FAMILIES
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_chain_parameters
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.model_file import parse_foreign_model

RECORD = Path(__file__).parents[2] / "fixtures" / "model_types.json"
CONFIG = Path("config.json")

MEDIA = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)
SEQUENCES = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"


def list_types() -> list[str]:
    """All of images, of several modalities, of speech; and of those from sequence to sequence what has audio."""
    from transformers import CONFIG_MAPPING

    from mm_autoparallel.profilers.huggingface_classes import model_types

    found = {*model_types(*MEDIA)}
    with_audio = {kind for kind in model_types(SEQUENCES) if "audio_config" in CONFIG_MAPPING[kind].sub_configs}
    return sorted(found | with_audio)


def record_type(model_type: str) -> dict[str, Any]:
    """What becomes of one type, as JSON values. parts: name, layers, and kinds of these, in the order data flows."""
    from published_sizes import PUBLISHED

    document = {"model_type": model_type, **PUBLISHED.get(model_type, {})}
    told: dict[str, Any] = {"route": "described" if model_type in FAMILIES else "taken apart"}
    try:
        return told | (_describe(document) if model_type in FAMILIES else _take_apart(document))
    except PlannerError as failure:
        return told | {"refusal": " ".join(str(failure).replace(f"model file {CONFIG}: ", "").split())}
    except Exception as failure:  # noqa: BLE001 — a crash of one type must not hide the others
        return told | {"crash": f"{type(failure).__name__}: {failure}"}


def _describe(document: dict[str, Any]) -> dict[str, Any]:
    import torch

    from mm_autoparallel.profilers.huggingface_classes import build_class

    chain = expand(parse_foreign_model(document, CONFIG))
    kinds: dict[str, dict[str, int]] = {}
    for block in chain.blocks:
        if block.role == "layer":
            of_part = kinds.setdefault(block.modality, {})
            of_part[block.kind] = of_part.get(block.kind, 0) + block.count
    thinker = f"{document['model_type']}_thinker"
    own = document if thinker not in FAMILIES else {"model_type": thinker, **document.get("thinker_config", {})}
    live, name = build_class(own, CONFIG, torch.bfloat16, "sdpa")
    return {
        "class": name,
        "parts": [[part, sum(counts.values()), len(counts)] for part, counts in kinds.items()],
        "parameters": count_chain_parameters(chain),
        "of_class": sum(parameter.numel() for parameter in live.parameters()),
        "remarks": [] if own is document else [f"what is read is its thinker, a {name}"],
    }


def _take_apart(document: dict[str, Any]) -> dict[str, Any]:
    from mm_autoparallel.profilers.trace.undescribed import Undescribed

    workload = Workload(global_batch_size=8, seq_length=256, implementation="transformers")
    found = Undescribed(document, CONFIG, workload, str(document["model_type"]), {})
    model = found.model
    return {
        "class": model.class_name,
        "parts": [
            [part.name, part.layers.num_layers, len({block.kind for block in part.blocks if block.role == "layer"})]
            for part in model.parts
        ],
        "parameters": sum(block.count * block.parameter_count for part in model.parts for block in part.blocks),
        "of_class": found.count_real_parameters(),
        "idle": sum(
            block.count * block.parameter_count
            for part in model.parts
            for block in part.blocks
            if block.trains_with == "nothing"
        ),
        "remarks": list(model.remarks),
    }


def is_whole(told: dict[str, Any]) -> bool:
    """Whether every part of a type is read, with the parameters of its class."""
    counted = "parameters" in told and told["parameters"] == told["of_class"]
    return counted and not any("cannot be run" in remark for remark in told["remarks"])


def main() -> int:
    """Records each type; how many are read whole, and whether one is so no more."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", nargs="+", default=())
    chosen.add_argument("--missing", action="store_true", help="types that have no record yet")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    import transformers

    types, lost = list_types(), []
    recorded = json.loads(RECORD.read_text())["types"] if arguments.missing else {}
    for model_type in arguments.only or [one for one in types if one not in recorded]:
        told = record_type(model_type)
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        before = record.get("types", {})
        if "crash" in told or (is_whole(before.get(model_type, {})) and not is_whole(told)):
            lost.append(model_type)
        kept = {name: before[name] for name in before if name in types} | {model_type: told}
        release = {"transformers": transformers.__version__, "of_release": len(types)}
        now = release | {"types": dict(sorted(kept.items()))}
        write_text_atomically(RECORD, json.dumps(now, indent=1) + "\n")
        print(model_type, json.dumps(told), flush=True)
    record = json.loads(RECORD.read_text())["types"]
    print(f"{sum(map(is_whole, record.values()))} of {len(types)} types are read whole; worse than before: {lost}")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
