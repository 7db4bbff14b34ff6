"""One UNet call in every phase of every method, added up over a run."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from elfatt_sd.benchmarking.models import Model, make_model, unet_call
from elfatt_sd.benchmarking.names import COMPILED, FLOOR, PEER, UNPATCHED
from elfatt_sd.benchmarking.record import Record, Results, Session
from elfatt_sd.benchmarking.variants import (
    Size,
    Variant,
    by_phase,
    fitted_methods,
    fitting,
    forget_matchings,
    forget_residuals,
    height_and_width,
    repeated_call,
    resolve_methods,
    with_autotuned,
    with_compiled,
    with_exact,
)
from elfatt_sd.config import PatchConfig
from elfatt_sd.devices import synchronize
from elfatt_sd.errors import ElfattError
from elfatt_sd.families import copy_structure
from elfatt_sd.loading import pick_device, pick_dtype
from elfatt_sd.measure import Call, little_garbage, peak_memory
from elfatt_sd.phases import Backend


def unet(
    model: str | Model = "sd15",
    *,
    sizes: Sequence[Size] = (512, 1024),
    methods: Iterable[str | PatchConfig] | None = None,
    batch: int = 2,
    repeats: int = 5,
    device: str = "auto",
    dtype: str = "auto",
    compile: bool = False,
    autotune: bool = False,
    graphs: bool = False,
    competitors: Sequence[Backend] = (),
    memory: Sequence[int] | None = None,
    seconds: float = math.inf,
    variant: str | None = None,
    session: Session | None = None,
    **settings: Any,
) -> Results:
    """Time one UNet call in every phase of every method, and add them up over a run of 50 steps."""
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    batches = (batch, 2 * batch) if memory is None else memory
    _check(place, [batch, *batches], graphs=graphs, compile=compile, autotune=autotune)
    chosen = resolve_methods(methods, **settings)
    made = model if isinstance(model, Model) else make_model(model, place, precision, variant)
    lineup = by_phase(fitted_methods(chosen, made.unet, named=methods is not None))
    lineup = with_compiled(lineup) if compile else with_autotuned(lineup) if autotune else lineup
    lineup = fitting(with_exact(lineup, competitors), made.unet)
    asked: dict[str, Any] = {
        "model": model if isinstance(model, str) else "given",
        "dtype": str(precision).removeprefix("torch."),
        "graphs": graphs,
        "variants": lineup.described(),
        **({"variant": variant} if variant else {}),
    }
    details = lineup.details((UNPATCHED, PEER, UNPATCHED + COMPILED))
    record = Record(session, "unet", place, asked, **details)
    keys = [{"size": size, "batch": batch} for size in sizes]

    def lose(name: str, error: Exception) -> None:
        for key in keys:
            record.lose(key, name, error)

    units = units_of(made, lineup.variants, lose)
    measured = [name for name, variant in lineup.variants.items() if name in units and variant.kind != FLOOR]
    record.announce(len(keys) * (repeats * len(units) + len(measured) * len(batches)))
    for key in keys:
        inputs = made.inputs(key["size"], batch)
        calls = {
            name: _graphed_call(unit, inputs, lineup.variants[name]) if graphs else unet_call(unit, inputs)
            for name, unit in units.items()
        }
        small = made.inputs(min(*height_and_width(key["size"]), made.least_size), batch)
        shrinks = place.type == "cpu" and not (session and session.keep_going)  # then what fails is told by its name
        warm_up = _warm_up(units, lineup.variants, calls, small) if shrinks else None
        record.time(key, calls, repeats, seconds=seconds, warm_up=warm_up)
    with little_garbage():
        for key, name, rows in itertools.product(keys, measured, batches):
            call = unet_call(units[name], made.inputs(key["size"], rows))
            measure = functools.partial(_peak, units[name], call, lineup.variants[name], place)
            record.keep_peak(key, name, rows, measure)
    return record.results


def _check(place: torch.device, batches: Sequence[int], *, graphs: bool, compile: bool, autotune: bool) -> None:
    if graphs and place.type != "cuda":
        raise ElfattError(f"graphs=True is not accepted on {place.type}; CUDA graphs need a CUDA device.")
    if autotune and compile:
        raise ElfattError("autotune=True is not accepted with compile=True; compiled layers cannot be measured.")
    if min(batches) < 1:
        given = f"batch={batches[0]}, memory={list(batches[1:])}"
        raise ElfattError(f"{given} is not accepted; give batches of at least 1.")


def units_of(made: Model, variants: Mapping[str, Variant], lose: Callable[[str, Exception], object]) -> dict[str, Any]:
    """Put every variant on its own copy of the model; what cannot be put there is lost."""
    units: dict[str, Any] = {}
    kept = {} if made.copies is None else made.copies
    for name, variant in variants.items():
        try:
            if variant not in kept:
                kept[variant] = variant.install(copy_structure(made.unet))
            units[name] = kept[variant]
        except Exception as error:
            lose(name, error)
    if any(variant.compiled for variant in variants.values()):
        _let_compile(len(units))
    return {
        name: torch.compile(unit, dynamic=False) if variants[name].compiled else unit for name, unit in units.items()
    }


def _let_compile(copies: int) -> None:
    """Raise the limit of compilations: the copies share the code of their class, so each is an entry in its cache."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before PyTorch 2.6
    setattr(config, limit, max(getattr(config, limit), 16 * copies))


def _warm_up(
    units: Mapping[str, Any], variants: Mapping[str, Variant], calls: Mapping[str, Call], small: Mapping[str, Any]
) -> dict[str, Call]:
    """On a CPU, warm every variant up with a small image; what depends on the size, the cheapest one warms up."""
    cheapest = [name for name, variant in variants.items() if variant.kind in (UNPATCHED, FLOOR)][-1]
    prepared = {name for name, variant in variants.items() if variant.compiled or variant.autotune}
    reusing = {name for name, variant in variants.items() if variant.reuses_steps}
    full = {name: call for name, call in calls.items() if name in {cheapest, *prepared, *reusing}}
    shrunk = {f"{name}, small": unet_call(unit, small) for name, unit in units.items() if name not in prepared}
    return {**shrunk, **full}


def _peak(unet: Any, call: Call, variant: Variant, device: torch.device) -> int | None:
    """Measure the peak memory of a call, with all that it keeps for later ones."""
    if variant.compiled:
        peak_memory(call, device)  # compiles
    forget_residuals(unet)
    forget_matchings(unet)
    return peak_memory(call, device)


def _graphed_call(unet: Any, inputs: Mapping[str, Any], variant: Variant) -> Call:
    """Capture a UNet call in a CUDA graph at its first call; what its hooks prepare on the host, that prepares once."""
    call = unet_call(unet, inputs)
    device = next(unet.parameters()).device

    @functools.cache
    def capture() -> torch.cuda.CUDAGraph:
        with _without_generator(unet):
            call()
            call()
            synchronize(device)
            graph = torch.cuda.CUDAGraph()
            if variant.config.reuse_steps == 1:
                forget_matchings(unet)  # as the hook before a call does
            if variant.measures:
                forget_residuals(unet)
            try:
                with repeated_call(unet), torch.inference_mode(), torch.cuda.device(device), torch.cuda.graph(graph):
                    unet.forward(**inputs)
            except RuntimeError as error:  # the end of a capture fails, too, and hides what failed inside
                raise error.__context__ or error from None
        return graph

    return lambda: capture().replay()


@contextmanager
def _without_generator(unet: Any) -> Iterator[None]:
    """Let tomesd draw nothing inside: its own generator cannot be captured."""
    settings = getattr(unet, "_tome_info", {"args": {}})["args"]
    before = dict(settings)
    settings.update(dict.fromkeys(before.keys() & {"use_rand"}, False))
    try:
        yield
    finally:
        settings.update(before)
