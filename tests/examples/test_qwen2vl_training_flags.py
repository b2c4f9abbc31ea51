"""The script's flags: both spellings, what launch scripts pass, what is refused and how."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("skimage")

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")


def read(flags: str, world_size: int = 1):
    """What a line of flags amounts to: document, shape, parallelism."""
    from arguments import make_parser, read_model_document, read_parallelism, read_shape

    arguments = make_parser().parse_args(shlex.split(flags))
    document = read_model_document(arguments)
    return document, read_shape(arguments, document), read_parallelism(arguments, document, world_size)


def launch_flags(script_folder: Path) -> list[str]:
    """The flags of the launch script, as the shell hands them to python."""
    script = (script_folder / "pretrain_qwen2vl_72b.sh").read_text(encoding="utf-8")
    shown = script.replace("python pretrain_vlm.py", "printf '%s\\n'").replace(
        'python "$HERE/pretrain_vlm.py"', "printf '%s\\n'"
    )
    done = subprocess.run(
        ["bash", "-c", shown],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=os.environ | {"LOG": "/dev/null"},
    )
    return [line for line in done.stdout.splitlines() if line]


def test_the_launch_script_is_understood(script_folder: Path) -> None:
    from arguments import make_parser, read_model_document
    from mm_autoparallel import hooks

    parser = make_parser()
    hooks.add_arguments(parser)
    arguments = parser.parse_args(launch_flags(script_folder))
    assert arguments.auto_parallel_mm
    assert (arguments.simulated_nnodes, arguments.simulated_nproc_per_node) == (8, 16)
    text = read_model_document(arguments)["text_config"]
    assert (text["num_hidden_layers"], text["hidden_size"], text["vocab_size"]) == (80, 8192, 152064)
    assert (arguments.bf16, arguments.use_distributed_optimizer, arguments.lr) == (True, True, 1e-5)


MEGATRON_FLAGS = """
    --use-mcore-models --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 1
    --global-batch-size 32 --num-layers 80 --hidden-size 8192 --ffn-hidden-size 29568 --num-attention-heads 64
    --tokenizer-type NullTokenizer --vocab-size 152064 --seq-length 8192 --max-position-embeddings 32768
    --make-vocab-size-divisible-by 1 --init-method-std 0.01 --normalization RMSNorm --use-fused-rmsnorm --swiglu
    --use-fused-swiglu --lr 1.0e-5 --lr-decay-style cosine --weight-decay 0 --train-iters 5 --lr-warmup-fraction 0.1
    --clip-grad 0.0 --adam-beta1 0.9 --adam-beta2 0.999 --no-gradient-accumulation-fusion --no-load-optim --no-load-rng
    --no-save-optim --no-save-rng --seed 42 --bf16 --load checkpoint --variable-seq-lengths --enable-one-logger
    --use-distributed-optimizer --reuse-fp32-param --mm-data data_72b.json --mm-model MODEL --mm-tool tools.json
    --log-interval 1 --save-interval 10000 --eval-interval 10000 --eval-iters 5000 --save save_dir
    --distributed-backend nccl
"""


def test_a_launch_script_for_megatron_is_understood(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every flag is accepted, and those without effect are listed by --help with the reason."""
    from arguments import WITHOUT_EFFECT, WITHOUT_EFFECT_VALUED, make_parser

    model = repository / "examples" / "qwen2vl_72b" / "model_72b.json"
    document, shape, parallelism = read(MEGATRON_FLAGS.replace("MODEL", str(model)), world_size=8)
    assert document["text_config"]["num_hidden_layers"] == 80
    assert (shape.seq_length, parallelism.tp, parallelism.pp, parallelism.zero) == (8192, 4, 2, 1)
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for flag in (*WITHOUT_EFFECT, *WITHOUT_EFFECT_VALUED):
        assert flag in told


@pytest.mark.parametrize("flag", ["--micro-batch-size 2", "--micro_batch_size 2"])
def test_both_spellings(flag: str) -> None:
    assert read(flag)[2].micro_batch_size == 2


@pytest.mark.parametrize("flag", ["--micro-batch 2", "--use-fancy-kernel", "--sequence-parallel"])
def test_unknown_flags_are_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read(flag)
    assert ended.value.code == 2
    assert flag.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--image-size 300", "--image-size 300 is no multiple of 28"),
        ("--seq-length 100", "--seq-length 100 leaves no text"),
        ("--pipeline-model-parallel-size 3", "does not divide the 1 processes"),
        ("--context-parallel-size 2", "--context-parallel-size"),
        ("--vit-layer-placement 8", "go together"),
        ("--vit-layer-placement 7 --llm-layer-placement 12", "--vit-layer-placement 7 must have 1 numbers"),
        ("--recompute-num-layers 2", "--recompute-granularity full"),
        ("--vit-layer-recompute 9", "--vit-layer-recompute needs 1 numbers"),
        ("--use-torch-fsdp2 --use-distributed-optimizer", "--use-distributed-optimizer"),
        ("--num-attention-heads 7", "--num-attention-heads"),
        ("--mm-model MODEL --num-layers 3", "num_hidden_layers 80 and the flags say 3"),
        ("--mm-model OTHER", "a Qwen2-VL has"),
    ],
)
def test_flags_that_do_not_go_together(flags: str, message: str, repository: Path) -> None:
    from failures import TrainingError

    models = {"MODEL": "qwen2vl_72b/model_72b.json", "OTHER": "internvl2_76b/model_76b.json"}
    for word, path in models.items():
        flags = flags.replace(word, str(repository / "examples" / path))
    with pytest.raises(TrainingError, match=message):
        read(flags)


def test_a_vision_layer_after_text_is_refused() -> None:
    from failures import TrainingError

    with pytest.raises(TrainingError, match="no vision layer may lie after"):
        read("--pipeline-model-parallel-size 2 --vit-layer-placement 4,4 --llm-layer-placement 6,6", world_size=2)


def test_the_chain_is_cut_evenly_where_nothing_is_said() -> None:
    pieces = read("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 5", world_size=2)[2].pieces
    held = [[(piece.modality, piece.role, piece.first, piece.count) for piece in stage] for stage in pieces]
    assert held == [
        [("vision", "pre", 0, 1), ("vision", "layer", 0, 5)],
        [
            ("vision", "layer", 5, 3),
            ("vision", "post", 0, 1),
            ("text", "pre", 0, 1),
            ("text", "layer", 0, 2),
        ],
        [("text", "layer", 2, 5)],
        [("text", "layer", 7, 5), ("text", "post", 0, 1)],
    ]


def test_recompute_as_megatron_says_it() -> None:
    pipeline = "--pipeline-model-parallel-size 2 --vit-layer-placement 8,0 --llm-layer-placement 1,11"
    block = read(f"{pipeline} --recompute-granularity full --recompute-method block --recompute-num-layers 3", 2)[2]
    uniform = read(f"{pipeline} --recompute-granularity full --recompute-method uniform", 2)[2]
    for parallelism, expected in ((block, [3, 1, 3]), (uniform, [8, 1, 11])):
        found = [piece.recomputed for stage in parallelism.pieces for piece in stage if piece.role == "layer"]
        assert found == expected


def test_sizes_agree_between_the_model_file_and_the_published_size(repository: Path) -> None:
    from sizes import MODEL_SIZES, change_text, read_document

    found = read_document(repository / "examples" / "qwen2vl_72b" / "model_72b.json")
    assert change_text(found, {}) == change_text(MODEL_SIZES["72b"], {})


@pytest.mark.parametrize("size", ["tiny", "2b", "7b", "72b"])
def test_the_planner_counts_what_is_built(size: str) -> None:
    """Parameters of the planner's blocks equal those of Hugging Face's class, built without memory."""
    import torch
    from transformers import Qwen2VLForConditionalGeneration

    from mm_autoparallel.model.blocks.expand import expand
    from mm_autoparallel.model.blocks.parameters import count_chain_parameters
    from mm_autoparallel.model.readers.model_file import parse_inline_model
    from sizes import MODEL_SIZES, change_text, make_config

    document = change_text(MODEL_SIZES[size], {})
    with torch.device("meta"):
        built = Qwen2VLForConditionalGeneration(make_config(document))
    planned = count_chain_parameters(expand(parse_inline_model(document, Path("job.yaml"))))
    assert planned == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 0.853553, 0.5, 0.146447, 0.0]),
    ],
)
def test_the_course_of_the_learning_rate(style: str, expected: list[float]) -> None:
    from arguments import make_parser
    from optimizer import learning_rate

    arguments = make_parser().parse_args(f"--lr 1 --train-iters 6 --lr-warmup-iters 2 --lr-decay-style {style}".split())
    assert [learning_rate(i, arguments) for i in range(6)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr 1e30 --train-iters 4", "The loss of iteration"),
        pytest.param(
            "--global-batch-size 3 --micro-batch-size 2", "size 3 is no multiple of 2", marks=pytest.mark.nightly
        ),
        pytest.param("--log-file nowhere/log.jsonl", "log.jsonl cannot be written", marks=pytest.mark.nightly),
        pytest.param("--load .", "holds no *.safetensors", marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_cannot_go_on_says_why(
    flags: str, message: str, small_flags: str, script_folder: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        str(script_folder / "pretrain_vlm.py"),
        *f"{small_flags} --train-iters 1 {flags}".split(),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == (0 if "--load" in flags else 2), done.stderr
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("choice", [{"zero": 2}, {"cp": 2}, {"optimizer_offload": True}])
def test_a_plan_beyond_the_script_is_refused_before_it_trains(choice: dict[str, int]) -> None:
    from arguments import make_parser
    from failures import TrainingError
    from mm_autoparallel import hooks
    from mm_autoparallel.model.job.strategy import Strategy
    from mm_autoparallel.planner.plan import Plan
    from pretrain_vlm import follow

    plan = Plan(Strategy(pp=1, tp=1, dp=2, mbs=1, **choice), {"text": (2,)}, {"text": (0,)}, 8)
    with pytest.raises(TrainingError, match="this script runs ZeRO 0 and 1, CP 1"):
        follow(hooks.AppliedPlan(plan, ((),)), make_parser().parse_args([]))


def test_encoder_ranks_that_share_images_are_refused() -> None:
    from arguments import make_parser
    from failures import TrainingError
    from mm_autoparallel import hooks
    from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
    from mm_autoparallel.model.job.strategy import Strategy
    from mm_autoparallel.planner.plan import Plan
    from pretrain_vlm import follow

    divided = Arrangement("colocated", "inline", ModuleLayout("vision", 1, 1, 1, 2, cp=2))
    plan = Plan(Strategy(1, 1, 2, 1, arrangement=divided), {"vision": (4,), "text": (2,)}, {"text": (0,)}, 8)
    with pytest.raises(TrainingError, match="CP 2 DP 1, and this script's encoder ranks have whole images"):
        follow(hooks.AppliedPlan(plan, ((),)), make_parser().parse_args([]))


@pytest.mark.parametrize("flag", ["--uneven-images", "--pipeline-order order.csv"])
def test_flags_that_go_with_the_chain_alone_are_refused_beside_a_layout(flag: str) -> None:
    from arguments import make_parser
    from failures import TrainingError
    from mm_autoparallel import hooks
    from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
    from mm_autoparallel.model.job.strategy import Strategy
    from mm_autoparallel.planner.plan import Plan
    from pretrain_vlm import follow

    apart = Arrangement("disaggregated", "inline", ModuleLayout("vision", 1, 1, 1, 1, rank_offset=2))
    plan = Plan(Strategy(pp=3, tp=1, dp=1, mbs=1, arrangement=apart), {}, {}, 8)
    with pytest.raises(TrainingError, match=r"layout is disaggregated, vision PP 1 TP 1 DP 1, which .*drop --pipeline"):
        follow(hooks.AppliedPlan(plan, ((), ()), encoder=((),)), make_parser().parse_args(flag.split()))


def test_an_encoder_that_trains_nothing_gives_no_gradients_to_send() -> None:
    from arguments import make_parser
    from failures import TrainingError
    from mm_autoparallel import hooks
    from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
    from mm_autoparallel.model.job.strategy import Strategy
    from mm_autoparallel.planner.plan import Plan
    from prefetch import count_passes
    from pretrain_vlm import follow

    def of(run: str, flags: str) -> object:
        layout = Arrangement("colocated", run, ModuleLayout("vision", 1, 1, 2, 1))  # type: ignore[arg-type]
        plan = Plan(Strategy(pp=2, tp=1, dp=1, mbs=1, arrangement=layout), {}, {}, 8)
        return follow(hooks.AppliedPlan(plan, ((), ()), encoder=((),)), make_parser().parse_args(flags.split()))

    with pytest.raises(
        TrainingError, match=r"colocated in phases.*with --freeze-ViT and --freeze-projector there are none"
    ):
        of("phases", "--freeze-ViT --freeze-projector")
    for run, flags in (("phases", "--freeze-projector"), ("prefetch", "--freeze-ViT --freeze-projector")):
        assert of(run, flags)
    assert count_passes("0F0@vision 0F0 1F0 1F0@vision 2F0@vision 0B0 1B0") == [1, 0, 2, 0, 0]


def test_older_releases_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """On import, before a name that they lack; this environment's are new enough."""
    import releases

    assert releases.find_older() == []
    monkeypatch.setattr(releases, "version", {"torch": "2.1.0.post3+cpu", "transformers": "4.57.1"}.__getitem__)
    assert releases.find_older() == [
        "torch 2.1.0.post3+cpu is installed, and 2.7 or newer is needed",
        "transformers 4.57.1 is installed, and 5.0 or newer is needed",
    ]


def test_samples_that_differ_need_one_stage() -> None:
    from arguments import make_parser, read_model_document, read_parallelism, read_shape
    from failures import TrainingError
    from sizes import make_config
    from uneven import UnevenBatches

    flags = ["--uneven-images", "--balance-samples", "--pipeline-model-parallel-size", "2"]
    arguments = make_parser().parse_args(flags)
    document = read_model_document(arguments)
    shape, parallelism = read_shape(arguments, document), read_parallelism(arguments, document, 2)
    with pytest.raises(TrainingError, match="--uneven-images runs on one stage"):
        UnevenBatches(arguments, make_config(document), shape, parallelism, 0, 1)
    with pytest.raises(TrainingError, match="add --uneven-images"):
        read_shape(make_parser().parse_args(["--balance-samples"]), document)
