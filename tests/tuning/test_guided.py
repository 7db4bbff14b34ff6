"""Errors are measured in what guidance makes of the rows of a call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from elfatt_sd.tuning.probe import Guidance, flat

WITHOUT, GIVEN = torch.arange(6.0).reshape(1, 2, 3), torch.ones(1, 2, 3)
BOTH = torch.cat([WITHOUT, GIVEN])


def test_rows_are_joined_as_guidance_does() -> None:
    guidance = Guidance(3.0, 2)
    assert torch.equal(guidance.joined(BOTH), (WITHOUT + 3.0 * (GIVEN - WITHOUT)).flatten())
    assert torch.equal(guidance.given(BOTH), GIVEN.flatten())
    shared = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0))
    changed = guidance.joined(BOTH + shared) - guidance.joined(BOTH)
    torch.testing.assert_close(changed, shared.flatten())  # what both rows have in common counts once


def test_all_that_was_given_counts() -> None:
    output = SimpleNamespace(sample=(BOTH, None, BOTH[:, :1].half()))
    joined = Guidance(3.0, 2).joined(output)
    assert joined.shape == (6 + 3,)
    assert joined.dtype == torch.float32
    assert flat(output).shape == (12 + 6,)


@pytest.mark.parametrize("guidance", [Guidance(), Guidance(3.0, 1), Guidance(None, 2), Guidance(3.0, 3)])
def test_other_rows_stay_as_they_are(guidance: Guidance) -> None:
    assert not guidance.joins
    assert torch.equal(guidance.joined(BOTH), flat(BOTH))
    assert torch.equal(guidance.given(BOTH), flat(BOTH))
