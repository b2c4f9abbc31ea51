"""What is published about module layouts, each figure with where it stands, and the jobs that are made of it.

Nothing is fitted to any of these figures. What a source does not say is assumed, here by name:

- Optimus: either part takes 2,048 tokens of each sample, and none is merged. The appendix says 2,048 of all runs; the
  operations of Table 5 are those of both parts over so many tokens, with every forward once more, to 0.7 %. They are
  also those of four times as many encoder tokens with no forward twice, to 0.1 %; but then a first stage would have
  four times the mean work, and the published baselines are 0.7 to 2.5 % apart.
- its ViT-11B is the appendix's ViT-10B, 4,096 wide; LLAMA-70B has Llama 2's feed-forward, groups and vocabulary
  (arXiv:2307.09288), GPTs four times their width and 51,200 words.
- "Megatron-LM" has the whole encoder on the first stage, as the paper says, and the decoder's layers where they are
  best, also beside it. Both baselines' own layers lie at the best place that is found in the published sizes.
- where it has two ViTs, either takes 2,048 tokens of each sample, and what they make is added: the appendix says
  "sequence length 2048" of all runs. Megatron-LM has both on the first stage, as section 5.2.3 says.
- links and rates are those of our catalog, uncalibrated; layers recompute where memory asks for it.
- the benchmark of Megatron MIMO: its encoder's tokens are image tokens of the decoder, one projector of two matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mm_autoparallel.measurements.gpt import gpt_layers
from mm_autoparallel.model.job.arrangement import ENCODER_RUNS, EncoderRun
from mm_autoparallel.model.job.strategy import Strategy


@dataclass(frozen=True)
class Baseline:
    """What a gain was published over.

    told: the gain, as it was published. strategy: its sizes (None: not published; any of several stages). num_chunks:
    a stage's, of such sizes. encoder_first: all of the encoder is on the first stage. encoder_tp: not 0 where the
    baseline is the row's own kind with this TP of the encoder. why: why ours differs.
    """

    name: str
    told: str
    why: str = ""
    strategy: Strategy | None = None
    num_chunks: int = 1
    encoder_first: bool = False
    encoder_tp: int = 0


@dataclass(frozen=True)
class Published:
    """A row. job: None where it is not planned, and `cannot` says why. kind: the paper's, with these runs of the
    encoder. decoder: limits of the search for it. chunks: of a stage. encoder_tp: 0 where any is tried. pieces: into
    which the paper's system cuts a pass of the encoder, as far as that is planned here."""

    paper: str
    name: str
    source: str
    baselines: tuple[Baseline, ...]
    job: Mapping[str, Any] | None = None
    kind: str = "colocated"
    runs: tuple[EncoderRun, ...] = ENCODER_RUNS
    decoder: Mapping[str, Any] = field(default_factory=dict)
    chunks: tuple[int, ...] = (1,)
    encoder_tp: int = 0
    pieces: tuple[int, ...] = (1,)
    cannot: str = ""
    why: str = "no job to compare"


VITS = {"ViT-3B": (2304, 18), "ViT-5B": (3072, 24), "ViT-10B": (4096, 32), "ViT-22B": (6144, 48)}
"""Width and heads of 48 layers, whose MLP is four times as wide (Optimus, Table 8)."""
GPTS = {"GPT-11B": (3072, 80, 24), "LLAMA-70B": (8192, 80, 64), "GPT-175B": (12288, 96, 96)}
"""Width, layers, heads (Optimus, Table 9)."""
_STAGES = {"GPT-11B": [1, 2, 4, 8], "LLAMA-70B": [4, 8], "GPT-175B": [8, 16]}
"""Of the whole space: those of the paper's baselines, and twice as many."""
PATCH_FEATURES = 3 * 14 * 14
"""Numbers of a patch. Assumed; it is next to nothing of any step."""


def encoder_document(
    name: str, sizes: tuple[int, int, int], projector: list[int], num_positions: int
) -> dict[str, Any]:
    """A ViT of `sizes` (width, layers, heads) that trains."""
    width, num_layers, num_heads = sizes
    return {
        "name": name,
        "stem": {"type": "patches", "in_features": PATCH_FEATURES, "bias": True, "num_positions": num_positions},
        "layers": gpt_layers(width, num_layers, num_heads),
        "projector": {"layer_sizes": projector},
        "freeze": False,
    }


def optimus_job(vit: str, decoder: str, num_devices: int, batch: int, device: str, second: str = "") -> dict[str, Any]:
    """A job of Optimus: seq_length 2,048 everywhere. second: a ViT that encodes the same images."""
    width, num_layers, num_heads = GPTS[decoder]
    text: dict[str, Any] = {"layers": gpt_layers(width, num_layers, num_heads), "vocab_size": 51200}
    text |= {"num_positions": 2048, "tied": True}
    if decoder == "LLAMA-70B":
        layers = {"num_layers": 80, "hidden_size": width, "ffn_size": 28672, "num_heads": 64, "num_kv_groups": 8}
        text = {"layers": layers | {"norm": "rms"}, "vocab_size": 32000}
    names = {"vision": vit} | ({"second": second} if second else {})
    encoders = [
        encoder_document(name, (VITS[one][0], 48, VITS[one][1]), [VITS[one][0], width], 2048)
        for name, one in names.items()
    ]
    return {
        "model": {"name": "+".join([*names.values(), decoder]), "encoders": encoders, "text": text},
        "cluster": {"num_nodes": num_devices // 8, "devices_per_node": 8, "device": device},
        "workload": {
            "global_batch_size": batch,
            "seq_length": 2048,
            "image_tokens_per_sample": 2048,
            "gradient_fusion": True,
        },
        "search": {"pp": _STAGES[decoder], "tp": [4, 8], "cp": [1], "mbs": [2], "layouts": "all", "choice": "point"},
    }


def optimus(
    name: str, source: str, sizes: tuple[int, int, int, int, int], told: tuple[str, str], job: Mapping[str, Any]
) -> Published:
    """A row of Optimus on H100. sizes: PP, TP, DP, MBS, and chunks of the balanced baseline. told: over Megatron-LM,
    and over its balanced form."""
    pp, tp, dp, mbs, chunks = sizes
    baselines = (
        Baseline("Megatron-LM", told[0], OVER_FIRST, Strategy(pp, tp, dp, mbs), encoder_first=True),
        Baseline("balanced", told[1], OVER_BALANCED, Strategy(pp, tp, dp, mbs, vpp=chunks)),
    )
    decoder = {"pp": (pp,), "tp": (tp,), "dp": (dp,), "mbs": (mbs,)}
    beside: dict[str, Any] = {"runs": BESIDE, "pieces": PIECES, "decoder": decoder, "chunks": (1, chunks)}
    return Published("Optimus", name, source, baselines, job, **beside)


OPTIMUS = "arXiv:2408.03505, USENIX ATC 2025"
BESIDE: tuple[EncoderRun, ...] = ("bubbles", "phases", "recomputed_phases")
"""Runs of an encoder that each of several stages holds: what Optimus does, as far as it is planned here."""
PIECES = (1, 8)
"""Of a pass: whole, and of six layers each; Optimus cuts it into layers and kernels."""
OVER_FIRST = "no chunks are published for it, so its fill and drain are longer here than of a kind that has them"
OVER_BALANCED = "a pass is in one or eight pieces here, and Optimus cuts it into layers and kernels"
OVER_BOTH = f"{OVER_FIRST}; its first stage waits for its host, 1 ms a ViT layer forth and 2 back"
UNSIZED = "no sizes of it are published; here it has the best that are found, of several stages"
H100 = "h100-80g"
_SMALL = optimus_job("ViT-3B", "GPT-11B", 8, 16, "a100-80g")
_SMALL["search"] |= {"tp": [1, 2, 4, 8], "mbs": [1, 2, 4]}


def _weak(name: str, vit: str, decoder: str, num_devices: int, batch: int) -> Published:
    pp, chunks = (4, 6) if decoder == "LLAMA-70B" else (8, 12)
    return optimus(
        f"{name}, {vit.replace('10', '11')} + {decoder}, {num_devices} H100, batch {batch}",
        f"{OPTIMUS}: section 5.2.1 and Figure 15 (the largest of four models), Tables 3, 8, 9 and 11",
        (pp, 8, num_devices // 8 // pp, 2, chunks),
        ("up to +22 %", "up to +18 %"),
        optimus_job(vit, decoder, num_devices, batch, H100),
    )


def _strong(num_devices: int, plain_s: float, balanced_s: float, own_s: float) -> Published:
    return optimus(
        f"ViT-22B + GPT-175B, {num_devices} H100, batch 1536",
        f"{OPTIMUS}: Table 5, Tables 8, 9 and 12",
        (8, 8, num_devices // 64, 2, 12),
        (f"{(plain_s / own_s - 1) * 100:+.1f} %", f"{(balanced_s / own_s - 1) * 100:+.1f} %"),
        optimus_job("ViT-22B", "GPT-175B", num_devices, 1536, H100),
    )


def _two(first: str, second: str, gain_percent: int) -> Published:
    """A row of two encoders, of which no baseline with balanced layers is published."""
    baseline = Baseline("Megatron-LM", f"up to +{gain_percent} %", OVER_BOTH, Strategy(8, 8, 8, 2), encoder_first=True)
    return Published(
        "Optimus",
        f"{first.replace('10', '11')} + {second.replace('10', '11')} + GPT-175B, 512 H100, batch 256",
        f"{OPTIMUS}: section 5.2.3, Tables 6, 8 and 9, Figure 16, appendix D.3",
        (baseline,),
        optimus_job(first, "GPT-175B", 512, 256, H100, second),
        runs=BESIDE,
        pieces=PIECES,
        decoder={"pp": (8,), "tp": (8,), "dp": (8,), "mbs": (2,)},
        chunks=(1, 12),
    )


BENCHMARK = "github yashaswikarnati/Megatron-LM (the paper's first author), benchmarks/mimo_throughput"


def _mimo_job(
    vit: tuple[int, int, int], gpt: tuple[int, int, int], vocab_size: int, num_devices: int, workload: Mapping[str, Any]
) -> dict[str, Any]:
    """A job of the benchmark of Megatron MIMO: both parts of GPT's layers, 8,192 tokens, untied."""
    projector = [vit[0], gpt[0], gpt[0]]
    text = {"layers": gpt_layers(*gpt), "vocab_size": vocab_size, "num_positions": 8192}
    model = {"name": "mimo", "encoders": [encoder_document("vision", vit, projector, 8192)], "text": text}
    return {
        "model": model,
        "cluster": {"num_nodes": num_devices // 8, "devices_per_node": 8, "device": H100},
        "workload": {"seq_length": 8192, "cross_entropy": "fused", **workload},
        "search": {"tp": [1, 2, 4, 8], "cp": [1], "mbs": [1, 2], "layouts": "all", "choice": "point"},
    }


_BESIDE = Published(
    "Megatron MIMO",
    "ViT-1B + 7B, 8 H100, batch 8",
    f"{BENCHMARK}/experiments/EXPERIMENT_LOG.md at 22e69de, experiments 1 and 2; configs/1node_1b_7b",
    (
        Baseline(
            "one size", "-0.3 %", "as measured; the first step is 1,114 ms here, 1,230 there", Strategy(1, 4, 2, 2)
        ),
    ),
    _mimo_job(
        (1408, 40, 16),
        (4096, 32, 32),
        32000,
        8,
        {"global_batch_size": 8, "image_tokens_per_sample": 2048, "sequence_parallel": False},
    ),
    decoder={"pp": (1,), "tp": (4,), "dp": (2,), "mbs": (2,)},
    runs=("inline",),
    encoder_tp=2,
)
_IN_PHASES = Published(
    "Megatron MIMO",
    "ViT-3B + 70B, 64 H100, batch 16, encoder TP 4 DP 16",
    f"{BENCHMARK}/campaigns/3b70b_8n_sweep/results at 1fb0a28 and a524833 (4 images of 1,024 tokens, 8 of 512)",
    (
        Baseline(
            "encoder TP 8 DP 8",
            "+0.8 %",
            "as measured, there with images half as long; the first step is 2,678 ms here, 2,720 there",
            encoder_tp=8,
        ),
    ),
    _mimo_job(
        (2304, 48, 32),
        (8192, 80, 64),
        128000,
        64,
        {"global_batch_size": 16, "image_tokens_per_sample": 4096, "images_per_sample": 4, "gradient_fusion": True},
    ),
    decoder={"pp": (4,), "tp": (8,), "dp": (2,), "mbs": (1,)},
    runs=("phases", "recomputed_phases"),
    encoder_tp=4,
)


def _untold(paper: str, name: str, source: str, over: str, told: str, cannot: str) -> Published:
    return Published(paper, name, source, (Baseline(over, told),), cannot=cannot)


_MIMO = "arXiv:2605.27678, abstract"
ROWS: tuple[Published, ...] = (
    Published(
        "Optimus",
        "ViT-3B + GPT-11B, 8 A100, batch 16",
        f"{OPTIMUS}: Tables 4 and 10, appendix C",
        (
            Baseline("Megatron-LM", f"{(3.42 / 2.78 - 1) * 100:+.1f} %", UNSIZED, encoder_first=True),
            Baseline("balanced", f"{(3.04 / 2.78 - 1) * 100:+.1f} %", UNSIZED, num_chunks=2),
        ),
        _SMALL,
        runs=BESIDE,
        pieces=PIECES,
        decoder={"pp": (2, 4, 8)},
        chunks=(1, 2),
    ),
    _weak("Model A", "ViT-10B", "LLAMA-70B", 64, 32),
    _weak("Model B", "ViT-22B", "LLAMA-70B", 128, 64),
    _weak("Model C", "ViT-10B", "GPT-175B", 256, 128),
    _weak("Model D", "ViT-22B", "GPT-175B", 512, 256),
    _strong(1536, 10.65, 10.43, 9.80),
    _strong(2048, 8.26, 8.06, 7.29),
    _strong(3072, 5.91, 5.87, 4.87),
    _two("ViT-10B", "ViT-5B", 25),
    _two("ViT-22B", "ViT-5B", 26),
    _two("ViT-22B", "ViT-10B", 27),
    _BESIDE,
    _IN_PHASES,
    _untold(
        "Megatron MIMO",
        "best of its colocated runs",
        _MIMO,
        "one size",
        "up to +49.3 % TFLOPS a device",
        "the sources that were read do not say which model, batch and sizes it is of",
    ),
    _untold(
        "Megatron MIMO",
        "best of its runs apart",
        _MIMO,
        "one size",
        "up to +13.0 % tokens, +9.6 % TFLOPS a device",
        "the sources that were read do not say which model, batch and sizes it is of",
    ),
    _untold(
        "DistTrain",
        "72B, 1,172 devices (54.7 % MFU)",
        "arXiv:2408.04275, SIGCOMM 2025, abstract",
        "Megatron-LM",
        "up to +120 %",
        "its model has a generator of images behind the decoder, and a job has encoders and a decoder alone",
    ),
    _untold(
        "Cornstarch",
        "mean of its models",
        "arXiv:2503.11367, abstracts of versions 3 and 2",
        "others",
        "+126 % on average; earlier up to +57 %",
        "a mean over models, batches and sizes that the sources that were read do not list",
    ),
)
"""In the order of the table."""

IMAGE_RANKS = "Qwen3.5-VL-27B, an image rank apart"
IMAGE_RANKS_SOURCE = (
    "github NVIDIA-NeMo/Megatron-Bridge at 067f987df, tutorials/megatron_mimo/qwen35-vl-non-colocated-sft.md, means of "
    "three data sets; examples/published_measurements/multimodal_published.csv"
)
IMAGE_RANKS_WHY = "what a host takes to launch a layer of text is assumed, 1.33 ms"
