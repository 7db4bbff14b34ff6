"""Where a denoiser can be cut: in steps that take over from earlier ones, what lies within a cut is not run."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from elfatt_sd.phases import StepReuse, reused_steps

OUTPUT = "output"  # the cut that leaves a call out as a whole
History = dict[str, deque[tuple[int, dict[str, Tensor]]]]  # by cut: the latest steps that computed it, and the values


class Taking:
    """What one call keeps of the parts of a cut, or takes over in their place."""  # traced code reads and writes it

    def __init__(self, taken: dict[str, Tensor] | None = None) -> None:
        self.taken = taken  # by name; None in a call that computes everything
        self.kept: dict[str, Tensor] = {}  # in such a call, for later steps
        self.begun: dict[str, Tensor] = {}  # what a stack of blocks was given


class Part:
    """A module that is not run, or in part, where a call takes over."""

    runs: Any = None  # what of it is run there

    def __init__(self, module: Any) -> None:
        self.module = module

    def skip(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Taking) -> Any:
        """Return what the module hands on where a call takes over: here, what it was given."""
        return args[0] if args else next(iter(kwargs.values()))

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, call: Taking) -> None:
        """Keep what later calls take over."""


class Down(Part):
    """A block on the way down a UNet: its first layers are run if they meet late ones of the last block."""

    def __init__(self, block: Any, layers: int) -> None:
        super().__init__(block)
        self.outputs = len(block.resnets) + len(block.downsamplers or ())
        self.runs = _some_layers(block, slice(0, layers)) if layers else None

    def skip(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Taking) -> Any:
        given: Tensor = super().skip(forward, args, kwargs, call)
        outputs = type(self.module).forward(self.runs, *args, **kwargs)[1] if self.runs is not None else ()
        nothing = given.new_zeros(())  # nobody reads it; a ControlNet's residual may be added to it
        return nothing, (*outputs, *[nothing] * (self.outputs - len(outputs)))


class LastUp(Part):
    """The last block of a UNet, of which the last layers are run, on deep features of earlier steps."""

    def __init__(self, block: Any, layers: int) -> None:
        super().__init__(block)
        self.layers, self.names = layers, _parameters(type(block))
        self.runs = _some_layers(block, slice(len(block.resnets) - layers, None))

    def skip(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Taking) -> Any:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        given |= {"hidden_states": (call.taken or {})["deep"]}
        given["res_hidden_states_tuple"] = given["res_hidden_states_tuple"][: self.layers]
        return type(self.module).forward(self.runs, **given)


class DeepFeatures(Part):
    """The layer of a UNet that follows the deep ones; its input begins with the channels that they give."""

    def __init__(self, resnet: Any, before: nn.Module) -> None:
        super().__init__(resnet)
        self.runs = resnet
        self.channels = next(each.out_channels for each in before.modules() if isinstance(each, nn.Conv2d))

    def skip(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Taking) -> Any:
        return forward(*args, **kwargs)

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, call: Taking) -> None:
        given: Tensor = args[0] if args else kwargs["input_tensor"]
        call.kept["deep"] = given[:, : self.channels].clone()


class Block(Part):
    """A block of a stack of a transformer; the stack hands on what it was given, and what it added in earlier steps."""

    def __init__(self, block: Any, stack: str, first: bool, last: bool, streams: tuple[str, ...]) -> None:
        super().__init__(block)
        self.stack, self.first, self.last = stack, first, last
        self.names = _parameters(type(block))
        self.streams = streams if "hidden_states" in self.names else self.names[:1]
        self.main = "hidden_states" if "hidden_states" in self.streams else self.streams[0]
        self.returns: tuple[str, ...] = ()  # what its output is a tuple of; nothing where it is one tensor

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Taking) -> dict[str, Tensor]:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        streams = {name: given[name] for name in self.streams if given.get(name) is not None}
        if self.first:
            call.begun = streams
        return streams

    def skip(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Taking) -> Any:
        streams, taken = self._begin(args, kwargs, call), call.taken or {}
        if self.last:  # without what a ControlNet adds in between, which is in what was kept
            known = {name: taken.get(f"{self.stack} {name}") for name in streams}
            streams |= {key: call.begun[key].to(each.device) + each for key, each in known.items() if each is not None}
        return tuple(map(streams.get, self.returns)) if self.returns else streams[self.main]

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, call: Taking) -> None:
        self._begin(args, kwargs, call)
        self.returns = self.streams if isinstance(output, tuple) else ()
        outputs = dict(zip(self.returns, output, strict=False)) if self.returns else {self.main: output}
        for name, each in outputs.items() if self.last else ():
            if each is not None and name in call.begun:
                call.kept[f"{self.stack} {name}"] = each - call.begun[name].to(each.device)


class Whole(Part):
    """A denoiser or ControlNet whose whole output is taken over."""

    like: Any = None  # its output, with whether each leaf is a tensor: a copy of PyTorch's `TreeSpec` warns

    def skip(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Taking) -> Any:
        leaves = iter((call.taken or {}).values())
        return tree_map(lambda kept: next(leaves).clone() if kept else None, self.like)

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, call: Taking) -> None:
        self.like = tree_map(torch.is_tensor, output)
        tensors = filter(torch.is_tensor, tree_leaves(output))
        call.kept |= {str(place): leaf.detach().clone() for place, leaf in enumerate(tensors)}


def _some_layers(block: Any, layers: slice) -> Any:
    """Return a block with some of its layers, which it shares with the block, and without a change of resolution."""
    some, count = copy.copy(block), len(block.resnets)
    some._modules = dict(block._modules)
    for name, part in block._modules.items():
        if name in ("downsamplers", "upsamplers"):
            some._modules[name] = None
        elif isinstance(part, nn.ModuleList) and len(part) == count:
            some._modules[name] = nn.ModuleList([*part][layers])
    return some


def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


class Stand:
    """Stands in for the `forward` of a part, within those of hooks that bring its weights."""

    def __init__(self, part: Part, find: Callable[[], Taking | None]) -> None:
        holder: Any = part.module
        name = "_old_forward" if hasattr(holder, "_old_forward") else "forward"
        if references := _references(holder):
            holder, name = references[0], "original_forward" if references[0].original_forward else "forward"
        self.part, self.find, self.own = part, find, vars(holder).get(name)
        self.forward = getattr(holder, name)
        functools.update_wrapper(self, self.forward, updated=())  # which may be the stand of another cut
        setattr(holder, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.find()
        if call is not None and call.taken is not None:
            return self.part.skip(self.forward, args, kwargs, call)
        output = self.forward(*args, **kwargs)
        if call is not None:
            self.part.keep(args, kwargs, output, call)
        return output

    def remove(self) -> None:
        put_back(self.part.module, self, self.forward, self.own)


def put_back(module: Any, stand: object, forward: Any, own: Any, name: str = "forward") -> None:
    """Put a forward back for what stands in for it, also where accelerate or diffusers has wrapped that since."""
    for holder in (module, *_references(module)):
        for place, value in [*vars(holder).items()]:
            if value is stand:
                setattr(holder, place, forward)
    if own is None and vars(module).get(name) == forward:  # the class's
        delattr(module, name)


def _references(module: Any) -> Sequence[Any]:
    return getattr(getattr(module, "_diffusers_hook", None), "_fn_refs", ())


class Cuts:
    """The cuts of a patched denoiser, and what a call takes over there: it is extrapolated from earlier steps."""

    def __init__(self, reuse: tuple[StepReuse, ...], family: Any, module: Any) -> None:
        self._reuse = reuse
        self.orders = {each.cut: max(other.order for other in reuse if other.cut == each.cut) for each in reuse}
        self.parts: dict[str, list[Part]] = {name: family.cut(module, name) for name in self.orders}

    def skipped(self, cut: str) -> set[nn.Module]:
        """Return the modules that are not run where a call takes over."""
        run = {each for part in self.parts[cut] if part.runs is not None for each in part.runs.modules()}
        return {each for part in self.parts[cut] for each in part.module.modules()} - run

    def takings(self, step: int, steps: int, history: History) -> dict[str, Taking]:
        """Return what a call takes over, by the name of its cut; or what it keeps, where a later one may."""
        plan = (*reused_steps(self._reuse, steps), None)  # a loop of one's own may call once more
        now = plan[step]
        for known in history.values():  # of a guidance that was off meanwhile, for instance
            if known and step - known[-1][0] > max(each.every for each in self._reuse):
                known.clear()
        if now is not None and len(history.get(now.cut, ())) > now.order:
            return {now.cut: Taking(extrapolated(history[now.cut], now.order, step))}
        return {later.cut: Taking() for later in plan[step + 1 :] if later is not None}


@torch.no_grad()
def extrapolated(known: Iterable[tuple[int, dict[str, Tensor]]], order: int, step: int) -> dict[str, Tensor]:
    """Return the value in a step of the polynomial through the last `order + 1` known ones (Lagrange)."""
    used = [*known][-order - 1 :]
    nodes = [node for node, _ in used]
    weights = [math.prod((step - other) / (node - other) for other in nodes if other != node) for node in nodes]
    parts = [
        {name: weight * value for name, value in each.items()} for weight, (_, each) in zip(weights, used, strict=True)
    ]
    return {name: functools.reduce(torch.add, (each[name] for each in parts)) for name in parts[0]}
