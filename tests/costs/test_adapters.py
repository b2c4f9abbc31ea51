"""Adapters beside frozen weights: what trains, what it takes in memory and time, and what a real layer keeps for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.blocks.chain import Block
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_adapter_parameters, count_chain_parameters, count_parameters
from mm_autoparallel.model.blocks.tokens import count_tokens
from mm_autoparallel.model.costs.communication import data_group
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.memory import static_bytes
from mm_autoparallel.model.costs.stage import block_costs, build_problem
from mm_autoparallel.model.job.hashing import hash_job
from mm_autoparallel.model.job.layers import Experts, Layers
from mm_autoparallel.model.job.model import Adapters, Decoder, Encoder, Model, Patches, Projector
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.operators.adapters import INPUTS
from mm_autoparallel.model.operators.layers import list_layer
from mm_autoparallel.model.operators.operators import Share
from mm_autoparallel.model.profiles.store import hash_model
from mm_autoparallel.model.readers.job_file import parse_job

ALL = ("qkv", "proj", "fc1", "fc2")
WORKLOAD = {"global_batch_size": 8, "seq_length": 1024, "image_tokens_per_sample": 256}


def small(adapters: dict[str, Any] | None = None, freeze_vision: bool = True) -> Model:
    """Four layers of text, 64 wide with 8 heads on 4 groups; a tower of two."""
    vision = Encoder(
        name="vision",
        stem=Patches(in_features=48),
        layers=Layers(num_layers=2, hidden_size=32, ffn_size=128, num_heads=4, norm="layer", gated=False),
        projector=Projector(merge_tokens=4, layer_sizes=(128, 64), freeze=True),
        freeze=freeze_vision,
    )
    text = Layers(num_layers=4, hidden_size=64, ffn_size=96, num_heads=8, num_kv_groups=4, norm="rms")
    return Model(
        encoders=(vision,),
        text=Decoder(vocab_size=512, layers=text),
        adapters=Adapters.model_validate(adapters) if adapters else None,
    )


def job(adapters: dict[str, Any] | None, **workload: Any) -> Any:
    document = {
        "model": small().model_dump(mode="json"),
        "cluster": {"num_nodes": 1, "devices_per_node": 4, "device": "a100-80g"},
        "workload": WORKLOAD | workload,
        "adapters": adapters,
    }
    return parse_job(document, Path("job.yaml"))


def layer_of(model: Model, modality: str = "text") -> Block:
    return next(block for block in expand(model).blocks if block.role == "layer" and block.modality == modality)


@pytest.mark.parametrize(
    ("targets", "tp", "count"),
    [
        # query 64, key and value 32 each: 64 + 128; 64 + 64; gate and input: 64 + 192; 96 + 64
        (ALL, 1, 8 * ((64 + 128) + (64 + 64) + (64 + 192) + (96 + 64))),
        (("qkv",), 1, 8 * (64 + 128)),
        # each of query, key and value with a pair of its own, as Hugging Face's classes have them; so gate and input
        (("q", "k", "v"), 1, 8 * ((64 + 64) + 2 * (64 + 32))),
        (("gate", "up", "fc2"), 1, 8 * (2 * (64 + 96) + (96 + 64))),
        # of what is divided by columns the second of a pair, by rows the first
        (ALL, 2, 8 * ((64 + 64) + (32 + 64) + (64 + 96) + (48 + 64))),
    ],
)
def test_parameters_by_hand(targets: tuple[str, ...], tp: int, count: int) -> None:
    layer = layer_of(small({"rank": 8, "targets": targets})).structure
    assert count_adapter_parameters(layer, tp) == count
    assert count_parameters(layer, tp) == count_parameters(layer_of(small()).structure, tp) + count


def test_what_trains_and_what_gradients_pass() -> None:
    """Layers of free parts have adapters; all else is frozen, and gradients pass what lies behind the first of them."""
    blocks = {block.name: block for block in expand(small({"rank": 8, "targets": ALL})).blocks}
    assert [name for name, block in blocks.items() if block.trainable] == ["text_layer"]
    assert [name for name, block in blocks.items() if block.has_backward] == ["text_layer", "text_post"]
    both = {block.name: block for block in expand(small({"rank": 8, "targets": ALL}, freeze_vision=False)).blocks}
    assert [name for name, block in both.items() if block.trainable] == ["vision_layer", "text_layer"]
    assert [name for name, block in both.items() if not block.has_backward] == ["vision_pre"]
    chain = expand(small({"rank": 8, "targets": ALL}))
    assert count_chain_parameters(chain, trainable_only=True) == 4 * count_adapter_parameters(chain.blocks[4].structure)


def test_bytes_and_times_of_a_layer() -> None:
    """Weights stay; gradients and states are those of adapters; the backward has no gradients of weights but theirs."""
    strategy = Strategy(pp=2, tp=1, dp=2, mbs=1)
    whole, adapted = (job(given) for given in (None, {"rank": 8, "targets": list(ALL)}))
    problems = {one: build_problem(one_job, strategy) for one, one_job in (("whole", whole), ("adapted", adapted))}
    before, after = (
        next(block for block in problem.chain if block.name == "text_layer") for problem in problems.values()
    )
    trained = 8 * ((64 + 128) + (64 + 64) + (64 + 192) + (96 + 64))
    frozen = count_parameters(layer_of(small()).structure)
    assert before.footprint
    assert after.footprint
    assert after.footprint.weight_bytes == 2 * (frozen + trained)
    assert after.footprint.gradient_bytes == 4 * trained
    assert after.footprint.optimizer_bytes == 12 * trained / 2
    assert after.footprint.moment_bytes == 8 * trained / 2
    assert before.footprint.gradient_bytes == 4 * frozen
    costs = {name: block_costs(one, strategy)["text_layer"] for name, one in (("whole", whole), ("adapted", adapted))}
    assert costs["adapted"].forward_ms > costs["whole"].forward_ms
    assert costs["adapted"].backward_input_ms > costs["whole"].backward_input_ms
    assert costs["adapted"].trained_count == trained
    assert after.tail_ms < before.tail_ms
    head = next(block for block in problems["adapted"].chain if block.name == "text_post")
    assert head.footprint
    assert (head.footprint.gradient_bytes, head.footprint.optimizer_bytes, head.tail_ms) == (0.0, 0.0, 0.0)
    assert head.backward_ms > 0


def test_units_are_gathered_whole() -> None:
    """Under ZeRO 3 the frozen base is sharded with the adapters: both are gathered, in forward and in backward."""
    given = job({"rank": 8, "targets": list(ALL)}, overlap_param_gather=False, overlap_grad_reduce=False)
    count = count_parameters(layer_of(small({"rank": 8, "targets": ALL})).structure)
    trained = count_adapter_parameters(layer_of(small({"rank": 8, "targets": ALL})).structure)
    strategies = [Strategy(pp=1, tp=1, dp=4, mbs=1, zero=zero) for zero in (1, 2, 3)]
    plain, reduced, gathered = (
        next(block for block in build_problem(given, one).chain if block.name == "text_layer") for one in strategies
    )
    group = data_group(CostModel(given).shard_cluster, strategies[-1])
    gather_ms = group.all_gather_ms(2 * count)
    assert reduced.forward_ms == plain.forward_ms
    reduce_ms = group.reduce_scatter_ms(trained * given.workload.reduction_bytes)
    assert reduced.backward_ms - plain.backward_ms == pytest.approx(reduce_ms)
    assert gathered.forward_ms - plain.forward_ms == pytest.approx(gather_ms)
    assert gathered.backward_ms - reduced.backward_ms == pytest.approx(gather_ms)


def test_weight_gradients_are_those_of_adapters() -> None:
    """At sizes where products decide a layer 4096 wide does its forward and half of its backward, and little more."""
    wide = Layers(num_layers=2, hidden_size=4096, ffn_size=11008, num_heads=32, norm="rms")
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": wide.model_dump(mode="json")}},
        "cluster": {"num_nodes": 1, "devices_per_node": 1, "device": "a100-80g"},
        "workload": {"global_batch_size": 1, "seq_length": 4096},
    }
    strategy = Strategy(pp=1, tp=1, dp=1, mbs=1)
    plain = block_costs(parse_job(document, Path("job.yaml")), strategy)["text_layer"]
    adapted_job = parse_job(document | {"adapters": {"rank": 16, "targets": list(ALL)}}, Path("job.yaml"))
    adapted = block_costs(adapted_job, strategy)["text_layer"]
    assert adapted.backward_weight_ms < 0.1 * plain.backward_weight_ms
    assert adapted.backward_input_ms == pytest.approx(plain.backward_input_ms, rel=0.35)
    assert adapted.forward_ms == pytest.approx(plain.forward_ms, rel=0.35)  # outputs are scaled and added
    assert adapted.forward_ms > plain.forward_ms


def test_names_of_kept_inputs_are_those_of_the_layer() -> None:
    share = Share(mbs=1)
    layer = layer_of(small()).structure
    tokens = count_tokens(small().text, job(None).workload)
    names = {saved.name for saved in list_layer(layer, tokens, share).saved}  # type: ignore[arg-type]
    assert set(INPUTS.values()) <= names


@pytest.mark.parametrize("targets", [ALL, ("qkv",), ("proj", "fc2"), ("fc1",)])
def test_against_a_real_layer(targets: tuple[str, ...]) -> None:
    """What torch keeps of a layer with adapters beyond one without, whose gradients pass as well, to the byte."""
    pytest.importorskip("torch")
    real = kept_by_torch(targets) - kept_by_torch(())
    tokens = replace(count_tokens(small().text, job(None).workload), layer_tokens=16)
    share = Share(mbs=1, fused_attention=True)
    bare, adapted = layer_of(small()), layer_of(small({"rank": 4, "targets": targets}))
    frozen_bytes = list_layer(bare.structure, tokens, share).kept_bytes(trainable=False)  # type: ignore[arg-type]
    kept_bytes = list_layer(adapted.structure, tokens, share).kept_bytes(trainable=True)  # type: ignore[arg-type]
    assert kept_bytes - frozen_bytes == real


def kept_by_torch(targets: tuple[str, ...], rank: int = 4, num_tokens: int = 16) -> int:
    """Bytes that autograd keeps of a layer as `small` has it, on bf16 tokens, parameters left out."""
    import torch
    from torch.nn import functional

    class Core(torch.autograd.Function):
        """Stands for fused attention: keeps query, key, value and its output."""

        @staticmethod
        def forward(context: Any, query: Any, key: Any, value: Any) -> Any:
            output = query * key.repeat(1, 2) * value.repeat(1, 2)
            context.save_for_backward(query, key, value, output)
            return output

        @staticmethod
        def backward(_context: Any, *gradients: Any) -> Any:
            return gradients[0], None, None

    def matrix(rows: int, columns: int, trains: bool) -> Any:
        return torch.ones(rows, columns, dtype=torch.bfloat16, requires_grad=trains)

    sizes = {"qkv": (64, 128), "proj": (64, 64), "fc1": (64, 192), "fc2": (96, 64)}
    own = {name: matrix(out, taken, False) for name, (taken, out) in sizes.items()}
    pairs = {name: (matrix(rank, sizes[name][0], True), matrix(sizes[name][1], rank, True)) for name in targets}
    norms = [torch.ones(64, dtype=torch.bfloat16) for _ in range(2)]

    def product(name: str, taken: Any) -> Any:
        given = functional.linear(taken, own[name])
        if name not in pairs:
            return given
        first, second = pairs[name]
        return given + 2.0 * functional.linear(functional.linear(taken, first), second)

    parameters = {one.untyped_storage().data_ptr() for one in (*own.values(), *norms)}
    parameters |= {one.untyped_storage().data_ptr() for pair in pairs.values() for one in pair}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor
        return tensor

    tokens = torch.ones(num_tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        parts = product("qkv", functional.rms_norm(tokens, (64,)) * norms[0]).split([64, 32, 32], dim=-1)
        hidden = tokens + product("proj", Core.apply(*parts))
        gate, taken = product("fc1", functional.rms_norm(hidden, (64,)) * norms[1]).chunk(2, dim=-1)
        output = hidden + product("fc2", functional.silu(gate) * taken)
        bytes_kept = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        del output
    return int(bytes_kept)


def test_shards_of_a_layer_with_experts_and_adapters() -> None:
    """1,000 weights, 600 of them experts, and 10 of adapters: under torch FSDP2 in MindSpeed-MM all shards are fp32."""
    known = Workload(global_batch_size=8, seq_length=64, stack="mindspeed-mm", weight_bytes=2.0, optimizer_bytes=10.0)
    strategy = Strategy(pp=1, tp=1, dp=8, mbs=1, zero=3)
    found = static_bytes(1010, True, known, strategy, expert_count=600, frozen_count=1000)
    assert found.weight_bytes == 1000 / 8 * 4 + 10 / 8 * 2
    assert (found.gradient_bytes, found.optimizer_bytes) == (10 / 8 * known.gradient_bytes, 10 / 8 * 10)
    assert static_bytes(1000, False, known, strategy, expert_count=600).weight_bytes == 1000 / 8 * 4


def test_what_is_refused() -> None:
    text = small().text
    mixed = text.model_copy(
        update={"layers": text.layers.model_copy(update={"experts": Experts(num_experts=4, top_k=2, ffn_size=32)})}
    )
    with pytest.raises(ValueError, match="adapters beside experts of text are not understood"):
        Model(text=mixed, adapters=Adapters(rank=8, targets=ALL))
    beside_attention = Model(text=mixed, adapters=Adapters(rank=8, targets=("q", "k", "v", "proj")))
    assert count_chain_parameters(expand(beside_attention), trainable_only=True) == 4 * 8 * (128 + 2 * 96 + 128)
    with pytest.raises(ValueError, match="qkv is one matrix, and q, k, v are matrices of their own"):
        Adapters(rank=8, targets=("qkv", "v"))
    with pytest.raises(ValueError, match="every part is"):
        Model(text=text.model_copy(update={"freeze": True}), adapters=Adapters(rank=8, targets=ALL))
    with pytest.raises(ValueError, match="twice"):
        Adapters(rank=8, targets=("qkv", "qkv"))
    with pytest.raises(JobError, match=r"adapters\.targets"):
        job({"rank": 8, "targets": ["query"]})


def test_without_adapters_nothing_changes_its_name() -> None:
    """Plans and profiles are bound by hashes, which a key that is left out does not change."""
    plain, adapted = job(None), job({"rank": 8, "targets": ["qkv"]})
    assert '"adapters"' not in str(plain.model.model_dump(exclude_defaults=True))
    assert hash_job(plain.model, plain.cluster, plain.workload) != adapted.sha256
    bare = adapted.model.model_copy(update={"adapters": None})
    assert hash_model(bare) == hash_model(plain.model)
    assert hash_job(bare, plain.cluster, plain.workload) == plain.sha256
