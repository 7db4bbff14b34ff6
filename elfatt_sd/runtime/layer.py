"""Layers: which ones a method patches, what others put around them, and what a patched one keeps from call to call."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from diffusers.models.attention_processor import FusedAttnProcessor2_0
from torch import Tensor, nn
from torch.utils._device import DeviceContext

from elfatt_sd.config import Method, PatchConfig, for_transformers, method_named
from elfatt_sd.devices import is_exporting, refuse_tracing
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import SelfAttention, family_of, find_layers, levels_of, replaceable, select_layers, unwrap
from elfatt_sd.families.cuts import put_back
from elfatt_sd.methods import Attention, is_own
from elfatt_sd.methods.conformance import check
from elfatt_sd.phases import Phase, Settings
from elfatt_sd.runtime import BYPASSED, origin_in_words

if TYPE_CHECKING:  # what a layer does in a call
    from elfatt_sd.runtime.call import LayerCall

STATE = "elfatt_state"  # attribute of a patched attention module
_OVERRIDDEN = ("get_processor", "set_processor")  # of a patched attention module: they speak of the original
_OF_WEIGHTS = ("offload", "layerwise_casting", "autocast")  # in the names of such hooks of diffusers


class Layers(NamedTuple):
    """The self-attention layers of a denoiser over image tokens."""

    found: list[SelfAttention]
    chosen: list[SelfAttention]  # those that a method patches


def resolve(method: Method | str | os.PathLike[str] | PatchConfig | Attention, settings: Settings) -> PatchConfig:
    if isinstance(method, Attention):
        method = PatchConfig(method.name, (Phase(1.0, method),))
    config = method if isinstance(method, PatchConfig) else method_named(method)
    config = config.with_settings(**settings)
    for phase in config.all_phases:
        if not is_own(type(phase.attention)):
            check(phase.attention)
    return config


def fitted(config: PatchConfig, denoisers: dict[str, nn.Module]) -> PatchConfig:
    """Return the configuration that a method is on a family of denoisers; presets have one for transformers."""
    if problem := next(_misfits(config, denoisers), ""):
        raise ElfattError(problem)
    return for_transformers(config) if family_of(next(iter(denoisers.values()))).joint else config


def fits(config: PatchConfig, denoisers: dict[str, nn.Module]) -> bool:
    return not any(_misfits(config, denoisers))


def _misfits(config: PatchConfig, denoisers: dict[str, nn.Module]) -> Iterator[str]:
    """Say what of a method a family of transformers cannot have."""
    main = next(iter(denoisers.values()))
    family, name = family_of(main), type(unwrap(main)).__name__
    for phase in for_transformers(config).all_phases if family.joint else ():
        if phase.matches and not family.merges:
            yield (
                f"method {config.method!r} merges tokens, and those of {name} have rotary positions, which cannot be "
                "merged; give a method that does not merge, such as 'elfatt-fast'."
            )
        if family.text and phase.attention.matches:
            yield (
                f"agent_source='merged' is not accepted for {name}, which joins image and text; give "
                "agent_source='pooled'."
            )
        if family.text and not phase.attention.joint:
            yield (
                f"attention={phase.attention.name!r} does not attend to text (its `joint` is False), and {name} joins "
                "image and text; give another one."
            )
    if family.joint and family.text and config.attention_backend not in ("auto", "triton"):
        yield (
            f"attention_backend={config.attention_backend!r} is not accepted for {name}, whose parts of attention are "
            "joined by log-sum-exps; leave it out, and call set_attention_backend of the model for exact attention."
        )


def choose_layers(
    denoisers: dict[str, nn.Module], config: PatchConfig, take_over: Sequence[str] = ()
) -> dict[str, Layers]:
    for denoiser in denoisers.values() if config.active else ():
        refuse_context_parallel(unwrap(denoiser))
    found = {name: find_layers(denoiser) for name, denoiser in denoisers.items()}
    main, title = next(iter(found)), family_of(next(iter(denoisers.values()))).title
    levels = levels_of(found[main])
    chosen = {name: select_layers(layers, config, levels) for name, layers in found.items()}
    for reuse in config.reuse:  # says which cuts there are
        family_of(denoisers[main]).cut(unwrap(denoisers[main]), reuse.cut)
    if config.active and not found[main]:
        raise ElfattError(f"the {title} has no self-attention layer over the image; there is nothing to patch.")
    for own in config.per_layer:
        if not any(own.matches(layer.name) for layers in found.values() for layer in layers):
            names = ", ".join([*(layer.name for layer in found[main][:3]), "..."])
            tuned = f"these settings were tuned for {origin_in_words(config.origin)}, and " * bool(config.origin)
            raise ElfattError(f"{tuned}no self-attention layer matches layers={own.layers!r}; this {title} has {names}")
    if config.active and not chosen[main]:
        raise ElfattError(
            f"no self-attention layer matches max_downsample={config.max_downsample}; this {title} has some at "
            f"{', '.join(map(str, levels))}. Give max_downsample=None to take the finest level of them."
        )
    return {
        name: Layers(layers, [layer for layer in chosen[name] if replaceable(layer, layer.processor, take_over)])
        for name, layers in found.items()
    }


class Processor:
    """An attention processor of this package."""


class PatchedLayer:
    """A patched layer: what stays the same from call to call.

    While a layer is patched, its `get_processor` and `set_processor` speak of the original: what diffusers, PEFT or a
    user saves, inspects, fuses, slices or resets works as without the patch.
    """

    def __init__(self, layer: SelfAttention, index: int, patch: Any) -> None:
        self.layer, self.index = layer, index
        self.patch = patch  # the `Patch` of its denoiser
        self.take_original(layer.processor)
        self.config = patch.config.for_layer(layer.name)  # with the layer's own phases
        self.latest: LayerCall | None = None  # of any thread; compiled code reads it, as it cannot ask for its thread
        self.parts: list[nn.Module] = list(layer.attention.modules())  # and those around it, see `device_of`

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "latest": None}

    def take_original(self, processor: Callable[..., Tensor]) -> None:
        self.original = processor
        self.accepted = frozenset(inspect.signature(processor.__call__).parameters)  # type: ignore[operator]
        # The layer's own flag outlives `unfuse_qkv_projections`.
        self.fused = isinstance(processor, FusedAttnProcessor2_0)

    def install(self) -> None:
        self.take_original(self.layer.processor)
        setattr(self.layer.attention, STATE, self)
        self._put(self.patch.processor_of(self))
        for name in _OVERRIDDEN:
            setattr(self.layer.attention, name, getattr(self, name))

    def remove(self) -> None:
        """Put the original processor back, unless another one took the place of ours."""
        for name in _OVERRIDDEN:
            delattr(self.layer.attention, name)
        if self.installed:
            self._put(self.original)
        delattr(self.layer.attention, STATE)

    def _put(self, processor: Any) -> None:
        """Set the layer's processor; an original that is a module stays a child, whose weights are moved and saved."""
        attention: Any = self.layer.attention
        attention._modules.pop("processor", None)
        type(attention).set_processor(attention, processor)
        if isinstance(self.original, nn.Module) and processor is not self.original:
            attention._modules["processor"] = self.original

    @property
    def installed(self) -> bool:
        return isinstance(self.layer.attention.processor, Processor)

    def get_processor(self, return_deprecated_lora: bool = False) -> Any:
        return self.original if self.installed else self.layer.attention.processor

    def set_processor(self, processor: Any) -> None:
        """Replace the original; one that is not plain attention takes our place, until a plain one is back."""
        if isinstance(processor, Processor):
            return
        ours = replaceable(self.layer, processor, self.patch.take_over)
        self.take_original(processor)
        self._put(self.patch.processor_of(self) if ours else processor)

    @property
    def state(self) -> LayerCall | None:
        """What the layer does in the call that goes on; None outside of any call."""
        if torch.compiler.is_compiling():
            if is_exporting():
                refuse_tracing(torch.device("cpu"))
            return self.latest
        call = self.patch.call or self.patch.repeats.call()
        if call is not None:
            state: LayerCall | None = call.states.get(self.index)
            return state
        refuse_tracing(device_of_weights(self.parts, torch.device("cpu")))  # a block alone
        if recomputed_part() is not None:
            raise ElfattError(
                f"a checkpoint computes {self.layer.name} once more, and its call of the model is not known; "
                "checkpoint whole transformer blocks, as enable_gradient_checkpointing does, and leave what they are "
                "given where it is: a copy, as save_on_cpu makes one, tells nothing."
            )
        if torch._C._current_graph_task_id() == -1:  # no checkpoint within one that computes without gradients
            self.warn_of_bypass()
        return None

    @torch.compiler.disable(reason=BYPASSED)  # type: ignore[untyped-decorator, no-untyped-call]
    def warn_of_bypass(self) -> None:
        self.patch.warn("bypassed", layer=self.layer.name)

    def keep_block_input(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook of the normalisation before the layer: keep the block's input until the matching is made."""
        state = self.state
        if state is not None and (state.phase.matches or self.patch.watched):
            state.block_input = inputs[0]


def recomputed_part() -> tuple[int, int] | None:
    """Return which part of a call a checkpoint computes once more; None where none does."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
        return None
    node = torch._C._current_autograd_node()
    return torch._C._current_graph_task_id(), -1 if node is None else int(node._sequence_nr())


def modules_around(module: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Return the modules that hold layers, from the outermost inwards, the layers included."""
    paths = (itertools.accumulate(name.split("."), getattr, initial=module) for name in names)
    return list({id(part): part for path in paths for part in path}.values())


def device_of(parts: Iterable[nn.Module], given: torch.device) -> torch.device:
    """Return the device on which a layer computes, wherever its weights are kept between calls.

    Accelerate's hooks and those of diffusers' group offloading bring weights, or inputs, to a device of their own.
    """
    weights = device_of_weights(parts := [*parts], given)
    if weights.type not in ("cpu", "meta"):
        return weights
    for part in parts:
        hook = part.__dict__.get("_hf_hook")
        hooks = [*getattr(hook, "hooks", (hook,)), *(getattr(own, "group", None) for own in hooks_of(part).values())]
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
        or any(getattr(hook, "_is_stateful", False) for hook in hooks_of(part).values())
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
        for hook in hooks_of(getattr(attention, name, None)):
            if not any(word in hook for word in _OF_WEIGHTS):
                return f"diffusers' {hook} is at its {name}"
    return ""


def skipped_like(ours: type, kind: type) -> None:
    """Let guiders that leave out attention, which look a processor's class up, treat one of ours like a class."""
    with contextlib.suppress(ImportError, ValueError):
        from diffusers.hooks._helpers import AttentionProcessorRegistry

        AttentionProcessorRegistry.register(ours, AttentionProcessorRegistry.get(kind))


def called_like(base: type, kind: type, signature: inspect.Signature) -> Any:
    """Return a class of processors in the place of a kind; in its signature diffusers looks up what to hand over."""
    own: Any = base.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    made = type(base.__name__, (base,), {"__call__": call})
    skipped_like(made, kind)
    return made


def refuse_context_parallel(module: nn.Module) -> None:
    """Refuse a denoiser whose tokens are divided among processes: a method would sample those of one."""
    config = getattr(module, "_parallel_config", None)
    if getattr(config, "context_parallel_config", None) is not None:
        raise ElfattError(
            f"{type(module).__name__} cannot be patched with context parallelism (`enable_parallelism`): each process "
            "holds only a part of the image's tokens. Call elfatt_sd.remove_patch(pipe) if it is patched already, or "
            "load the model without context parallelism."
        )


def hooks_of(module: Any) -> dict[str, Any]:
    return dict(getattr(getattr(module, "_diffusers_hook", None), "hooks", {}))


def around_forward(
    module: Any, around: Callable[[Callable[[], Any]], Any], name: str = "forward"
) -> Callable[[], None]:
    """Let a function decide what a module's forward, or another method, returns, also in calls that have no hooks."""
    forward, own = getattr(module, name), vars(module).get(name)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(forward, *args, **kwargs))

    setattr(module, name, wrapped)
    return functools.partial(put_back, module, wrapped, forward, own, name)


def after_forward(module: Any, after: Callable[[Callable[[], Any], Any], None]) -> Callable[[], None]:

    def around(compute: Callable[[], Any]) -> Any:
        output = compute()
        after(compute, output)
        return output

    return around_forward(module, around)
