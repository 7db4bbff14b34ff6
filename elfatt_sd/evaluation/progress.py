"""How far the making of images has come, over all rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from elfatt_sd.progress import progress_of


@contextlib.contextmanager
def image_progress(total: int, *, shares: int = 1, shown: bool) -> Iterator[Callable[[int, str], None]]:
    """Show progress over all rows; yields a function that takes the number of new images and the row's name.

    Of several processes only one shows it, and knows of its own share alone.
    """
    unit, made = "images" if shares == 1 else f"images of process 1 of {shares}", 0
    with progress_of(unit, every=60, title="generate: {},", shown=shown) as tell:

        def advance(images: int, row: str) -> None:
            nonlocal made
            made += images
            tell(row, made, total)

        yield advance
