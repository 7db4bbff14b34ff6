"""Settings for others: where they come from, the card that tells it, and the hub."""

from __future__ import annotations

import dataclasses
import datetime
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from elfatt_sd.config import SETTINGS, Origin, PatchConfig, is_hub_id
from elfatt_sd.devices import device_name
from elfatt_sd.drawing.compare import side_by_side
from elfatt_sd.drawing.studio import versions
from elfatt_sd.errors import ElfattError, ElfattFailure, shortened
from elfatt_sd.families import main_denoiser
from elfatt_sd.families.shapes import fingerprint
from elfatt_sd.files import write_file
from elfatt_sd.plans import input_grid
from elfatt_sd.toy import EMBEDDED
from elfatt_sd.tuning.proof import Budget, Measure, Proof
from elfatt_sd.tuning.runs import Runs, png

if TYPE_CHECKING:
    from elfatt_sd.tuning.tuned import Tuned

_CARD = """---
{front}
---
# {model}, {times:.2f} times as fast without training

Settings of elfatt-sd, found by `elfatt_sd.tune` for {origin},
guidance {origin.guidance}, on {origin.device} in {origin.dtype}.

- **Asked for:** {origin.asked}
- **Promised:** {promised}

```python
import elfatt_sd  # {versions}

elfatt_sd.apply_patch(pipe, "{name}")  # your diffusers pipeline of {model}
elfatt_sd.remove_patch(pipe)  # untouched again
```

They hold for this model, size, number of steps, scheduler and guidance; elsewhere a warning says what differs.
The image changes: a promise is for the mean of images, not for each.

| settings | times as fast | {metric} to untouched | images |
|---|---:|---:|---:|
{rows}

![Closeness over speed of what was run](curve.png)

![The farthest of the held-out images, untouched and tuned](pair.png)

{origin.images} held-out images of {origin.prompts} prompts, {origin.date}.
"""


def embedded_name(pipe: Any) -> str:
    """Return the name of a pipeline of this package; empty for another one."""
    where = str(getattr(pipe.config, "_name_or_path", ""))
    return next((name for name, each in EMBEDDED.items() if where == str(each.folder)), "")


def with_origin(runs: Runs, budget: Budget, measure: Measure, proof: Proof) -> PatchConfig:
    """Return settings that were proved, with what their file, and whoever applies them, is told."""
    pipe, drawn = runs.pipe, proof.untouched[0].frames
    (width, height), count = drawn[0].size, len(drawn)
    where = str(getattr(pipe.config, "_name_or_path", "")) or type(pipe).__name__
    frames, rows, columns = input_grid(pipe, height, width, count if count > 1 else None)
    origin = Origin(
        embedded_name(pipe) or (Path(where).name if os.path.exists(where) else where),
        *fingerprint(main_denoiser(pipe)),
        width,
        height,
        count,
        (frames, rows, columns),
        runs.settings.steps,
        type(pipe.scheduler).__name__,
        runs.settings.guidance,
        device_name(runs.device),
        str(pipe.dtype).removeprefix("torch."),
        budget.words(measure),
        f"{proof.words()}; {proof.point.times:.2f} times as fast",
        len({sample.prompt for sample in proof.samples}),
        len(proof.samples),
        versions(),
        datetime.date.today().isoformat(),
    )
    return dataclasses.replace(proof.point.config, origin=origin)


def write_folder(tuned: Tuned, folder: Path, curve: bytes, name: str) -> None:
    """Write settings as a folder, with a card that says how they are used by this name."""
    from huggingface_hub import ModelCardData

    proof, origin = tuned.proof, tuned.config.origin
    if proof is None or origin is None:
        raise ElfattError("the settings leave the pipeline untouched; there is nothing to share, so ask for less.")
    base = origin.model if is_hub_id(origin.model) else None
    front = ModelCardData(library_name="elfatt-sd", base_model=base, tags=["elfatt-sd", "diffusers", "settings"])
    runs = sorted(tuned.points, key=lambda each: each.times)
    numbers = [f"{each.times:.2f} | {each.mean:.{tuned.measure.digits}f} | {len(each.closeness)}" for each in runs]
    card = _CARD.format(
        front=front.to_yaml(),
        model=origin.model,
        times=proof.point.times,
        origin=origin,
        promised=origin.promised,
        versions=", ".join(f"{library} {version}" for library, version in origin.versions.items()),
        name=name,
        metric=tuned.measure.name,
        rows="\n".join(f"| {each.name} | {figures} |" for each, figures in zip(runs, numbers, strict=True)),
    )
    farthest = proof.order[0]
    pictures = [drawn[farthest].frames[0] for drawn in (proof.untouched, proof.tuned)]
    close = tuned.measure.words(proof.point.closeness[farthest])
    pair = side_by_side(pictures, [("untouched", ""), ("tuned", close)], proof.samples[farthest].prompt)
    for file, content in {"README.md": card.encode(), "curve.png": curve, "pair.png": png(pair)}.items():
        write_file(folder / file, content)
    tuned.config.save(folder / SETTINGS)  # last: with it the folder is whole


def upload(tuned: Tuned, curve: bytes, name: str, token: str | None, private: bool) -> str:
    """Write settings as a repository of the hub, which is made where there is none, and return its address."""
    from huggingface_hub import HfApi

    with TemporaryDirectory() as folder:
        write_folder(tuned, Path(folder), curve, name)
        try:
            api = HfApi(token=token)
            address = str(api.create_repo(name, private=private, exist_ok=True))
            api.upload_folder(repo_id=name, folder_path=folder, commit_message="Settings of elfatt-sd")
        except Exception as error:
            raise ElfattFailure(f"{name!r} could not be written to the hub: {shortened(error)}") from error
    return address
