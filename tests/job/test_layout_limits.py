"""Sizes that a search asks for, and that no encoder of any of its layouts can have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from two_modules import make_job

from mm_autoparallel.errors import JobError
from mm_autoparallel.planner.search.space import list_entries


@pytest.mark.parametrize(
    ("search", "words"),
    [
        (
            {"layouts": "all", "encoder_cp": [16]},
            "search.encoder_cp is [16], and no encoder with sizes of its own can have that: no ranks of 8 devices make "
            "an encoder's CP 16 (on the decoder's devices it takes all, which CP must divide; on ranks of its own it ",
        ),
        (
            {"layouts": ["chain", "colocated"], "encoder_cp": [3, 5], "devices": [4, 8]},
            "no ranks of 4 or 8 devices make an encoder's CP 3 (on the decoder's devices it takes all, which CP must ",
        ),
        (
            {"layouts": ["disaggregated"], "encoder_cp": [8]},
            "no ranks of 8 devices make an encoder's CP 8 (on ranks of its",
        ),
        (
            {"layouts": "all", "encoder_cp": [3], "devices": [4]},
            "the encoder's CP 3 does not divide the 256 tokens that vision makes of a sample; add 1, or leave it out",
        ),
        (
            {"layouts": "all", "encoder_cp": [2], "stack": "megatron-te"},
            "the encoder's CP is 2, and layouts of workload.stack megatron-te have encoders of CP 1; add 1, or",
        ),
        (
            {"layouts": "all", "encoder_pieces": [3]},
            "search.encoder_pieces is [3], and no encoder with sizes of its own can have that: each of 3 pieces needs "
            "a layer, and the encoders have 2; add 1, or leave it out",
        ),
        (
            {"layouts": "all", "encoder_pieces": [2], "pp": [1]},
            "lie between those of several stages, and search.pp has 1",
        ),
        (
            {"layouts": "all", "encoder_pieces": [2], "stack": "megatron-te"},
            "colocated bubbles: no layout that workload.stack megatron-te runs; it runs disaggregated and",
        ),
    ],
)
def test_sizes_of_which_no_encoder_can_have_one_are_refused(search: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        make_job(**search)
    assert words in str(caught.value)
    assert str(caught.value).startswith("job file job.yaml: search.encoder_")


def test_sizes_of_which_some_cannot_be_are_warned_of() -> None:
    (warning,) = make_job(layouts="all", encoder_cp=[1, 2, 16, 32]).warnings
    assert warning.startswith(
        "search.encoder_cp names 16, 32, which no encoder with sizes of its own can have: no ranks of 8 devices make"
    )
    (warning,) = make_job(layouts="all", encoder_pieces=[1, 2, 4]).warnings
    assert warning == (
        "search.encoder_pieces names 4, which no encoder with sizes of its own can have: each of 4 pieces needs a "
        "layer, and the encoders have 2"
    )
    assert not make_job(layouts="all", encoder_cp=[1, 2, 4, 8], encoder_pieces=[1, 2]).warnings


def test_a_chain_that_is_left_alone_is_said_where_layouts_are_named_too() -> None:
    (warning,) = make_job(layouts=["chain", "colocated"], schedule="zb_h1", encoder_cp=[16]).warnings
    assert warning.startswith(
        "search.layouts is chain, colocated, and the chain alone is planned: arrangements are plan"
    )


@pytest.mark.parametrize("layouts", [("colocated",), ("disaggregated",), ("colocated", "disaggregated")])
@pytest.mark.parametrize("hears", [False, True])
def test_what_is_refused_is_in_no_lawful_strategy(layouts: tuple[str, ...], hears: bool) -> None:
    sizes = {"devices": [4, 8], "mbs": [1, 2], "tp": [1, 2]}
    job = make_job(hears=hears, layouts=list(layouts), **sizes)
    for cp in (2, 3, 4, 5, 7, 8, 16):
        alone = replace(job, search=job.search.model_copy(update={"encoder_cp": (cp,)}))
        shared = {
            part.encoder.cp
            for entry in list_entries(alone, with_several=False)
            if entry.reason is None and entry.strategy.arrangement
            for part in entry.strategy.arrangement.each
        }
        try:
            make_job(hears=hears, layouts=list(layouts), encoder_cp=[cp], **sizes)
        except JobError:
            assert cp not in shared
        else:
            assert hears or cp in shared
