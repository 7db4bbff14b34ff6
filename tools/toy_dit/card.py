"""The model card of the embedded diffusion transformer: `python -m tools.toy_dit.card PIPELINE --quality FILE`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tools.toy.card import plot_curves, quality_parts

RECORD = "training.json"  # in a pipeline's folder: how it was trained
TEXT = """---
license: mit
library_name: diffusers
pipeline_tag: text-to-image
---

# elfatt-sd toy-dit: a small Flux of shapes on patterns

{size:.1f} MB of float16 weights. Images have {side}x{side} pixels, which are {tokens} tokens, as Flux has at 1024x1024.
It draws the same scenes as the first embedded pipeline. It exists to test and to show attention patches; it knows
nothing else.

```python
from diffusers import FluxPipeline

pipe = FluxPipeline.from_pretrained("elfatt_sd/toy/weights-dit")
pipe("a red star on a striped blue background").images[0]
```

## Parts
| part | parameters |
|---|---|
{parts}

The transformer has {joint} joint and {single} single blocks with {heads} heads of {head} channels. It is not distilled:
`guidance_scale` has no effect, and `true_cfg_scale` with an empty negative prompt is possible but not needed. The
autoencoder is that of the first pipeline. The text encoders were trained with the transformer. Each layer of the T5
text encoder sees only the {reach} tokens before a token, so that padding changes no prompt.

## Training
By `python -m tools.toy_dit.recipe`, on endless renders of `elfatt_sd.toy.renderer`; no other data. On {machine}.
Seed {seed}; {versions}; {date}.

| stage | steps | images a step | hours |
|---|---|---|---|
{stages}

`layout` trains on 16x16 tokens and `outline` on 32x32. `detail` trains on 64x64 tokens with sparse image keys, and
`finish` with exact attention. The cores were shared with other work, so the hours say little about the cost.
{notes}

![loss curves](curves.png)

## Quality
{quality}
"""
QUALITY = """{made} of {steps} steps, seed {seed}
(`python -m tools.toy.quality --pipeline elfatt_sd/toy/weights-dit --count {asked} --steps {steps} \
--batch 1 --out DIR`):

| | |
|---|---|
| attributes right, mean | {mean_accuracy:.3f} |
| shape, colour, pattern, background | {each} |
| all four right | {all_four_right:.3f} |
| `FD-toy` to {reference_renders} held-out renders | {distance} |
| `FD-toy` of {count} other renders to the same (floor) | {floor} |
"""


def write_card(folder: Path, quality: dict[str, Any] | None = None) -> None:
    """Write `README.md` and `curves.png` into a pipeline's folder.

    Args:
        folder: the pipeline, with its training record.
        quality: the content of `quality.json`, if it was measured.
    """
    record, config = (json.loads((folder / name).read_text()) for name in (RECORD, "transformer/config.json"))
    stages = record["stages"]
    rows = [f"| {name} | {x['steps']} | {x['images']} | {x['seconds'] / 3600:.2f} |" for name, x in stages.items()]
    text = TEXT.format(
        size=sum(path.stat().st_size for path in folder.glob("*/*.safetensors")) / 1e6,
        side=8 * record["grid"],
        tokens=record["grid"] ** 2,
        parts="\n".join(f"| {name} | {count:,} |" for name, count in record["parameters"].items()),
        joint=config["num_layers"],
        single=config["num_single_layers"],
        heads=config["num_attention_heads"],
        head=config["attention_head_dim"],
        reach=record["reach"],
        machine=record["machine"],
        seed=record["seed"],
        versions=", ".join(f"{name} {version}" for name, version in record["packages"].items()),
        date=record["date"],
        stages="\n".join(rows),
        notes=record.get("notes", ""),
        quality=describe_quality(quality) if quality else "Not measured yet.",
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    plot_curves({name: stage["curve"] for name, stage in stages.items()}, folder / "curves.png")


def describe_quality(figures: dict[str, Any]) -> str:
    """The section of the card about what `tools.toy.quality` measured."""
    count, asked = figures["count"], figures["asked"]
    made = f"{count} images" if count == asked else f"The first {count} images of {asked} (the others are to be made)"
    return QUALITY.format(made=made, **quality_parts(figures))


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and write the card again."""
    parser = argparse.ArgumentParser(prog="python -m tools.toy_dit.card", description=__doc__)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--quality", type=Path, help="what `python -m tools.toy.quality` wrote")
    options = parser.parse_args(arguments)
    write_card(options.pipeline, json.loads(options.quality.read_text()) if options.quality else None)


if __name__ == "__main__":
    main()
