"""The images of a row, each of which is checked against its hash when it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elfatt_sd.config import ElfattError
from elfatt_sd.evaluation.entries import Entry, Source
from elfatt_sd.evaluation.extraction import Pictures, Preprocessing, SourceImages
from elfatt_sd.evaluation.run import Row
from elfatt_sd.files import read_plain, sha256_of_data


@dataclass(frozen=True)
class Images:
    """The images of a row."""

    name: str  # the row's
    paths: Sequence[Path]  # their files, in the order of their indices
    sha256: Sequence[str]  # their hashes when they were generated
    classes: Sequence[int]  # class index of each
    texts: Sequence[str]  # prompt of each
    frames: int = 1  # of each; clips have several, which lie below each other in their file

    @classmethod
    def of_row(cls, row: Row, frames: int = 1, count: int | None = None) -> Images:
        """List the images of a finished row."""
        made = row.made_images()
        if count is not None and len(made) != count:
            remedy = f"delete the file to make row {row.name!r} again"
            raise ElfattError(f"{row.manifest} lists {len(made)} images; accepted: {count}; {remedy}.")
        paths = [row.image_file(each.index) for each in made]
        hashes, classes = [each.sha256 for each in made], [each.class_index for each in made]
        return cls(row.name, paths, hashes, classes, [each.prompt for each in made], frames)

    @property
    def identity(self) -> str:
        """Hash of all images."""
        return sha256_of_data(list(self.sha256))

    @property
    def frame_classes(self) -> list[int]:
        """The class of each frame of each image."""
        return [number for number in self.classes for _ in range(self.frames)]

    def stacks(self) -> Iterator[Tensor]:
        """Yield each image as uint8 `[frames, 3, h, w]`."""
        stack: list[Tensor] = []
        for frame in self.pictures().load(0, len(self.paths) * self.frames):
            if isinstance(frame, str):
                raise ElfattError(f"image {frame} cannot be read.")
            stack.append(torch.from_numpy(frame).permute(2, 0, 1))
            if len(stack) == self.frames:
                yield torch.stack(stack)
                stack = []

    def pictures(self) -> Pictures:
        """All frames, decoded; each file is checked against its hash when it is read."""
        entries = [Entry(str(path), (path, digest)) for path, digest in zip(self.paths, self.sha256, strict=True)]
        files = SourceImages(Source(entries, self.identity, _read_checked), Preprocessing(), threads=2)
        return files if self.frames == 1 else Frames(files, self.frames)


@dataclass(frozen=True)
class Frames:
    """The frames of clips, clip after clip."""

    clips: Pictures  # each has its frames below each other
    count: int  # frames of each

    def __len__(self) -> int:
        return len(self.clips) * self.count

    def load(self, start: int, stop: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]] | str]:
        """Yield the frames of a range in order; of a clip that cannot be read, the reason for each."""
        first, last = start // self.count, -(-stop // self.count)
        for number, clip in enumerate(self.clips.load(first, last), first):
            whole = isinstance(clip, str) or clip.shape[0] % self.count == 0
            frames = np.split(clip, self.count) if whole and not isinstance(clip, str) else [clip] * self.count
            for place, frame in enumerate(frames, number * self.count):
                if start <= place < stop:
                    yield frame if whole else f"image {number} (no {self.count} frames)"


def _read_checked(entry: Entry) -> bytes:
    path, digest = entry.where
    try:
        content = read_plain(path)
    except FileNotFoundError as error:
        raise ElfattError(f"{path} was deleted after generation; delete its row's manifest to remake it.") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ElfattError(
            f"{path} was altered after generation (its sha256 is not the manifest's); put it back, or delete its row's "
            "manifest to remake it."
        )
    return content
