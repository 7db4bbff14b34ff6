"""The demo page."""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from elfatt_sd.config import METHODS, UNTOUCHED, PatchConfig, method_named
from elfatt_sd.drawing.pictures import psnr
from elfatt_sd.drawing.running import Shot
from elfatt_sd.drawing.studio import OnStep, Request, Studio, fault_of_pair, why_unchanged
from elfatt_sd.errors import ElfattError, in_plain_words
from elfatt_sd.measure import ratios
from elfatt_sd.patch import plan
from elfatt_sd.toy import PROMPT

TITLE = "elfatt-sd: untouched and patched"
STEPS, SHORT = 50, 12


def make_page(demo: Demo, models: Sequence[str], method: str = "elfatt-fast", steps: int = SHORT) -> Any:
    """Return the page, a `gradio.Blocks` that is not launched yet."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio

    def draw(
        model: str,
        prompt: str,
        method: str,
        file: str | None,
        steps: float | None,
        seed: float | None,
        bar: Any = gradio.Progress(),  # noqa: B008  # how Gradio hands a bar over
    ) -> Any:
        def tell(step: int, of: int) -> None:
            bar((step, of), desc="drawing", unit="steps")

        try:
            pair = demo.answer(model, prompt, method, file, steps, seed, tell)
        except ElfattError as error:
            raise gradio.Error(str(error), duration=None, print_exception=False) from error
        return (pair.untouched, pair.patched), pair.figures, pair.plan

    with gradio.Blocks(title=TITLE, analytics_enabled=False) as page:
        gradio.Markdown(f"# {TITLE}\nLeft of the slider untouched, right of it patched: the same prompt and seed.")
        with gradio.Row():
            with gradio.Column(scale=1):
                prompt = gradio.Textbox(PROMPT, label="Prompt", elem_id="prompt")
                model = gradio.Dropdown(list(models), value=models[0], label="Model", allow_custom_value=True)
                names = [name for name in METHODS if name != UNTOUCHED]
                chosen = gradio.Dropdown(names, value=method, label="Method")
                file = gradio.File(label="or a saved configuration (JSON)", file_types=[".json"], height=140)
                count = gradio.Slider(1, STEPS, value=steps, step=1, label="Steps")
                seed = gradio.Number(0, label="Seed", precision=0, minimum=0)
                button = gradio.Button("Draw", variant="primary", elem_id="draw")
            with gradio.Column(scale=2):
                images = gradio.ImageSlider(label="untouched | patched", type="pil", elem_id="images", height=560)
                figures = gradio.Textbox(label="Speed and closeness", elem_id="figures", interactive=False, lines=2)
                with gradio.Accordion("What is patched", open=False):
                    planned = gradio.Code(
                        label="plan", language=None, interactive=False, wrap_lines=True, show_line_numbers=False
                    )
        button.click(draw, [model, prompt, chosen, file, count, seed], [images, figures, planned])
    return page.queue(default_concurrency_limit=1)


@dataclass(frozen=True)
class Pair:
    """What was drawn for one request."""

    untouched: Image.Image  # the image of the pipeline as it is
    patched: Image.Image  # the image with the method
    figures: str  # how many times as fast, and how close, in a sentence or two
    plan: str  # what was patched, in lines


@dataclass
class Demo:
    """Pipelines that are loaded when they are first asked for; one image is drawn at a time."""

    load: Callable[[str], Any]  # returns a pipeline by its name, as `load_pipeline` does
    _pipes: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def draw(
        self,
        model: str,
        prompt: str,
        method: str,
        file: str | Path | None = None,
        steps: int | None = None,
        seed: int = 0,
        on_step: OnStep = lambda step, steps: None,
    ) -> Pair:
        """Draw an image untouched and patched, in turn, after a warm-up of two steps each."""
        config = method_named(method) if file is None else PatchConfig.load(file)
        request = Request((prompt,), config, model=model, steps=steps, seed=seed, compare=True)
        with self._lock:
            if model not in self._pipes:
                self._pipes[model] = self.load(model)
            return self._draw(self._pipes[model], request, on_step)

    def answer(
        self,
        model: str,
        prompt: str,
        method: str,
        file: str | None,
        steps: float | None,
        seed: float | None,
        on_step: OnStep,
    ) -> Pair:
        """Draw what the fields of a page ask for; see `draw`. An empty field is None."""
        if seed is None:
            raise ElfattError("there is no seed; give a whole number, such as 0.")
        whole = None if steps is None else int(steps)
        try:
            return self.draw(model, prompt, method, file or None, whole, int(seed), on_step)
        except Exception as error:
            raise ElfattError(in_plain_words(error)) from error

    def _draw(self, pipe: Any, request: Request, on_step: OnStep) -> Pair:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            before, after = self._shots(Studio(pipe, request, Path()), on_step)
        said = dict.fromkeys(str(warning.message) for warning in told if "elfatt-sd" in str(warning.message))
        pictures = before.frames[0], after.frames[0]
        decibel, ratio = psnr(*pictures), ratios([before.seconds], [after.seconds])[0]
        if fault := fault_of_pair(before, after):
            figures = f"Not compared: {fault}."
        elif math.isfinite(decibel):
            figures = f"{ratio:.2f} times as fast as untouched (one image each, in turn, after a warm-up); "
            figures += f"PSNR {decibel:.1f} dB."
        else:
            figures = why_unchanged(request.config, len(pipe.scheduler.timesteps))
        planned = plan(pipe, request.config, height=pictures[0].height, width=pictures[0].width)
        return Pair(*pictures, " ".join([figures, *said]), str(planned))

    def _shots(self, studio: Studio, on_step: OnStep) -> tuple[Shot, Shot]:
        """Draw untouched and patched, after a warm-up of each."""
        prompt, seed = studio.request.prompts[0], studio.request.seed
        studio.warm_up()
        with studio.patched():
            studio.warm_up()
        studio.on_step = lambda step, steps: on_step(step, 2 * steps)
        before = studio.draw(prompt, seed)
        with studio.patched():
            studio.on_step = lambda step, steps: on_step(steps + step, 2 * steps)
            return before, studio.draw(prompt, seed)
