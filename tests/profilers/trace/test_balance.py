"""What code that asks for numbers of a router's choice is told: a balanced one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mm_autoparallel.errors import ProfileError  # noqa: E402
from mm_autoparallel.profilers.trace.fakes import FAKES, on_fakes  # noqa: E402

EXPERTS, CHOSEN = 4, 2


@pytest.mark.parametrize("num_tokens", [4, 6, 64])
def test_each_expert_gets_its_part_of_the_tokens(num_tokens: int) -> None:
    """Also of as many tokens as there are experts: what is asked is known by where it comes from, not by its length."""
    with FAKES:
        scores = torch.empty(num_tokens, EXPERTS)
    with on_fakes(torch.nn.Identity()):
        places = scores.topk(CHOSEN, dim=-1).indices
        mask = torch.nn.functional.one_hot(places, num_classes=EXPERTS).permute(2, 1, 0)
        chosen = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        assert chosen.flatten().tolist() == [0, 1, 2, 3]
        _, tokens = torch.where(mask[2])
        assert tokens.shape == (num_tokens * CHOSEN // EXPERTS,)
        assert (places == 1).flatten().nonzero().shape == (num_tokens * CHOSEN // EXPERTS, 1)
        marks = torch.zeros(num_tokens, EXPERTS).scatter(1, places, 1.0)
        counts = marks.long().sum(0).tolist()
        assert sum(counts) == num_tokens * CHOSEN
        assert max(counts) - min(counts) <= 1


def test_what_no_router_chose_is_not_made_up() -> None:
    with FAKES:
        numbers = torch.empty(8)
    with pytest.raises(ProfileError, match="depends on numbers"), on_fakes(torch.nn.Identity()):
        (numbers > 0).nonzero()
