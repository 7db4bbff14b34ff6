"""Functions that tests give as metrics."""

from __future__ import annotations

from torch import Tensor


def brightness(images: Tensor, prompts: list[str]) -> Tensor:
    return images.flatten(1).double().mean(1)


def moved(images: Tensor, prompts: list[str], untouched: Tensor) -> list[float]:
    return (images.double() - untouched.double()).abs().flatten(1).mean(1).tolist()  # type: ignore[no-any-return]


def one_number(images: Tensor, prompts: list[str]) -> float:
    return 1.0


def broken(images: Tensor, prompts: list[str]) -> Tensor:
    raise RuntimeError("no\nway")


def endless(images: Tensor, prompts: list[str]) -> list[float]:
    return [float("inf")] * len(prompts)


def complex_numbers(images: Tensor, prompts: list[str]) -> Tensor:
    return brightness(images, prompts) + 1j


def scaled(images: Tensor, prompts: list[str], scale: float = 2.0, *, more: float = 0.0) -> Tensor:
    return brightness(images, prompts) * scale + more


def needs_a_word(images: Tensor, prompts: list[str], *, scale: float) -> Tensor:
    return brightness(images, prompts) * scale


def maybe_moved(images: Tensor, prompts: list[str], untouched: Tensor | None = None) -> list[float]:
    return [] if untouched is None else moved(images, prompts, untouched)


def ssim(images: Tensor, prompts: list[str]) -> Tensor:
    return brightness(images, prompts)


def astronomic(images: Tensor, prompts: list[str]) -> list[float]:
    return [1e308] * len(prompts)


def alone(images: Tensor) -> Tensor:
    return images


NUMBER = 3
