"""Loaders of diffusers, whose errors become one line that tells a hub out of reach from a damaged model."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from elfatt_sd.config import ElfattError, ElfattFailure


def call_loader(model: str | Path, load: Callable[..., Any], *args: Any, source: str = "", **options: Any) -> Any:
    """Call a loader of diffusers, which raises errors of any kind for a model that is damaged or not there."""
    try:
        return load(*args, **options)
    except Exception as error:
        kind = ElfattFailure if _unreachable(error) else ElfattError
        if kind is ElfattFailure:
            source = source.replace("the hub", "the hub, which cannot be reached")
        reason = _lacking(error) or shortened(error.__cause__ or error)
        raise kind(f"model={str(model)!r} could not be loaded{source}: {reason}") from error


def _lacking(error: Exception) -> str:
    found = re.search(r"diffusers['`]? has no (?:attribute|class) ['`]?(\w+)", str(error))
    lacks = f"the installed diffusers {version('diffusers')} has no "
    return f"{lacks}{found[1]}; pip install -U diffusers." if found else ""


_NOT_REACHED = {"ConnectionError", "TransportError", "Timeout", "TimeoutError", "gaierror", "OfflineModeIsEnabled"}
_REACHED = {"RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError", "RemoteEntryNotFoundError"}


def _unreachable(error: BaseException) -> bool:
    chain = list(_causes(error))
    names = {kind.__name__ for each in chain for kind in type(each).__mro__}
    statuses = [getattr(getattr(each, "response", None), "status_code", 0) for each in chain]
    return bool(names & _NOT_REACHED or max(statuses) >= 500) and not names & _REACHED


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def first_cause(error: BaseException) -> BaseException:
    return list(_causes(error))[-1]


def dtype_keyword() -> str:
    import diffusers

    renamed = tuple(int(part) for part in diffusers.__version__.split(".")[:2]) >= (0, 42)
    return "dtype" if renamed else "torch_dtype"


def shortened(error: BaseException) -> str:
    return textwrap.shorten(str(error), 240, placeholder=" ...") or type(error).__name__
