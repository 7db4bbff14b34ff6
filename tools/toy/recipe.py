"""The recipe of the embedded pipeline: `python -m tools.toy.recipe --out DIR` renders, trains and exports it.

Stages: the autoencoder, the classifier, the UNet with its text encoder from the inner levels outwards, and the export.
Each finished or interrupted stage is kept under `DIR/checkpoints`; the same command goes on from there after a kill.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from elfatt_sd.toy.features import ToyClassifier
from elfatt_sd.toy.renderer import ATTRIBUTES, describe, render_parameters, sample_parameters
from tools.toy import export, models
from tools.toy.card import training_folder
from tools.toy.growing import Denoiser, train_with
from tools.toy.training import Stage, command_line, next_title, train

CAPTION_SHARES = (0.40, 0.10, 0.15, 0.10, 0.10, 0.05, 0.10)  # of the wordings in `wordings`, the empty one last
SNR_LIMIT = 5.0
KEY_ROWS = 16  # and columns of keys in self-attention, before the last stage
OBJECT_WEIGHT = 3.0  # in the denoising loss: the object's outline is few of the tokens, and the hardest to learn
LATENT_NOISE = 0.3  # on unit latents, at most, while the decoder trains
LOG_VARIANCE = -7.0  # of the encoder's posterior


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Network sizes and stages.

    Attributes:
        sizes: the networks' sizes.
        vae: trains the autoencoder.
        classifier: trains the classifier.
        layout: trains the UNet's two inner levels, on 1/16 of the tokens.
        outline: trains its three inner levels, on 1/4 of the tokens.
        detail: trains the whole UNet, with sparse keys on the finer grids (see `TrainingAttention`).
        finish: trains the whole UNet with exact attention everywhere, down to a learning rate of 0.
    """

    sizes: models.Sizes
    vae: Stage
    classifier: Stage
    layout: Stage
    outline: Stage
    detail: Stage
    finish: Stage


STAGES = tuple(field.name for field in dataclasses.fields(Recipe))[1:]
# Which levels a stage draws its steps from, and how many images a step has for each of `Stage.batch`.
LEVELS = {"layout": (2,), "outline": (1, 1, 2), "detail": (0, 0, 1), "finish": (0, 0, 1)}
PICTURES = (1, 3, 6)


def full_recipe(minutes: float) -> Recipe:
    """The recipe of the published weights, fitted into a time budget."""
    shares = {"vae": 0.08, "classifier": 0.05, "layout": 0.12, "outline": 0.12, "detail": 0.45, "finish": 0.18}
    seconds = {name: 60 * minutes * share for name, share in shares.items()}
    return Recipe(
        models.FULL,
        Stage("vae", 16, 2e-3, seconds=seconds["vae"], decay=0.99),
        Stage("classifier", 24, 2e-3, seconds=seconds["classifier"], decay=0.98),
        Stage("layout", 4, 2e-3, seconds=seconds["layout"], hold=0.5),
        Stage("outline", 4, 1.5e-3, seconds=seconds["outline"], hold=0.5),
        Stage("detail", 4, 1e-3, seconds=seconds["detail"], hold=0.5),
        Stage("finish", 4, 1e-3, seconds=seconds["finish"]),
    )


def tiny_recipe() -> Recipe:
    """A recipe of a few seconds whose images are bad but whose every part is exercised."""
    return Recipe(models.TINY, *(Stage(name, 2, 2e-3, steps=6) for name in STAGES))


def pictures(batch: int, size: int, generator: torch.Generator, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Fresh renders: images `[n, 3, size, size]` in [-1, 1] and labels `[n, 4]`, on the generator's device."""
    labels, geometry = sample_parameters(batch, generator, scale)
    images = 2 * render_parameters(labels, geometry, size) - 1
    return images.contiguous(memory_format=torch.channels_last), labels


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Blur, tint and noise that training adds so that slightly imperfect images are still read right.

    Args:
        images: `[n, 3, s, s]` in [0, 1].
        generator: the source of randomness, on the images' device.
    """
    draw = torch.rand(6, len(images), 1, 1, 1, generator=generator, device=images.device)
    noise = torch.randn(images.shape, generator=generator, device=images.device)
    tint = torch.rand(2, len(images), 3, 1, 1, generator=generator, device=images.device) - 0.5
    blurred = functional.avg_pool2d(functional.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    images = images + draw[0] * (blurred - images)
    images = images * (1 + 0.16 * tint[0]) + 0.1 * tint[1]
    return images + 0.12 * draw[1] * draw[2] * noise


def object_weights(geometry: Tensor, side: int) -> Tensor:
    """Weights `[n, 1, side, side]` of mean 1 each, `OBJECT_WEIGHT` times as large on a disc around the object."""
    ticks = (torch.arange(side, device=geometry.device) + 0.5) / side
    x, y, radius = geometry[:, :3, None, None].unbind(1)
    inside = torch.hypot(ticks[None, None, :] - x, ticks[None, :, None] - y) < 1.25 * radius
    weights = 1 + (OBJECT_WEIGHT - 1) * inside.float()
    return (weights / weights.mean((1, 2), keepdim=True))[:, None]


def working_copy(module: Any, device: torch.device) -> Any:
    """A frozen copy on `device`, in bf16 on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return copy.deepcopy(module).requires_grad_(False).eval().to(device, dtype, memory_format=torch.channels_last)


def vae_loss(vae: Any, size: int, batch: int, generator: torch.Generator) -> Tensor:
    """Errors of the decoder on noisy codes, and of the encoder against the code.

    Three of four steps see close-ups of a quarter of the side, which hold most edges for the work, the others whole
    images.
    """
    whole = float(torch.rand(1, generator=generator, device=generator.device)) < 0.25
    images, _ = pictures(max(1, batch // 16), size, generator) if whole else pictures(batch, size // 4, generator, 2.5)
    code = models.encode_code(functional.avg_pool2d(images, 4))
    blur = torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device).square()
    noisy = code + (LATENT_NOISE / models.SCALING) * blur * draw(code, generator)
    with torch.autocast(images.device.type, torch.bfloat16):
        error = vae.decode(noisy).sample.float() - images
        posterior = vae.encode(images).latent_dist
    miss = posterior.mean.float() - code
    narrow = (posterior.logvar.float() - LOG_VARIANCE).square().mean()
    picture: Tensor = error.abs().mean() + 2 * error.square().mean()
    total: Tensor = picture + miss.abs().mean() + miss.square().mean() + 1e-3 * narrow
    return total


def draw(like: Tensor, generator: torch.Generator) -> Tensor:
    """Normal noise of the shape, type and device of `like`."""
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def classifier_loss(model: ToyClassifier, coder: Any, size: int, batch: int, generator: torch.Generator) -> Tensor:
    """Cross entropy summed over the attributes, on renders of half the side, which is what the classifier sees.

    One image in twelve comes out of the decoder, from a noisy code.
    """
    images, labels = pictures(batch, size // 2, generator)
    part = max(1, batch // 12)
    seen, truth = pictures(part, size, generator)
    with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16):
        code = models.encode_code(functional.avg_pool2d(seen, 4))
        decoded = coder.decode((code + 0.15 / models.SCALING * draw(code, generator)).to(coder.dtype)).sample
    images = torch.cat([images[part:], functional.avg_pool2d(decoded.float(), 2)])
    labels = torch.cat([labels[part:], truth])
    scores = model.scores(model.features(augment((images + 1) / 2, generator)))
    losses = [functional.cross_entropy(scores[name], labels[:, i]) for i, name in enumerate(ATTRIBUTES)]
    return torch.stack(losses).sum()


def denoising_loss(
    model: Denoiser, words: Words, side: int, levels: tuple[int, ...], batch: int, generator: torch.Generator
) -> Tensor:
    """Squared error of the velocity at one of `levels`, weighted.

    Nearly clean latents weigh little (min-SNR), the object much (`object_weights`), and what noise hides little
    (`surprise`). Otherwise the errors that no model can avoid drown those at medium noise,
    where outlines become straight.

    The noise is that of the latent grid of `side`, averaged to the level's grid as the outer levels will hand it down.
    """
    device = generator.device
    level = levels[int(torch.randint(len(levels), (1,), generator=generator, device=device))]
    labels, geometry = sample_parameters(PICTURES[level] * batch, generator)
    images = 2 * render_parameters(labels, geometry, side) - 1
    clean = functional.avg_pool2d(models.SCALING * models.encode_code(images), 2**level)
    noise = draw(clean, generator) / 2**level
    uniform = torch.rand(len(clean), generator=generator, device=device)
    exponent = 1 / (1.5 + 0.5 * level)  # what an image shows is decided at high noise, the more so on coarse grids
    timesteps = (len(words.signal) * uniform**exponent).long()
    alpha = words.signal[timesteps]
    root, rest = alpha.sqrt()[:, None, None, None], (1 - alpha).sqrt()[:, None, None, None]
    noisy = (root * clean + rest * noise).contiguous(memory_format=torch.channels_last)
    with torch.autocast(device.type, torch.bfloat16):
        velocity = model(noisy, timesteps, words.tokens(labels, generator), level)
    error = (velocity.float() - (root * noise - rest * clean)).square()
    error = (error * object_weights(geometry, clean.shape[-1])).mean((1, 2, 3))
    weighted: Tensor = error * (SNR_LIMIT * (1 - alpha)).clamp_max(1) / surprise(alpha)
    return weighted.mean()


def surprise(alpha: Tensor) -> Tensor:
    """How much less an error under much noise weighs, where an image's layout is decided.

    The error of a trained model was measured to grow as `1 + 1.1 log10(alpha) ** 2`; divided by all of that, outlines
    became straighter but stripes lost their common direction.

    Args:
        alpha: fraction of the signal in the noisy latents' variance, `[n]`, above 0.

    Returns:
        1 for clean latents, about 2.6 at `alpha` 0.007 and 3.8 at 0.0015.
    """
    return 1 + 0.35 * alpha.log10().square()


class Words:
    """Tokens of every wording of every combination of labels, and the noise schedule, on the training device."""

    def __init__(self, tokenizer: Any, scheduler: Any, device: torch.device) -> None:
        """Tokenise all prompts once."""
        combinations = list(itertools.product(*ATTRIBUTES.values()))
        prompts = [text for labels in combinations for text in wordings(*labels)]
        ids = tokenizer(prompts, padding="max_length", max_length=models.TOKENS, return_tensors="pt").input_ids
        self.table = ids.view(len(combinations), len(CAPTION_SHARES), models.TOKENS).to(device)
        self.shares = torch.tensor(CAPTION_SHARES, device=device)
        self.counts = [len(values) for values in ATTRIBUTES.values()]
        self.signal = scheduler.alphas_cumprod.to(device)

    def tokens(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Tokens `[n, TOKENS]` of a random wording for each row of `labels` `[n, 4]`."""
        index = labels[:, 0]
        for i, count in enumerate(self.counts[1:], 1):
            index = index * count + labels[:, i]
        wording = torch.multinomial(self.shares, len(labels), replacement=True, generator=generator)
        tokens: Tensor = self.table[index, wording]
        return tokens


def wordings(shape: str, color: str, pattern: str, background: str) -> tuple[str, ...]:
    """The ways in which training names a scene; the last is the empty prompt that guidance needs."""
    full = describe(shape, color, pattern, background)
    brief = full.replace(" plain", "")
    thing = full.split(" on ")[0]
    bare = f"{color} {shape} on {pattern} {background} background"
    return full, bare, brief, f"a high quality photograph of {full}.", f"a photo of {brief}", thing, ""


class Workshop:
    """The networks in training, the stages that train them, and the export."""

    def __init__(self, recipe: Recipe, out: Path, seed: int, device: torch.device, save_every: float = 60.0) -> None:
        """Build the networks with random weights; nothing is trained yet."""
        torch.manual_seed(seed)  # the initial weights; later draws have their own generators
        self.recipe, self.out, self.seed, self.device, self.save_every = recipe, out, seed, device, save_every
        self.records: dict[str, Any] = {}
        self.notes = ""
        self.vae = self._placed(models.build("vae", recipe.sizes))
        self.classifier = self._placed(ToyClassifier())
        self.denoiser = self._placed(Denoiser(recipe.sizes))
        tokenizer = out / "pipeline" / "tokenizer"
        models.save_tokenizer(tokenizer)
        self.words = Words(load_tokenizer(tokenizer), models.build("scheduler", recipe.sizes), device)

    def _placed(self, module: Any) -> Any:
        return module.to(self.device, memory_format=torch.channels_last)

    def load(self, folder: Path) -> None:
        """Start from exported weights: a pipeline's folder, and the classifier's and the training's own next to it.

        Their training record goes on: a stage that is run again is a further row.
        """
        parts = {"vae": self.vae, "unet": self.denoiser.unet, "text_encoder": self.denoiser.text_encoder}
        for name, module in parts.items():
            export.load_half(module, folder / name)
        export.load_half(self.classifier, folder.parent / "weights-classifier")
        export.load_half(self.denoiser.doors, training_folder(folder))
        earlier = export.load_record(folder)
        self.records, self.notes = dict(earlier.get("stages", {})), earlier.get("notes", "")

    def run(self, name: str) -> None:
        """Run a stage, from where an earlier run stopped."""
        stage, size = getattr(self.recipe, name), self.recipe.sizes.picture
        levels = LEVELS.get(name, ())
        model: nn.Module = self.denoiser
        loss: Any = functools.partial(denoising_loss, self.denoiser, self.words, size // 4, levels)
        if name == "vae":
            model, loss = self.vae, functools.partial(vae_loss, self.vae, size)
        elif name == "classifier":
            coder = working_copy(self.vae, self.device)
            model, loss = self.classifier, functools.partial(classifier_loss, self.classifier, coder, size)
        else:
            train_with(self.denoiser.unet, None if name == "finish" else KEY_ROWS)
        checkpoints = self.out / "checkpoints"
        record = train(stage, model, loss, checkpoints, self.seed, self.device, self.save_every)
        counts = sorted({stage.batch * PICTURES[level] for level in levels or (0,)})
        self.records[next_title(name, self.records)] = {**record, "pictures": " or ".join(map(str, counts))}

    def export(self) -> Path:
        """Write the results; return the pipeline's folder."""
        parts = {"vae": self.vae, "unet": self.denoiser.unet, "text_encoder": self.denoiser.text_encoder}
        return export.export(
            self.recipe.sizes,
            parts,
            {"classifier": self.classifier, "training": self.denoiser.doors},
            {"stages": self.records, "notes": self.notes},
            self.out,
            self.seed,
            str(self.device),
        )


def load_tokenizer(folder: Path) -> Any:
    """The CLIP tokenizer of a folder."""
    import transformers

    return transformers.CLIPTokenizer.from_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = command_line("tools.toy.recipe", str(__doc__), STAGES, minutes=180)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    recipe = tiny_recipe() if options.config == "tiny" else full_recipe(options.minutes)
    workshop = Workshop(recipe, options.out, options.seed, device, options.save_every)
    if options.resume_from:
        workshop.load(options.resume_from)
    for name in options.stages:
        workshop.run(name)
    print(f"pipeline in {workshop.export()}")


if __name__ == "__main__":
    main()
