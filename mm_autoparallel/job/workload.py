"""Workload: what one training step processes, and in which precision its parameters are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mm_autoparallel.job.fields import Count, Flag, NonNegative, Noun, Number, Positive


class Workload(Noun):
    """One training step: `global_batch_size` samples of `seq_length` tokens in the text decoder.

    seq_length: image and audio tokens included. image_tokens_per_sample, audio_tokens_per_sample: what images and audio
    occupy of it, after merging; their encoders process more (blocks/tokens.py). images_per_sample, audios_per_sample:
    into how many separate attention spans these divide (tiles, where images are tiled).
    micro_batch_scale: modality → factors on the times of its blocks, one a micro-batch in turn, cycled.

    weight_bytes, gradient_bytes, optimizer_bytes: per parameter; by default bf16 weights, fp32 gradients (Megatron-LM
    forces them with --bf16, training/arguments.py), and an fp32 copy with Adam's two moments (Kingma & Ba 2015).
    attention: `flash` keeps no score matrices, `unfused` does. overlap_grad_reduce, overlap_param_gather: data-parallel
    traffic hidden behind computation (Megatron's flags of these names).
    """

    global_batch_size: Count
    seq_length: Count
    image_tokens_per_sample: Number = 0
    images_per_sample: Count = 1
    audio_tokens_per_sample: Number = 0
    audios_per_sample: Count = 1
    micro_batch_scale: dict[str, Annotated[tuple[Positive, ...], Field(min_length=1)]] = Field(default_factory=dict)
    weight_bytes: Positive = 2.0
    gradient_bytes: NonNegative = 4.0
    optimizer_bytes: NonNegative = 12.0
    attention: Literal["flash", "unfused"] = "flash"
    overlap_grad_reduce: Flag = True
    overlap_param_gather: Flag = True

    @model_validator(mode="after")
    def _check(self) -> Workload:
        media_tokens = self.image_tokens_per_sample + self.audio_tokens_per_sample
        if media_tokens > self.seq_length:
            raise ValueError(
                f"image_tokens_per_sample {self.image_tokens_per_sample} and audio_tokens_per_sample "
                f"{self.audio_tokens_per_sample} make {media_tokens}, and seq_length, which includes them, is "
                f"{self.seq_length}"
            )
        for tokens, count, name in (
            (self.image_tokens_per_sample, self.images_per_sample, "image"),
            (self.audio_tokens_per_sample, self.audios_per_sample, "audio"),
        ):
            if tokens and count > tokens:
                raise ValueError(f"{name}s_per_sample {count} is more than {name}_tokens_per_sample {tokens}")
        return self
