"""GPT as Megatron-LM builds it, from its sizes: the model of three of the tables."""

from __future__ import annotations

from typing import Any

PADDED_VOCAB_SIZE = 51200
"""GPT-2's 50257 tokens as Megatron's papers have them padded (arXiv:2104.04473 and 2205.05198)."""

GPT_SEQ_LENGTH = 2048
"""Tokens of a sample, and so learned positions, in those papers."""


def gpt_layers(hidden_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    """Layers as GPT-2 has them, a model's `layers`: layer norms, biases, a feed-forward of four widths."""
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "ffn_size": 4 * hidden_size,
        "num_heads": num_heads,
        "norm": "layer",
        "gated": False,
        "mlp_bias": True,
        "qkv_bias": True,
        "output_bias": True,
        "rotary": False,
    }


def gpt_model(
    name: str, hidden_size: int, num_heads: int, num_layers: int, seq_length: int, vocab_size: int
) -> dict[str, Any]:
    """A job's `model` for GPT-2's architecture (Radford et al. 2019): layer norms, biases, a feed-forward of four
    widths, learned positions for `seq_length` tokens, a head tied to the embedding.
    """
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "tied": True,
        "num_positions": seq_length,
        "layers": gpt_layers(hidden_size, num_layers, num_heads),
    }
    return {"name": name, "text": text}
