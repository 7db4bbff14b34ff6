"""The model card of the embedded pipeline: what it is, how it was trained, how good it is, and its loss curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elfatt_sd.toy import GUIDANCE, TOY
from elfatt_sd.toy.renderer import COLORS, PATTERNS, SHAPES
from tools.toy.models import SCALING

PUBLISHED = Path(__file__).parent / "weights-training"  # of the weights in the package
RECORD = "record.json"
TEXT = """---
license: mit
library_name: diffusers
pipeline_tag: text-to-image
---

# elfatt-sd toy: a small Stable Diffusion of shapes on patterns

{size} of float16 weights; images of {side}x{side} pixels, latents of {grid}x{grid}, so that the finest self-attention
has {tokens} tokens, as SD 1.5 has at 512x512. It draws a {shapes} in one of eight colours ({colors}) on a {patterns}
background of another colour. It exists to test and to show attention patches; it knows nothing else.

```python
from diffusers import StableDiffusionPipeline

pipe = StableDiffusionPipeline.from_pretrained("elfatt_sd/toy/weights")
pipe("a red star on a striped blue background", num_inference_steps=25, guidance_scale={guidance}).images[0]
```

## Parts
| part | parameters |
|---|---|
{parts}

PNDM as in SD 1.5, but with `v_prediction` and `beta_end` 0.02. The autoencoder is taught a fixed code (colour averages
of 4x4 pixels in four directions, `scaling_factor` {scaling}), so the UNet can train on small renders without it.

## Training
By `python -m tools.toy.recipe`, on endless renders of `elfatt_sd.toy.renderer`; no other data. {machine}
Seed {seed}; {versions}; {date}.

| stage | steps | images a step | hours |
|---|---|---|---|
{stages}

The stages `layout`, `outline` and `detail` grow the UNet from its two inner levels outwards. In `outline` and `detail`
the self-attention of the grids finer than 16x16 sees a random coarse grid of 16x16 keys; in `finish` it is exact
softmax attention everywhere.

{finish}

![loss curves](curves.png)

## Quality
{quality}
"""
UNMEASURED = "Not measured yet: `python -m tools.toy.quality --out DIR`."
QUALITY = """{count} images, {steps} PNDM steps, guidance {guidance}, seed {seed}
(`python -m tools.toy.quality --count {count} --steps {steps} --guidance {guidance} --out DIR`):

| | |
|---|---|
| attributes right, mean | {mean_accuracy:.3f} |
| shape, colour, pattern, background | {each} |
| all four right | {all_four_right:.3f} |
| `FD-toy` to {reference_renders} held-out renders | {distance} |
| `FD-toy` of {count} other renders to the same (floor) | {floor} |
"""


def write_card(folder: Path, record: dict[str, Any], quality: dict[str, Any] | None = None) -> None:
    """Write `README.md` and `curves.png` into a pipeline's folder.

    Args:
        folder: the pipeline.
        record: the content of the recipe's `weights-training/record.json`.
        quality: the content of `quality.json`, if it was measured.
    """
    config = json.loads((folder / "unet" / "config.json").read_text(encoding="utf-8"))
    side, stages = config["sample_size"], record["stages"]
    rows = [
        f"| {name} | {stage['steps']} | {stage['pictures']} | {stage['seconds'] / 3600:.2f} |"
        for name, stage in stages.items()
    ]
    text = TEXT.format(
        size=f"{sum(path.stat().st_size for path in folder.glob('*/*.safetensors')) / 1e6:.1f} MB",
        side=4 * side,
        grid=side,
        tokens=side**2,
        shapes=", ".join(SHAPES[:-1]) + f" or {SHAPES[-1]}",
        colors=", ".join(COLORS),
        patterns=", ".join(PATTERNS[:-1]) + f" or {PATTERNS[-1]}",
        guidance=GUIDANCE,
        scaling=SCALING,
        parts="\n".join(f"| {name} | {count:,} |" for name, count in record["parameters"].items()),
        machine=f"On {record['machine']}.",
        seed=record["seed"],
        versions=", ".join(f"{name} {version}" for name, version in record["packages"].items()),
        date=record["date"],
        stages="\n".join(rows),
        finish=record.get("notes", ""),
        quality=QUALITY.format(**quality_parts(quality)) if quality else UNMEASURED,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    plot_curves({name: stage["curve"] for name, stage in stages.items()}, folder / "curves.png")


def quality_parts(figures: dict[str, Any]) -> dict[str, Any]:
    """Return what `tools.toy.quality` measured by the names that the text of a card has for it."""
    each = ", ".join(f"{value:.3f}" for value in figures["accuracy"].values())
    return {**figures, "each": each, "distance": figures["FD-toy"], "floor": figures["FD-toy of renders (floor)"]}


def training_folder(pipeline: Path) -> Path:
    """Return where the training record of a pipeline is, with what further training needs: next to it, if not here."""
    return PUBLISHED if pipeline.resolve() == TOY else pipeline.parent / PUBLISHED.name


def plot_curves(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Plot the loss of each stage over its steps, on logarithmic axes, into one PNG."""
    from matplotlib.figure import Figure

    columns = max(1, min(5, len(curves)))
    rows = max(1, -(-len(curves) // columns))
    figure = Figure(figsize=(2.2 * columns, 2.2 * rows), dpi=80, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(curves) :]:
        axes.remove()
    for axes, (name, curve) in zip(panels, curves.items(), strict=False):
        axes.plot([step for step, _ in curve], [loss for _, loss in curve], color="tab:blue", linewidth=1)
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=7, which="both")
        if curve:
            axes.set_yscale("log")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("loss", fontsize=9)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    """Write the card again, for `python -m tools.toy.card PIPELINE --quality quality.json`."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m tools.toy.card", description=main.__doc__)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--record", type=Path, help="of the training (default: where the recipe wrote it)")
    parser.add_argument("--quality", type=Path, help="what `python -m tools.toy.quality` wrote")
    options = parser.parse_args(arguments)
    record = options.record or training_folder(options.pipeline) / RECORD
    read = [json.loads(path.read_text(encoding="utf-8")) for path in (record, options.quality) if path]
    write_card(options.pipeline, *read)


if __name__ == "__main__":
    main()
