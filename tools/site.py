"""A hook of `mkdocs.yml`: the files of the site keep their places in the repository, and so their links hold."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

PAGES = (
    "*.md",
    "LICENSE",
    "NOTICE",
    "docs/**/*",
    "eval/*.md",
    "eval/*.toml",
    "eval/results/**/*.md",
    "eval/results/**/*.png",
    "eval/results/**/*.html",
    "benchmarks/*.md",
    "benchmarks/results/**/*.md",
    "benchmarks/results/**/*.png",
    "elfatt_sd/toy/*/README.md",
    "elfatt_sd/toy/*/*.png",
    "notebooks/*.ipynb",
    "tools/*.md",
)


SHIM, OWN_SHIM = "https://unpkg.com/iframe-worker/shim", "docs/worker.js"  # the offline search needs one

_FOREIGN = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def page_files(root: Path) -> list[Path]:
    """Return all files of the site, as paths in the repository."""
    found = {path.relative_to(root) for pattern in PAGES for path in root.glob(pattern) if path.is_file()}
    return sorted(found)


def on_files(files: Any, config: Any) -> Any:
    """Take the repository's own folders in place of `docs_dir`; the theme's files stay."""
    from mkdocs.structure.files import File, Files

    root = Path(config.config_file_path).parent
    kept = [file for file in files if not str(file.abs_src_path).startswith(config.docs_dir)]
    own = [File.generated(config, path.as_posix(), abs_src_path=str(root / path)) for path in page_files(root)]
    return Files([*kept, *own])


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Load nothing from elsewhere: the search's shim is our own.

    Raises:
        ValueError: the page would load something else from the network.
    """
    own = posixpath.relpath(OWN_SHIM, posixpath.dirname(page.url) or ".")
    output = output.replace(SHIM, own)
    if foreign := _FOREIGN.findall(output):
        raise ValueError(f"{page.url} loads from elsewhere: {foreign}.")
    return output
