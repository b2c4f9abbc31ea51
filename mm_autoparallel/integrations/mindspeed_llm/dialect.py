"""MindSpeed-LLM's flags (26.1.0, on MindSpeed 26.1.0_core_r0.12.1) in Megatron-LM's, and back.

What they mean: mindspeed_llm/features_manager of MindSpeed-LLM; mindspeed/features_manager and mindspeed/arguments.py
of MindSpeed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import describe_value
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.decided import TEXT, Decided
from mm_autoparallel.integrations.megatron_core.dialect import Dialect
from mm_autoparallel.integrations.megatron_core.layers import format_layout
from mm_autoparallel.integrations.megatron_core.passed import Passed
from mm_autoparallel.integrations.mindspeed_llm import deepspeed_experts, schedules
from mm_autoparallel.integrations.mindspeed_llm.adapters import find_adapters
from mm_autoparallel.model.job.strategy import Strategy

LAYER_LIST, LAYER_LISTS, NOOP = "--num-layer-list", "--pipeline-num-transformer-layers", "--noop-layers"
ALGORITHM, ULYSSES = "--context-parallel-algo", "--ulysses-degree-in-cp"
STAGE = "--stage"
EXTEND, PER_RANK = "--moe-tp-extend-ep", "--enable-recompute-layers-per-pp-rank"
REPEATED = "--kv-head-repeat-before-uly-alltoall"
ALGORITHMS = {
    "ring": "megatron_cp_algo",
    "all_to_all": "ulysses_cp_algo",
    "hierarchical": "hybrid_cp_algo",
    "all_gather": "kvallgather_cp_algo",
}
FUSED = "--use-ascend-mc2"
SWITCHES = {flags.SWAPPED: "--swap-attention", flags.REACTIVATED: "--recompute-activation-function"}
OVERLAPPED = "--moe-alltoall-overlap-comm"
BESIDE_OVERLAPPED = ("--moe-permutation-async-comm", flags.GROUPED)
"""What the overlap of the exchange asks for (MindSpeed, docs/features/megatron_moe)."""
REFUSED = {
    "--recompute-in-bubble": "recomputes in idle time, which no plan says; take it out",
    "--recompute-in-advance": "recomputes ahead of time, which no plan says; take it out",
    "--adaptive-recompute-device-swap": "chooses what recomputes while it runs; take it out",
    "--tp-2d": "divides matrices along two axes, which no plan says; take it out",
    "--use-torch-fsdp2": "shards with torch FSDP2, which is not read; take it out",
    "--pp2vpp": "is a conversion of weights, not a training",
    "--use-nanopipe": "parts backwards in an order of its own, which no plan says; take it out",
    "--use-nanopipe-swap": "parts backwards in an order of its own, which no plan says; take it out",
    "--enable-zero3": "shards weights of tensor parallel layers in a way of its own, which is not read; take it out",
    "--ampipe-degree": "runs attention and experts of parts of a sequence beside each other, which no plan says; take "
    "it out",
    "--layerwise-disaggregated-training": "runs parts of the layers elsewhere, which no plan says; take it out",
}
"""Flag → why a script that passes it is no plan."""

FLASH = "--use-flash-attn"
FULL: dict[str, tuple[str, ...]] = {flags.GRANULARITY: ("full",), flags.METHOD: ("uniform",), flags.RECOMPUTED: ("1",)}
REPLACED: dict[str, dict[str, tuple[str, ...]]] = {flags.OLD_FULL: FULL, "--triangle-attn": {FLASH: ()}}
"""Flag of ModelLink 1.0 → the flags that say the same today."""
OLD = {
    flags.OLD_FULL: f"is read as {flags.GRANULARITY} full, {flags.METHOD} uniform, {flags.RECOMPUTED} 1",
    "--triangle-attn": f"is read as {FLASH}",
    "--mlp-layer-fusion": "says what is always so today",
    "--release-fp32-grad": "has --reuse-fp32-param in its place; the peak that is told has what it releases",
    "--checkpoint-policy": f"has {flags.METHOD} and {flags.RECOMPUTED} in its place",
    "--auto-recompute-profiling-step": "has --adaptive-recompute-device-swap in its place; plans choose recompute here",
    "--optimized-pipeline": "has nothing in its place: all micro-batches are planned alike",
    "--manual-mbs": "has nothing in its place: all micro-batches are planned alike",
    "--fold-mode": "has nothing in its place: the order is planned as 1F1B",
}
"""Flag of ModelLink 1.0, which is in no parser since → what is read for it; told, and never written."""

NOTED = {
    "--swap-optimizer": "keeps states on the host while they rest; the peak that is told has them on the device",
    "--swap-attention": "moves what attention keeps to the host; the peak that is told has it on the device",
    "--recompute-activation-function": "runs activations again; the peak that is told keeps them",
    "--recompute-norm": "runs norms again; the peak that is told keeps them",
    "--moe-zero-memory": "keeps less of experts; the peak that is told keeps it",
    "--reuse-fp32-param": "keeps no bf16 copy of weights beside fp32; the peak that is told has it",
    "--moe-alltoall-overlap-comm": "hides the exchange of tokens; the step that is told has it in the open",
    "--moe-allgather-overlap-comm": "hides the exchange of tokens; the step that is told has it in the open",
    "--no-pad-to-seq-lengths": "pads samples to the longest beside them; planned are --seq-length tokens, the most",
    "--variable-seq-lengths": "pads samples to the longest beside them; planned are --seq-length tokens, the most",
    "--neat-pack": "packs several samples into one of --seq-length, whose attention is planned over all of it",
    "--use-ascend-coc": "hides TP's transfers beside products; the step that is told has them in the open",
    REPEATED: "is on without it too; where ranks deal heads, groups are planned as repeated where they are fewer than "
    "those ranks, as MindSpeed does whatever the flag says",
    **deepspeed_experts.NOTED,
}
"""Flag → what it does beside the plan; people read the sentence, and the flag stays in the script."""

KEEPS_LESS = frozenset(
    {
        *("--swap-optimizer", "--swap-attention", "--recompute-activation-function", "--recompute-norm"),
        *("--moe-zero-memory", "--reuse-fp32-param", "--no-pad-to-seq-lengths", "--variable-seq-lengths"),
    }
)
"""Of these, those by which a training holds less than the peak that people read."""

MARKS = frozenset(
    {
        *(LAYER_LIST, LAYER_LISTS, NOOP, ALGORITHM, ULYSSES, EXTEND, PER_RANK, FUSED, *REFUSED, *NOTED),
        *(OLD.keys() - {flags.OLD_FULL}),
        *("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb", "--use-mc2"),
        *("--tokenizer-name-or-path", "--no-shared-storage", "--moe-permutation-async-comm"),
        *("--virtual-pipeline-model-parallel-size", "--first-k-dense-replace", "--n-shared-experts"),
        *("--mla-fa-without-pad", "--gemm-gradient-accumulation-fusion", "--use-fused-moe-token-permute-and-unpermute"),
        *(*deepspeed_experts.MARKS, *schedules.MARKS),
    }
) - {"--use-torch-fsdp2"}
"""Flags that Megatron-LM does not have: a script that passes one is MindSpeed-LLM's."""

_SWITCHES = frozenset(
    {
        *(EXTEND, PER_RANK, FUSED, *NOTED, "--recompute-in-bubble", "--recompute-in-advance"),
        *(
            "--use-fused-rmsnorm",
            "--use-fused-swiglu",
            "--use-fused-rotary-pos-emb",
            "--use-mc2",
            "--no-shared-storage",
        ),
        *("--use-mcore-models", "--moe-permutation-async-comm", "--mla-fa-without-pad", "--tp-2d"),
        *("--gemm-gradient-accumulation-fusion", "--use-fused-moe-token-permute-and-unpermute"),
        *("--use-nanopipe", "--use-nanopipe-swap", "--enable-zero3", deepspeed_experts.LEGACY),
        *(*deepspeed_experts.SWITCHES, *schedules.SWITCHES, "--shared-expert-gate"),
    }
) - {"--moe-zero-memory"}

_SHARED_GATE = "--shared-expert-gate"

_EVENLY = (flags.LAYERS_PER_CHUNK, flags.CHUNKS)
"""Flags that a layout says more than."""

_SPECS = re.compile(r"mindspeed_llm\.(tasks\.models|core\.models)\.spec\.\w+")
_OTHER_SPECS = ("mamba", "hybrid", "deepseek4", "gemma", "longcat", "phi35", "minimax_m1")
"""Parts of names of specifications whose layers are of several kinds or of another form."""


def read(passed: Passed) -> Passed:
    """What a script passes, in Megatron-LM's flags. Raises PlanError naming what no plan says."""
    for flag, reason in REFUSED.items():
        if passed.has(flag):
            raise PlanError(f"{passed.where}: {flag} {reason}")
    words = dict(passed.words)
    for flag in _SWITCHES & set(words):
        words[flag] = ()
    if passed.text(STAGE) not in (None, "sft"):
        raise PlanError(
            f"{passed.where}: {STAGE} {passed.text(STAGE)} trains on preferences: it holds another model beside the "
            "one that learns, which no plan says"
        )
    layout = dict(_read_layers(passed))
    words = {flag: each for flag, each in words.items() if not layout or flag not in _EVENLY}
    for flag, same in REPLACED.items():
        words |= {each: value for each, value in same.items() if passed.has(flag) and each not in words}
    words |= layout | dict(_read_context(passed)) | dict(_read_model(passed))
    words |= dict(deepspeed_experts.read(passed)) | dict(schedules.read(passed, layout))
    if passed.has(EXTEND):
        tp, ep = passed.number(flags.TENSOR) or 1, passed.number(flags.EXPERT) or 1
        words |= {flags.EXPERT: (str(tp * ep),), flags.EXPERT_TENSOR: ("1",)}
    words |= {flags.FUSED: ()} if passed.has(FUSED) else {}
    words |= {flags.SHARED_OVERLAP: ()} if passed.has(OVERLAPPED) and _has_shared(passed) else {}
    if passed.text(flags.DISPATCHER) == "alltoall_seq":
        words[flags.DISPATCHER] = ("alltoall",)
    if passed.has(PER_RANK) and passed.has(flags.RECOMPUTED) and (passed.has(flags.LAYERS_PER_CHUNK)):
        raise PlanError(f"{passed.where}: {PER_RANK} counts over a rank's chunks, and plans count in each; take it out")
    ours = (MARKS - OLD.keys() - {"--first-k-dense-replace"}) | {flags.OLD_FULL, "--spec"}  # lint names the old ones
    kept = {flag: each for flag, each in words.items() if flag not in ours}
    return replace(passed, words=kept)


def _read_model(passed: Passed) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names of sizes that Megatron-LM has by others. Raises PlanError for layers of another form."""
    spec = " ".join(passed.words.get("--spec", ()))
    if spec and (not _SPECS.match(spec) or any(name in spec for name in _OTHER_SPECS)):
        raise PlanError(f"{passed.where}: --spec {spec} is of another form than layers that are planned")
    shared, width = passed.number("--n-shared-experts", least=0), passed.number("--moe-ffn-hidden-size")
    if shared and width and not passed.has("--moe-shared-expert-intermediate-size"):
        yield "--moe-shared-expert-intermediate-size", (str(shared * width),)
    if passed.has(_SHARED_GATE):
        yield "--moe-shared-expert-gate", ()
    text, layers = passed.text("--first-k-dense-replace"), passed.number(flags.NUM_LAYERS)
    dense = 0 if text == "-1" else passed.number("--first-k-dense-replace", least=0)
    if passed.text("--moe-layer-freq") == "-1":  # experts in every layer
        yield "--moe-layer-freq", ("1",)
    if dense and layers and passed.has("--num-experts"):
        yield "--moe-layer-freq", (f"([0]*{dense}+[1]*{layers - _count_noops(passed) - dense})",)
    if passed.has(NOOP) and layers:
        yield flags.NUM_LAYERS, (str(layers - _count_noops(passed)),)


def _count_noops(passed: Passed) -> int:
    return len(_list_noops(passed)) if passed.has(NOOP) else 0


def _list_noops(passed: Passed) -> list[int]:
    text = passed.text(NOOP) or ""
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise PlanError(f"{passed.where}: {NOOP} is {describe_value(text)}; numbers with commas between are expected")
    return [int(word) for word in text.split(",")]


def _read_layers(passed: Passed) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A layout where a list, lists or layers that do nothing say which stage holds what."""
    counts = _count_layers(passed)
    if counts is not None:
        if not counts:
            raise PlanError(f"{passed.where}: {LAYER_LISTS} leaves no layers to the stages")
        if 0 in counts:
            raise PlanError(
                f"{passed.where}: {NOOP} leaves virtual stage {counts.index(0)} of {len(counts)} without a layer; "
                "those with an embedding or a loss alone are not planned"
            )
        yield flags.LAYOUT, (format_layout(counts, passed.number(flags.MTP, least=0) or 0),)


def _count_layers(passed: Passed) -> list[int] | None:
    """Layers of each virtual stage, chunk x PP + stage; None where Megatron-LM's own flags say it."""
    pp = passed.number(flags.PIPELINE) or 1
    if passed.has(LAYER_LIST):
        text = passed.text(LAYER_LIST) or ""
        counts = [int(word) for word in text.split(",")] if re.fullmatch(r"\d{1,4}(,\d{1,4})*", text) else []
        if len(counts) != pp or passed.has(flags.LAYERS_PER_CHUNK):
            raise PlanError(f"{passed.where}: {LAYER_LIST} {text} has no number for each of {pp} stages without chunks")
        return counts
    if passed.has(LAYER_LISTS):
        try:
            rows = ast.literal_eval(passed.text(LAYER_LISTS) or "")
            lawful = len(rows) == pp and len({len(row) for row in rows}) == 1
            return [int(rows[stage][chunk]) for chunk in range(len(rows[0])) for stage in range(pp)] if lawful else []
        except (ValueError, SyntaxError, TypeError, IndexError, RecursionError, MemoryError):
            raise PlanError(f"{passed.where}: {LAYER_LISTS} has no list of numbers for each stage") from None
    if not passed.has(NOOP):
        return None
    layers, each = passed.number(flags.NUM_LAYERS) or 0, passed.number(flags.LAYERS_PER_CHUNK)
    stages = pp * (schedules.CHUNKS if schedules.is_v(passed) else 1)
    held = each or layers // stages
    if not held or layers % (held * stages):
        raise PlanError(f"{passed.where}: {layers} layers with {NOOP} are not dealt evenly to PP {pp}")
    counts = [held] * (layers // held)
    for index in _list_noops(passed):
        if index >= layers:
            raise PlanError(f"{passed.where}: {NOOP} names layer {index} of {layers}")
        counts[index // held] -= 1
    return counts


def _read_context(passed: Passed) -> Iterator[tuple[str, tuple[str, ...]]]:
    cp = passed.number(flags.CONTEXT) or 1
    if cp == 1:
        return
    usual = "all_to_all" if deepspeed_experts.is_deepspeed(passed) else "ring"  # of releases that have those experts
    said = passed.text(ALGORITHM) or ALGORITHMS[usual]
    kinds = {word: kind for kind, word in ALGORITHMS.items()}
    if said not in kinds:
        raise PlanError(f"{passed.where}: {ALGORITHM} is {said}; one of {', '.join(kinds)} is expected")
    yield flags.CONTEXT_KIND, (flags.CONTEXT_KINDS[kinds[said]],)
    if kinds[said] == "hierarchical":
        near = passed.number(ULYSSES)
        if near is None or cp % near:
            raise PlanError(f"{passed.where}: {ALGORITHM} {said} needs {ULYSSES}, a divisor of {flags.CONTEXT} {cp}")
        yield flags.CONTEXT_SIZES, (str(near), str(cp // near))


def write(decided: Decided) -> Decided:
    """The flags of a plan as MindSpeed-LLM spells them. Raises PlanError naming a choice that it cannot run."""
    values, strategy = dict(decided.values), decided.plan.strategy
    if strategy.optimizer_offload:
        raise PlanError(
            "plan: its optimizer lies and steps on the host, and MindSpeed's --swap-optimizer steps on the device; "
            "plan with search.optimizer_offload [false]"
        )
    if strategy.zero > 1:
        raise PlanError(
            f"plan: ZeRO {strategy.zero}, and MindSpeed-LLM has no Megatron-FSDP; plan with search.zero [0, 1]"
        )
    if values.pop(flags.USER_BUFFERS, None) is not None:
        raise PlanError(
            "plan: products run beside TP's traffic in user buffers, which are TransformerEngine's; plan with "
            "search.tp_overlap [none, mc2]"
        )
    values |= {FUSED: values.pop(flags.FUSED)} if flags.FUSED in values else {}
    values |= {switch: values.pop(flag) for flag, switch in SWITCHES.items() if flag in values}
    kind = _kind_of(decided)
    values |= dict.fromkeys((flags.CONTEXT_KIND, flags.CONTEXT_SIZES, flags.OPTIMIZER_OFFLOAD, flags.CUSTOM_FSDP))
    values |= dict.fromkeys((flags.MEGATRON_FSDP, flags.SHARDING, flags.OPTIMIZER_COPIES, flags.GROUP))
    if strategy.cp > 1 and kind:
        values[ALGORITHM] = (ALGORITHMS[kind],)
        sizes = decided.values.get(flags.CONTEXT_SIZES)
        values[ULYSSES] = (sizes[0],) if sizes else None
    if values.get(flags.MODULES):
        raise PlanError(
            "plan: layers run operators once more, and MindSpeed-LLM has no --recompute-modules; plan with "
            "search.modes [recompute]"
        )
    dispatcher = values.get(flags.DISPATCHER)
    if dispatcher not in (None, ("alltoall",)):
        raise PlanError(
            f"plan: tokens go by {dispatcher[0]}, and MindSpeed-LLM has alltoall; plan with that dispatcher"
        )
    beside = values.pop(flags.BATCH_OVERLAP, None) is not None
    values |= {schedules.BESIDE: None} | (_write_overlap(strategy) if strategy.overlap_all_to_all else {})
    values |= schedules.write_overlap(values, strategy) if beside else {}
    values = {flag: words for flag, words in values.items() if flag not in (flags.BACKEND, flags.DEEPEP)}
    values = schedules.write_schedule(_write_layers(values, decided), decided)
    return replace(decided, values=values | dict.fromkeys((LAYER_LISTS, PER_RANK, EXTEND)))


def _write_overlap(strategy: Strategy) -> dict[str, tuple[str, ...] | None]:
    """The exchange beside the shared expert, which MindSpeed does in smaller parts than Megatron-LM's own flag."""
    if strategy.overlap_all_to_all != "shared_experts":
        return {OVERLAPPED: None, flags.SHARED_OVERLAP: None}
    if strategy.tp > 1:
        raise PlanError(
            f"plan: it hides the experts' exchange ({OVERLAPPED}) with TP {strategy.tp}, beside which MindSpeed asks "
            f"for {EXTEND}; plan with TP 1 or without search.overlap_all_to_all"
        )
    asked: dict[str, tuple[str, ...] | None] = dict.fromkeys((OVERLAPPED, *BESIDE_OVERLAPPED), ())
    return {**asked, flags.SHARED_OVERLAP: None, flags.DISPATCHER: ("alltoall",)}


def _kind_of(decided: Decided) -> str:
    said = decided.values.get(flags.CONTEXT_KIND)
    return next((kind for kind, word in flags.CONTEXT_KINDS.items() if said == (word,)), "")


def _write_layers(values: dict[str, tuple[str, ...] | None], decided: Decided) -> dict[str, tuple[str, ...] | None]:
    """First and last stages, and chunks by number, are spelt by a layout and by layers a chunk."""
    counts, strategy = decided.plan.layers[TEXT], decided.plan.strategy
    by_number = values.get(flags.CHUNKS) is not None
    if values.get(flags.FIRST) or values.get(flags.LAST):
        values |= {flags.FIRST: None, flags.LAST: None, flags.LAYOUT: (format_layout(counts, 0),)}
    values |= {flags.CHUNKS: None, LAYER_LIST: None, NOOP: None}
    if by_number:
        values[flags.LAYERS_PER_CHUNK] = (str(counts[0]),)
    for flag in (flags.COUNTS_EMBEDDING, flags.COUNTS_LOSS, *(() if strategy.pp > 1 else (flags.LAYOUT,))):
        values[flag] = None
    return values


def note(passed: Passed) -> tuple[str, ...]:
    """A sentence for each flag that does something beside the plan."""
    said = {OVERLAPPED} if _has_shared(passed) else set()
    told = [f"{flag} {what}" for flag, what in NOTED.items() if passed.has(flag) and flag not in said]
    of_old = [
        f"{flag} is of ModelLink 1.0 and in no parser since; it {what}"
        for flag, what in OLD.items()
        if passed.has(flag)
    ]
    return (*told, *schedules.note(passed), *of_old)


def _has_shared(passed: Passed) -> bool:
    """Whether there is a shared expert beside which tokens are exchanged, or the model is said elsewhere."""
    sizes = ("--n-shared-experts", "--moe-shared-expert-intermediate-size")
    return not passed.has("--num-experts") or any(passed.number(flag, least=0) for flag in sizes)


_NO_PATCH = {
    NOOP: f"counts layers that do nothing in {flags.NUM_LAYERS}, and a plan places the others; take it out and give "
    f"{flags.NUM_LAYERS} without them first"
}
MINDSPEED = Dialect(
    "MindSpeed-LLM",
    "26.1",
    read,
    write,
    note,
    "mindspeed",
    _NO_PATCH,
    old=frozenset(OLD),
    adapters=find_adapters,
    keeps_less=KEEPS_LESS,
    allows=schedules.ALLOWS,
)
