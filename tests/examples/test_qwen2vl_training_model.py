"""The example's model computes what Hugging Face's own class computes, whole, in pieces and split by the profiler."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("skimage")

# While they are imported, transformers and torch.distributed.optim script functions, which torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")


@pytest.fixture
def described(small_flags):
    """Arguments, config.json and sample shape of the small model."""
    from arguments import make_parser, read_model_document, read_shape

    arguments = make_parser().parse_args(small_flags.split())
    document = read_model_document(arguments)
    return arguments, document, read_shape(arguments, document)


@pytest.fixture
def whole(described):
    """The whole model, its configuration, and a batch of three samples."""
    from data import make_batch
    from model import Recipe, build_stage, whole_chain
    from sizes import make_config

    _, document, shape = described
    config = make_config(document)
    recipe = Recipe(config, 7, 0.05, torch.device("cpu"), torch.float32)
    return build_stage(recipe, whole_chain({"vision": 4, "text": 5})), config, make_batch([4, 5, 6], shape, config, 7)


def relative(found, expected) -> float:
    return float((found - expected).norm() / expected.norm())


def test_loss_and_gradients_equal_those_of_hugging_face(whole) -> None:
    from transformers import Qwen2VLForConditionalGeneration

    from checkpoint import whole_name

    model, config, batch = whole
    reference = Qwen2VLForConditionalGeneration(config).train()
    pairs = {}
    for modality, tower in (("vision", model.vision), ("text", model.text)):
        parts = [("pre", 0, tower.pre), *(("layer", i, layer) for i, layer in enumerate(tower.layers))]
        for role, index, part in [*parts, ("post", 0, tower.post)]:
            for path, parameter in part.named_parameters():
                pairs[whole_name(modality, role, index, path)] = parameter
    theirs = dict(reference.named_parameters())
    assert pairs.keys() == theirs.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(pairs[name])
    their_loss = reference(
        input_ids=batch.input_ids,
        pixel_values=batch.pixel_values.flatten(0, 1),
        image_grid_thw=batch.image_grid.flatten(0, 1),
        mm_token_type_ids=(batch.input_ids == config.image_token_id).int(),
        labels=batch.labels,
        use_cache=False,
    ).loss
    our_loss = model(**batch.tensors())
    assert our_loss.item() == pytest.approx(their_loss.item(), rel=1e-5)
    their_loss.backward()
    our_loss.backward()
    worst = max((relative(pairs[name].grad, parameter.grad), name) for name, parameter in theirs.items())
    assert worst[0] < 1e-5, worst


def test_stages_in_turn_are_the_whole_model(whole, described) -> None:
    """Any cut of the chain, each stage built by itself, hands on what makes the same loss; one tensor crosses."""
    from arguments import cut_chain
    from model import Recipe, build_stage, output_of

    model, config, batch = whole
    expected = model(**batch.tensors()).item()
    recipe = Recipe(config, 7, 0.05, torch.device("cpu"), torch.float32)
    layers = {"vision": (3, 1, 0, 0), "text": (0, 0, 4, 1)}
    pieces = cut_chain(layers, {"vision": (1, 0, 0, 0), "text": (0, 0, 2, 0)})
    hidden = None
    for held in pieces:
        stage = build_stage(recipe, held)
        hidden = stage(hidden, **{name: batch.tensors()[name] for name in stage.wanted})
        if held is not pieces[-1]:
            assert hidden.shape == output_of(held[-1], config, 3, described[2], torch.float32).shape
            hidden = hidden.detach().requires_grad_()
    assert hidden.item() == pytest.approx(expected, rel=1e-6)


def test_exactly_the_first_layers_recompute(whole) -> None:
    """They run twice, once more in the backward; the others once."""
    model, _, batch = whole
    model.vision.recomputed, model.text.recomputed = 2, 3
    runs: dict[int, int] = {}
    for layer in (*model.vision.layers, *model.text.layers):
        layer.register_forward_pre_hook(lambda layer, _: runs.update({id(layer): runs.get(id(layer), 0) + 1}))
    model(**batch.tensors()).backward()
    assert [runs[id(layer)] for layer in model.vision.layers] == [2, 2, 1, 1]
    assert [runs[id(layer)] for layer in model.text.layers] == [2, 2, 2, 1, 1]


def test_the_subject_splits_into_its_parts(described) -> None:
    """The profiler's cut run of the subject's own model reproduces its loss and gradients."""
    from mm_autoparallel.model.job.workload import Workload
    from mm_autoparallel.profilers.layout import find_layout
    from mm_autoparallel.profilers.split_check import check_split
    from mm_autoparallel.profilers.subject import Build
    from subject import LAYOUT, make_subject, make_workload

    arguments, document, shape = described
    subject = make_subject(arguments, document)
    workload = Workload(**make_workload(arguments, document, shape))
    model = subject.build_model(Build({"vision": 2, "text": 3}, torch.device("cpu")))
    assert (len(model.vision.layers), len(model.text.layers)) == (2, 3)
    assert find_layout(model, LAYOUT) == LAYOUT
    check_split(model, LAYOUT, lambda: subject.forward_step(model, 2, workload))


def test_patches_and_positions_are_those_of_the_processor(whole) -> None:
    """Patch order is undone to the image; positions equal get_rope_index of Hugging Face, two images a sample."""
    from transformers import Qwen2VLModel

    from data import SampleShape, make_batch

    _, config, _ = whole
    batch = make_batch([0, 3], SampleShape(64, 2, (4, 6)), config, 1)
    tokens = (batch.input_ids == config.image_token_id).int()
    their_positions, _ = Qwen2VLModel.get_rope_index(
        _PositionsOnly(config), batch.input_ids, tokens, batch.image_grid.flatten(0, 1)
    )
    assert torch.equal(batch.position_ids.transpose(0, 1), their_positions)
    image = batch.pixel_values[0, :24].reshape(2, 3, 2, 2, 3, 2, 14, 14)  # down, across, merge², colour, frame, patch²
    picture = image.permute(4, 5, 0, 2, 6, 1, 3, 7).reshape(3, 2, 4 * 14, 6 * 14)
    assert torch.equal(picture[:, 0], picture[:, 1])
    steps = (picture[:, 0].diff(dim=-1).abs().mean(dim=(0, 1))).reshape(-1)
    assert steps[13::14].mean() < 2 * steps.mean(), "neighbouring patches of a photograph are alike at their seams"
    assert (batch.labels[:, 1:-1] == -100)[tokens[:, 1:-1].bool()].all()


class _PositionsOnly:
    """What get_rope_index needs of a Qwen2VLModel."""

    def __init__(self, config) -> None:
        from transformers import Qwen2VLModel

        self.config = config
        self.get_vision_position_ids = Qwen2VLModel.get_vision_position_ids.__get__(self)


def test_samples_are_the_same_on_every_rank(whole) -> None:
    from data import SampleShape, make_batch

    _, config, _ = whole
    shape = SampleShape(48, 1, (4, 4))
    several, one = make_batch(range(4), shape, config, 5), make_batch([2], shape, config, 5)
    assert all(torch.equal(several.tensors()[name][2:3], tensor) for name, tensor in one.tensors().items())
    assert not torch.equal(several.input_ids[0], several.input_ids[1])
