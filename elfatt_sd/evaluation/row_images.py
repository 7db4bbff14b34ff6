"""The pictures of a row, each of which is checked against its hash when it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.extraction import Preprocessing, SourcePictures
from elfatt_sd.evaluation.run import Row
from elfatt_sd.evaluation.sources import Entry, Source
from elfatt_sd.files import sha256_of_data


@dataclass(frozen=True)
class Images:
    """The pictures of a row.

    Attributes:
        name: the row's.
        paths: their files, in the order of their indices.
        sha256: their hashes when they were generated.
        classes: class index of each.
    """

    name: str
    paths: Sequence[Path]
    sha256: Sequence[str]
    classes: Sequence[int]

    @classmethod
    def of_row(cls, row: Row, count: int | None = None) -> Images:
        """List the pictures of a finished row.

        Args:
            row: which one.
            count: how many there must be; None takes any number.

        Raises:
            ElfattError: the row is not finished, or its list is not whole.
        """
        made = row.made_images()
        if count is not None and len(made) != count:
            remedy = f"delete the file to make row {row.name!r} anew"
            raise ElfattError(f"{row.manifest} lists {len(made)} images; accepted: {count}; {remedy}.")
        paths = [row.image_file(each.index) for each in made]
        return cls(row.name, paths, [each.sha256 for each in made], [each.class_index for each in made])

    @property
    def identity(self) -> str:
        """Hash of all pictures."""
        return sha256_of_data(list(self.sha256))

    def pictures(self) -> SourcePictures:
        """The decoded pictures; each is checked against its hash when it is read."""
        entries = [Entry(str(path), (path, digest)) for path, digest in zip(self.paths, self.sha256, strict=True)]
        return SourcePictures(Source(entries, self.identity, _read_checked), Preprocessing(), threads=2)


def _read_checked(entry: Entry) -> bytes:
    path, digest = entry.where
    try:
        content: bytes = path.read_bytes()
    except FileNotFoundError as error:
        raise ElfattError(f"{path} was deleted after generation; delete its row's manifest to make it anew.") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ElfattError(
            f"{path} was altered after generation (its sha256 is not the manifest's); put it back, or delete its row's "
            "manifest to make it anew."
        )
    return content
