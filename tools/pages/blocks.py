"""Pages whose figures come from committed results: between markers, in a text that people write.

<!-- WORD NAME OPTIONS -->
... what the results of NAME say ...
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from elfatt_sd.errors import ElfattError

MISSING = "Not measured yet."  # in the place of results that are not there


def check_results(folder: Path) -> None:
    """Check that a folder of results is there, so that a mistyped one does not empty a page.

    Raises:
        ElfattError: it is not.
    """
    if not folder.is_dir():
        raise ElfattError(f"{str(folder)!r} is not a folder; give that of the results.")


def check_markers(text: str, words: Sequence[str]) -> None:
    """Check that a page has a place for results.

    Args:
        text: of the page.
        words: with which its markers may start.

    Raises:
        ElfattError: it has none.
    """
    if not any(_block(word).search(text) for word in words):
        raise ElfattError(f"the page has no marker '<!-- {words[0]} NAME -->' with an '<!-- end -->' after it.")


def fill_blocks(text: str, word: str, write: Callable[[str, Sequence[str]], str]) -> str:
    """Put text between the markers of a page.

    Args:
        text: of the page.
        word: with which the markers start.
        write: returns what stands between them, from the name and the options after it.

    Returns:
        The page; whatever is outside the markers stays as it is.
    """
    return _block(word).sub(lambda found: found[1] + write(found[2], found[3].split()) + found[4], text)


def _block(word: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {re.escape(word)} ([\w/-]+)((?: [\w./:=,-]+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
