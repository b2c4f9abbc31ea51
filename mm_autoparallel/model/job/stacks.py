"""Facts of a software stack: what its code does in every step, whatever device runs it and however fast.

They are counted, not fitted. Each stack has those in which it differs from an unknown one, with the place in its code
where they were read; a workload may state others (`workload.facts`), for a kernel or an option that its run turned on.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from mm_autoparallel.records import BytesEach, Factor, Flag, Noun, or_zero

AttentionKernel = Literal["", "flash-1", "flash-2", "triton", "fused-softmax", "torch"]
"""FlashAttention 1 and 2, Triton's with biases (ALiBi); unfused: with a fused softmax, or PyTorch's operators one by
one. Empty: flash-2 or fused-softmax, as the workload's `attention` says."""

Dispatcher = Literal["", "alltoall", "deepep", "hybridep"]
"""What takes tokens to their experts' ranks and back (Megatron's --moe-token-dispatcher-type, and for the flex type
--moe-flex-dispatcher-backend). Empty: nobody says."""

Graphs = Literal["", "none", "partial", "full"]
"""Which operators a device launches by itself from a graph that was recorded once: none, parts of every layer
(Megatron's --cuda-graph-scope), or a whole step (its full_iteration). Empty: nobody says."""

TensorOverlap = Literal["", "user_buffers", "asynchronous", "mc2"]
"""What tensor parallel traffic runs beside: products that take it in pieces, in TransformerEngine's user buffers, as
PyTorch's asynchronous tensor parallelism, or in MindSpeed's fused operators (MC2). Empty: as `hides_sums` says."""

RepeatedGroups = Literal["never", "fewer", "always"]
"""Where key and value groups are repeated for every query head before context parallel ranks deal heads."""

FusedProducts = Literal["", "none", "mc2", "user_buffers"]
"""Of these what a strategy may choose; none: traffic runs beside no product. Empty: as the workload has it."""


_OPEN_RING = 0.15
"""What of a ring's traffic stays open. Assumed: what published steps with TransformerEngine at CP 4 and 8 ask for; of a
stack that nobody measured, the same."""


class StackFacts(Noun):
    """What a stack does. The defaults are those of a stack that nobody knows.

    split: what the pipeline deals out evenly: layers, or `modules`: embedding, layers, final norm and head in equal
    counts, the first stages one more. linear_sums: input gradients are summed among tensor parallel ranks for each
    matrix by itself, so twice for gate and up; else once for all matrices that share an input. gathers: where sequence
    parallelism gathers: in front of a `matrix`, once more in the backward, or in the `norm`, whose whole output is
    kept. gathered_logits: every tensor parallel rank gathers all logits and evaluates the loss of them.

    gradient_bytes, optimizer_bytes: of one accumulated gradient, and of the optimizer's states of one parameter (0: as
    the workload says). updates: whether the optimizer works on all weights together, or on one after the other.
    reduction_bytes: of one gradient while it is reduced among replicas (0: as it is accumulated). all_reduces: ZeRO 1
    all-reduces gradients, of which each rank then takes its shard. hides_reduction: gradients are reduced behind the
    backward, and weights gathered behind the forward. hidden_reduction_fraction: the part of both that hides in another
    way, whatever is computed. hides_sums: tensor parallel sums of input gradients run beside the products of weight
    gradients. shards: what ZeRO 3 moves at once: a `unit`, as all weights of a layer in one buffer, which hides as
    reductions do; or a `tensor`, each by itself and in the open, whatever hides of ZeRO 1.

    waits_for_hops: a stage computes nothing while it sends or receives, one tensor after the other. exchanges_hops: one
    of a single chunk computes nothing while it sends and receives either, both at once.

    norms, elementwise: whether norms, and activations, rotations and reshapes, are fused kernels or PyTorch's operators
    one by one. keeps_copies: those operators keep what fused kernels work out again: the activated gate, and
    attention's output as the kernel gave it. keeps_gate: the former alone. keeps_joint: values stay a part of what one
    matrix made of query, key and value, all of which is then kept. attention: kernel. recomputes_ends: embedding and
    head run once more in the backward, as full recompute of every module has it. stops_early: a recomputed layer stops
    once all is there that was kept, so that its last product does not run again. writes_gradients: a weight gradient is
    written by its product and read once more to be added, else the product adds it. step_bytes: read and written of one
    parameter that a rank holds, once a step beside the optimizer's own: gradients set to zero, measured, scaled and
    copied.

    dispatcher: of tokens to their experts; it tells what permutes them and what they send to whom. graphs: what a host
    need not launch. drops_tokens: experts take as many tokens as their share and drop the rest, so that no shape
    depends on the router. grouped_activation: the activation inside experts is part of their products. joined_heads:
    one kernel rotates and joins the heads of latent attention. early_experts: a release whose layers with experts were
    slower, before their kernels were tuned.

    Under low precision (model/job/precision.py): low_first_last: the decoder's first and last layer are low too.
    low_parameters: weights are kept and gathered in it (Megatron's --fp8-param-gather); nothing: as the recipe has it,
    under ZeRO 3 not. fp8_attention: the attention core multiplies in FP8. fused_casts: a compiler joins the casts with
    what stands before them. tp_overlap: tensor parallel traffic runs beside products that take it in pieces, in
    TransformerEngine's user buffers, as PyTorch's asynchronous tensor parallelism or in MindSpeed's fused operators
    (model/operators/tensor_traffic.py); empty: as hides_sums says.

    compiled: a compiler joins norms, activations, rotations and casts (`norms`, `elementwise` and `fused_casts` unless
    they are stated), and the host launches half as much. open_ring_fraction: what of a ring's traffic stays whatever
    attention takes, beside each step's latency (0: a step, latency too, hides behind its part of the attention).
    split_attention_factor: attention to gathered keys over one kernel's, from four context parallel ranks on.
    repeated_groups: where context parallel ranks deal heads, keys and values are repeated for every query head before:
    never, so that the ranks must divide the groups; where a tensor parallel rank has `fewer` groups than ranks deal; or
    always.
    """

    split: Literal["layers", "modules"] = "layers"
    linear_sums: Flag = False
    gathers: Literal["matrix", "norm"] = "matrix"
    gathered_logits: Flag = False
    gradient_bytes: BytesEach = 0.0
    optimizer_bytes: BytesEach = 0.0
    updates: Literal["together", "each"] = "together"
    reduction_bytes: BytesEach = 0.0
    all_reduces: Flag = False
    hides_reduction: Flag = False
    hidden_reduction_fraction: Annotated[float, or_zero(1.0)] = 0.0
    shards: Literal["unit", "tensor"] = "unit"
    waits_for_hops: Flag = False
    exchanges_hops: Flag = False
    hides_sums: Flag = False
    norms: Literal["fused", "operators"] = "fused"
    elementwise: Literal["fused", "operators"] = "operators"
    keeps_copies: Flag = False
    keeps_gate: Flag = False
    keeps_joint: Flag = False
    attention: AttentionKernel = ""
    recomputes_ends: Flag = False
    stops_early: Flag = False
    writes_gradients: Flag = True
    step_bytes: BytesEach = 12.0
    compiled: Flag = False
    open_ring_fraction: Annotated[float, or_zero(1.0)] = _OPEN_RING
    split_attention_factor: Factor = 1.0
    repeated_groups: RepeatedGroups = "never"
    dispatcher: Dispatcher = ""
    graphs: Graphs = ""
    drops_tokens: Flag = False
    grouped_activation: Flag = False
    joined_heads: Flag = False
    early_experts: Flag = False
    low_first_last: Flag = True
    low_parameters: Flag | None = None
    fp8_attention: Flag = False
    fused_casts: Flag = False
    tp_overlap: TensorOverlap = ""

    def stated(self, facts: StackFacts | None) -> StackFacts:
        """These with what `facts` states in place of its own; what it leaves out stays."""
        if facts is None:
            return self
        if len(facts.model_fields_set) == _NUM_FACTS:
            return facts
        update = {name: getattr(facts, name) for name in facts.model_fields_set}
        return self.model_copy(update=(_BY_A_COMPILER if facts.compiled else {}) | update)


_NUM_FACTS = len(StackFacts.model_fields)
_BY_A_COMPILER = {"norms": "fused", "elementwise": "fused", "fused_casts": True}

UNKNOWN = StackFacts()

_FUSED = StackFacts(hides_reduction=True, elementwise="fused", writes_gradients=False, step_bytes=0.0)
_MEGATRON = _FUSED.model_copy(update={"hides_sums": True})

_KNOWN: dict[str, tuple[StackFacts, str]] = {
    "megatron-core": (
        _MEGATRON,
        "Megatron-LM core_r0.12: sums beside weight gradients (core/tensor_parallel/layers.py, "
        "LinearWithGradAccumulationAndAsyncCommunication), buckets behind the backward (core/distributed), fused bias, "
        "activation and rotation (core/fusions), loss of divided logits (core/tensor_parallel/cross_entropy.py)",
    ),
    "megatron-bridge": (
        _MEGATRON.model_copy(update={"gradient_bytes": 2.0, "joined_heads": True, "exchanges_hops": True}),
        "NVIDIA-NeMo/Megatron-Bridge v0.2 to v0.6 on Megatron-Core: as megatron-core, gradients reduced in bf16 "
        "(grad_reduce_in_fp32 false in its performance recipes), fused rotation of latent attention's heads "
        "(apply_rope_fusion); without chunks compute waits for requests that are sent in batches "
        "(megatron/core/pipeline_parallel/p2p_communication.py, _communicate; overlap_p2p_comm is of chunks alone)",
    ),
    "megatron-lm": (
        _MEGATRON,
        "Megatron-LM v3.0: sums beside weight gradients (megatron/core/tensor_parallel/layers.py)",
    ),
    "megatron-lm-2021": (
        _FUSED,
        "Megatron-LM v2.6: sums beside nothing (megatron/mpu/layers.py), fused bias and GELU (megatron/model)",
    ),
    "megatron-deepspeed": (
        _FUSED.model_copy(update={"shards": "tensor"}),
        "assumed, Megatron-DeepSpeed of 2021: as Megatron-LM v2.6, which it is a fork of; ZeRO 3 as deepspeed's",
    ),
    "bigscience": (
        StackFacts(all_reduces=True, shards="tensor", waits_for_hops=True),
        "BigScience's Megatron-DeepSpeed 8387ae17: sums beside nothing (megatron/mpu/layers.py); DeepSpeed v0.5.9 "
        "reduces after the last backward (runtime/pipe/engine.py, _exec_reduce_grads), sends and receives "
        "synchronously (runtime/pipe/p2p.py, send, recv), ZeRO 3 as deepspeed's. Assumed: "
        "activations as single operators, although bias and GELU are fused there (megatron/model/fused_bias_gelu.py), "
        "since published steps are longer still",
    ),
    "aleph-alpha": (
        StackFacts(
            split="modules",
            linear_sums=True,
            gathers="norm",
            gathered_logits=True,
            gradient_bytes=2.0,
            reduction_bytes=4.0,
            all_reduces=True,
            norms="operators",
            keeps_copies=True,
            waits_for_hops=True,
        ),
        "Aleph-Alpha/scaling 737f855: modules in equal counts, a sum for each linear, gathers in the norm, logits "
        "gathered and evaluated in fp32 on every rank, gradients accumulated in bf16 and all-reduced in fp32 bucket by "
        "bucket after the last backward, every module recomputed, synchronous sends and receives "
        "(core/nn/parallel_module/communicator.py)",
    ),
    "internevo": (
        StackFacts(
            linear_sums=True,
            gradient_bytes=2.0,
            all_reduces=True,
            hidden_reduction_fraction=0.67,
            elementwise="fused",
            attention="flash-1",
        ),
        "InternEvo v0.1.0: buckets of bf16 gradients are all-reduced behind the backward, four of six bytes a "
        "parameter; updated weights are sent and waited for after the optimizer (solver/optimizer/"
        "hybrid_zero_optim.py, _reduce_and_copy, broadcast_params). A sum for each of the two linears of a gate "
        "(model/linear.py); that flash-attn starts it beside the weight's gradient is taken to hide nothing (assumed). "
        "Rotation of flash-attn (model/embedding.py), attention of its version 1 (model/multi_head_attention.py)",
    ),
    "llm-foundry": (
        StackFacts(
            hides_reduction=True,
            hides_sums=True,
            stops_early=True,
            attention="triton",
            optimizer_bytes=10.0,
            updates="each",
        ),
        "mosaicml/llm-foundry 8c8dd48: PyTorch FSDP, which gathers the next module behind this one (BACKWARD_PRE, "
        "torch/distributed/fsdp) and casts its fp32 shards to bf16 there, so that they are the optimizer's copy; "
        "checkpoints that are not reentrant; MPT with Triton's attention and ALiBi (llmfoundry/models/mpt); an "
        "optimizer that takes one flat weight after the other (composer, DecoupledAdamW)",
    ),
    "fsdp": (
        StackFacts(hides_reduction=True, hides_sums=True, stops_early=True),
        "PyTorch FSDP 1 and 2: prefetch of the next module's weights (torch/distributed/fsdp); checkpoints that are "
        "not reentrant stop early (torch/utils/checkpoint.py, set_checkpoint_early_stop)",
    ),
    "torchtitan": (
        StackFacts(
            hides_reduction=True,
            gathers="norm",
            reduction_bytes=4.0,
            norms="operators",
            attention="flash-2",
            split_attention_factor=1.4,
        ),
        "torchtitan v0.2.0: FSDP2 of each layer, gradients reduced in fp32 (config/job_config.py, "
        "mixed_precision_reduce); checkpoints run to their end (early_stop, off); DTensor's sums wait where they "
        "stand, and a module's gathered input is kept (models/llama3/infra/parallelize.py, PrepareModuleInput); norms, "
        "rotation and gate as single operators unless compiled (models/llama3/model/model.py); PyTorch's attention "
        "takes FlashAttention 2 first but on B200 (models/attention.py, 9dec370 and 820504e); 1.4 assumed: its "
        "published steps of CP 4 and 8 ask for it",
    ),
    "deepspeed": (
        StackFacts(all_reduces=True, shards="tensor"),
        "DeepSpeed v0.14.4: ZeRO 1 all-reduces buckets of several ranks' gradients after the last backward "
        "(runtime/zero/stage_1_and_2.py, average_tensor, reduce_gradients). ZeRO 3 fetches the tensors of the next "
        "modules on a stream of its own (runtime/zero/partitioned_param_coordinator.py, fetch_sub_module) and overlaps "
        "reductions unless told otherwise (runtime/zero/config.py, overlap_comm). Assumed: in sum nothing hides, since "
        "published steps on A100 and V100 take as long as compute and traffic together. Kernels are the model's: the "
        "usual",
    ),
    "mindspeed-llm": (
        StackFacts(hides_reduction=True),
        "MindSpeed-LLM v1.0.RC3: --overlap-grad-reduce and --overlap-param-gather as its scripts say, whose rows state "
        "them; fused attention, norm, rotation and SwiGLU are options of scripts; gradients are added apart "
        "(modellink/arguments.py: gradient_accumulation_fusion stays off). Assumed: none of the sums that Megatron "
        "core_r0.6 starts beside weight gradients hides, since published steps are longer still",
    ),
    "mindspeed-mm": (
        StackFacts(hides_reduction=True),
        "assumed, MindSpeed-MM 2.0 on Megatron-LM core_r0.8: as mindspeed-llm, whose operators it runs; its scripts "
        "say --overlap-grad-reduce and --overlap-param-gather",
    ),
    "mindformers": (
        StackFacts(elementwise="fused"),
        "MindFormers v1.3.2: graphs whose gradients and weights move in the open (docs/model_cards/llama2.md: "
        "enable_grad_comm_opt and enable_opt_shard_comm_opt are false), of parallel optimizers (configs: "
        "enable_parallel_optimizer). Assumed: elementwise operators are fused by the compiler",
    ),
}
"""Software → its facts, and where in its code they stand; `assumed` where that was not read line by line."""

STACK_SOFTWARE: Mapping[str, str] = MappingProxyType(
    {
        "megatron-te": "megatron-core",
        "megatron-local": "megatron-lm",
        "mindspeed": "mindspeed-llm",
        "mindspeed-fsdp": "fsdp",
        "transformers": "fsdp",
    }
)
"""The workload's `stack` → the software whose facts it has, where that is called otherwise."""

FACTS: Mapping[str, StackFacts] = MappingProxyType({name: facts for name, (facts, _) in _KNOWN.items()})
FACT_SOURCES: Mapping[str, str] = MappingProxyType({name: source for name, (_, source) in _KNOWN.items()})


def facts_of(software: str, stated: StackFacts | None = None) -> StackFacts:
    """The facts of `software`, those of an unknown stack where nobody knows it; `stated`: of this run alone."""
    return FACTS.get(software, UNKNOWN).stated(stated)


def software_of(stack: str) -> str:
    """The software that a workload's `stack` names."""
    return STACK_SOFTWARE.get(stack, stack)


def describe_facts(software: str, facts: StackFacts) -> str:
    """In a sentence, what times and memory take a stack to do where it differs from an unknown one, and the source."""
    own = (f"{name} {_say(value)}" for name, value in facts if value != getattr(UNKNOWN, name))
    said = ", ".join(own) or "nothing that an unknown stack does not"
    return f"facts of {software}: {said} ({FACT_SOURCES.get(software, 'nobody knows it: the usual')})"


def _say(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
