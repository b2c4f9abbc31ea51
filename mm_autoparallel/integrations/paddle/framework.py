"""PaddlePaddle, as it is registered: training arguments of PaddleFormers and PaddleNLP, in JSON or YAML."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework, deferred

FRAMEWORK = Framework(
    "PaddleFormers 1.2 and PaddleNLP 3.0",
    launches=deferred("paddle.written:LAUNCHES"),
    exporter=deferred("paddle.written:EXPORTER"),
    linter=deferred("paddle.said:LINTER"),
)
