"""Accelerators of other packages: what a user could pick instead, or together with a patch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from elfatt_sd import errors as checks
from elfatt_sd.errors import ElfattError, need
from elfatt_sd.families import family_of, main_denoiser
from elfatt_sd.families.unet import UNet
from elfatt_sd.methods.base import in_one_line

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Peer:
    """An accelerator that a user could pick instead."""

    name: str  # of it, in protocols and tables
    package: str  # that has it, as `elfatt_sd.errors` names it; empty for diffusers itself
    settings: Mapping[str, Any]  # their names, with what holds where nobody gives others
    # `on(pipe, **settings)` puts it on a pipeline for the length of a `with` block
    on: Callable[..., AbstractContextManager[None]]
    models: Literal["unet", "transformer"] = "unet"  # that it speeds up
    joins: bool = False  # whether a patch can be on together with it; otherwise it takes the patch's place


@contextmanager
def _tomesd(pipe: Any, stride: int, **options: Any) -> Iterator[None]:
    """Token merging by its authors' package (Bolya and Hoffman 2023)."""
    import tomesd

    tomesd.apply_patch(pipe, sx=stride, sy=stride, **options)
    try:
        yield
    finally:
        tomesd.remove_patch(pipe)


@contextmanager
def _deepcache(pipe: Any, **settings: Any) -> Iterator[None]:
    """DeepCache (Ma et al. 2024): most steps run the outer blocks alone, on deep features of an earlier step."""
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(**settings)
    helper.enable()
    try:
        yield
    finally:
        helper.disable()
        _tidy(pipe.unet)


_TGATE_LOADERS = {"StableDiffusionPipeline": "TgateSDLoader", "StableDiffusionXLPipeline": "TgateSDXLLoader"}


@contextmanager
def _tgate(pipe: Any, gate_fraction: float, **settings: Any) -> Iterator[None]:
    """T-GATE (Liu et al. 2024): cross-attention stops after a step, self-attention is reused before it.

    The pipeline's call becomes the package's, which has a loop of its own.
    """
    import tgate

    kind = type(pipe)
    if kind.__name__ not in _TGATE_LOADERS:
        raise ElfattError(f"tgate knows no {kind.__name__}; accepted: {', '.join(_TGATE_LOADERS)}.")
    getattr(tgate, _TGATE_LOADERS[kind.__name__])(pipe)

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps = kwargs.get("num_inference_steps", 50)
        return self.tgate(*args, gate_step=max(1, round(gate_fraction * steps)), **settings, **kwargs)

    pipe.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    try:
        yield
    finally:
        pipe.__class__ = kind
        del pipe.tgate
        for module in pipe.unet.modules():
            if getattr(module.__dict__.get("forward"), "__module__", None) == "tgate.tgate_utils":
                del module.forward
                module.__dict__.pop("cache", None)


@contextmanager
def _cache(pipe: Any, config: str, **settings: Any) -> Iterator[None]:
    """Diffusers' own caches for transformers."""
    import diffusers

    kind = getattr(diffusers, config, None)
    if kind is None or not hasattr(pipe.transformer, "enable_cache"):
        raise ElfattError(f"this diffusers ({diffusers.__version__}) has no {config} for {type(pipe).__name__}.")
    if "current_timestep_callback" in kind.__dataclass_fields__:
        settings["current_timestep_callback"] = lambda: pipe.current_timestep
    with in_one_line(f"{config} does not go with {type(pipe).__name__}"):
        pipe.transformer.enable_cache(kind(**settings))
    try:
        yield
    finally:
        pipe.transformer.disable_cache()
        _tidy(pipe.transformer)


def _tidy(module: nn.Module) -> None:
    """Take out methods of a module and its parts that a package has put back as attributes of the objects."""
    for part in module.modules():
        own: Any = part.__dict__.get("forward")
        if getattr(own, "__self__", None) is part and own.__func__ is getattr(type(part), "forward", None):
            del part.forward


_BROADCAST = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (100, 800)}
_TGATE = {"gate_fraction": 0.4, "sp_interval": 5, "fi_interval": 1, "warm_up": 2}  # gate_step 10 of 25 steps
_TAYLOR = {"cache_interval": 3, "disable_cache_before_step": 3, "max_order": 1}
_UNETS = (
    Peer("tomesd", "tomesd", {"ratio": 0.5, "stride": 2, "max_downsample": 1, "use_rand": True}, _tomesd),
    Peer("deepcache", "DeepCache", {"cache_interval": 3, "cache_branch_id": 0}, _deepcache, joins=True),
    Peer("tgate", "tgate", _TGATE, _tgate),
)
_CACHES = (
    ("first_block_cache", "FirstBlockCacheConfig", {"threshold": 0.05}),
    ("pyramid_attention_broadcast", "PyramidAttentionBroadcastConfig", _BROADCAST),
    ("taylorseer", "TaylorSeerCacheConfig", _TAYLOR),
)
PEERS: dict[str, Peer] = {peer.name: peer for peer in _UNETS} | {
    name: Peer(name, "", settings, functools.partial(_cache, config=config), "transformer", joins=True)
    for name, config, settings in _CACHES
}


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    checks.choice("peer", name, PEERS)
    known = PEERS[name].settings
    if unknown := sorted(settings.keys() - known.keys()):
        raise ElfattError(f"setting {unknown[0]!r} of {name} is not known; accepted: {', '.join(known) or 'none'}.")
    for key, value in settings.items():
        kinds: Any = {float: (int, float), tuple: (list, tuple)}.get(type(known[key]), type(known[key]))
        if not isinstance(value, kinds) or ("interval" in key and value < 1):
            raise ElfattError(f"setting {key}={value!r} of {name} is not accepted; its default is {known[key]!r}.")


def packages_of(names: Iterable[str]) -> list[str]:
    """Return the packages of peers, as `elfatt_sd.errors` names them."""
    return sorted({PEERS[name].package for name in names} - {""})


@contextmanager
def running(pipe: Any, name: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Put a peer on a pipeline for the length of a `with` block.

    Args:
        pipe: the pipeline.
        name: the name of the peer, such as `deepcache`; docs/tuning.md lists them.
        settings: settings of the peer; those not given have the values of `PEERS`.

    Raises:
        ElfattError: the package is missing, a setting is not known, or the peer does not go with the pipeline.
    """
    check_settings(name, settings)
    need(f"peer {name!r}", *packages_of([name]))
    peer = PEERS[name]
    kind = "unet" if isinstance(family_of(main_denoiser(pipe)), UNet) else "transformer"
    if kind != peer.models:
        raise ElfattError(f"{name} speeds up pipelines with a {peer.models}; {type(pipe).__name__} has a {kind}.")
    with peer.on(pipe, **{**peer.settings, **settings}):
        yield
