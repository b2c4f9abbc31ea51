"""What tells whether a certificate's problem is the one that was placed."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.problem_file import problem_document


def problem_sha256(problem: Problem) -> str:
    """Of the problem's document (`document_sha256`)."""
    return document_sha256(problem_document(problem))


def document_sha256(document: dict[str, Any]) -> str:
    """Of a document as JSON with sorted keys and every number a float: one for equal problems, however typed."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    text = json.dumps(plain(document), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
