"""What is asked for, checked before anything heavy is imported."""

from __future__ import annotations

import pytest

from elfatt_sd.config import PatchConfig
from elfatt_sd.drawing.studio import SCHEDULERS, Request, check_quoted, scheduler_class
from elfatt_sd.errors import ElfattError


@pytest.mark.parametrize("prompts", [["a", "red", "star"], ["red", "star"], ["a red", "star", "here"]])
def test_a_prompt_without_quotes_is_refused(prompts: list[str]) -> None:
    with pytest.raises(ElfattError) as caught:
        check_quoted(prompts, "draw")
    assert f'give draw "{" ".join(prompts)}", or --each' in str(caught.value)


@pytest.mark.parametrize("prompts", [[], ["star"], ["a red star", "a blue moon"], ["a red star", "moon"]])
def test_quoted_prompts_are_left_alone(prompts: list[str]) -> None:
    check_quoted(prompts, "draw")


def test_schedulers_by_short_name_and_by_class() -> None:
    assert scheduler_class("DDIM") == scheduler_class("ddim") == scheduler_class("DDIMScheduler") == "DDIMScheduler"
    with pytest.raises(ElfattError, match=r"scheduler='fast' is not known; accepted: ddim, ddpm, .*, lcm, tcd, or one"):
        scheduler_class("fast")
    with pytest.raises(ElfattError, match="scheduler='fast'"):
        Request(("a",), PatchConfig.preset("sd"), scheduler="fast")


def test_every_scheduler_is_in_diffusers() -> None:
    import diffusers

    assert all(hasattr(diffusers, name) for name in SCHEDULERS.values())
