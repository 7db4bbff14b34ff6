"""The recipe of the embedded pipeline: `python -m elfatt_sd.toy.recipe --out DIR` renders, trains and exports it.

Stages: the autoencoder, the classifier, the UNet with its text encoder on pictures of half the side, the same on full pictures, and the
export. Each finished or interrupted stage is kept under `DIR/checkpoints`; the same command goes on from there after a kill.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from elfatt_sd.toy import export, models
from elfatt_sd.toy.features import ToyClassifier, augment
from elfatt_sd.toy.renderer import ATTRIBUTES, describe, render_parameters, sample_parameters
from elfatt_sd.toy.training import Stage, train

CAPTION_SHARES = (0.40, 0.10, 0.15, 0.10, 0.10, 0.05, 0.10)  # of the wordings in `wordings`, the empty one last
SNR_LIMIT = 5.0
KL_WEIGHT = 1e-3


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Network sizes and stages; the stages' names are `vae`, `classifier`, `layout` and `detail`."""

    sizes: models.Sizes
    vae: Stage
    classifier: Stage
    layout: Stage
    detail: Stage

    @property
    def stages(self) -> tuple[Stage, Stage, Stage, Stage]:
        """The stages in order."""
        return self.vae, self.classifier, self.layout, self.detail


def full_recipe(minutes: float, device: torch.device) -> Recipe:
    """The recipe of the published weights, fitted into a time budget; a CPU takes an eighth of each batch."""
    share = 1 if device.type == "cuda" else 8
    seconds = 60 * minutes
    return Recipe(
        models.FULL,
        Stage("vae", 32 // share, 1.5e-3, seconds=0.17 * seconds),
        Stage("classifier", 64 // share, 2e-3, seconds=0.08 * seconds, decay=0.99),
        Stage("layout", 512 // share, 2e-3, seconds=0.25 * seconds, hold=0.5),
        Stage("detail", 128 // share, 1.5e-3, seconds=0.5 * seconds),
    )


def tiny_recipe() -> Recipe:
    """A recipe of a few seconds whose pictures are bad but whose every part is exercised."""
    return Recipe(
        models.TINY,
        Stage("vae", 4, 2e-3, steps=20),
        Stage("classifier", 4, 2e-3, steps=20),
        Stage("layout", 4, 2e-3, steps=20),
        Stage("detail", 4, 1e-3, steps=20),
    )


def pictures(batch: int, size: int, generator: torch.Generator, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Fresh renders: pictures `[n, 3, size, size]` in [-1, 1] and labels `[n, 4]`, on the generator's device."""
    labels, geometry = sample_parameters(batch, generator, scale)
    images = 2 * render_parameters(labels, geometry, size) - 1
    return images.contiguous(memory_format=torch.channels_last), labels


def working_copy(module: Any, device: torch.device) -> Any:
    """A frozen copy on `device`, in bf16 on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return copy.deepcopy(module).requires_grad_(False).eval().to(device, dtype, memory_format=torch.channels_last)


def vae_loss(vae: Any, size: int, batch: int, generator: torch.Generator) -> Tensor:
    """Absolute and squared error of the reconstruction, and a small divergence of the latents from the normal distribution."""
    images, _ = pictures(batch, size, generator)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
        posterior = vae.encode(images).latent_dist
        latents = posterior.mean + posterior.std * draw(posterior.mean, generator)
        error = vae.decode(latents).sample.float() - images
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return error.abs().mean() + error.square().mean() + KL_WEIGHT * divergence


def draw(like: Tensor, generator: torch.Generator) -> Tensor:
    """Normal noise of the shape, type and device of `like`."""
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def classifier_loss(model: ToyClassifier, coder: Any, size: int, batch: int, generator: torch.Generator) -> Tensor:
    """Cross entropy summed over the attributes; half the pictures pass through the autoencoder with some latent noise."""
    images, labels = pictures(batch, size, generator)
    half = batch // 2
    with torch.no_grad():
        latents = coder.encode(images[:half].to(coder.dtype)).latent_dist.mean
        latents = latents + 0.1 * latents.std() * draw(latents, generator)
        images[:half] = coder.decode(latents).sample.float()
    scores = model.logits(augment((images + 1) / 2, generator))
    losses = [functional.cross_entropy(scores[name], labels[:, i]) for i, name in enumerate(ATTRIBUTES)]
    return torch.stack(losses).sum()


class Denoiser(nn.Module):
    """The UNet and the text encoder that is trained along, as one module."""

    def __init__(self, sizes: models.Sizes) -> None:
        """Build both with random weights."""
        super().__init__()
        self.unet = models.build("unet", sizes)
        self.text_encoder = models.build("text_encoder", sizes)

    def forward(self, noisy: Tensor, timesteps: Tensor, tokens: Tensor) -> Tensor:
        """Predicted velocity `[n, 4, h, w]` from noisy latents, timesteps `[n]` and tokens `[n, 77]`."""
        velocity: Tensor = self.unet(noisy, timesteps, self.text_encoder(tokens)[0]).sample
        return velocity


def call(model: Denoiser, noisy: Tensor, *inputs: Tensor) -> Tensor:
    """Call the model, on a GPU in bf16 throughout while its weights stay float32."""
    if not noisy.is_cuda:
        return model(noisy, *inputs)  # type: ignore[no-any-return]
    weights = {name: value.bfloat16() for name, value in model.named_parameters()}
    return torch.func.functional_call(model, weights, (noisy.bfloat16(), *inputs)).float()  # type: ignore[no-any-return]


def denoising_loss(
    model: Denoiser, coder: Any, words: Words, size: int, scale: float, batch: int, generator: torch.Generator
) -> Tensor:
    """Squared error of the velocity, weighted so that nearly clean latents do not dominate (min-SNR)."""
    images, labels = pictures(batch, size, generator, scale)
    with torch.no_grad():
        clean = coder.encode(images.to(coder.dtype)).latent_dist.mean.float() * coder.config.scaling_factor
    noise = draw(clean, generator)
    timesteps = torch.randint(0, len(words.signal), (batch,), generator=generator, device=clean.device)
    alpha = words.signal[timesteps]
    root, rest = alpha.sqrt()[:, None, None, None], (1 - alpha).sqrt()[:, None, None, None]
    velocity = call(model, root * clean + rest * noise, timesteps, words.tokens(labels, generator))
    error = (velocity - (root * noise - rest * clean)).square().mean((1, 2, 3))
    return (error * (SNR_LIMIT * (1 - alpha)).clamp_max(1)).mean()


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
        """Tokens `[n, 77]` of a random wording for each row of `labels` `[n, 4]`."""
        index = labels[:, 0]
        for i, count in enumerate(self.counts[1:], 1):
            index = index * count + labels[:, i]
        wording = torch.multinomial(self.shares, len(labels), replacement=True, generator=generator)
        return self.table[index, wording]


def wordings(shape: str, color: str, pattern: str, background: str) -> tuple[str, ...]:
    """The ways in which training names a scene; the last is the empty prompt that guidance needs."""
    full = describe(shape, color, pattern, background)
    brief = full.replace(" plain", "")
    thing = full.split(" on ")[0]
    bare = f"{color} {shape} on {pattern} {background} background"
    return full, bare, brief, f"a high quality photograph of {full}.", f"a photo of {brief}", thing, ""


def build_all(recipe: Recipe, out: Path, seed: int, device: torch.device, until: str, save_every: float) -> Path | None:
    """Run the stages, each from where it stopped, and export.

    Returns:
        The folder of the pipeline, or None if `until` named an earlier stage than the last.
    """
    torch.manual_seed(seed)  # the initial weights; later draws have their own generators
    size, folder, records = recipe.sizes.picture, out / "checkpoints", {}
    vae = models.build("vae", recipe.sizes).to(device, memory_format=torch.channels_last)
    classifier = ToyClassifier().to(device, memory_format=torch.channels_last)
    denoiser = Denoiser(recipe.sizes).to(device, memory_format=torch.channels_last)

    def run(stage: Stage, model: nn.Module, loss: Any, *arguments: Any) -> bool:
        bound = functools.partial(loss, model, *arguments)
        records[stage.name] = train(stage, model, bound, folder, seed, device, save_every)
        return stage.name == until

    if run(recipe.vae, vae, vae_loss, size):
        return None
    images, _ = pictures(64, size, torch.Generator(device).manual_seed(seed))
    models.standardise(vae, images)
    coder = working_copy(vae, device)
    if run(recipe.classifier, classifier, classifier_loss, coder, size):
        return None
    models.save_tokenizer(out / "pipeline" / "tokenizer")
    words = Words(load_tokenizer(out / "pipeline" / "tokenizer"), models.build("scheduler", recipe.sizes), device)
    if run(recipe.layout, denoiser, denoising_loss, coder, words, size // 2, 1.4):
        return None
    if run(recipe.detail, denoiser, denoising_loss, coder, words, size, 1.0):
        return None
    parts = {"vae": vae, "unet": denoiser.unet, "text_encoder": denoiser.text_encoder}
    return export.export(recipe.sizes, parts, classifier, records, out, seed, str(device))


def load_tokenizer(folder: Path) -> Any:
    """The CLIP tokenizer of a folder."""
    import transformers

    return transformers.CLIPTokenizer.from_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m elfatt_sd.toy.recipe", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--config", choices=("full", "tiny"), default="full")
    parser.add_argument("--minutes", type=float, default=20.0, help="time to train with --config full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until", choices=("vae", "classifier", "layout", "detail"), default="export", help="stop after a stage")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    recipe = tiny_recipe() if options.config == "tiny" else full_recipe(options.minutes, device)
    result = build_all(recipe, options.out, options.seed, device, options.until, options.save_every)
    print(f"pipeline in {result}" if result else f"stopped after {options.until}")


if __name__ == "__main__":
    main()
