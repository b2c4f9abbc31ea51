"""What nodes tell each other: documents of fixed form, sealed so that one is taken only where it was meant.

A sealed document is `MAC body`: HMAC-SHA256, under a key that comes from the launch's token, of the key that it stands
under in the store and of its body. The key of a pair of nodes also comes from a random number of each, so nothing of an
earlier launch fits, and what one node says to another fits nowhere else.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from mm_autoparallel.errors import BackendError
from mm_autoparallel.files import MAX_DOCUMENT_BYTES
from mm_autoparallel.hooks.task import Task, Trained
from mm_autoparallel.records import Noun

Document = TypeVar("Document", bound=BaseModel)
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
MAX_TEXT = 100_000
"""Assumed: characters of one message or name; the ends of a few tracebacks are a tenth of it."""


def _tame(value: object) -> object:
    """A text that JSON can hold, whatever bytes a file's name had, and not too long."""
    return value.encode("utf-8", "backslashreplace").decode()[:MAX_TEXT] if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_tame)]


class Opening(Noun):
    """From node 0 to all, before it knows them: the launch's random number."""

    nonce: Nonce


class Hello(Noun):
    """From another node: its random number and its fingerprint."""

    nonce: Nonce
    versions: dict[Text, Text]
    files: dict[Text, Text]
    flags: dict[Text, Text]


class TaskStep(Noun):
    """From node 0: carry out a task, ranks meeting at its `port`."""

    kind: Literal["task"] = "task"
    task: Task
    port: Annotated[int, Field(ge=1, le=65535)]


class EndStep(Noun):
    """From node 0: end with this exit code, and these words if there are any."""

    kind: Literal["end"] = "end"
    code: Annotated[int, Field(ge=0, le=255)]
    message: Text


class Step(Noun):
    """From node 0: what is next."""

    step: Annotated[TaskStep | EndStep, Field(discriminator="kind")]


class Outcome(Noun):
    """From another node: how its part of a task went; `told` and `killed` as in RankFailure. trained: where it was a
    training."""

    failure: Text | None = None
    told: bool = False
    killed: bool = False
    trained: Trained = Trained()


class Beat(Noun):
    """From another node, every second: it is there. Only a higher count is news."""

    count: Annotated[int, Field(ge=0)]


class Bye(Noun):
    """From another node: it has heard the end."""


class Seal:
    """Closes and opens documents between those who know `secret`; `parts` say for what, so that no two uses are one."""

    def __init__(self, secret: bytes, *parts: str) -> None:
        self._key = hmac.digest(secret, "\0".join(("mm-autoparallel", *parts)).encode(), "sha256")

    def close(self, key: str, document: BaseModel) -> str:
        """`document` as it is to stand under `key`."""
        body = document.model_dump_json(by_alias=True)
        return f"{self._mac(key, body.encode())} {body}"

    def open(self, key: str, text: bytes, kind: type[Document]) -> Document | None:
        """The document that stands under `key` as `text`; None where whoever wrote it does not know the secret.

        Raises BackendError where it was sealed, and is none of its kind all the same.
        """
        if len(text) > MAX_DOCUMENT_BYTES:
            return None
        mac, _, body = text.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(key, body).encode()):
            return None
        try:
            return kind.model_validate_json(body)
        except ValidationError as failure:
            first = failure.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise BackendError(
                f"the document {key} between nodes is none that this version knows ({where}: {first['msg']}); run the "
                "same version of mm-autoparallel on all nodes"
            ) from None

    def _mac(self, key: str, body: bytes) -> str:
        return hmac.new(self._key, key.encode() + b"\0" + body, hashlib.sha256).hexdigest()
