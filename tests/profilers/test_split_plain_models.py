"""Hand-written models with what real ones do at the boundaries of layers; each test is one such habit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from mm_autoparallel.errors import ProfileError  # noqa: E402
from mm_autoparallel.profilers.split import PartRun, backward_parts, find_split, run_cut  # noqa: E402
from mm_autoparallel.profilers.split_check import check_split  # noqa: E402
from mm_autoparallel.profilers.subject import Layout  # noqa: E402

SIZE = 6
NAMES = Layout(layers={"sight": "eye.rods", "text": "mind.thoughts"}, post={"sight": "nerve"})


class Layer(nn.Module):
    """Every token learns the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(hidden + hidden.mean(0)))


def stack(*layers: nn.Module) -> nn.Module:
    """`thoughts` in a module without a forward of its own."""
    holder = nn.Module()
    holder.thoughts = nn.ModuleList(layers)
    return holder


class Plain(nn.Module):
    """Words are embedded first, then the eye sees, then the mind thinks. Parts of it may be overridden."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(9, SIZE)
        self.eye = nn.Module()
        self.eye.lens = nn.Linear(4, SIZE)
        self.eye.rods = nn.ModuleList([Layer(), Layer()])
        self.nerve = nn.Linear(SIZE, SIZE)
        self.mind = stack(*(layers or (Layer(), Layer(), Layer())))
        self.mouth = nn.Linear(SIZE, 9)

    def end_sight(self, seen: Tensor) -> Tensor:
        return self.nerve(seen)

    def think(self, hidden: Tensor, seen: Tensor) -> Tensor:
        for layer in self.mind.thoughts:
            hidden = layer(hidden)
        return hidden

    def forward(self, words: Tensor, light: Tensor) -> Tensor:
        embedded = self.words(words)
        seen = self.eye.lens(light)
        for rod in self.eye.rods:
            seen = rod(seen)
        hidden = torch.cat([self.end_sight(seen), embedded])
        hidden = self.think(hidden, seen)
        return nn.functional.cross_entropy(self.mouth(hidden)[-len(words) :], words)


def step_of(model: nn.Module) -> Callable[[], Tensor]:
    words, light = torch.arange(5), torch.linspace(-1, 1, 12).reshape(3, 4)
    return lambda: model(words, light)


def check(model: nn.Module, layout: Layout = NAMES) -> tuple[str, ...]:
    return check_split(model, layout, step_of(model))


def run(model: nn.Module, layout: Layout = NAMES, **options: Any) -> dict[str, PartRun]:
    return {run.part.name: run for run in run_cut(model, layout, step_of(model), **options)}


def modules_of(model: nn.Module, layout: Layout = NAMES) -> dict[str, tuple[str, ...]]:
    return {part.name: part.modules for part in find_split(model, layout, step_of(model)).parts}


def test_names_of_the_users_own() -> None:
    model = Plain()
    step_of(model)().backward()
    assert all(parameter.grad.any() for parameter in model.parameters())
    assert check(model) == ()
    assert modules_of(model) == {
        "sight_pre": ("eye.lens",),
        "sight_layer_0": ("eye.rods.0",),
        "sight_layer_1": ("eye.rods.1",),
        "sight_post": ("nerve",),
        "text_pre": ("words",),
        **{f"text_layer_{index}": (f"mind.thoughts.{index}",) for index in range(3)},
        "text_post": ("mouth",),
    }


def test_an_encoders_end_is_found_where_the_layout_does_not_name_it() -> None:
    model = Plain()
    layout = Layout(NAMES.layers)
    assert modules_of(model, layout)["sight_post"] == ("nerve",)
    assert check(model, layout) == ()


class Chained(Plain):
    """Three modules in a row end the encoder, and none of them is the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.widen, self.narrow = nn.LayerNorm(SIZE), nn.Linear(SIZE, 9), nn.Linear(9, SIZE)
        del self.nerve

    def end_sight(self, seen: Tensor) -> Tensor:
        return self.narrow(self.widen(self.norm(seen)).relu())


def test_an_encoders_end_may_be_several_modules() -> None:
    model, layout = Chained(), Layout(NAMES.layers)
    assert check(model, layout) == ()
    end = run(model, layout)["sight_post"]
    assert end.part.modules == ("norm", "widen", "narrow")
    assert (len(end.inputs), len(end.outputs), len(end.segments)) == (1, 1, 3)
    assert end.outputs[0].shape == (3, SIZE)


def test_each_part_reads_what_the_one_before_gives() -> None:
    runs = run(Plain())
    assert runs["sight_pre"].inputs == ()
    assert runs["text_post"].outputs[0].ndim == 0
    assert [len(each.inputs) for each in runs.values()] == [0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert [len(each.outputs) for each in runs.values()] == [1] * 9
    assert runs["text_layer_1"].args[0] is runs["text_layer_1"].inputs[0]


def test_backward_of_one_part_needs_no_other() -> None:
    runs = run(Plain())
    part = runs["text_layer_1"]
    (gradient,) = torch.autograd.grad(part.outputs, part.inputs, torch.ones_like(part.outputs[0]))
    assert gradient.shape == part.inputs[0].shape


def test_gradients_of_inputs_alone() -> None:
    model = Plain()
    runs = run(model)
    told: list[str] = []
    backward_parts(tuple(runs.values()), lambda part: told.append(part.name), inputs_only=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert told == [name for name in reversed(runs) if name != "sight_pre"]


def test_learning_leaves_the_model_as_it_was() -> None:
    model = Plain()
    model.nerve.requires_grad_(False)
    before, state = [p.requires_grad for p in model.parameters()], torch.get_rng_state()
    find_split(model, NAMES, step_of(model))
    run(model, stub_layers=True)
    assert [p.requires_grad for p in model.parameters()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_error_in_the_step_leaves_no_hooks() -> None:
    model = Plain()
    with pytest.raises(IndexError):
        run_cut(model, NAMES, lambda: model(torch.full((5,), 99), torch.ones(3, 4)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class NamedLayer(Layer):
    """Its hidden state comes by name beside a table that learns, and goes in a dict."""

    def forward(self, *, table: Tensor, hidden_states: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"table": table.detach(), "hidden": super().forward(hidden_states) * table}


class Tabled(Plain):
    def __init__(self) -> None:
        super().__init__(NamedLayer(), NamedLayer(), NamedLayer())
        self.table = nn.Parameter(torch.linspace(0.5, 1, SIZE))

    def think(self, hidden: Tensor, seen: Tensor) -> Tensor:
        table = self.table.exp().expand(len(hidden), SIZE).contiguous()
        for layer in self.mind.thoughts:
            hidden = layer(table=table, hidden_states=hidden)["hidden"]
        return hidden


def test_learned_positions_are_cut_once_and_collect_from_all_layers() -> None:
    model = Tabled()
    remarks = check(model)
    assert remarks == (
        "What text_pre gives is read by text_layer_1, text_layer_2, and must be sent on to where they run.",
    )
    runs = run(model)
    assert len(runs["text_pre"].outputs) == 2
    assert any(parameter is model.table for parameter in runs["text_pre"].part.parameters)
    assert runs["text_layer_0"].kwargs["table"] is runs["text_layer_2"].kwargs["table"]


def test_stubs_keep_the_form_of_named_arguments_and_outputs() -> None:
    model = Tabled()
    backward_parts(tuple(run(model, stub_layers=True).values()))
    assert model.words.weight.grad is not None
    assert model.mouth.weight.grad is not None
    assert model.mind.thoughts[0].inner.weight.grad is None


class CrossLayer(Layer):
    def forward(self, hidden: Tensor, states: list[Tensor] | None = None) -> tuple[Tensor, str]:  # type: ignore[override]
        return super().forward(hidden) + (states[0].mean(0) if states else 0), "kept"


class Crossed(Plain):
    """Only the last layer looks at what was seen, through a module of its own."""

    def __init__(self) -> None:
        super().__init__(CrossLayer(), CrossLayer(), CrossLayer())
        self.adapter = nn.Linear(SIZE, SIZE)

    def forward(self, words: Tensor, light: Tensor) -> Tensor:
        seen = self.eye.lens(light)
        for rod in self.eye.rods:
            seen = rod(seen)
        states, hidden = self.adapter(self.nerve(seen)), self.words(words)
        for index, layer in enumerate(self.mind.thoughts):
            hidden, _ = layer(hidden, [states] if index == 2 else None)
        return nn.functional.cross_entropy(self.mouth(hidden), words)


def test_states_that_only_a_later_layer_takes_belong_to_the_beginning() -> None:
    model = Crossed()
    check(model)
    assert set(modules_of(model)["text_pre"]) == {"adapter", "words"}
    runs = run(model)
    assert len(runs["text_pre"].segments) == 1
    assert len(runs["text_layer_2"].inputs) == 2


class InPlace(Plain):
    """Changes its hidden state in place between layers, by what was seen before the nerve."""

    def think(self, hidden: Tensor, seen: Tensor) -> Tensor:
        for layer in self.mind.thoughts:
            hidden = layer(hidden)
            hidden[: len(seen)] += seen
        return hidden


def test_hidden_states_may_be_changed_in_place_between_layers() -> None:
    (remark,) = [remark for remark in check(InPlace()) if "sight_layer_1" in remark]
    assert "text_layer_1, text_layer_2, text_post" in remark


class Scaled(Plain):
    """Between layers a module and a parameter of the model itself work."""

    def __init__(self) -> None:
        super().__init__()
        self.between, self.scale = nn.Linear(SIZE, SIZE), nn.Parameter(torch.ones(SIZE))

    def think(self, hidden: Tensor, seen: Tensor) -> Tensor:
        for layer in self.mind.thoughts:
            hidden = layer(self.between(hidden) * self.scale)
        return hidden


def test_what_runs_between_layers_belongs_to_the_next() -> None:
    model = Scaled()
    check(model)
    holders = [name for name, each in run(model).items() if any(p is model.scale for p in each.part.parameters)]
    assert holders == ["text_pre", "text_layer_1", "text_layer_2"]
    assert modules_of(model)["text_layer_2"] == ("mind.thoughts.2", "between")
    layer = run(model)["text_layer_2"]
    assert (len(layer.inputs), len(layer.outputs), len(layer.segments)) == (1, 1, 2)
    backward_parts(tuple(run(model, stub_layers=True).values()))
    assert model.words.weight.grad is not None


class Aside(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        self.kept = self.inner(hidden)
        return hidden + torch.tanh(self.kept)


class Auxiliary(Plain):
    """The loss takes a tensor from inside each layer, as routers' losses do."""

    def __init__(self) -> None:
        super().__init__(Aside(), Aside())

    def forward(self, words: Tensor, light: Tensor) -> Tensor:
        return super().forward(words, light) + sum(layer.kept.square().mean() for layer in self.mind.thoughts)


def test_a_tensor_from_inside_a_layer_is_refused_by_name() -> None:
    with pytest.raises(ProfileError, match=r"text_post reaches into that of text_layer_0 by a way that no boundary"):
        check(Auxiliary())


def test_gradients_are_right_even_where_graphs_are_shared() -> None:
    model = Auxiliary()
    step_of(model)().backward()
    whole = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    backward_parts(tuple(run(model).values()))
    for parameter, gradient in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class Peeking(Layer):
    """Reads a parameter of the model past its arguments."""

    def __init__(self, table: list[nn.Parameter]) -> None:
        super().__init__()
        self.table = table

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.table[0]


def test_a_layer_that_reads_a_parameter_of_others_is_refused_by_name() -> None:
    table = [nn.Parameter(torch.ones(SIZE))]
    model = Plain(Peeking(table), Peeking(table))
    model.table = table[0]
    with pytest.raises(
        ProfileError, match=r"text_layer_0 reads `table` other than through a tensor among its arguments"
    ):
        check(model)


class Pocket:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class PocketTaking(Layer):
    def forward(self, hidden: Tensor, pocket: Pocket) -> Tensor:  # type: ignore[override]
        return super().forward(hidden) + pocket.tensor.mean(0)


class Pocketed(Plain):
    def __init__(self) -> None:
        super().__init__(PocketTaking(), PocketTaking())

    def forward(self, words: Tensor, light: Tensor) -> Tensor:
        seen = self.eye.lens(light)
        for rod in self.eye.rods:
            seen = rod(seen)
        hidden, pocket = self.words(words), Pocket(self.nerve(seen))
        for layer in self.mind.thoughts:
            hidden = layer(hidden, pocket)
        return nn.functional.cross_entropy(self.mouth(hidden), words)


def test_a_tensor_hidden_in_an_argument_is_refused_by_name() -> None:
    with pytest.raises(
        ProfileError, match=r"text_layer_1 reads what sight_post gives other than through a tensor among"
    ):
        check(Pocketed())


class PocketGiving(Layer):
    def forward(self, hidden: Tensor) -> Pocket:  # type: ignore[override]
        return Pocket(super().forward(hidden))


class Opaque(Plain):
    def __init__(self) -> None:
        super().__init__(PocketGiving(), PocketGiving())

    def think(self, hidden: Tensor, seen: Tensor) -> Tensor:
        for layer in self.mind.thoughts:
            hidden = layer(hidden).tensor
        return hidden


def test_an_output_hidden_in_an_object_is_refused_by_name() -> None:
    with pytest.raises(ProfileError, match=r"text_layer_0 trains, but no tensor among its outputs requires grad"):
        check(Opaque())


class Recomputed(Plain):
    reentrant = False

    def think(self, hidden: Tensor, seen: Tensor) -> Tensor:
        for layer in self.mind.thoughts:
            hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return hidden


def test_recompute_that_hides_layers_from_the_graph_is_refused() -> None:
    model = Recomputed()
    assert check(model) == ()
    model.reentrant = True
    with pytest.raises(ProfileError, match=r"recompute with use_reentrant=True does that"):
        check(model)


class Late(Plain):
    """Looks only when the first thought is done."""

    def forward(self, words: Tensor, light: Tensor) -> Tensor:
        hidden = self.words(words)
        for index, layer in enumerate(self.mind.thoughts):
            if index == 1:
                seen = self.eye.lens(light)
                for rod in self.eye.rods:
                    seen = rod(seen)
                hidden = hidden + self.nerve(seen).mean(0)
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.mouth(hidden), words)


@pytest.mark.parametrize("post", [NAMES.post, {}], ids=["named", "found"])
def test_an_encoder_may_run_between_layers_of_text(post: dict[str, str]) -> None:
    model, layout = Late(), Layout(NAMES.layers, post)
    remarks = check(model, layout)
    assert remarks == ("What sight_post gives is read by text_layer_1, and must be sent on to where it runs.",)
    assert modules_of(model, layout) == modules_of(Plain())


class Hiding(Layer):
    """Lets gradients through in its first run only."""

    def forward(self, hidden: Tensor) -> Tensor:
        first = not getattr(self, "ran", False)
        self.ran = True
        return super().forward(hidden if first else hidden.detach())


def test_a_gradient_that_goes_astray_names_its_part() -> None:
    model = Plain(Layer(), Hiding(), Layer())
    with pytest.raises(ProfileError, match=r"go another way in text_pre: of that of `words.weight`"):
        check(model)


def test_a_layer_that_never_runs_is_named() -> None:
    model = Plain()
    model.think = lambda hidden, seen: model.mind.thoughts[0](hidden)
    with pytest.raises(
        ProfileError, match=r"2 of the model's 5 layers did not run in one step: text_layer_1, text_lay"
    ):
        check(model)


class Wasteful(Plain):
    def think(self, hidden: Tensor, seen: Tensor) -> Tensor:
        outputs = [layer(hidden) for layer in self.mind.thoughts]
        return outputs[0]


def test_an_output_that_nothing_reads_is_told() -> None:
    model = Wasteful()
    remarks = check(model)
    assert "Nothing that the loss depends on reads the output of text_layer_2, so no gradient reaches it." in remarks
    runs = run(model)
    told: list[str] = []
    backward_parts(tuple(runs.values()), lambda part: told.append(part.name))
    assert "text_layer_2" not in told
    assert "text_layer_0" in told


def test_modules_that_do_not_run_are_told() -> None:
    model = Plain()
    model.spare = nn.Linear(2, 2)
    assert check(model) == ("No part holds `spare.weight`, `spare.bias`: the modules they are in did not run.",)


def test_a_wholly_frozen_model_has_parts_and_no_graphs() -> None:
    model = Plain().requires_grad_(False)
    check(model)
    runs = run(model)
    assert all(each.outputs == () == each.segments for each in runs.values())
    assert runs["sight_post"].part.modules == ("nerve",)
    assert len(runs["text_layer_0"].args) == 1


def test_frozen_ends_are_stubbed_with_gradients_for_what_follows() -> None:
    model = Plain()
    for module in (model.words, model.eye.lens, model.nerve):
        module.requires_grad_(False)
    check(model)
    runs = run(model, stub_layers=True)
    backward_parts(tuple(runs.values()))
    assert model.mouth.weight.grad is not None
    # the rods train, so the nerve gives them a gradient though it has none of its own
    assert len(runs["sight_post"].inputs) == 1


class Twice(Plain):
    """Looks twice in one step, as models do that take images and videos."""

    def forward(self, words: Tensor, light: Tensor) -> Tensor:
        return super().forward(words, light) + super().forward(words, light.flip(0))


def test_parts_that_run_twice_in_a_step() -> None:
    model = Twice()
    check(model)
    runs = run(model)
    assert len(runs["sight_layer_0"].segments) == 2
    assert runs["sight_post"].part.modules == ("nerve",)


def test_a_loss_that_is_no_number_is_refused() -> None:
    model = Plain()
    with torch.no_grad():
        model.mouth.bias.fill_(float("nan"))
    with pytest.raises(ProfileError, match=r"The loss of one forward of Plain is nan"):
        check(model)


def test_a_step_that_returns_no_loss_is_refused() -> None:
    model = Plain()
    words, light = torch.arange(5), torch.ones(3, 4)

    def logits() -> Tensor:
        return model(words, light).expand(4)

    with pytest.raises(ProfileError, match=r"a tensor of one number; it returned one of shape \(4,\)"):
        run_cut(model, NAMES, logits)


class Shrinking(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)[: len(hidden) - 1]


def test_layers_that_change_the_shape_cannot_be_stubbed() -> None:
    model = Plain(Layer(), Layer())
    model.eye.rods[1] = Shrinking()
    check(model)
    with pytest.raises(ProfileError, match=r"sight_layer_1 \(Shrinking\) gives no tensor of the shape"):
        run(model, stub_layers=True)
