"""Images in a fixed order, and which files are images."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

from elfatt_sd.evaluation.decoding import is_image
from elfatt_sd.files import is_hidden

# Of what is meant as an image, whether it can be read or not; of what never is one; and what nobody misses.
SUFFIXES = re.compile(
    r"\.(apng|avif|bmp|dib|gif|hei[cf]|j2k|jfif|jp2|jpe?g?|jpf|jpx|jxl|p[bgnp]m|pcx|png|qoi|sgi|tga|tiff?|webp)"
)
BESIDE = re.compile(r"\.(caption|cls|csv|jsonl?|md|np[yz]|tsv|txt|xml|ya?ml)")
_LITTER = frozenset((".ds_store", "thumbs.db", "desktop.ini", "__macosx"))
LARGEST = 1 << 30  # bytes of an image's file, unpacked: a few bytes of a .zip, or a file with holes, can stand for more
Place = TypeVar("Place")


@dataclass(frozen=True)
class Entry:
    """One image.

    Attributes:
        name: what messages call it.
        where: what `Source.read` needs to find it.
        group: its class, as its folder, `.cls` member or label column says; empty where nothing does.
    """

    name: str
    where: Any
    group: str = ""


@dataclass(frozen=True)
class Source:
    """Images in a fixed order.

    Attributes:
        entries: the images.
        fingerprint: plain data that changes when the images do.
        read: returns the encoded bytes of an entry; safe to call from several threads.
        left_out: names of what is hidden or no image; without what tells of an image, such as `a.txt` next to `a.png`.
    """

    entries: Sequence[Entry]
    fingerprint: Any
    read: Callable[[Entry], bytes]
    left_out: Sequence[str] = ()


def stamp(name: str, path: Path) -> list[Any]:
    """Return a file's name, size and modification time."""
    try:
        status = path.stat()
    except OSError:  # such as a link to nowhere, which is named when it is read
        return [name, None, None]
    return [name, status.st_size, status.st_mtime_ns]


def check_size(size: int) -> None:
    """Refuse an image that has more bytes than memory should be spent on.

    Raises:
        OSError: it has.
    """
    if size > LARGEST:
        raise OSError(f"{size / 2**30:.0f} GiB; accepted: at most {LARGEST / 2**30:.0f} GiB an image")


def is_litter(name: str) -> bool:
    """Tell what systems leave behind, which nobody misses."""
    path = PurePosixPath(name)
    return path.name.startswith("._") or any(part.lower() in _LITTER for part in path.parts)


def sorted_out(
    files: Iterable[tuple[str, Place]], open_file: Callable[[Place], IO[bytes] | None]
) -> tuple[list[tuple[str, Place]], list[str]]:
    """Tell images from other files, by their suffix and otherwise by their content; what is hidden is left out.

    Args:
        files: names and places.
        open_file: gives the content at a place; None where there is no plain file.

    Returns:
        The images by name, and the names of what is left out.
    """
    images: list[tuple[str, Place]] = []
    others: list[str] = []
    for name, place in sorted(files, key=lambda file: file[0]):
        if is_litter(name):
            continue
        if any(map(is_hidden, PurePosixPath(name).parts)):
            others.append(name)
        elif ends(name, SUFFIXES) or (not ends(name, BESIDE) and _holds_image(place, open_file)):
            images.append((name, place))
        else:
            others.append(name)
    keys = {key(name) for name, _ in images}
    return images, [name for name in others if key(name) not in keys or not ends(name, BESIDE)]


def ends(name: str, suffixes: re.Pattern[str]) -> bool:
    """Tell whether a name ends in one of some suffixes."""
    return suffixes.fullmatch(PurePosixPath(name).suffix.lower()) is not None


def _holds_image(place: Place, open_file: Callable[[Place], IO[bytes] | None]) -> bool:
    try:
        file = open_file(place)
    except OSError:
        return False
    if file is None:
        return False
    with file:
        return is_image(file)


def parent(name: str) -> str:
    """Return the name of the folder that a file is in."""
    return PurePosixPath(name).parent.name


def key(name: str) -> str:
    """WebDataset's key of a member: its name up to the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]
