"""Model: the sizes of a multimodal model, whatever file they came from.

Readers (mindspeed_mm.py, huggingface.py) turn model files into it; an inline mapping in a job is this form itself.
Modalities stand in the order data flows: encoders first, `text` last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.layers import Layers, Norm
from mm_autoparallel.records import Count, Flag, Name, Noun, Number
from mm_autoparallel.validation import nearest

RESERVED_NAMES = ("vit", "llm")
"""What result files call vision and text."""


MEL_FRAMES_PER_S = 100.0
"""Encoders of audio take a mel frame every 10 ms (Whisper, arXiv:2212.04356, section 2.2)."""


class Patches(Noun):
    """Image patches of `in_features` numbers (channels × frames × height × width) become tokens.

    num_positions: learned positions (0: none, or rotary). class_token: one more token per image. norm: after it all.
    """

    type: Literal["patches"] = "patches"
    in_features: Count
    bias: Flag = False
    num_positions: Number = 0
    class_token: Flag = False
    norm: Norm | None = None


class MelFrames(Noun):
    """Mel frames become tokens, two frames one token, through two 1-d convolutions of kernel 3.

    num_positions: learned positions (0: computed ones). conv_channels: not 0 where three 2-d convolutions of kernel 3
    and stride 2 over frames and bins, of so many channels, and a matrix without bias do it, eight frames one token
    (Qwen3-Omni, arXiv:2509.17765, section 2.2).
    """

    type: Literal["mel_frames"] = "mel_frames"
    num_mel_bins: Count
    num_positions: Number = 0
    conv_channels: Number = 0

    @property
    def frames_per_token(self) -> int:
        return 8 if self.conv_channels else 2


class Projector(Noun):
    """Makes text tokens of encoder tokens: a norm, `merge_tokens` into one, then matrices `layer_sizes[0] → [1] → …`.

    Merging joins tokens where `layer_sizes[0]` is `merge_tokens` times the encoder's width, and averages them where it
    is that width. norm_size: what the norm sees (one token, or joined ones). num_special_tokens: learned output vectors
    that belong to it. replicated: plain matrices, of which every tensor parallel rank holds the whole. gated_ffn_size:
    width of a gated feed-forward without biases behind them all (0: none); of the matrices only the first then has a
    bias (GLM-4.1V, whose first is a convolution over merged tokens). convolutions: widths before, between and behind
    convolutions with biases of kernel 3 and stride 2 that merge instead, each four tokens into one; the matrices then
    begin with the last of them.
    """

    norm: Norm | None = None
    norm_size: Number = 0
    merge_tokens: Count = 1
    layer_sizes: tuple[Count, ...] = Field(min_length=2)
    bias: Flag = True
    num_special_tokens: Number = 0
    replicated: Flag = False
    gated_ffn_size: Number = 0
    convolutions: tuple[Count, ...] = ()
    freeze: Flag = False

    @model_validator(mode="after")
    def _check(self) -> Projector:
        if self.convolutions and (self.norm or self.merge_tokens != 4 ** (len(self.convolutions) - 1)):
            raise ValueError("convolutions have no norm before them, and each of them merges 4 tokens into one")
        if self.norm and not self.norm_size:
            raise ValueError("norm is given, so norm_size is needed: the width that the norm sees")
        return self


class Encoder(Noun):
    """An encoder of images or audio, with its projector.

    final_norm: a norm after the last layer that is no part of the projector. deepstack: a projector like the main one
    on each of `num_deepstack` inner layers' outputs. freeze: of all but the projectors, which have their own, and, with
    train_positions, of the stem's positions, which train then: frozen layers pass gradients on to them.
    """

    name: Name
    stem: Annotated[Patches | MelFrames, Field(discriminator="type")]
    layers: Layers
    final_norm: Norm | None = None
    projector: Projector
    deepstack: Projector | None = None
    num_deepstack: Number = 0
    freeze: Flag = True
    train_positions: Flag = False

    @model_validator(mode="after")
    def _check(self) -> Encoder:
        if (self.deepstack is None) != (self.num_deepstack == 0):
            raise ValueError("deepstack and num_deepstack go together: give both or neither")
        for projector in (self.projector, self.deepstack):
            width, first = self.layers.hidden_size, projector.layer_sizes[0] if projector else 0
            convolutions = projector.convolutions if projector else ()
            if convolutions:
                if (convolutions[0], convolutions[-1]) != (width, first):
                    raise ValueError(
                        f"the projector's convolutions go from {convolutions[0]} to {convolutions[-1]}; its matrices "
                        f"begin with {first}, and the encoder is {width} wide"
                    )
            elif projector and first not in (width, width * projector.merge_tokens):
                raise ValueError(
                    f"the projector begins with {first} and merges {projector.merge_tokens} tokens of {width}; "
                    f"layer_sizes must begin with {width * projector.merge_tokens} (joined) or {width} (averaged)"
                )
        return self

    @property
    def media(self) -> Literal["images", "audios"]:
        """What it encodes, and so which of the workload's token counts are its own."""
        return "images" if isinstance(self.stem, Patches) else "audios"


class Images(Noun):
    """What a model that reads images alone has in place of a vocabulary: image patches in, `num_outputs` numbers out.

    pooled: the head sees one token of each sample, a class (ViT), else every token (DiT, whose outputs are numbers of a
    patch). num_labels: labels that are embedded as a condition beside the time step (0: there is no condition).
    """

    stem: Patches
    num_outputs: Count
    pooled: Flag = True
    num_labels: Number = 0


class Decoder(Noun):
    """The text decoder. vocab_size: with its padding, as the framework holds it. tied: the head is the embedding's.

    num_positions: learned positions (0: none). causal: a token sees only those before it. num_mtp: modules after the
    last layer, each of which predicts one token more (DeepSeek-V3, arXiv:2412.19437, section 2.2). masked: it predicts
    masked tokens and the next sentence as BERT does, which adds two token types, a transformed head with a bias per
    word, a pooler and a classifier of two.

    images: the model has no text at all; each sample is one image of seq_length tokens. It then stands where text does,
    is called so, and has no vocab_size.
    """

    name: Literal["text"] = "text"
    vocab_size: Number = 0
    layers: Layers
    images: Images | None = None
    tied: Flag = False
    num_positions: Number = 0
    causal: Flag = True
    num_mtp: Number = 0
    masked: Flag = False
    freeze: Flag = False

    @model_validator(mode="after")
    def _check(self) -> Decoder:
        if self.images is None:
            if not self.vocab_size:
                raise ValueError("vocab_size is missing; a whole number, at least 1, is expected")
            if self.layers.modulated:
                raise ValueError("modulated layers need a condition, which only images give")
            return self
        if self.vocab_size or self.tied or self.num_positions or self.num_mtp or self.masked or self.causal:
            raise ValueError(
                "a model of images has no vocab_size, num_positions, num_mtp, tied or masked head, and causal is false"
            )
        if self.layers.modulated != (self.images.num_labels > 0):
            raise ValueError("modulated layers and images.num_labels go together: a condition and what it is for")
        return self


Modality = Encoder | Decoder

Adapted = Literal["qkv", "proj", "fc1", "fc2", "q", "k", "v", "gate", "up"]
"""Matrices of a layer that may have adapters: of query, key and value in one; of attention's output; the first of a
feed-forward, gate and input in one; its second. Megatron: linear_qkv, linear_proj, linear_fc1, linear_fc2. Where
query, key, value, gate and input have matrices of their own, these; Hugging Face: q_proj, o_proj, down_proj and so on.
"""

OF_ATTENTION: tuple[Adapted, ...] = ("qkv", "proj", "q", "k", "v")
"""Those of them that stand in layers with experts too."""


class Adapters(Noun):
    """Adapters of low rank (LoRA) beside `targets` in the layers of every part that is not frozen: they alone train.

    dropout: of the input of each.
    """

    rank: Count
    targets: Annotated[tuple[Adapted, ...], Field(min_length=1)]
    dropout: Flag = False

    @model_validator(mode="after")
    def _check(self) -> Adapters:
        if len({*self.targets}) < len(self.targets):
            raise ValueError("a target stands there twice")
        for joint, single in (("qkv", ("q", "k", "v")), ("fc1", ("gate", "up"))):
            if joint in self.targets and {*single} & {*self.targets}:
                raise ValueError(
                    f"{joint} is one matrix, and {', '.join(single)} are matrices of their own; give either"
                )
        return self


class Model(Noun):
    """`encoders` in the order data flows (vision, audio, or names of the user's), then the `text` decoder.

    Several may encode the same images, or the same audio.
    """

    name: Name = "inline"
    encoders: tuple[Encoder, ...] = ()
    text: Decoder
    adapters: Adapters | None = None

    @model_validator(mode="after")
    def _check_adapters(self) -> Model:
        for modality in self.modalities if self.adapters else ():
            layers, targets = modality.layers, {*self.adapters.targets} if self.adapters else set()
            if modality.freeze:
                continue
            if layers.latent or layers.delta:
                what = "latent attention" if layers.latent else "a delta rule"
                raise ValueError(f"adapters beside {what} of {modality.name} are not understood")
            if layers.experts and targets - {*OF_ATTENTION}:
                raise ValueError(
                    f"adapters beside experts of {modality.name} are not understood, only beside its attention: "
                    f"{', '.join(OF_ATTENTION)}"
                )
            if not layers.gated and targets & {"gate", "up"}:
                raise ValueError(f"the feed-forward of {modality.name} has no gate, and adapters stand beside it")
        if self.adapters and all(modality.freeze for modality in self.modalities):
            raise ValueError("adapters stand in parts that are not frozen, and every part is")
        return self

    @model_validator(mode="after")
    def _check(self) -> Model:
        if self.text.images and self.encoders:
            raise ValueError("a model of images alone has no encoders before it")
        names = [modality.name for modality in self.modalities]
        for index, encoder in enumerate(self.encoders):
            if encoder.name in names[:index] or encoder.name == "text":
                raise ValueError(f"two modalities are called {encoder.name}; each needs a name of its own")
            if encoder.name in RESERVED_NAMES:
                raise ValueError(
                    f"an encoder is called {encoder.name}, which in a result file names another part; call it vision "
                    "or a name of your own"
                )
            for projector in (encoder.projector, encoder.deepstack):
                if projector and projector.layer_sizes[-1] != self.text.layers.hidden_size:
                    raise ValueError(
                        f"the projector of {encoder.name} ends with {projector.layer_sizes[-1]} and the text decoder "
                        f"is {self.text.layers.hidden_size} wide; the two must be equal"
                    )
        return self

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Encoders first, `text` last: the order data flows."""
        return (*self.encoders, self.text)

    @property
    def merge_tokens(self) -> int:
        """Patches of an image that become one token of the decoder, of the first encoder of images; 1 without one."""
        return next((encoder.projector.merge_tokens for encoder in self.encoders if encoder.media == "images"), 1)

    @property
    def audio_tokens_per_s(self) -> float:
        """Tokens of the decoder that a second of audio becomes; 0 without an encoder of audio."""
        for encoder in self.encoders:
            if isinstance(encoder.stem, MelFrames):
                return MEL_FRAMES_PER_S / (encoder.stem.frames_per_token * encoder.projector.merge_tokens)
        return 0.0

    def layers_train(self, encoder: Encoder) -> bool:
        """Whether a step changes what the layers of an encoder make: they train, or the positions before them do; with
        adapters these alone."""
        return not encoder.freeze or (encoder.train_positions and not self.adapters)

    def projectors_train(self, encoder: Encoder) -> bool:
        """Whether any of its projectors does; beside adapters none does."""
        return not self.adapters and any(p is not None and not p.freeze for p in (encoder.projector, encoder.deepstack))

    def encoders_of(self, media: str) -> tuple[str, ...]:
        """The names of those of "images" or of "audios"."""
        return tuple(encoder.name for encoder in self.encoders if encoder.media == media)

    def sharing_reason(self) -> str:
        """That several encoders read the same images or audio, a clause with their names; empty where none do."""
        for media in ("images", "audios"):
            names = self.encoders_of(media)
            if len(names) > 1:
                return f"{' and '.join(names)} encode the same {media}"
        return ""

    @property
    def num_layers(self) -> int:
        """Layers of all modalities."""
        return sum(modality.layers.num_layers for modality in self.modalities)

    def with_freeze(self, freeze: Mapping[str, bool]) -> Model:
        """This model with parts frozen or not: keys are modality names, and `NAME_projector` for their projectors.

        Raises JobError for a part that is not there.
        """
        parts = [m.name for m in self.modalities] + [f"{e.name}_projector" for e in self.encoders]
        for part in freeze:
            if part not in parts:
                known = ", ".join(parts)
                raise JobError(f"freeze: {part} is no part of the model{nearest(part, parts)}; parts are {known}")
        encoders = []
        for encoder in self.encoders:
            named = freeze.get(f"{encoder.name}_projector")
            frozen = {} if named is None else {"freeze": named}
            encoders.append(
                encoder.model_copy(
                    update={
                        "freeze": freeze.get(encoder.name, encoder.freeze),
                        "projector": encoder.projector.model_copy(update=frozen),
                        "deepstack": encoder.deepstack.model_copy(update=frozen) if encoder.deepstack else None,
                    }
                )
            )
        text = self.text.model_copy(update={"freeze": freeze.get("text", self.text.freeze)})
        return self.model_copy(update={"encoders": tuple(encoders), "text": text})
