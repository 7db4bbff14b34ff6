"""Accelerators of other packages, each a file: what a user could pick instead, or together with a patch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from elfatt_sd import errors as checks
from elfatt_sd.errors import ElfattError, need
from elfatt_sd.peers import caches, deepcache, tgate, tomesd
from elfatt_sd.peers.base import Peer

_ALL = (tomesd.PEER, deepcache.PEER, tgate.PEER, *caches.PEERS)
PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}


def peer_named(name: str) -> Peer:
    """Return a peer."""
    checks.choice("peer", name, PEERS)
    return PEERS[name]


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Check the names of a peer's settings."""
    known = peer_named(name).settings
    if unknown := sorted(settings.keys() - known.keys()):
        raise ElfattError(f"setting {unknown[0]!r} of {name} is not known; accepted: {', '.join(known) or 'none'}.")


def packages_of(names: Iterable[str]) -> list[str]:
    """Return the packages of peers, as `elfatt_sd.errors` names them."""
    return sorted({peer_named(name).package for name in names} - {""})


@contextmanager
def running(pipe: Any, name: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Put a peer on a pipeline for the length of a `with` block.

    Args:
        pipe: the pipeline.
        name: the name of the peer, such as `deepcache`; docs/tuning.md lists them.
        settings: settings of the peer; those not given have the values of its package.

    Raises:
        ElfattError: the package is missing, a setting is not known, or the peer does not go with the pipeline.
    """
    from elfatt_sd.families import family_of, main_denoiser
    from elfatt_sd.families.unet import UNet

    peer = peer_named(name)
    check_settings(name, settings)
    need(f"peer {name!r}", *packages_of([name]))
    kind = "unet" if isinstance(family_of(main_denoiser(pipe)), UNet) else "transformer"
    if kind != peer.models:
        raise ElfattError(f"{name} speeds up pipelines with a {peer.models}; {type(pipe).__name__} has a {kind}.")
    with peer.on(pipe, **{**peer.settings, **settings}):
        yield
