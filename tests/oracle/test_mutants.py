"""`verify` against certificates changed in meaning: it confirms none whose claim is false by brute force.

A mutant that is wrongly confirmed: `mutate_certificates.py --out DIR` with its seed keeps it."""

from __future__ import annotations

import pytest
from mutate_certificates import judge, mutants

OF_A_BATCH = 40


@pytest.mark.parametrize("first_seed", [0, 10, 20, 30])
def test_no_false_claim_is_confirmed(first_seed: int) -> None:
    refused = 0
    for mutant in mutants(first_seed, OF_A_BATCH):
        verdict = judge(mutant)
        refused += verdict == "refused"
        assert not verdict.startswith(("FALSE", "crash")), (mutant.name, mutant.what, mutant.false, verdict)
    assert refused >= 5
