"""CUDA graphs of a denoiser's calls, with a patch and without one.

A graph is captured within the denoiser's forward, inside of its hooks. What a patch works out on the host (step, phase,
random draws, what is extrapolated) is done by its hook before the forward; what it keeps for later steps is taken by
its hook behind. Both run in every call. What layers read of it is copied into buffers of the graph, as inputs are, and
what they leave is copied out of it, as outputs are. So a graph holds no step's draws, and serves any run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elfatt_sd import errors
from elfatt_sd.attention.merging import Matching
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import family_of, find_denoisers, unwrap
from elfatt_sd.families.cuts import Stand, Taking, put_back
from elfatt_sd.measure import Stopwatch
from elfatt_sd.methods import Prepared
from elfatt_sd.runtime import warn
from elfatt_sd.runtime.call import Call
from elfatt_sd.runtime.denoiser import GRAPHS, PATCH, Forward, Owner, Patch
from elfatt_sd.runtime.layer import PatchedLayer, hooks_of, skips_calls, stand_in
from elfatt_sd.runtime.layout import Layout, NormForward
from elfatt_sd.runtime.schedule import Schedule

PAYS, ROUNDS = 1.03, 3  # times as fast as eager, below which graphs are off; rounds in which both are timed
_MOST = 64  # kinds of calls that are told apart
_stream = functools.cache(torch.cuda.Stream)  # of a device, on which all of its graphs are captured


class CudaGraph:
    """What a function does on a GPU, to be done again; all that needs one is here."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool  # of memory, one for all graphs
        self._device, self._graph = device, torch.cuda.CUDAGraph()
        self.replay = self._graph.replay

    def capture(self, function: Callable[[], Any]) -> Any:
        """Return what the function gives; its tensors have values after a replay alone, and others after the next."""
        how: Any = {"pool": self.pool, "stream": _stream(self._device), "capture_error_mode": "thread_local"}
        with torch.cuda.device(self._device), torch.cuda.graph(self._graph, **how):  # other threads go on
            return function()


CAPTURES: dict[str, Any] = {"cuda": CudaGraph}  # by the kind of a device


class Graphs:
    """Stands in for the forward of a denoiser, and replays it as graphs."""

    def __init__(self, module: Any, owner: Owner, say: Callable[[str], None]) -> None:
        self.module, self.say = module, say
        self.layout: Layout | None = None
        self.schedule = Schedule(owner)  # of calls without a patch
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("module", "say", "layout", "schedule", "forward")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def _begin(self) -> None:
        self.off = ""  # why graphs are not used any more
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._times: dict[str, list[float]] = {"eager": [], "graph": []}
        self._forget()

    def _forget(self) -> None:
        self._captured: dict[Any, Any] = {}  # by the kind of a call: graph, buffers, what it leaves; None once seen
        self._buffers: dict[Any, Tensor] = {}  # that graphs read; they share them
        self._pool: Any = None
        self._timed: Any = None  # the kind of calls that are timed
        self._run: Any = None  # the latest, in which weights and hooks were looked at
        self._why = ""  # why graphs are not used in it
        self._fixed: object = None  # what graphs hold on to

    @property
    def __wrapped__(self) -> Any:
        return self.forward

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters()).device  # type: ignore[no-any-return]

    def install(self) -> None:
        self.forward, self.module.forward = self.module.forward, self
        setattr(self.module, GRAPHS, self)

    def remove(self) -> None:
        """Put the forward back, and let all graphs go."""
        of_class = self.forward == types.MethodType(type(self.module).forward, self.module)
        put_back(self.module, self, self.forward, None if of_class else self.forward)
        delattr(self.module, GRAPHS)
        self._begin()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patch: Patch | None = vars(self.module).get(PATCH)
        call = None if patch is None else patch.call
        traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        eager = functools.partial(self.forward, *args, **kwargs)
        if self.off or traced or (patch is not None and (call is None or call.entered or patch.watched)):
            return eager()
        if not self._lock.acquire(blocking=False):
            self._warn("another thread is within a call of the model, and graphs have one set of buffers")
            return eager()
        try:
            given, tensors = (args, kwargs, None if call is None else _read(call)), list[Tensor]()
            key = _kind(given, tensors)
            timed = key == self._timed and len(self._times["graph"]) < ROUNDS
            if why := self._obstacle(patch, call, args, kwargs):
                self._warn(why)
            elif (captured := self._captured_for(key, call, given, tensors)) is not None:
                replay = functools.partial(_replay, captured, call, tensors)
                return self._in_turn(eager, replay) if timed else replay()
            return eager()
        finally:
            self._lock.release()

    def _obstacle(self, patch: Any, call: Call | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why a call is not for graphs; empty if it is. Weights and hooks are looked at once a run."""
        if torch.is_grad_enabled():
            return "gradients are on; call the model within torch.no_grad()"
        if call is None:
            given = family_of(self.module).call(self.module, args, kwargs)
            position = self.schedule.locate(given.timestep, given.unit)
            run = self.schedule.run if position is not None and position.scheduled else None
        else:
            run = patch.schedule.run if call.scheduled else None
        if run is None or self._run is None or self._run() is not run:
            if (fixed := _fixed(self.module)) != self._fixed:
                self._forget()
            self._fixed, self._run = fixed, None if run is None else weakref.ref(run)
            self._why = obstacle_to(self.module)
        if not self._why and torch.is_autocast_enabled(self._device.type):
            return "autocast is on; load the model in half precision"
        return self._why or stand_in(self.module, moved=False)

    def _captured_for(self, key: Any, call: Call | None, given: Any, tensors: list[Tensor]) -> Any:
        """Return the graph of a kind of calls; None for the first one, which fills caches and chooses kernels."""
        if key not in self._captured and len(self._captured) < _MOST:
            self._captured[key] = None
        elif key in self._captured and self._captured[key] is None:
            try:
                self._captured[key] = self._capture(call, given, tensors)
                self._timed = self._timed or key
            except RuntimeError as error:  # the end of a capture fails, too, and hides what failed inside
                reason = " ".join(str(error.__context__ or error).split())[:200]
                self._forget()
                self.off = f"a call could not be captured ({reason})"
                self._warn(self.off)
        return self._captured.get(key)

    def _capture(self, call: Call | None, given: Any, tensors: list[Tensor]) -> Any:
        number, buffers, device = Counter[Any](), list[Tensor](), self._device
        for tensor in tensors:
            number[kind := _kind(tensor, [])] += 1
            if (kind, number[kind]) not in self._buffers:
                with torch.inference_mode(False):
                    self._buffers[kind, number[kind]] = torch.empty_like(tensor, device=device, requires_grad=False)
            buffers.append(self._buffers[kind, number[kind]])
        supply = iter(buffers)
        args, kwargs, read = _mapped(given, lambda _: next(supply))
        torch._foreach_copy_(buffers, tensors)
        graph = CAPTURES[device.type](device, self._pool)
        self._pool = graph.pool
        if call is None:
            return graph, buffers, graph.capture(lambda: (self.forward(*args, **kwargs), None))
        patch, twin = vars(self.module)[PATCH], copy.copy(call)  # whose layers read buffers, and leave what they make
        twin.last, twin.matchings, twin.states = False, read["matchings"], {}  # the call itself lets go of what is left
        twin.takings = {cut: Taking(taken) for cut, taken in read["taken"].items()}
        for index, state in call.states.items():
            twin.states[index] = own = copy.copy(state)
            own.call, (own.prepared, own.split, own.residuals) = twin, read["layers"][index]
        patch.enter(twin)
        try:
            return graph, buffers, graph.capture(lambda: (self.forward(*args, **kwargs), _left(twin, call)))
        finally:
            patch.enter(call)

    def _in_turn(self, eager: Callable[[], Any], replay: Callable[[], Any]) -> Any:
        """Do what a call does in one of both ways, and decide for one of them after some rounds."""
        times = self._times
        name = "graph" if len(times["graph"]) < len(times["eager"]) else "eager"
        with Stopwatch(self._device) as watch:
            output = replay() if name == "graph" else eager()
        times[name].append(watch.seconds)
        if len(times["graph"]) == ROUNDS:
            gain = median(before / after for before, after in zip(times["eager"], times["graph"], strict=True))
            before, after = (1000 * median(each) for each in times.values())
            if gain < PAYS:
                self._forget()
                self.off = f"they are {gain:.2f} times as fast"
            said = f"{type(self.module).__name__} takes {after:.3g} ms a call as a CUDA graph, {before:.3g} without it"
            self.say(f"elfatt-sd: {said}: {gain:.2f} times as fast; graphs are {'off' if self.off else 'on'}.")
        return output

    def _warn(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            warn("graphs", 5, why=why)


def obstacle_to(module: Any) -> str:
    """Return why a denoiser's calls are not for graphs, whatever they are given; empty if they are."""
    parts, patch = dict(module.named_modules()), vars(module).get(PATCH)
    devices = {weight.device for weight in module.parameters()}
    if skips_calls(parts.values()):
        return "a cache decides call by call what of the model is run; take it out"
    if any("_hf_hook" in vars(part) or hooks_of(part) for part in parts.values()):
        return "hooks of accelerate or diffusers are on it, as for offloading; keep the model on the GPU"
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in parts.values()):
        return "torch.compile was applied; its mode='reduce-overhead' has graphs of its own"
    if len(devices) != 1 or next(iter(devices)).type not in CAPTURES:
        return f"its weights are on {' and '.join(sorted(map(str, devices)))}; graphs need one GPU with CUDA"
    if patch is not None and patch.config.residuals == "host":
        return "residuals='host' keeps what steps share on the host; give residuals='device' or 'fp8'"
    for name, part in parts.items():
        hooks = [] if part is module else [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        forward: Any = vars(part).get("forward")
        while isinstance(forward, Graphs | Forward | Stand):
            forward = forward.forward if isinstance(forward, Stand) else forward.__wrapped__
        ours = forward is None or isinstance(forward, NormForward)
        ours = ours or forward == types.MethodType(type(part).forward, part)
        if not (ours and all(isinstance(getattr(hook, "__self__", None), Patch | PatchedLayer) for hook in hooks)):
            return f"{name or 'it'} has a hook or a forward of somebody else's, which a replay would leave out"
    return ""


def _fixed(module: nn.Module) -> object:
    """Return what a graph holds on to: where weights are, and plain values such as the scale of a LoRA."""
    held = [holder for part in module.modules() for holder in (part, vars(part).get("processor"))]
    values = [(name, value) for each in held for name, value in getattr(each, "__dict__", {}).items()]
    return [(name, _plain(value)) for name, value in values if not name.startswith("_forward_")]  # but for hooks


def _plain(value: Any, depth: int = 2) -> object:
    if isinstance(value, Tensor):
        return id(value), value.data_ptr() if type(value) in (Tensor, nn.Parameter) else 0
    if isinstance(value, dict) and depth:
        return [(key, _plain(each, depth - 1)) for key, each in value.items()]
    if isinstance(value, list | tuple | set) and depth:
        return [_plain(each, depth - 1) for each in value]
    return value if isinstance(value, bool | int | float | str) else type(value)


# What a call is given, and what its layers read and leave, as trees of tensors.


def _kind(value: Any, tensors: list[Tensor]) -> Any:
    """Return what tells a tree from another one, but for its tensors' values, and add its tensors to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device
    value = vars(value) if isinstance(value, Prepared | Matching) else value
    if isinstance(value, dict):
        return tuple((key, _kind(each, tensors)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), *(_kind(each, tensors) for each in value)
    return type(value), value if isinstance(value, Hashable) else object()  # which no other call is given


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a tree with its tensors changed, in the order of `_kind`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        parts = [_mapped(each, change) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict | Prepared | Matching):
        twin = copy.copy(value)
        own: Any = twin if isinstance(twin, dict) else vars(twin)
        for key, each in [*own.items()]:
            own[key] = _mapped(each, change)
        return twin
    return value


def _read(call: Call) -> dict[str, Any]:
    """Return what the layers of a call read, and all else on which depends what they do."""
    given, states = call.given, call.states.items()
    return {
        "call": (given.rows, given.grid, given.before, call.copies),
        "kinds": [(id(state.phase), state.shares, state.grid) for _, state in states],
        "layers": {index: (state.prepared, state.split, state.residuals) for index, state in states},
        "taken": {cut: taking.taken for cut, taking in call.takings.items()},
        "matchings": call.matchings,
    }


def _left(twin: Call, call: Call) -> dict[Any, Any]:
    """Return what the layers of a call's twin have made for later calls."""
    made: dict[Any, Any] = {"outcomes": {index: state.outcome for index, state in twin.states.items()}}
    made["kept"] = {cut: taking.kept for cut, taking in twin.takings.items()}
    made["matchings"] = {key: each for key, each in twin.matchings.items() if key not in call.matchings}
    for index, state in call.states.items():
        made[index] = {turn: each for turn, each in twin.states[index].residuals.items() if turn not in state.residuals}
    return made


def _replay(captured: Any, call: Call | None, tensors: list[Tensor]) -> Any:
    """Return a copy of the output, and hand copies of what layers left to the run."""
    graph, buffers, made = captured
    torch._foreach_copy_(buffers, tensors)
    graph.replay()
    output, left = _mapped(made, torch.clone)
    if call is not None:
        call.matchings |= left["matchings"]
        for cut, taking in call.takings.items():
            taking.kept = left["kept"][cut]
        for index, state in call.states.items():
            state.outcome = left["outcomes"][index]
            state.residuals |= left[index]
            if call.last:  # what decodes the latents needs the memory
                state.residuals.clear()
    return output


def graphs(
    pipe: Any, *, layout: Literal["channels_last"] | None = None, say: Callable[[str], None] = print
) -> AbstractContextManager[Any]:
    """Replay the calls of a pipeline's denoisers as CUDA graphs, which leaves out the time of the host.

    Latents are those of the eager run, bit for bit, with a patch and without one. The second call of each kind is
    captured. Both ways are timed in the first run; graphs stay on if a call is at least 1.03 times as fast. A LoRA, or
    weights that moved, are noticed when a run begins. `docs/compatibility.md` has the limits. Not timed on a GPU yet.

    Args:
        pipe: a diffusers pipeline, or its UNet or transformer, on a GPU with CUDA.
        layout: "channels_last" moves weights and activations of UNets to that layout, with norms in Triton that keep
            it. Values differ by rounding.
        say: is told, in a line, what graphs gave.

    Returns:
        A context manager that takes them back; without it, `remove_graphs` does.

    Raises:
        ElfattError: there is no denoiser, or its calls are not for graphs, as on a CPU or with offloading.
    """
    if layout is not None:
        errors.choice("layout", layout, ("channels_last",))
    denoisers = find_denoisers(pipe).values()
    for denoiser in denoisers:
        parallel = isinstance(denoiser, nn.DataParallel)
        if why := "DataParallel copies it to several GPUs" if parallel else obstacle_to(unwrap(denoiser)):
            raise ElfattError(f"CUDA graphs are not accepted for {type(unwrap(denoiser)).__name__}: {why}.")
    remove_graphs(pipe)
    for denoiser in denoisers:
        made = Graphs(unwrap(denoiser), Owner(pipe), say)
        made.layout = None if layout is None else Layout(made.module)
        made.install()
    undo = contextlib.ExitStack()
    undo.callback(remove_graphs, pipe)
    return undo


def remove_graphs(pipe: Any) -> None:
    """Let the calls of a pipeline's denoisers run as before `graphs`, in the layout of before.

    Args:
        pipe: what `graphs` was given.

    Raises:
        ElfattError: there is no denoiser.
    """
    for denoiser in find_denoisers(pipe).values():
        if (made := vars(unwrap(denoiser)).get(GRAPHS)) is not None:
            made.remove()
            if made.layout is not None:
                made.layout.remove()
