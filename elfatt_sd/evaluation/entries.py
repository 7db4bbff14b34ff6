"""Images in a fixed order, and which files are images."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from elfatt_sd.evaluation.decoding import is_image
from elfatt_sd.files import is_hidden

# Of what is meant as an image, whether it can be read or not; of what never is one; and what nobody misses.
SUFFIXES = re.compile(
    r"\.(apng|avif|bmp|dib|gif|hei[cf]|j2k|jfif|jp2|jpe?g?|jpf|jpx|jxl|p[bgnp]m|pcx|png|qoi|sgi|tga|tiff?|webp)"
)
BESIDE = re.compile(r"\.(caption|cls|csv|jsonl?|md|np[yz]|tsv|txt|xml|ya?ml)")
_LITTER = frozenset((".ds_store", "thumbs.db", "desktop.ini", "__macosx"))
LARGEST = 1 << 30  # bytes of an image's file: one with holes can have more than there is memory


@dataclass(frozen=True)
class Entry:
    """One image."""

    name: str  # what messages call it
    where: Any  # what `Source.read` needs to find it
    group: str = ""  # its class, as its folder or label column says; empty where nothing does


@dataclass(frozen=True)
class Source:
    """Images in a fixed order."""

    entries: Sequence[Entry]  # the images
    fingerprint: Any  # plain data that changes when the images do
    read: Callable[[Entry], bytes]  # returns the encoded bytes of an entry; safe to call from several threads
    # names of what is hidden or no image; without what tells of an image, such as `a.txt` next to `a.png`
    left_out: Sequence[str] = ()


def stamp(name: str, path: Path) -> list[Any]:
    try:
        status = path.stat()
    except OSError:  # such as a link to nowhere, which is named when it is read
        return [name, None, None]
    return [name, status.st_size, status.st_mtime_ns]


def check_size(size: int) -> None:
    """Refuse an image that has more bytes than memory should be spent on."""
    if size > LARGEST:
        raise OSError(f"{size / 2**30:.0f} GiB; accepted: at most {LARGEST / 2**30:.0f} GiB an image")


def is_litter(name: str) -> bool:
    """Tell what systems leave behind, which nobody misses."""
    path = PurePosixPath(name)
    return path.name.startswith("._") or any(part.lower() in _LITTER for part in path.parts)


def sorted_out(files: Iterable[tuple[str, Path]]) -> tuple[list[tuple[str, Path]], list[str]]:
    """Tell images from other files, by their suffix and otherwise by their content; what is hidden is no image."""
    images: list[tuple[str, Path]] = []
    others: list[str] = []
    for name, path in sorted(files):
        if is_litter(name):
            continue
        if any(map(is_hidden, PurePosixPath(name).parts)):
            others.append(name)
        elif ends(name, SUFFIXES) or (not ends(name, BESIDE) and _holds_image(path)):
            images.append((name, path))
        else:
            others.append(name)
    keys = {_key(name) for name, _ in images}
    return images, [name for name in others if _key(name) not in keys or not ends(name, BESIDE)]


def ends(name: str, suffixes: re.Pattern[str]) -> bool:
    return suffixes.fullmatch(PurePosixPath(name).suffix.lower()) is not None


def _holds_image(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return is_image(file)
    except OSError:
        return False


def parent(name: str) -> str:
    return PurePosixPath(name).parent.name


def _key(name: str) -> str:
    """What `a.png` and `a.txt` have in common: the name up to the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]
