"""Classes of transformers with layers, samples or configs of a kind of their own, small, taken apart and traced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mm_autoparallel.errors import ProfileError  # noqa: E402
from mm_autoparallel.model.job.workload import Workload  # noqa: E402
from mm_autoparallel.model.profiles.traced import TracedEntry, read_trace  # noqa: E402
from mm_autoparallel.profilers.trace import routes, samples  # noqa: E402
from mm_autoparallel.profilers.trace.cut_run import copy_state  # noqa: E402
from mm_autoparallel.profilers.trace.fakes import FAKES, on_fakes  # noqa: E402
from mm_autoparallel.profilers.trace.routes import count_tokens  # noqa: E402
from mm_autoparallel.profilers.trace.samples import coded, image_batches, made  # noqa: E402
from mm_autoparallel.profilers.trace.undescribed import Undescribed  # noqa: E402

TEXT = {"hidden_size": 64, "vocab_size": 160, "num_attention_heads": 4, "num_key_value_heads": 4}
ZAMBA = {
    **TEXT,
    "model_type": "zamba2",
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "hybrid_layer_ids": [1, 3],
    "num_mem_blocks": 1,
    "n_mamba_heads": 2,
    "mamba_d_state": 8,
    "chunk_size": 32,
    "use_mamba_kernels": False,
}
MUSICGEN_DECODER = {
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "num_codebooks": 4,
}
DBRX = {
    "model_type": "dbrx",
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 160,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 4, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
}
KOSMOS = {
    "model_type": "kosmos-2",
    "text_config": {
        "vocab_size": 160,
        "embed_dim": 64,
        "layers": 3,
        "ffn_dim": 96,
        "attention_heads": 4,
        "max_position_embeddings": 256,
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    },
    "latent_query_num": 80,
}

JETMOE = {
    "model_type": "jetmoe",
    "hidden_size": 64,
    "vocab_size": 160,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "kv_channels": 16,
    "intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
HRM = {
    "model_type": "hrm_text",
    "H_cycles": 2,
    "L_cycles": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 160,
}
XLNET = {"model_type": "xlnet", "vocab_size": 160, "d_model": 64, "n_layer": 3, "n_head": 4, "d_inner": 96}


def take_apart(document: dict[str, Any]) -> Undescribed:
    workload = Workload(global_batch_size=4, seq_length=64, implementation="transformers")
    found = Undescribed(document, Path("config.json"), workload, "model", {})
    blocks = [block for part in found.model.parts for block in part.blocks]
    assert sum(block.count * block.parameter_count for block in blocks) == found.count_real_parameters()
    assert not [remark for remark in found.model.remarks if "cannot be run" in remark]
    return found


def trace(found: Undescribed, folder: Path, **sizes: int) -> dict[str, TracedEntry]:
    workload = Workload(global_batch_size=4, implementation="transformers", **{"seq_length": 64, **sizes})
    path = found.write_traces(folder, 1, workload, "a test", recompute=False)
    return {entry.kind: entry for entry in read_trace(path).entries}


def test_parameters_that_layers_share_count_with_the_first_of_them() -> None:
    found = take_apart(ZAMBA)
    first, owning, second, sharing = [block for block in found.model.text.blocks if block.role == "layer"]
    assert first.kind == second.kind
    assert owning.kind != sharing.kind
    assert sharing.parameter_count < owning.parameter_count
    assert found.model.remarks == ("layers of its text share parameters, which are counted with the first of them",)


UDOP = {
    "model_type": "udop",
    "vocab_size": 160,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
}


def test_what_no_forward_reaches_is_told() -> None:
    """A tower of films beside that of images."""
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7, "num_attention_heads": 4}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    text = {"model_type": "llama", "vocab_size": 160, "num_attention_heads": 4, **sizes, "hidden_size": 64}
    found = take_apart({"model_type": "video_llava", "text_config": text, "vision_config": {**vision, **sizes}})
    (idle,) = (block for block in found.model.text.blocks if block.kind == "text_idle")
    whole = found.model.parameter_count
    (remark,) = found.model.remarks
    assert remark.startswith(
        f"{idle.parameter_count:,} of its {whole:,} parameters ({idle.parameter_count / whole:.1%})"
    )
    assert remark.endswith(": model.video_tower")


def test_an_encoder_of_tokens_in_boxes_runs_before_its_decoder() -> None:
    found = take_apart(UDOP)
    assert [(part.name, part.layers.num_layers) for part in found.model.parts] == [("text_encoder", 3), ("text", 3)]
    assert not [remark for remark in found.model.remarks if "encoder.block" in remark]


def test_a_decoder_whose_encoder_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the model would count as frozen and without work."""
    plain = samples.text_batch

    def in_pixels(*args: Any) -> samples.Batch:
        batch = plain(*args)
        return batch | {"bbox": batch["bbox"].to(torch.int64)} if "bbox" in batch else batch

    monkeypatch.setattr(samples, "text_batch", in_pixels)
    with pytest.raises(
        ProfileError, match=r"more than the decoder \(RuntimeError: mean\(\).*what its encoder computes"
    ):
        take_apart(UDOP)


def test_the_head_of_a_model_runs_behind_a_text_that_runs_by_itself() -> None:
    """The whole model asks for images, and the text inside of it gives vectors alone."""

    class Text(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(16, 8)

        def forward(self, input_ids: Any) -> Any:
            return SimpleNamespace(last_hidden_state=self.table(input_ids))

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model, self.lm_head = Text(), torch.nn.Linear(8, 16)

        def get_output_embeddings(self) -> Any:
            return self.lm_head

        def forward(self, pixel_values: Any) -> Any: ...

    model = Whole()
    (step,) = routes._text_steps(model, SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=16)))
    loss = step(2, 5, 1)()
    assert loss.dim() == 0
    loss.backward()
    assert model.lm_head.weight.grad is not None


def test_types_of_tokens_are_given_where_a_class_does_not_run_without() -> None:
    class Asking(torch.nn.Module):
        def forward(self, input_ids: Any, mm_token_type_ids: Any = None) -> Any: ...

    plain, typed = coded({"input_ids": torch.ones((2, 5), dtype=torch.int64)}, Asking())
    assert plain.keys() == {"input_ids"}
    assert torch.equal(typed["mm_token_type_ids"], torch.zeros((2, 5), dtype=torch.int64))


def test_a_class_of_one_part_takes_the_config_of_that_part_and_as_many_codes(tmp_path: Path) -> None:
    found = take_apart({"model_type": "musicgen", "decoder": MUSICGEN_DECODER})
    assert [block.count for block in found.model.text.blocks if block.role == "layer"] == [3]
    assert trace(found, tmp_path)["text_layer"].output_bytes == 64 * 64 * 2


@pytest.mark.slow
def test_experts_whose_choice_is_read_are_balanced(tmp_path: Path) -> None:
    """Each of 4 experts, two of them for a token, runs half of the 64 tokens through its three matrices."""
    entry = trace(take_apart(DBRX), tmp_path)["text_layer"]
    attention = 2 * 64 * (64 * 3 * 64 + 64 * 64)
    router = 2 * 64 * 64 * 4
    experts = 4 * 2 * 32 * 3 * 64 * 48
    assert entry.flops("forward", "matrix_product") == attention + router + experts


@pytest.mark.slow
def test_experts_whose_counts_are_read_are_balanced(tmp_path: Path) -> None:
    """Rows of 4 experts, two of them for a token; attention has experts of its own for queries and outputs."""
    entry = trace(take_apart(JETMOE), tmp_path)["text_layer"]
    routers = 2 * 2 * 64 * 64 * 4
    keys_and_values = 2 * 64 * 64 * 2 * 32
    queries_and_outputs = 2 * 2 * 64 * 2 * 64 * 32
    feed_forward = 2 * 2 * 64 * (64 * 2 * 48 + 48 * 64)
    assert entry.flops("forward", "matrix_product") == routers + keys_and_values + queries_and_outputs + feed_forward


@pytest.mark.nightly
@pytest.mark.slow
def test_text_whose_layers_run_in_turns_is_one_block(tmp_path: Path) -> None:
    found = take_apart(HRM)
    assert found.model.remarks == (
        "its text passes no list of layers one after another, on one width, so text is one block, in one stage",
    )
    counts = {block.kind: block.parameter_count for block in found.model.text.blocks}
    assert counts["text_pre"] == 160 * 64
    entries = trace(found, tmp_path)
    assert {kind: entry.parameter_count for kind, entry in entries.items()} == counts
    assert entries["text_layer"].flops("backward_weight", "matrix_product") > 0
    assert entries["text_layer"].gradient_bytes == 2 * counts["text_layer"]
    assert not entries["text_post"].operators


@pytest.mark.slow
def test_fp32_among_bf16_weights_runs_under_autocast(tmp_path: Path) -> None:
    found = take_apart(XLNET)
    assert [block.count for block in found.model.text.blocks if block.role == "layer"] == [3]
    entry = trace(found, tmp_path)["text_layer"]
    products = [one for one in entry.operators if one.phase == "forward" and one.kind == "matrix_product"]
    assert products
    assert {one.dtype for one in products} == {"bf16"}


def test_a_cache_is_what_it_was_before_its_layer_ran() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys = [torch.ones(1, requires_grad=True) * 2]

        def get_seq_length(self) -> int:
            return len(self.keys)

    cache = Cache()
    copied = copy_state({"past": cache})["past"]
    cache.keys.append(torch.ones(1))
    assert copied.get_seq_length() == 1
    assert copied.keys[0].grad_fn is None
    assert copy_state("sdpa") == "sdpa"


def test_images_of_an_encoder_inside_of_the_config_have_its_size() -> None:
    vision = SimpleNamespace(image_size=28, patch_size=14)
    config = SimpleNamespace(encoder=SimpleNamespace(vision_config=vision))
    _, squares, *_ = image_batches(config, 1, 1, 4, torch.bfloat16)
    assert made(squares)["pixel_values"].shape == (1, 3, 28, 28)


def test_a_size_that_a_model_rounds_is_asked_for_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an image end with a token of their own: neither always as many, nor in proportion."""
    monkeypatch.setattr(routes, "run_route", lambda *given: SimpleNamespace(output=torch.empty(given[3]() + 10, 16)))
    route = routes._fit_tokens(torch.nn.Identity(), {}, "images", lambda _, tokens, count: lambda: tokens * count, 74)
    assert route.fixed_tokens == 74
    assert route.step(1, 74, 2)() == 2 * routes.PROBE_TOKENS


@pytest.mark.nightly
@pytest.mark.slow
def test_images_whose_places_among_the_tokens_are_asked_run_with_them(tmp_path: Path) -> None:
    found = take_apart(KOSMOS)
    assert found.model.tokens_per_image == 80
    assert {encoder.kind for encoder in found.model.encoders} == {"images"}
    assert trace(found, tmp_path, seq_length=96, image_tokens_per_sample=80)["vision_layer"].parameter_count > 0


def test_queries_that_samples_share_are_attended_for_each() -> None:
    with FAKES:
        query, keys = torch.empty(1, 2, 3, 16), torch.empty(5, 2, 7, 16)
    with on_fakes(torch.nn.Identity()):
        given = torch.nn.functional.scaled_dot_product_attention(query, keys, keys, dropout_p=0.1)
    assert given.shape == (5, 2, 3, 16)


def test_vectors_for_several_layers_of_text_are_the_tokens_once() -> None:
    vectors = torch.empty(6, 16)
    assert count_tokens({"deepstack_features": [(0, [vectors]), (3, [vectors])]}) == 6
    assert count_tokens({}) == 0
