"""Lists of layers in models of no known class, layouts that the user gives, and what is said where neither fits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mm_autoparallel.errors import ProfileError  # noqa: E402
from mm_autoparallel.profilers.layout import find_layout, layers_of, structural_kind  # noqa: E402
from mm_autoparallel.profilers.subject import Layout  # noqa: E402


class Block(nn.Module):
    def __init__(self, size: int = 4, layer_idx: int = 0, window: int | None = None, drop_path: float = 0.0) -> None:
        super().__init__()
        self.layer_idx, self.window, self.drop_path = layer_idx, window, drop_path
        self.inner = nn.Linear(size, size)


def blocks(count: int, size: int = 4) -> nn.ModuleList:
    return nn.ModuleList([Block(size, layer_idx=index) for index in range(count)])


def model(**parts: nn.Module | dict[str, nn.Module]) -> nn.Module:
    """A module with these children; dicts become modules with children."""
    made = nn.Module()
    for name, part in parts.items():
        setattr(made, name, model(**part) if isinstance(part, dict) else part)
    return made


def test_words_in_paths_tell_the_modality() -> None:
    found = find_layout(
        model(
            llm={"h": blocks(3), "head": nn.Linear(2, 2)},
            speech={"blocks": blocks(2)},
            vision_tower={"stem": nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)]), "blocks": blocks(2)},
        )
    )
    assert dict(found.layers) == {"audio": "speech.blocks", "vision": "vision_tower.blocks", "text": "llm.h"}
    assert found.post == {}


def test_a_list_without_a_word_is_text_where_no_other_is() -> None:
    assert find_layout(model(visual={"blocks": blocks(2)}, h=blocks(3))).layers["text"] == "h"


def test_lists_inside_layers_are_not_layers_of_the_model() -> None:
    layers = nn.ModuleList([model(experts=blocks(8, size=16)) for _ in range(2)])
    assert dict(find_layout(model(text={"layers": layers})).layers) == {"text": "text.layers"}


def test_a_sequence_of_equal_layers_counts_and_one_of_unequal_does_not() -> None:
    parts = model(
        text={"blocks": nn.Sequential(Block(), Block())},
        text_head=nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20)),
    )
    assert dict(find_layout(parts).layers) == {"text": "text.blocks"}


def test_small_lists_beside_the_layers_are_passed_over() -> None:
    parts = model(visual={"mergers": blocks(2), "blocks": blocks(5)}, text={"layers": blocks(2)})
    assert find_layout(parts).layers["vision"] == "visual.blocks"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            model(head=nn.Linear(2, 2)),
            "No list of repeated text layers was found in Module. ModuleLists of Module: none.",
        ),
        (model(text={"layers": blocks(1)}), r"`text.layers` \(1 × Block\)"),
        (model(text_encoder=blocks(3), text_decoder=blocks(3)), "may be at `text_encoder` or at `text_decoder`"),
        (model(text=blocks(3), rods=blocks(3)), "`rods` holds layers of which no word says the modality"),
    ],
    ids=["none", "one", "two", "nameless"],
)
def test_what_is_not_clear_is_refused_with_all_lists(parts: nn.Module, words: str) -> None:
    with pytest.raises(ProfileError, match=words) as error:
        find_layout(parts)
    assert 'Layout(layers={"vision": PATH, "text": PATH})' in str(error.value)
    assert "--auto-parallel-layers vision=PATH" in str(error.value)


SHARED = Block()
GIVEN = model(
    eye={"rods": blocks(2), "nerve": nn.Linear(2, 2)},
    mind=blocks(3),
    none=nn.ModuleList(),
    same=nn.ModuleList([SHARED, SHARED]),
)


def test_a_given_layout_that_fits_is_taken() -> None:
    given = Layout({"sight": "eye.rods", "text": "mind"}, {"sight": "eye.nerve"})
    assert find_layout(GIVEN, given) is given
    assert {name: len(layers) for name, layers in layers_of(GIVEN, given).items()} == {"sight": 2, "text": 3}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Layout({"text": "brain"}), "layers of text are said to be `brain`, but the model has no such module"),
        (Layout({"text": "eye.nerve"}), "`eye.nerve`, but that is no ModuleList, it is a Linear"),
        (Layout({"text": "none"}), "`none`, but that list is empty"),
        (Layout({"text": "same"}), r"Layer 1 of text \(`same`\) is the same module as layer 0 of text"),
        (Layout({"text": "mind", "sight": "eye.rods"}), "in the order data flows, and `text` last"),
        (Layout({"sight": "eye.rods"}), "in the order data flows, and `text` last"),
        (Layout({}), "in the order data flows, and `text` last"),
        (Layout({"text": "mind"}, {"sight": "eye.nerve"}), r"Layout.post names 'sight', but only encoders"),
        (
            Layout({"sight": "eye.rods", "text": "mind"}, {"sight": "nerve"}),
            "Layout.post of sight is said to be `nerve`",
        ),
    ],
)
def test_a_given_layout_that_does_not_fit_is_refused(given: Layout, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        find_layout(GIVEN, given)


def test_a_wrong_path_is_answered_with_the_lists_there_are() -> None:
    with pytest.raises(ProfileError, match=r"`eye.rods` \(2 × Block\), `mind` \(3 × Block\)"):
        find_layout(GIVEN, Layout({"text": "brain"}))


def test_another_class_of_a_known_name_is_searched() -> None:
    class VLMModel(nn.Module):
        pass

    ours = VLMModel()
    ours.llm = blocks(3)
    assert dict(find_layout(ours).layers) == {"text": "llm"}


def test_structure_is_what_sets_layers_apart() -> None:
    plain = structural_kind(Block())
    assert structural_kind(Block(layer_idx=7, drop_path=0.3)) == plain
    assert len({plain, structural_kind(Block(window=8)), structural_kind(Block(size=5))}) == 3
    other_type = Block().to(torch.bfloat16)
    other_class = Block()
    other_class.inner.__class__ = type("Special", (nn.Linear,), {})
    assert len({plain, structural_kind(other_type), structural_kind(other_class)}) == 3
