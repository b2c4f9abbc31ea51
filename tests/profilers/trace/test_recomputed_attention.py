"""A layer that is recomputed runs the operators again that it ran first, also those that CPU would choose otherwise."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tracing_jobs import WHOLE_DOCUMENTS, job_of, trace_job


@pytest.mark.nightly
def test_values_of_another_size_than_queries() -> None:
    document = WHOLE_DOCUMENTS["deepseek_v3"]
    found = trace_job(document, job_of(document, 64))
    for kind in ("text_dense_layer", "text_expert_layer"):
        entry = found[kind]
        assert entry.flops("recompute", "attention") == entry.flops("forward", "attention") > 0
        assert entry.recompute_transient_bytes is not None
