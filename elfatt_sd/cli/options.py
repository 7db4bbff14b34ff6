"""What commands that load a model share: their options, and the model with how it is loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elfatt_sd.cli.console import adds_options, complain, quiet_libraries
from elfatt_sd.cli.names import SCHEDULERS
from elfatt_sd.toy import EMBEDDED

if TYPE_CHECKING:
    from elfatt_sd.drawing.studio import Request

MODELS = f"{', '.join(EMBEDDED)}, a diffusers directory, a hub id, or a .safetensors file"
STEPS, GUIDANCE = (
    f"{text}; if not given {', '.join(f'{getattr(each, field):g} for {name}' for name, each in EMBEDDED.items())}, "
    "otherwise the pipeline's own."
    for text, field in (("Denoising steps", "steps"), ("Guidance scale", "guidance"))
)
Model = Annotated[str, typer.Option(help=f"{MODELS}.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, mps or xpu.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Load pickled weights, which can run any code.")]
Variant = Annotated[str | None, typer.Option(help="Variant of the weights: fp16 loads *.fp16.safetensors.")]
NegativePrompt = Annotated[str | None, typer.Option(help="Prompt that guidance leads away from.")]
Scheduler = Annotated[
    str | None,
    typer.Option(
        autocompletion=lambda: list(SCHEDULERS),
        help=f"{', '.join(SCHEDULERS)}, or diffusers' class; the model's own if not given.",
    ),
]
Height = Annotated[int | None, typer.Option(help="Height in pixels, a multiple of 8; the model's own if not given.")]
Width = Annotated[int | None, typer.Option(help="Width in pixels, a multiple of 8; the model's own if not given.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DRAWING_OPTIONS: dict[str, tuple[Any, Any]] = {
    "steps": (Annotated[int | None, typer.Option(help=STEPS)], None),
    "guidance": (Annotated[float | None, typer.Option(help=GUIDANCE)], None),
    "height": (Height, None),
    "width": (Width, None),
    "negative_prompt": (NegativePrompt, None),
    "scheduler": (Scheduler, None),
}
SOURCE_OPTIONS: dict[str, tuple[Any, Any]] = {
    "device": (Device, "auto"),
    "dtype": (Dtype, "auto"),
    "allow_pickle": (AllowPickle, False),
    "variant": (Variant, None),
}


@dataclass(frozen=True)
class Source:
    """A model and how it is loaded; see `load_pipeline`."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    allow_pickle: bool = False
    variant: str | None = None

    def check(self) -> None:
        """Check what can be checked before it is loaded."""
        from elfatt_sd.loading import check_model, check_names, pick_device

        check_names(self.device, self.dtype)
        pick_device(self.device)
        check_model(self.model, allow_pickle=self.allow_pickle, variant=self.variant)

    def load_for(self, request: Request) -> Any:
        """Check all that can be checked, and load the pipeline for what is to be drawn."""
        from elfatt_sd.cli.preflight import check_sizes, check_steps

        self.check()
        check_steps(self.model, request.steps)
        check_sizes(self.model, [(request.height, request.width)])
        if self.model in EMBEDDED:
            tell_unknown_words(list(request.prompts))
        return self.load()

    def load(self) -> Any:
        """Load the pipeline."""
        from elfatt_sd.loading import load_pipeline

        quiet_libraries()
        return load_pipeline(
            self.model, device=self.device, dtype=self.dtype, allow_pickle=self.allow_pickle, variant=self.variant
        )


def tell_unknown_words(prompts: list[str]) -> None:
    """Say which words of prompts the embedded pipelines do not know."""
    from elfatt_sd.toy.renderer import COLORS, PATTERNS, SHAPES, unknown_words

    unknown = sorted({word for prompt in prompts for word in unknown_words(prompt)})
    if unknown:
        named = ", ".join(map(repr, unknown[:10])) + f" and {len(unknown) - 10} more words" * (len(unknown) > 10)
        complain(
            f"the toy does not know {named}; it draws one of {', '.join(SHAPES)} in "
            f"{', '.join(COLORS)} on a {', '.join(PATTERNS)} background. For anything else give a real model: "
            "--model DIRECTORY, HUB-ID or FILE.safetensors",
            "note",
        )


takes_drawing = adds_options("drawing", DRAWING_OPTIONS, dict)


def takes_source(device: str = "auto") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    options = {**SOURCE_OPTIONS, "device": (Device, device)}
    return adds_options("source", options, lambda **given: functools.partial(Source, **given))
