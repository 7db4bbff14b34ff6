"""The recipe of the embedded diffusion transformer: `python -m tools.toy_dit.recipe --out DIR` trains and exports it.

Stages train the transformer with its text encoders on ever finer grids. The autoencoder is that of the first embedded
pipeline. Each finished or interrupted stage is kept under `DIR/checkpoints`; the same
command goes on from there after a kill.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elfatt_sd.measure import timed
from elfatt_sd.toy import TOY
from elfatt_sd.toy.renderer import ATTRIBUTES, render_parameters, sample_parameters
from tools.toy import recipe as first
from tools.toy.export import load_half
from tools.toy.models import SCALING, encode_code
from tools.toy.training import Stage, command_line, next_title, train
from tools.toy_dit import models
from tools.toy_dit.denoiser import SLOTS, Denoiser
from tools.toy_dit.export import PARTS, export, load_record

COPIES = 0.5  # fraction of the steps with the padding of a plain call; the others draw a length
UNKNOWN = 0.01  # fraction of the text tokens that are hidden


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Network sizes and stages.

    Attributes:
        sizes: the networks' sizes.
        layout: trains on grids of a quarter of the finest grid's side.
        outline: trains on grids of half the side.
        detail: trains on the finest grid, with sparse image keys.
        finish: trains on the finest grid with exact attention, down to a learning rate of 0.
    """

    sizes: models.Sizes
    layout: Stage
    outline: Stage
    detail: Stage
    finish: Stage


@dataclasses.dataclass(frozen=True)
class View:
    """What a training step sees.

    Attributes:
        coarse: the finest grid's side divided by this grid's side.
        images: images a step for each of `Stage.batch`.
        keys: rows and columns of image keys; None for all.
    """

    coarse: int
    images: int
    keys: int | None = None


STAGES = tuple(field.name for field in dataclasses.fields(Recipe))[1:]
# A step draws one of its stage's views.
VIEWS = {
    "layout": (View(4, 16),),
    "outline": (View(2, 4), View(2, 4, 16), View(4, 16)),
    "detail": (View(1, 2, 16), View(1, 2, 32), View(2, 4)),
    "finish": (View(1, 2),),
}
# Steps a second on one core of the machine that trained the published weights, compiled.
SPEEDS = {"layout": 1.9, "outline": 1.5, "detail": 0.85, "finish": 0.2}


def full_recipe(minutes: float) -> Recipe:
    """The recipe of the published weights; `minutes` are those of one core of the machine that trained them.

    Steps are counted, so that a slower or busier machine makes the same steps in a longer time.
    """
    shares = {"layout": 0.2, "outline": 0.3, "detail": 0.3, "finish": 0.2}
    steps = {name: round(60 * minutes * share * SPEEDS[name]) for name, share in shares.items()}
    return Recipe(
        models.FULL,
        Stage("layout", 1, 1.5e-3, steps=steps["layout"], hold=0.6),
        Stage("outline", 1, 1e-3, steps=steps["outline"], hold=0.6),
        Stage("detail", 1, 6e-4, steps=steps["detail"], hold=0.6),
        Stage("finish", 1, 4e-4, steps=steps["finish"]),
    )


def tiny_recipe() -> Recipe:
    """A recipe of a few seconds whose images are bad but whose every part is exercised."""
    return Recipe(models.TINY, *(Stage(name, 2, 2e-3, steps=6) for name in STAGES))


class Words:
    """Tokens of every wording of every combination of labels for both text encoders, on the training device."""

    def __init__(self, tokenizer: Any, clip_tokenizer: Any, layers: int, device: torch.device) -> None:
        """Tokenise all prompts once.

        Args:
            tokenizer: the T5 tokenizer.
            clip_tokenizer: the CLIP tokenizer.
            layers: layers of the T5 text encoder.
            device: where the tables are kept.

        Raises:
            ValueError: if a prompt leaves no padding out of its tokens' reach within `SLOTS`.
        """
        combinations = list(itertools.product(*ATTRIBUTES.values()))
        prompts = [text for labels in combinations for text in first.wordings(*labels)]
        ids = tokenizer(prompts, padding="max_length", max_length=SLOTS, return_tensors="pt").input_ids
        longest = int((ids != tokenizer.pad_token_id).sum(1).max())
        if longest + layers * models.REACH >= SLOTS:
            raise ValueError(f"prompts have up to {longest} tokens, too many for SLOTS={SLOTS}")
        clip_ids = clip_tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
        shape = (len(combinations), len(first.CAPTION_SHARES), -1)
        self.tokens, self.clip_tokens = ids.view(shape).to(device), clip_ids.view(shape).to(device)
        self.shares = torch.tensor(first.CAPTION_SHARES, device=device)
        self.counts = [len(values) for values in ATTRIBUTES.values()]

    def draw(self, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """T5 tokens `[n, SLOTS]`, a few of them hidden, and CLIP tokens of random wordings of `labels` `[n, 4]`."""
        wording = torch.multinomial(self.shares, len(labels), replacement=True, generator=generator)
        index = self.index(labels)
        tokens = self.tokens[index, wording]
        hidden = torch.rand(tokens.shape, generator=generator, device=tokens.device) < UNKNOWN
        words = tokens > models.PIECES.index(models.UNKNOWN)
        return tokens.where(~(hidden & words), models.PIECES.index(models.UNKNOWN)), self.clip_tokens[index, wording]

    def full(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """T5 and CLIP tokens of the full description of `labels` `[n, 4]`."""
        index = self.index(labels)
        return self.tokens[index, 0], self.clip_tokens[index, 0]

    def index(self, labels: Tensor) -> Tensor:
        """Row of each combination of `labels` `[n, 4]` in the tables."""
        index = labels[:, 0]
        for i, count in enumerate(self.counts[1:], 1):
            index = index * count + labels[:, i]
        return index


def denoising_loss(
    model: Denoiser, words: Words, views: tuple[View, ...], batch: int, generator: torch.Generator
) -> Tensor:
    """Squared error of the velocity `noise - clean` on one of `views`, weighted as the first pipeline's is.

    Times are shifted towards noise the more the finer the grid is. The model is told the time of the finest grid at
    which an object is equally visible, so that a time means the same on all grids.
    """
    device = generator.device
    view = views[int(torch.randint(len(views), (1,), generator=generator, device=device))]
    count = view.images * batch
    labels, geometry = sample_parameters(count, generator)
    images = 2 * render_parameters(labels, geometry, 2 * model.grid // view.coarse) - 1
    clean = SCALING * encode_code(images)
    noise = first.draw(clean, generator)
    uniform = (torch.arange(count, device=device) + torch.rand(count, generator=generator, device=device)) / count
    told = shift(uniform, models.SHIFT)
    times = shift(told, 1 / view.coarse)
    mix = times[:, None, None, None]
    tokens, clip_tokens = words.draw(labels, generator)
    with torch.autocast(device.type, torch.bfloat16, enabled=half_is_faster(device)):
        velocity = model(
            (1 - mix) * clean + mix * noise, told, tokens, clip_tokens, draw_padding(generator), view.keys, generator
        )
    error = (velocity.float() - (noise - clean)).square()
    error = (error * first.object_weights(geometry, clean.shape[-1])).mean((1, 2, 3))
    weighted: Tensor = error * importance(told)
    return weighted.mean()


@functools.cache
def half_is_faster(device: torch.device) -> bool:
    """Measure whether products in bfloat16 are faster than in float32; processors without it take 100 times as long."""
    if device.type != "cpu":
        return True
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        product = functools.partial(torch.matmul, *[torch.ones(384, 384, dtype=dtype)] * 2)
        seconds[dtype] = min(timed(product, device) for _ in range(3))
    return seconds[torch.bfloat16] < seconds[torch.float32]


def shift(times: Tensor, factor: float) -> Tensor:
    """Times at which noise is `factor` times as large relative to the signal; the scheduler's `shift`."""
    return factor * times / (1 + (factor - 1) * times)


def importance(told: Tensor) -> Tensor:
    """Weights `[n]` of the errors at times of the finest grid.

    They are the first pipeline's (`recipe.denoising_loss` there), whose grid has half the side.
    """
    times = shift(told, 0.5)
    signal = ((1 - times).square() / ((1 - times).square() + times.square())).clamp(1e-4, 1)
    limit: Tensor = (first.SNR_LIMIT * (1 - signal)).clamp_max(1)
    return limit / first.surprise(signal)


def draw_padding(generator: torch.Generator) -> int:
    """Padding beyond `SLOTS`: that of a plain call, or that of any shorter maximum length."""
    most = models.LENGTH - SLOTS
    plain, length = torch.rand(2, generator=generator, device=generator.device).tolist()
    return most if plain < COPIES else round((most + 1) ** length) - 1


class Workshop:
    """The networks in training, the stages that train them, and the export."""

    def __init__(self, recipe: Recipe, out: Path, seed: int, device: torch.device, save_every: float = 60.0) -> None:
        """Build the networks with random weights; nothing is trained yet."""
        torch.manual_seed(seed)  # the initial weights; later draws have their own generators
        self.recipe, self.out, self.seed, self.device, self.save_every = recipe, out, seed, device, save_every
        self.records: dict[str, Any] = {}
        self.denoiser = Denoiser(recipe.sizes).to(device)
        self.words = load_words(recipe.sizes, out / "pipeline" / "tokenizer_2", device)

    def load(self, folder: Path) -> None:
        """Start from the exported weights in a pipeline's folder; its training record goes on."""
        for name in PARTS:
            load_half(getattr(self.denoiser, name), folder / name)
        self.records = dict(load_record(folder).get("stages", {}))

    def run(self, name: str) -> None:
        """Run a stage, from where an earlier run stopped."""
        loss = functools.partial(denoising_loss, self.denoiser, self.words, VIEWS[name])
        stage, folder = getattr(self.recipe, name), self.out / "checkpoints"
        record = train(stage, self.denoiser, loss, folder, self.seed, self.device, self.save_every)
        self.records[next_title(name, self.records)] = {**record, "images": describe_images(name, stage.batch)}

    def export(self) -> Path:
        """Write the pipeline; see `tools.toy_dit.export`."""
        training = {"device": str(self.device), "seed": self.seed, "stages": self.records}
        return export(self.recipe.sizes, self.denoiser, training, self.out)


def describe_images(name: str, batch: int) -> str:
    """How many images a step of a stage has, in words."""
    return " or ".join(map(str, sorted({batch * view.images for view in VIEWS[name]})))


def load_words(sizes: models.Sizes, tokenizer: Path, device: torch.device) -> Words:
    """`Words` from the first pipeline's CLIP tokenizer and a T5 tokenizer that is written to `tokenizer`."""
    import transformers

    models.save_tokenizer(tokenizer)
    t5_tokenizer: Any = getattr(transformers, "T5TokenizerFast")  # noqa: B009 - newer releases make it on demand
    return Words(
        t5_tokenizer.from_pretrained(tokenizer),
        first.load_tokenizer(TOY / "tokenizer"),
        sizes.layers,
        device,
    )


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = command_line("tools.toy_dit.recipe", str(__doc__), STAGES, minutes=240)
    parser.add_argument("--compile", action="store_true", help="compile the transformer; needs a C++ compiler")
    options = parser.parse_args(arguments)
    torch.set_flush_denormal(True)
    recipe = tiny_recipe() if options.config == "tiny" else full_recipe(options.minutes)
    workshop = Workshop(recipe, options.out, options.seed, torch.device(options.device), options.save_every)
    if options.resume_from:
        workshop.load(options.resume_from)
    if options.compile:
        workshop.denoiser.compile_blocks()
    for name in options.stages:
        workshop.run(name)
    print(f"pipeline in {workshop.export()}")


if __name__ == "__main__":
    main()
