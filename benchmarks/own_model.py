"""Train the toy on to another model, which nothing was tuned to: `python -m benchmarks.own_model --out FOLDER`.

Its colours have other names, and its images have 128 pixels a side. It goes on where it was stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import elfatt_sd
from elfatt_sd.files import atomic_file
from elfatt_sd.measure import progress_of
from elfatt_sd.toy.renderer import render_parameters, sample_parameters
from tools.toy.models import SCALING, encode_code
from tools.toy.recipe import Words, object_weights, surprise

SIZE, BATCH, RATE, SAVED_EVERY = 128, 8, 4e-4, 50


def loss_of(pipe: Any, words: Words, generator: torch.Generator) -> torch.Tensor:
    """The weighted error of the velocity, on renders whose channels change places."""
    labels, geometry = sample_parameters(BATCH, generator)
    images = (2 * render_parameters(labels, geometry, SIZE // 4) - 1)[:, [1, 2, 0]]
    clean = SCALING * encode_code(images)
    noise = torch.randn(clean.shape, generator=generator)
    timesteps = (len(words.signal) * torch.rand(BATCH, generator=generator) ** (2 / 3)).long()
    alpha = words.signal[timesteps]
    root, rest = alpha.sqrt()[:, None, None, None], (1 - alpha).sqrt()[:, None, None, None]
    context = pipe.text_encoder(words.tokens(labels, generator))[0]
    velocity = pipe.unet(root * clean + rest * noise, timesteps, context).sample
    error = (velocity - (root * noise - rest * clean)).square() * object_weights(geometry, clean.shape[-1])
    weighted = error.mean((1, 2, 3)) * (5 * (1 - alpha)).clamp_max(1) / surprise(alpha)
    return weighted.mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    torch.manual_seed(0)
    pipe = elfatt_sd.load_pipeline("toy")
    words = Words(pipe.tokenizer, pipe.scheduler, torch.device("cpu"))
    trained = [*pipe.unet.parameters(), *pipe.text_encoder.parameters()]
    pipe.unet.train().requires_grad_(True)
    pipe.text_encoder.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, RATE)
    kept, begin = given.out / "training.pt", 0
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        begin = state["step"]
        pipe.unet.load_state_dict(state["unet"])
        pipe.text_encoder.load_state_dict(state["text_encoder"])
        optimizer.load_state_dict(state["optimizer"])
    with progress_of("steps") as tell:
        for step in range(begin, given.steps):
            optimizer.param_groups[0]["lr"] = RATE * min(1, step / 20 + 0.05, 2 * (1 - step / given.steps))
            loss = loss_of(pipe, words, torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            tell(f"training, loss {float(loss.detach()):.3f}", step + 1, given.steps)
            if (step + 1) % SAVED_EVERY == 0:
                kept.parent.mkdir(parents=True, exist_ok=True)
                state = {"step": step + 1, "unet": pipe.unet.state_dict(), "optimizer": optimizer.state_dict()}
                with atomic_file(kept) as file:
                    torch.save(state | {"text_encoder": pipe.text_encoder.state_dict()}, file)
    pipe.unet.eval().requires_grad_(False)
    pipe.save_pretrained(given.out / "pipeline")


if __name__ == "__main__":
    main()
