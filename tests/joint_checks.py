"""What has to hold for every transformer that is patched and put back, through its pipeline's own `__call__`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import recorded

import elfatt_sd
from elfatt_sd import PatchConfig, Phase
from elfatt_sd.families import find_denoisers, find_layers, main_denoiser, step_denoisers

Run = Callable[..., torch.Tensor]  # makes the same latents whenever it is called; takes the pipeline's options
MANY = 10**6  # more than any small grid has tokens
ALL_KEYS = {
    "sampled": Phase(1.0, "sampled", keys=MANY, groups=1),
    "cell_spread": Phase(1.0, "cell_spread", block_size=MANY),
    "cell_spread, cells": Phase(1.0, "cell_spread", block_size=MANY, cell=4),
    "block": Phase(1.0, "block", block_size=MANY, block_order="windows"),
    "elfatt": Phase(1.0, "elfatt", block_size=MANY, agent_share=0.0),
}
FEW_KEYS = {
    "sampled": Phase(1.0, "sampled", keys=8),
    "cell_spread": Phase(1.0, "cell_spread", block_size=8),
    "cell_spread, cells": Phase(1.0, "cell_spread", block_size=16, cell=8),
    "block": Phase(1.0, "block", block_size=8, block_order="curve"),
    "elfatt": Phase(1.0, "elfatt", block_size=8, agents=4, block_order="windows"),
    "agent": Phase(1.0, "agent", agents=4, block_order="windows"),
}
HALF = PatchConfig("half", (Phase(0.5, "cell_spread", block_size=8),))


def check_all_keys(pipe: Any, run: Run, atol: float = 1e-5) -> None:
    """What sees all keys equals the original processors' output."""
    untouched = run()
    for name, phase in ALL_KEYS.items():
        with elfatt_sd.patched(pipe, PatchConfig("all", (phase,))), recorded() as calls:
            found = run()
        assert calls, name
        torch.testing.assert_close(
            found, untouched, atol=atol, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def check_methods(pipe: Any, run: Run) -> None:
    """Every attention changes the image, repeats itself, and is taken back: the same processors, the same bits."""
    before = {id(layer.attention): layer.attention.processor for layer in all_layers(pipe)}
    untouched = run()
    for name, phase in FEW_KEYS.items():
        elfatt_sd.apply_patch(pipe, PatchConfig("few", (phase,)))
        found = run()
        assert torch.isfinite(found).all(), name
        assert not torch.equal(found, untouched), name
        assert torch.equal(run(), found), name
        elfatt_sd.remove_patch(pipe)
    assert all(layer.attention.processor is before[id(layer.attention)] for layer in all_layers(pipe))
    assert torch.equal(run(), untouched)


def check_steps(pipe: Any, run: Run, layers: int, calls: int = 1, counts: tuple[int, ...] = (1, 4, 28)) -> None:
    """Phases are counted by the true step, in two runs in a row, and after an interrupted one.

    Args:
        pipe: the pipeline.
        run: takes `num_inference_steps`.
        layers: patched in all denoisers together.
        calls: of the transformer in a step.
        counts: of steps.
    """
    with elfatt_sd.patched(pipe, HALF):
        for steps in counts:
            wanted = [layers * (step < 0.5 * steps) for step in range(steps) for _ in range(calls)]
            for _ in range(2 if steps < 10 else 1):
                assert by_call(pipe, run, steps) == wanted, f"{steps} steps"
        interrupt(pipe, run)
        with recorded() as seen:
            run(num_inference_steps=4)
        assert sum(seen.values()) == layers * calls * 2, "after an interrupted run"


def by_call(pipe: Any, run: Run, steps: int) -> list[int]:
    """Return how many layers were approximated in each call of a transformer, and of ControlNets before it."""
    ends: list[int] = [0]
    with recorded() as seen, contextlib.ExitStack() as stack:
        for denoiser in step_denoisers(pipe).values():
            handle = denoiser.register_forward_hook(lambda *_: ends.append(sum(seen.values())))
            stack.callback(handle.remove)
        run(num_inference_steps=steps)
    return [after - before for before, after in itertools.pairwise(ends)]


def check_image_to_image(pipe: Any, run: Run, calls: int = 1) -> None:
    """A run that begins at the fifth of eight steps knows which they are.

    Args:
        pipe: the pipeline.
        run: begins there.
        calls: of the transformer in a step.
    """
    check_all_keys(pipe, run)
    check_methods(pipe, run)
    with elfatt_sd.patched(pipe, PatchConfig("most", (Phase(0.75, "cell_spread", block_size=4),))):
        for _ in range(2):
            with recorded() as seen:
                run()
            assert set(seen.values()) == {2 * calls}, "steps 4 and 5 of 4 to 7"


def check_texts(pipe: Any, run: Run) -> None:
    """A call with longer texts is patched as well, and leaves nothing to the calls after it."""
    texts = {name: _longer(given) for name, given in run.given.items() if "prompt" in name and "pooled" not in name}
    assert texts
    untouched = run(**texts)
    with elfatt_sd.patched(pipe, PatchConfig("all", (ALL_KEYS["cell_spread"],))):
        torch.testing.assert_close(run(**texts), untouched, atol=1e-5, rtol=1e-4)
    with elfatt_sd.patched(pipe, PatchConfig("few", (Phase(1.0, "cell_spread", block_size=8, residual_steps=2),))):
        before = run()
        with recorded() as calls:
            assert not torch.equal(run(**texts), untouched)
        assert calls
        assert torch.equal(run(), before)
    assert torch.equal(run(**texts), untouched)


def _longer(text: Any) -> Any:
    """Return embeddings or their mask, or a list of such rows, with some of them again at the end."""
    if isinstance(text, list):
        return [torch.cat([row, row[:4]]) for row in text]
    return torch.cat([text, text[:, :4]], 1)


def interrupt(pipe: Any, run: Run) -> None:
    """Break a run off in its second call of the transformer."""
    count = 0

    def stop(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt

    handle = main_denoiser(pipe).register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(num_inference_steps=6)
    finally:
        handle.remove()


def check_plan(pipe: Any, tokens: int, layers: int, *, counted: bool = True, **size: Any) -> None:
    """A plan knows the layers, their tokens and, but for models that read values, what a call costs."""
    plan = elfatt_sd.plan(pipe, HALF, **size)
    patched = [layer for layer in plan.layers if layer.patched]
    assert [layer.tokens for layer in patched] == [tokens] * layers
    if not counted:
        assert "not counted" in str(plan.call)
        return
    assert plan.call.before is not None
    assert plan.call.after is not None
    assert 0 < plan.call.after < plan.call.before


def check_autotune(pipe: Any, run: Run, **size: Any) -> None:
    """Every layer's attention is timed, with shared differences too; only what is faster is patched."""
    for phase in (FEW_KEYS["cell_spread"], Phase(1.0, "sampled", keys=8, residual_steps=2)):
        config = PatchConfig("few", (phase,))
        plan = elfatt_sd.plan(pipe, config, autotune=True, **size)
        assert all("of the untouched time, measured here" in layer.reason for layer in plan.layers), str(plan)
        elfatt_sd.apply_patch(pipe, config, autotune=True)
        run()
        elfatt_sd.remove_patch(pipe)


def all_layers(pipe: Any) -> list[Any]:
    return [layer for denoiser in find_denoisers(pipe).values() for layer in find_layers(denoiser)]
