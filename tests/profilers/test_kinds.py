"""The job's chain and the live model tell one story, or it is said where they do not."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from toy_model import JOB, LAYOUT, Toy, forward_step, make_job  # noqa: E402

from mm_autoparallel.errors import ProfileError  # noqa: E402
from mm_autoparallel.model.job.job import Job  # noqa: E402
from mm_autoparallel.profilers.kinds import check_parts, find_kinds, live_layout  # noqa: E402
from mm_autoparallel.profilers.layout import layers_of  # noqa: E402
from mm_autoparallel.profilers.split import find_split  # noqa: E402
from mm_autoparallel.profilers.subject import Layout  # noqa: E402


def encoder_job(**changes: Any) -> Job:
    encoder = {key: dict(value) if isinstance(value, dict) else value for key, value in _encoder().items()}
    for key, value in changes.items():
        encoder[key] = encoder[key] | value if isinstance(value, dict) and key in encoder else value
    return make_job(**{"model.encoders": [encoder]})


def _encoder() -> dict[str, Any]:
    return JOB["model"]["encoders"][0]  # type: ignore[no-any-return]


def check(model: Toy, job: Job) -> None:
    split = find_split(model, LAYOUT, lambda: forward_step(model, 1, job.workload))
    check_parts(find_kinds(job), split.parts, layers_of(model, LAYOUT))


def test_three_layers_of_the_only_kind() -> None:
    kinds = find_kinds(make_job())
    assert kinds.depth == {"vision": 3, "text": 3}
    assert {kind.block.kind: kind.indices for kind in kinds.layers} == {
        "vision_layer": (0, 1, 2),
        "text_layer": (0, 1, 2),
    }
    assert [end.part_name for end in kinds.ends] == ["vision_pre", "vision_post", "text_pre", "text_post"]


@pytest.mark.parametrize(
    ("num_layers", "full_layers", "depth"),
    [
        (1, [], 1),
        (2, [], 2),
        (6, [1, 3, 5], 6),  # three of each within six
        (32, [7, 15, 23, 31], 16),  # three would take 24, so two of each
        (8, [7], 8),  # only one there is
    ],
)
def test_the_fewest_layers_that_show_every_kind(num_layers: int, full_layers: list[int], depth: int) -> None:
    layers: dict[str, Any] = {"num_layers": num_layers}
    if full_layers:
        layers["window"] = {"num_tokens": 4, "full_layers": full_layers}
    kinds = find_kinds(encoder_job(layers=layers))
    assert kinds.depth["vision"] == depth
    found = {kind.block.kind: kind.indices for kind in kinds.layers if kind.block.modality == "vision"}
    assert sorted(index for indices in found.values() for index in indices) == list(range(depth))
    if full_layers:
        assert found["vision_full_layer"] == tuple(index for index in full_layers if index < depth)


def test_a_final_norm_is_measured_with_the_projector() -> None:
    kinds = find_kinds(encoder_job(final_norm="layer"))
    (post,) = [end for end in kinds.ends if end.part_name == "vision_post"]
    assert post.block.kind == "vision_post"
    assert [block.kind for block in post.merged] == ["vision_norm"]
    assert [block.kind for block in kinds.blocks if block.role == "post"] == ["vision_norm", "vision_post", "text_post"]


def test_projectors_of_inner_layers_are_refused() -> None:
    deepstack = {"layer_sizes": [128, 32], "merge_tokens": 4}
    with pytest.raises(ProfileError, match="vision_deepstack runs beside the layers of vision"):
        find_kinds(encoder_job(deepstack=deepstack, num_deepstack=2))


def test_a_modality_without_tokens_is_left_out() -> None:
    kinds = find_kinds(make_job(**{"workload.image_tokens_per_sample": 0}))
    assert kinds.modalities == ("text",)
    assert kinds.depth == {"vision": 1, "text": 3}
    assert live_layout(kinds, LAYOUT) == Layout(layers={"text": "layers"})


def test_modalities_must_be_called_alike() -> None:
    layout = Layout(layers={"image": "vision.blocks", "text": "layers"})
    with pytest.raises(ProfileError, match="live model's layers are of image, text and the job's model has vision, te"):
        live_layout(find_kinds(make_job()), layout)


def test_parts_that_agree_pass() -> None:
    check(Toy({"vision": 3, "text": 3}), make_job())


def test_a_model_of_another_depth_is_refused() -> None:
    with pytest.raises(ProfileError, match="asked for 3 layers of text and built 4"):
        check(Toy({"vision": 3, "text": 4}), make_job())


def test_layers_of_one_kind_must_be_built_alike() -> None:
    model = Toy({"vision": 3, "text": 3})
    model.layers[1].up = torch.nn.Linear(32, 64, bias=False)
    with pytest.raises(ProfileError, match="layers 0 and 1 of text are both text_layer"):
        check(model, make_job())


def test_what_trains_must_be_the_same() -> None:
    model = Toy({"vision": 3, "text": 3})
    with pytest.raises(ProfileError, match="vision_layer is frozen in the job's model, and vision layer 0 trains"):
        check(model, encoder_job(freeze=True))
    model.head.requires_grad_(False)
    with pytest.raises(ProfileError, match="text_post trains in the job's model, and text_post does not"):
        check(model, make_job())


def test_a_part_that_is_not_found_is_named() -> None:
    model = Toy({"vision": 3, "text": 3})
    job = make_job()
    layout = Layout(layers=LAYOUT.layers)
    split = find_split(model, layout, lambda: forward_step(model, 1, job.workload))
    parts = [part for part in split.parts if part.name != "vision_post"]
    with pytest.raises(ProfileError, match=r"the job's model has vision_post, .* Name the module that ends vision"):
        check_parts(find_kinds(job), parts, layers_of(model, layout))
