"""Models built from a config.json: depth, frozen parts, batches that fit, and one rank's part of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tracing_jobs  # noqa: E402
import transformers  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402

from mm_autoparallel.errors import ProfileError  # noqa: E402
from mm_autoparallel.model.job.workload import Workload  # noqa: E402
from mm_autoparallel.model.readers.model_file import parse_inline_model  # noqa: E402
from mm_autoparallel.profilers.huggingface import make_subject, scale_workload  # noqa: E402
from mm_autoparallel.profilers.layout import find_layout  # noqa: E402
from mm_autoparallel.profilers.shard import fake_mesh, record_collectives  # noqa: E402
from mm_autoparallel.profilers.split_check import check_split  # noqa: E402
from mm_autoparallel.profilers.subject import Build, Subject  # noqa: E402
from mm_autoparallel.profilers.tensor_shard import cross_entropy  # noqa: E402
from mm_autoparallel.profilers.transformers_releases import is_older_than  # noqa: E402

IMAGE_TOKENS = {"qwen2_vl": 12, "qwen2_5_vl": 12, "llava": 16, "internvl": 4}
DOCUMENTS = {model_type: tracing_jobs.DOCUMENTS[model_type] for model_type in IMAGE_TOKENS}


def workload_of(model_type: str, **changes: Any) -> Workload:
    sizes = {"image_tokens_per_sample": 2 * IMAGE_TOKENS[model_type], "images_per_sample": 2, "weight_bytes": 4.0}
    return Workload(**({"global_batch_size": 8, "seq_length": 48} | sizes | changes))


def subject_of(model_type: str, freeze: dict[str, bool], **changes: Any) -> Subject:
    document = copy.deepcopy(DOCUMENTS[model_type])
    model = parse_inline_model(document, Path("job.yaml")).with_freeze(freeze)
    return make_subject(document, model, workload_of(model_type, **changes), Path("config.json"))


@pytest.fixture(params=DOCUMENTS)
def model_type(request: pytest.FixtureRequest) -> str:
    if request.param not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {request.param}")
    return str(request.param)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(2, "cpu") as made:
        yield made


CPU = torch.device("cpu")


def test_models_of_any_depth_run_and_can_be_cut(model_type: str) -> None:
    subject = subject_of(model_type, {"vision": False})
    live = subject.build_model(Build({"vision": 2, "text": 2}, CPU))
    layout = find_layout(live)
    assert {modality: len(live.get_submodule(path)) for modality, path in layout.layers.items()} == {
        "vision": 2,
        "text": 2,
    }
    check_split(live, layout, lambda: subject.forward_step(live, 2, workload_of(model_type)))


def test_only_what_the_job_trains_has_gradients(model_type: str) -> None:
    freeze = {"vision": True, "vision_projector": False, "text": True}
    subject = subject_of(model_type, freeze)
    live = subject.build_model(Build({"vision": 2, "text": 2}, CPU))
    trained = {name for name, parameter in live.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(name.startswith(find_layout(live).post["vision"]) for name in trained)


def test_one_ranks_part_has_its_sizes_and_collectives(model_type: str, mesh: DeviceMesh) -> None:
    subject = subject_of(model_type, {"vision": False})
    whole = subject.build_model(Build({"vision": 2, "text": 2}, CPU))
    if model_type == "llava" and is_older_than(5):
        with pytest.raises(ProfileError, match=r"CLIP\w*Attention of this release of transformers"):
            subject.build_model(Build({"vision": 2, "text": 2}, CPU, mesh))
        return
    part = subject.build_model(Build({"vision": 2, "text": 2}, CPU, mesh))
    sizes = {name: parameter.numel() for name, parameter in part.named_parameters()}
    divided = {name for name, parameter in whole.named_parameters() if sizes[name] * 2 == parameter.numel()}
    same = {name for name, parameter in whole.named_parameters() if sizes[name] == parameter.numel()}
    assert divided | same == sizes.keys()
    assert all("norm" in name or name.endswith("bias") or "layers" not in name for name in same if "language" in name)
    assert any(name.endswith("embed_tokens.weight") for name in divided)

    def step() -> None:
        subject.forward_step(part, 1, workload_of(model_type)).backward()

    _, collectives = record_collectives(step)
    # two forward and two backward for each of four layers; the embedding's one, the head's input, the loss's three
    assert [one.operation for one in collectives].count("all_reduce") == 4 * 4 + 5


def test_narrow_weights_are_stepped_in_fp32() -> None:
    subject = subject_of("qwen2_vl", {}, weight_bytes=2.0)
    live = subject.build_model(Build({"vision": 1, "text": 1}, CPU))
    trained = [parameter for parameter in live.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.bfloat16}
    optimizer = subject.build_optimizer(trained)
    before = [parameter.detach().clone() for parameter in trained]
    subject.forward_step(live, 1, workload_of("qwen2_vl", weight_bytes=2.0)).backward()
    optimizer.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, trained, strict=True))
    states = [state["exp_avg"] for state in optimizer.state.values()]
    assert {state.dtype for state in states} == {torch.float32}
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in trained)


def test_the_divided_loss_is_the_whole_one_among_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every rank's part given by hand: two ranks' all-reduces are those of one rank that has the whole."""
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 10, dtype=torch.float32, requires_grad=True), torch.arange(6)
    expected = cross_entropy(logits, labels, None)
    (gradient,) = torch.autograd.grad(expected, logits)
    with fake_mesh(2, "cpu") as mesh:  # collectives leave their buffers as they are: a group of one in effect
        loss = cross_entropy(logits, labels, mesh)
        (divided,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(divided, gradient)


def test_longer_samples_keep_their_share_of_images() -> None:
    workload = workload_of("qwen2_vl")
    longer = scale_workload(DOCUMENTS["qwen2_vl"], workload, 96)
    assert (longer.seq_length, longer.image_tokens_per_sample, longer.images_per_sample) == (96, 48, 2)
    tiles = scale_workload(DOCUMENTS["llava"], workload_of("llava"), 96)
    assert (tiles.image_tokens_per_sample, tiles.images_per_sample) == (64, 4)


def test_what_cannot_be_built_is_refused() -> None:
    document = DOCUMENTS["qwen2_vl"]
    model = parse_inline_model(document, Path("job.yaml"))
    with pytest.raises(ProfileError, match="model_type is 'bert'"):
        make_subject({"model_type": "bert"}, model, workload_of("qwen2_vl"), Path("config.json"))
    with pytest.raises(ProfileError, match="weight_bytes is 1"):
        make_subject(document, model, workload_of("qwen2_vl", weight_bytes=1.0), Path("config.json"))


def test_images_that_the_model_cannot_make_are_refused() -> None:
    subject = subject_of("llava", {})
    live = subject.build_model(Build({"vision": 1, "text": 1}, CPU))
    with pytest.raises(ProfileError, match="images of llava with this configuration occupy 16"):
        subject.forward_step(live, 1, workload_of("llava", image_tokens_per_sample=30))
    with pytest.raises(ProfileError, match="2 images of 47 tokens"):
        subject.forward_step(live, 1, workload_of("llava", image_tokens_per_sample=47))


def test_a_value_that_transformers_refuses_is_named() -> None:
    document = copy.deepcopy(DOCUMENTS["llava"]) | {"image_token_index": "300"}
    model = parse_inline_model(DOCUMENTS["llava"], Path("job.yaml"))
    with pytest.raises(
        ProfileError, match=r"^model file config\.json: transformers builds no llava from it: .*image_token"
    ):
        make_subject(document, model, workload_of("llava"), Path("config.json"))
