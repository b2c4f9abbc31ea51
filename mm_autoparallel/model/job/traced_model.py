"""TracedModel: a model of which no more is known than what a trace of its live class tells.

Each part is a list of blocks by name, with how many there are and how many parameters each has; what they compute and
keep lies in traces (model/profiles/traced.py) under the same names. As a file it is the mapping

    {"schema": "mm-autoparallel/traced-model/1", "name": "gemma3-config",
     "class_name": "Gemma3ForConditionalGeneration", "parameter_count": 4300079472,
     "encoders": [{"name": "vision", "kind": "images", "hidden_size": 1152,
     "blocks": [{"kind": "vision_pre", "role": "pre", "parameter_count": 677376},
                {"kind": "vision_layer", "role": "layer", "count": 27, "parameter_count": 15239904}, …]}, …],
     "text": {"hidden_size": 2560, "blocks": […]}}

which `mm-autoparallel trace` writes beside the traces, and which needs no torch to be planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mm_autoparallel.model.job.layers import Layers
from mm_autoparallel.model.job.model import Decoder, Encoder, Model, Patches, Projector
from mm_autoparallel.records import Count, Flag, Name, Noun, Number
from mm_autoparallel.validation import parse_record

SCHEMA = "mm-autoparallel/traced-model/1"

Media = Literal["images", "audios", "text"]


class TracedBlock(Noun):
    """`count` equal parts behind each other. parameter_count: of each; a tied weight counts where it is used first.

    trains_with: the modality, its projector, or nothing: parameters that training never reaches. what: in words, the
    class of the live model.
    """

    kind: Name
    role: Literal["pre", "layer", "post"]
    count: Count = 1
    parameter_count: Number
    trains_with: Literal["modality", "projector", "nothing"] = "modality"
    what: str = ""


Blocks = Annotated[tuple[TracedBlock, ...], Field(min_length=1)]


def _layers_of(blocks: tuple[TracedBlock, ...], hidden_size: int) -> Layers:
    """What the rest of a job asks of any modality: how many layers. Heads and widths inside are not known, so 1."""
    num_layers = sum(block.count for block in blocks if block.role == "layer")
    return Layers(num_layers=num_layers, hidden_size=hidden_size, ffn_size=1, num_heads=1, norm="rms")


def _check_blocks(blocks: tuple[TracedBlock, ...]) -> None:
    if all(block.role != "layer" for block in blocks):
        raise ValueError("blocks has none of role layer; one at least is needed")
    order = [("pre", "layer", "post").index(block.role) for block in blocks]
    if order != sorted(order):
        raise ValueError("blocks stand in the order pre, layer, post")


class TracedEncoder(Encoder):
    """An encoder by its blocks. kind: what it encodes, and so which of the workload's tokens are its own."""

    kind: Media
    hidden_size: Count
    blocks: Blocks
    stem: Patches = Field(Patches(in_features=1), exclude=True)
    layers: Layers = Field(Layers(num_layers=1, hidden_size=1, ffn_size=1, num_heads=1, norm="rms"), exclude=True)
    projector: Projector = Field(Projector(layer_sizes=(1, 1)), exclude=True)
    projector_freeze: Flag = False

    @model_validator(mode="after")
    def _check(self) -> TracedEncoder:
        _check_blocks(self.blocks)
        object.__setattr__(self, "layers", _layers_of(self.blocks, self.hidden_size))
        object.__setattr__(self, "projector", Projector(layer_sizes=(1, 1), freeze=self.projector_freeze))
        return self

    @property
    def media(self) -> Any:
        """What it encodes."""
        return self.kind


class TracedDecoder(Decoder):
    """The text decoder by its blocks. tied: its head uses the embedding's table, of `table_count` parameters."""

    hidden_size: Count
    blocks: Blocks
    vocab_size: Number = 0
    table_count: Number = 0
    layers: Layers = Field(Layers(num_layers=1, hidden_size=1, ffn_size=1, num_heads=1, norm="rms"), exclude=True)

    @model_validator(mode="after")
    def _check(self) -> TracedDecoder:
        _check_blocks(self.blocks)
        object.__setattr__(self, "layers", _layers_of(self.blocks, self.hidden_size))
        return self


class TracedModel(Model):
    """Encoders, then text. parameter_count: of the live class, each parameter once, which the blocks' sum is.

    tokens_per_image: what an image becomes, where that does not follow the image. remarks: what a reader must know of
    it, a sentence each.
    """

    schema_name: Literal["mm-autoparallel/traced-model/1"] = Field("mm-autoparallel/traced-model/1", alias="schema")
    class_name: Name
    parameter_count: Number
    encoders: tuple[TracedEncoder, ...] = ()
    text: TracedDecoder
    tokens_per_image: Number = 0
    tokens_per_audio: Number = 0
    remarks: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> TracedModel:
        names = [modality.name for modality in self.modalities]
        if len(set(names)) < len(names):
            raise ValueError(f"two modalities have one name among {', '.join(names)}")
        counted = sum(block.count * block.parameter_count for part in self.parts for block in part.blocks)
        if counted != self.parameter_count:
            raise ValueError(f"its blocks have {counted:,} parameters together and parameter_count says otherwise")
        return self

    @property
    def parts(self) -> tuple[TracedEncoder | TracedDecoder, ...]:
        """As `modalities`, by their own types."""
        return (*self.encoders, self.text)

    def with_freeze(self, freeze: Mapping[str, bool]) -> TracedModel:
        """As Model.with_freeze."""
        super().with_freeze(freeze)  # refuses parts that are not there
        encoders = tuple(
            _copy(
                encoder,
                freeze=freeze.get(encoder.name, encoder.freeze),
                projector_freeze=freeze.get(f"{encoder.name}_projector", encoder.projector_freeze),
            )
            for encoder in self.encoders
        )
        text = self.text.model_copy(update={"freeze": freeze.get("text", self.text.freeze)})
        return self.model_copy(update={"encoders": encoders, "text": text})

    @property
    def frozen(self) -> dict[str, bool]:
        """Part → frozen or not, as with_freeze takes it."""
        found = {part.name: part.freeze for part in self.parts}
        return found | {f"{encoder.name}_projector": encoder.projector_freeze for encoder in self.encoders}

    def document(self) -> dict[str, Any]:
        """As JSON values, as a file holds it."""
        return self.model_dump(mode="json", by_alias=True)


def _copy(encoder: TracedEncoder, freeze: bool, projector_freeze: bool) -> TracedEncoder:
    projector = encoder.projector.model_copy(update={"freeze": projector_freeze})
    changed = {"freeze": freeze, "projector_freeze": projector_freeze, "projector": projector}
    return encoder.model_copy(update=changed)


def is_traced_model(document: Mapping[str, Any]) -> bool:
    """Whether a mapping is a file of this form."""
    return document.get("schema") == SCHEMA


def parse_traced_model(document: Mapping[str, Any], path: Path) -> TracedModel:
    """The model in the file at `path`. Raises JobError naming file and key."""
    return parse_record(TracedModel, dict(document), "model file", path)
