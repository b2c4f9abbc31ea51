"""Writes report.schema.json, the JSON Schema of what a report holds and what studio and page say to each other, from
which `npm run types` makes TypeScript's types.

    python studio/web/schema.py [--check]

--check writes nothing, and ends with 1 where the file is not what would be written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic.json_schema import GenerateJsonSchema

from mm_autoparallel.studio.document import Spoken

SCHEMA = Path(__file__).with_name("report.schema.json")


class _Plain(GenerateJsonSchema):
    """Without a title for every field, each of which would become a type of its own."""

    def field_title_should_be_set(self, schema: object) -> bool:  # noqa: ARG002  (pydantic's name)
        return False


def render() -> str:
    """The schema as it is written."""
    return json.dumps(Spoken.model_json_schema(mode="serialization", schema_generator=_Plain), indent=1) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if SCHEMA.is_file() and SCHEMA.read_text() == render() else 1)
    SCHEMA.write_text(render())
