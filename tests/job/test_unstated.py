"""What a job leaves unsaid of models that are known by their traces alone."""

from __future__ import annotations

from pathlib import Path

from mm_autoparallel.model.job.traced_model import parse_traced_model
from mm_autoparallel.model.job.unstated import find_unstated
from mm_autoparallel.model.job.workload import Workload

BLOCKS = [{"kind": "layer", "role": "layer", "count": 2, "parameter_count": 8}]


def test_an_encoder_of_text_is_asked_for_like_any_other() -> None:
    document = {
        "schema": "mm-autoparallel/traced-model/1",
        "name": "t5",
        "class_name": "T5",
        "parameter_count": 32,
        "encoders": [{"name": "text_encoder", "kind": "text", "hidden_size": 8, "blocks": BLOCKS}],
        "text": {"hidden_size": 8, "blocks": BLOCKS},
    }
    model = parse_traced_model(document, Path("model.json"))
    workload = Workload(global_batch_size=1, seq_length=8)
    assert "freeze.text_encoder" in find_unstated(model, {}, {}, workload)
    assert "freeze.text_encoder" not in find_unstated(model, {}, {"text_encoder": True}, workload)
