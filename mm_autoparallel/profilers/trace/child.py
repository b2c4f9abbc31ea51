"""What integrations/huggingface/generic.py starts: a folder has request.json, gets traces, then model.json."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.files import read_document, write_text_atomically
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.model_form import REFUSAL
from mm_autoparallel.validation import describe_unfit


def main(folder: str) -> int:
    """0 where all is written; 2 where it is refused, with the reason in a file."""
    from mm_autoparallel.profilers.trace.undescribed import Undescribed

    place = Path(folder)
    request = read_document(place / "request.json", "request")
    try:
        workload = Workload.model_validate_json(json.dumps(request["workload"]))
        found = Undescribed(request["config"], Path(request["path"]), workload, request["name"], request["freeze"])
        for mbs in request["mbs"]:
            found.write_traces(place / "traces", mbs, workload, "mm-autoparallel trace", recompute=True)
        text = json.dumps(found.model.document(), indent=1)
        write_text_atomically(place / "model.json", text + "\n")
    except ValidationError as failure:  # sizes that its class takes and no model has
        reason = f"model file {request['path']}: {describe_unfit(failure)}"
    except PlannerError as failure:
        reason = " ".join(str(failure).split())
    else:
        return 0
    write_text_atomically(place / REFUSAL, json.dumps({"reason": reason}))
    return 2
