"""Workload: what one training step processes, and in which precision its parameters are kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mm_autoparallel.model.job.precision import Precision
from mm_autoparallel.model.job.sample_source import MOST_DRAWN, SampleSource
from mm_autoparallel.model.job.stacks import FACTS, StackFacts, facts_of, software_of
from mm_autoparallel.records import BytesEach, Count, Factor, Flag, Name, Noun, Number, PositiveBytesEach, or_zero

Stack = Literal[
    "megatron-te",
    "megatron-local",
    "megatron-deepspeed",
    "mindspeed",
    "mindspeed-mm",
    "mindspeed-fsdp",
    "mindformers",
    "transformers",
    "galvatron",
]
"""Whose code trains."""

MINDSPEED: tuple[Stack, ...] = ("mindspeed", "mindspeed-mm")
"""MindSpeed, and MindSpeed-MM on it, whose encoders have laws of their own (model/job/mindspeed_mm_law.py)."""

ContextParallel = Literal["ring", "all_to_all", "all_gather", "hierarchical"]
"""How context parallel ranks share attention: keys and values go round behind it; heads are dealt instead of tokens
while it runs; every rank gathers all keys and values before it; heads are dealt among near ranks, beyond which keys and
values go round."""

ExpertKind = Literal["megatron", "deepspeed"]
"""Whose layer with experts runs: Megatron-LM's, or DeepSpeed's in MindSpeed (model/operators/deepspeed_experts.py)."""

Overlap = Literal["none", "shared_experts", "micro_batches"]
"""What hides the exchange of tokens with their experts' ranks."""

RecomputeOperator = Literal[
    "core_attn", "mla_up_proj", "layernorm", "mlp", "mlp_act", "moe", "moe_act", "shared_experts", "second_products"
]
"""Attention without its matrices; the up-projections of latent attention; the outputs of norms; the dense feed-forward,
or its activation alone, that of shared experts included; all experts with their exchange, or the activation inside them
alone; shared experts. second_products: every second matrix, and all that is no matrix and no attention (torchtitan's
selective recomputation by operator, torchtitan/distributed/activation_checkpoint.py). That name is ours, mlp_act stands
for MindSpeed's --recompute-activation-function, the others are Megatron's."""


class Workload(Noun):
    """One training step: `global_batch_size` samples of `seq_length` tokens in the text decoder.

    seq_length: image and audio tokens included. image_tokens_per_sample, audio_tokens_per_sample: what images and audio
    occupy of it, after merging; their encoders process more (blocks/tokens.py). images_per_sample, audios_per_sample:
    into how many separate attention spans these divide (tiles, where images are tiled).
    encoder_tokens_per_sample: encoder → tokens of its own, where several encode images, or audio, and their tokens
    stand side by side; without it each makes all of them, and what they make is added.
    samples_per_sequence: so many samples are packed into one sequence, of equal lengths, and the decoder attends within
    each alone (cu_seqlens); what a sample is elsewhere here is then such a sequence.
    micro_batch_scale: modality → factors on the times of its blocks, one a micro-batch in turn, cycled.
    samples: what they are like, one by one, of which the figures before are the means where they are left out; where
    they are packed, those of sequences, and samples_per_sequence is of as many as cost attention what the mean one
    does.

    weight_bytes, gradient_bytes, optimizer_bytes: per parameter; by default bf16 weights, fp32 gradients (Megatron-LM
    forces them with --bf16, training/arguments.py), and an fp32 copy with Adam's two moments (Kingma & Ba 2015).
    attention: `flash` keeps no score matrices, `unfused` does. overlap_grad_reduce, overlap_param_gather: data-parallel
    traffic hidden behind computation (Megatron's flags of these names). scatter_gather_p2p: without sequence parallel
    every tensor-parallel rank sends the next stage its part alone, and the parts are gathered there (Narayanan et al.
    2021, arXiv:2104.04473, section 4.1); else every rank sends the whole. overlap_p2p: with several chunks a stage,
    transfers between stages run beside compute (Megatron's --overlap-p2p-communication); else a stage waits for each.

    sequence_parallel: norms, residuals and layer boundaries are divided by TP too, where that is above 1.
    hidden_dropout, attention_dropout: dropout after the embedding and on both branches of a layer, and on attention
    weights, with masks of one byte a number (Korthikanti et al. 2022, arXiv:2205.05198, section 4.1). They are said
    here for classes of transformers too that drop out by themselves (GPT-2).
    recompute_operators: what every layer that is not recomputed whole runs once more in its backward instead of keeping
    it, by Megatron's names (--recompute-modules); transformers' code knows none. selective_operators: what layers in
    the mode `selective` run once more beside them (model/job/layer_modes.py). implementation: whose layers keep what:
    Megatron's fused ones, or those of Hugging Face's transformers as they run without a compiler, divided as the
    profilers divide them (projectors are whole on every tensor parallel rank). With `transformers`, stack and
    cross_entropy are `transformers` too, unless they are given.

    stack: whose matrix products run, which decides what lies in memory once beside tensors (model/costs/held_once.py):
    Megatron-LM with TransformerEngine's layers or with its own (--transformer-impl local), Megatron-DeepSpeed,
    MindSpeed on Ascend (mindspeed-mm: under MindSpeed-MM; mindspeed-fsdp: its FSDP trainer), MindFormers' graphs on
    Ascend (model/operators/mindformers_operators.py), transformers.
    gradient_fusion: weight gradients are added to the accumulated ones inside their product (Megatron's --gradient-
    accumulation-fusion, its default; scripts for Ascend and deterministic runs turn it off).
    cross_entropy: `unfused` works on fp32 logits beside the bf16 ones (Megatron-LM, core/tensor_parallel/
    cross_entropy.py, and its native fusion likewise), `fused` in their place (--cross-entropy-fusion-impl te),
    `transformers` on two fp32 copies of them (transformers, loss/loss_utils.py), `shifted` on three where a micro-batch
    has several samples (MindSpeed-MM's models); stack `mindformers` has a loss of its own. mask_compression: one
    attention mask of 2,048 by 2,048 serves all (MindFormers' use_attn_mask_compression); where it is off, that stack
    keeps masks of a byte for every pair of tokens. deterministic: matrix products repeat bit by bit, for which PyTorch
    takes larger workspaces (CUBLAS_WORKSPACE_CONFIG=:4096:8). context_parallel: how context parallel ranks share
    attention, Megatron's --cp-comm-type p2p (`ring`), a2a (`all_to_all`), all_gather and a2a+p2p (`hierarchical`);
    where heads are dealt TransformerEngine keeps attention's output in both layouts. Strategies may differ from it
    (Strategy.cp_kind). dealing_ranks: how many neighbours deal heads where it is hierarchical (the first of
    --hierarchical-context-parallel-sizes; 0: those of a group that share a node).

    expert_imbalance_factor: tokens of the busiest expert parallel rank over their mean, at most EP; it sets pace and
    memory. overlap_all_to_all: what hides the exchange of tokens with their experts' ranks: nothing, the shared
    expert beside it (Megatron's --moe-shared-expert-overlap), or the compute of the same layer in another micro-batch's
    opposite pass (--overlap-moe-expert-parallel-comm, which asks for several chunks a stage and recomputes no whole
    layer). ep_kind: whose layer with experts runs; DeepSpeed's divides experts as all else is (ETP as TP).
    token_rearrange: that layer permutes tokens, where it else multiplies them with masks. expert_capacity_factor:
    places of its experts over an even share of the tokens. fused_matmul_fraction: the part of tensor-parallel traffic
    beside matrix products that fused kernels hide (MindSpeed's MC2, TransformerEngine's userbuffers), of what nothing
    else does; of analytic times alone.
    grad_bucket_parameters: gradients are reduced, and weights gathered, so many at once (Megatron-LM: the larger of
    40 million and 1 million for each data parallel rank, core/distributed/distributed_data_parallel.py); of each stage
    the last bucket then hides behind nothing (0: it hides as all others do).
    text_chunk_samples: layers of the decoder run so many samples of a micro-batch at a time, with the recompute of each
    part by itself (0: all; MindSpeed-MM's chunk_mbs). loss_chunk_tokens: head and loss take so many tokens of each
    sample at a time, forward and backward at once, so that no more logits are there (0: all tokens at once;
    MindSpeed-MM's chunk loss). facts: what this run does otherwise than its stack (model/job/stacks.py).

    length_spread_fraction: standard deviation over mean of what micro-batches take, where samples are neither padded
    nor packed to one length; replicas then wait for the slowest of them, and stages for each other (costs/uneven.py).
    variable_seq_lengths: stages send the shapes of tensors before them, since lengths differ (Megatron's flag).
    precision: what linear layers multiply in (job/precision.py); strategies may differ from it (Strategy.precision).
    tower_precision: the same of towers and their projectors, which stay in BF16 unless it says otherwise; it holds
    beside a decoder of lower precision alone.
    replicate_towers: towers whose heads or widths tensor parallel ranks cannot divide are whole on each of them, as
    MindSpeed-MM and Megatron-LM run those of 25 heads; else such a TP is refused.
    cached_features: frozen encoders whose features of each sample may be made once and read in every step, since each
    epoch shows them the same inputs, not augmented ones; layouts may then leave them out of the step.
    """

    global_batch_size: Count
    seq_length: Count
    image_tokens_per_sample: Number = 0
    images_per_sample: Count = 1
    audio_tokens_per_sample: Number = 0
    audios_per_sample: Count = 1
    encoder_tokens_per_sample: dict[str, Count] = Field(default_factory=dict)
    samples_per_sequence: Count = 1
    micro_batch_scale: dict[str, Annotated[tuple[Factor, ...], Field(min_length=1)]] = Field(default_factory=dict)
    samples: SampleSource | None = None
    weight_bytes: PositiveBytesEach = 2.0
    gradient_bytes: BytesEach = 4.0
    optimizer_bytes: BytesEach = 12.0
    attention: Literal["flash", "unfused"] = "flash"
    overlap_grad_reduce: Flag = True
    overlap_param_gather: Flag = True
    scatter_gather_p2p: Flag = False
    overlap_p2p: Flag = True
    sequence_parallel: Flag = True
    hidden_dropout: Flag = False
    attention_dropout: Flag = False
    recompute_operators: tuple[RecomputeOperator, ...] = ()
    selective_operators: Annotated[tuple[RecomputeOperator, ...], Field(min_length=1)] = ("core_attn",)
    implementation: Literal["megatron", "transformers"] = "megatron"
    stack: Stack = "megatron-te"
    gradient_fusion: Flag = False
    cross_entropy: Literal["unfused", "fused", "transformers", "shifted"] = "unfused"
    mask_compression: Flag = False
    deterministic: Flag = False
    context_parallel: ContextParallel = "ring"
    dealing_ranks: Number = 0
    expert_imbalance_factor: Annotated[float, Field(strict=True, ge=1, le=1e6, allow_inf_nan=False)] = 1.0
    overlap_all_to_all: Overlap = "none"
    ep_kind: ExpertKind = "megatron"
    token_rearrange: Flag = False
    expert_capacity_factor: Annotated[float, Field(strict=True, gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    fused_matmul_fraction: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0
    grad_bucket_parameters: Number = 0
    loss_chunk_tokens: Number = 0
    text_chunk_samples: Number = 0
    length_spread_fraction: Annotated[float, or_zero(1.0)] = 0.0
    variable_seq_lengths: Flag = False
    replicate_towers: Flag = False
    cached_features: tuple[Name, ...] = ()
    precision: Precision = "bf16"
    tower_precision: Precision = "bf16"
    facts: StackFacts | None = None

    def handed_tokens(self, name: str, media: str) -> int:
        """What the encoder `name` of "images" or "audios" gives the decoder of a sample."""
        of_media = self.image_tokens_per_sample if media == "images" else self.audio_tokens_per_sample
        return self.encoder_tokens_per_sample.get(name) or of_media

    @property
    def known_facts(self) -> StackFacts:
        """What its stack does, but for what it states itself."""
        return facts_of(software_of(self.stack), self.facts)

    @property
    def reduction_bytes(self) -> float:
        """Bytes of one gradient while replicas reduce it."""
        return self.known_facts.reduction_bytes or self.gradient_bytes

    def software_under(self, software: str) -> str:
        """Whose facts it has under a calibration of `software`: that, or its stack's where nobody knows it."""
        return software if software in FACTS else software_of(self.stack)

    def run_by(self, software: str) -> Workload:
        """The workload with all facts of `software` stated, or of its stack where nobody knows that software."""
        facts = facts_of(self.software_under(software), self.facts)
        whole = StackFacts(**facts.model_dump())
        given = self.model_fields_set
        known: dict[str, Any] = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), facts.hides_reduction)
        sizes = {"gradient_bytes": facts.gradient_bytes, "optimizer_bytes": facts.optimizer_bytes}
        known |= {name: each_bytes for name, each_bytes in sizes.items() if each_bytes}
        return self.model_copy(
            update={"facts": whole} | {name: value for name, value in known.items() if name not in given}
        )

    @model_validator(mode="before")
    @classmethod
    def _follow_implementation(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("implementation") == "transformers":
            return {"stack": "transformers", "cross_entropy": "transformers"} | content
        return content

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
        if self.fused_matmul_fraction and self.known_facts.tp_overlap:
            raise ValueError(
                f"fused_matmul_fraction is {self.fused_matmul_fraction:g} and facts.tp_overlap is "
                f"{self.known_facts.tp_overlap}; both say what products hide of tensor parallel traffic, give one"
            )
        for key in ("micro_batch_scale", "length_spread_fraction"):
            if self.samples and getattr(self, key):
                raise ValueError(f"{key} and samples both say how micro-batches differ; leave {key} out")
        if self.samples and self.samples.batches * self.global_batch_size > MOST_DRAWN:
            raise ValueError(
                f"samples.batches {self.samples.batches} of global_batch_size {self.global_batch_size} are more than "
                f"{MOST_DRAWN:,} samples; draw fewer batches"
            )
        self._check_packing()
        self._check_experts()
        for key in ("recompute_operators", "selective_operators"):
            names = getattr(self, key)
            if "second_products" in names and len(names) > 1:
                raise ValueError(
                    f"{key} names second_products, which stands for a whole layer, beside "
                    f"{', '.join(name for name in names if name != 'second_products')}; name it alone"
                )
        if self.recompute_operators and self.implementation == "transformers":
            raise ValueError(
                f"recompute_operators names {', '.join(self.recompute_operators)}, and transformers recomputes whole "
                "layers alone; leave it out"
            )
        return self

    def _check_packing(self) -> None:
        if self.samples_per_sequence > 1:
            several = f"samples_per_sequence is {self.samples_per_sequence}"
        elif self.samples is not None and self.samples.packing is not None:
            several = "samples.packing packs samples into sequences"
        else:
            return
        if self.samples_per_sequence > self.seq_length:
            raise ValueError(f"{several}, more than the {self.seq_length} tokens of seq_length")
        if self.attention != "flash":
            raise ValueError(
                f"{several}, and attention is {self.attention}, which works out the scores of all pairs of a sequence; "
                "attention within each sample needs flash"
            )
        if self.stack == "mindformers":
            raise ValueError(f"{several}, and the masks of stack mindformers are planned for whole sequences alone")

    def _check_experts(self) -> None:
        if self.token_rearrange and self.ep_kind != "deepspeed":
            raise ValueError(
                "token_rearrange is of DeepSpeed's layer with experts, and ep_kind is megatron, whose layer always "
                "permutes tokens; leave it out, or give ep_kind deepspeed"
            )
        if self.expert_capacity_factor != 1.0 and self.ep_kind != "deepspeed":
            raise ValueError(
                f"expert_capacity_factor is {self.expert_capacity_factor}, of DeepSpeed's layer with experts, and "
                "ep_kind is megatron; leave it out, or give ep_kind deepspeed"
            )
        if self.ep_kind == "megatron":
            return
        if self.stack != "mindspeed":
            raise ValueError(f"ep_kind deepspeed is MindSpeed's (stack mindspeed), and stack is {self.stack}")
        if self.overlap_all_to_all != "none":
            raise ValueError(
                f"overlap_all_to_all is {self.overlap_all_to_all}, and DeepSpeed's layer with experts (ep_kind) hides "
                "its exchange behind nothing; leave it out"
            )
