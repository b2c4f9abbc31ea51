"""Real classes of transformers that hear, small: a tower and its projector, an encoder with its decoder at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mm_autoparallel.model.job.workload import Workload  # noqa: E402
from mm_autoparallel.model.profiles.traced import read_trace  # noqa: E402
from mm_autoparallel.profilers.trace.undescribed import Undescribed  # noqa: E402

WIDTH, INNER, FRAMES, TEXT = 32, 48, 64, 16
HEARD = FRAMES // 2
TOWER = {
    "d_model": WIDTH,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": INNER,
    "num_mel_bins": 8,
    "max_source_positions": HEARD,
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
}
QWEN2_AUDIO = {"model_type": "qwen2_audio", "text_config": SIZES, "audio_config": TOWER}
WHISPER = {
    "model_type": "whisper",
    **TOWER,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": INNER,
    "max_target_positions": 64,
    "vocab_size": 160,
    "encoder_layerdrop": 0.9,
    "pad_token_id": 1,
}


def take_apart(document: dict[str, Any]) -> Undescribed:
    workload = Workload(global_batch_size=4, seq_length=TEXT, implementation="transformers")
    found = Undescribed(document, Path("config.json"), workload, "model", {})
    assert found.model.remarks == ()
    blocks = [block for part in found.model.parts for block in part.blocks]
    assert sum(block.count * block.parameter_count for block in blocks) == found.count_real_parameters()
    assert not [block.kind for block in blocks if block.trains_with == "nothing"]
    return found


SEAMLESS = {
    "model_type": "seamless_m4t",
    "hidden_size": WIDTH,
    "vocab_size": 160,
    "feature_projection_input_dim": 10,
    "speech_encoder_layers": 4,
    "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": INNER,
    "speech_encoder_layerdrop": 0.9,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": INNER,
}


def test_a_class_of_speech_whose_mask_is_of_its_sounds_runs_with_every_layer() -> None:
    """Its frames are as wide as its config says of its first matrix, and its layers drop out under another name."""
    model = take_apart(SEAMLESS).model
    assert [(part.name, part.layers.num_layers) for part in model.parts] == [("audio", 4), ("text", 2)]


def test_a_class_that_only_has_a_tower_and_a_projector_hears() -> None:
    model = take_apart(QWEN2_AUDIO).model
    assert [(part.name, part.layers.num_layers) for part in model.parts] == [("audio", 3), ("text", 2)]
    assert model.tokens_per_audio == HEARD // 2  # the tower averages pairs
    (projector,) = [block for block in model.encoders[0].blocks if block.trains_with == "projector"]
    assert projector.parameter_count == (WIDTH + 1) * 64


def test_an_encoder_and_its_decoder_run_at_once(tmp_path: Path) -> None:
    """Matrix products in closed form: the decoder has attention of its own, and some whose keys are what was heard."""
    found = take_apart(WHISPER)
    assert [(part.name, part.layers.num_layers) for part in found.model.parts] == [("audio", 3), ("text", 2)]
    workload = Workload(
        global_batch_size=4, seq_length=TEXT, audio_tokens_per_sample=TEXT, implementation="transformers"
    )
    path = found.write_traces(tmp_path, 1, workload, "a test", recompute=True)
    entries = {entry.kind: entry for entry in read_trace(path).entries}
    square, inner = WIDTH * WIDTH, 2 * WIDTH * INNER
    assert entries["audio_layer"].flops("forward", "matrix_product") == 2 * HEARD * (4 * square + inner)
    own, heard = TEXT * (6 * square + inner), HEARD * 2 * square
    assert entries["text_layer"].flops("forward", "matrix_product") == 2 * (own + heard)
