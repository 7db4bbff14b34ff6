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


def alone(images: Tensor) -> Tensor:
    return images


NUMBER = 3
