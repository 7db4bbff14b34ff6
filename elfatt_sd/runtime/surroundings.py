"""What others have put around or into a denoiser, and what that means for patched layers."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

from elfatt_sd.errors import ElfattError

_OF_WEIGHTS = ("offload", "layerwise_casting", "autocast")  # in the names of such hooks of diffusers


def modules_around(module: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Return the modules that hold layers, from the outermost inwards, the layers included."""
    paths = (itertools.accumulate(name.split("."), getattr, initial=module) for name in names)
    return list({id(part): part for path in paths for part in path}.values())


def device_of(parts: Iterable[nn.Module], given: torch.device) -> torch.device:
    """Return the device on which a layer computes, wherever its weights are kept between calls.

    Accelerate's hooks and those of diffusers' group offloading bring weights, or inputs, to a device of their own.
    """
    weights = device_of_weights(parts, given)
    if weights.type not in ("cpu", "meta"):
        return weights
    for part in parts:
        hook = part.__dict__.get("_hf_hook")
        hooks = [*getattr(hook, "hooks", (hook,)), *(getattr(own, "group", None) for own in _hooks_of(part).values())]
        for each in hooks:
            found = getattr(each, "execution_device", None) or getattr(each, "onload_device", None)
            if found is not None:
                return torch.device(found)
    return given if weights.type == "meta" else weights


def device_of_weights(parts: Iterable[nn.Module], given: torch.device) -> torch.device:
    return next((weight.device for part in parts for weight in part._parameters.values() if weight is not None), given)


def skips_calls(around: Iterable[nn.Module]) -> bool:
    """Tell whether a cache is on that takes what a layer or block gave in an earlier step: diffusers', or DeepCache."""
    return any(
        getattr(part.__dict__.get("forward"), "__module__", "").startswith("DeepCache.")
        or any(getattr(hook, "_is_stateful", False) for hook in _hooks_of(part).values())
        for part in around
    )


def stand_in(attention: nn.Module, moved: bool) -> str:
    """Return why a method may not take the place of a layer's attention now: somebody else has; empty if nobody has.

    diffusers' perturbed-attention guidance puts a function mode in the place of the scores, its smoothed-energy
    guidance a hook behind the queries' projection, which takes them for the rows of an image.
    """
    for place in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(place)
        if not isinstance(mode, DeviceContext):  # of torch.set_default_device
            return f"{type(mode).__name__} stands in the place of torch functions"
    for name in ("to_q", "to_k", "to_v") if moved else ():
        if hooks := _foreign_hooks(getattr(attention, name, None)):
            return f"diffusers' {hooks[0]} is at its {name}"
    return ""


def skipped_like(ours: type, kind: type) -> None:
    """Let guiders that leave out attention, which look a processor's class up, treat one of ours like a class."""
    with contextlib.suppress(ImportError, ValueError):
        from diffusers.hooks._helpers import AttentionProcessorRegistry

        AttentionProcessorRegistry.register(ours, AttentionProcessorRegistry.get(kind))


def refuse_context_parallel(module: nn.Module) -> None:
    """Refuse a denoiser whose tokens are divided among processes: a method would sample those of one."""
    config = getattr(module, "_parallel_config", None)
    if getattr(config, "context_parallel_config", None) is not None:
        raise ElfattError(
            f"{type(module).__name__} cannot be patched with context parallelism (`enable_parallelism`): each process "
            "holds only a part of the image's tokens. Call elfatt_sd.remove_patch(pipe) if it is patched already, or "
            "load the model without context parallelism."
        )


def likely_cause(module: nn.Module, around: Sequence[nn.Module]) -> str:
    """Say what probably keeps layers from being approximated, and what to do."""
    if hasattr(module, "_tome_info"):
        return "tomesd is on: call tomesd.remove_patch(pipe), or use it alone."
    for part in around[1:]:
        kind = type(part).__name__
        if hooks := _foreign_hooks(part):
            return f"A hook of diffusers ({hooks[0]}) is around a {kind}: take it out."
        if "forward" in part.__dict__ and not hasattr(part, "_diffusers_hook") and "_old_forward" not in part.__dict__:
            return f"The forward of a {kind} was replaced (HyperTile does that): take it out."
    return "Something changes the tokens or bypasses the attention processors: take it out."


def _foreign_hooks(module: Any) -> list[str]:
    return [hook for hook in _hooks_of(module) if not any(word in hook for word in _OF_WEIGHTS)]


def _hooks_of(module: Any) -> dict[str, Any]:
    return dict(getattr(getattr(module, "_diffusers_hook", None), "hooks", {}))


def after_forward(module: Any, after: Callable[[Callable[[], Any], Any], None]) -> Callable[[], None]:
    """Call `after(call_again, output)` after every call of a module's forward, also those that have no hooks."""

    def around(compute: Callable[[], Any]) -> Any:
        output = compute()
        after(compute, output)
        return output

    return around_forward(module, around)


def around_forward(module: Any, around: Callable[[Callable[[], Any]], Any]) -> Callable[[], None]:
    """Let a function decide what a module's forward returns."""
    forward, own = module.forward, module.__dict__.get("forward")

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(forward, *args, **kwargs))

    def put_back() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    module.forward = wrapped
    return put_back
