"""The demo page."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from elfatt_sd.config import AUTO, METHODS, UNTOUCHED, PatchConfig, method_named
from elfatt_sd.drawing.compare import Trial, pair
from elfatt_sd.drawing.studio import OnStep, Request, Studio
from elfatt_sd.errors import ElfattError, in_plain_words
from elfatt_sd.patch import plan
from elfatt_sd.toy import PROMPT

TITLE = "elfatt-sd: untouched and patched"
STEPS, SHORT = 50, 12
Load = Callable[[str], Any]  # returns a pipeline by its name, as `load_pipeline` does


def make_page(load: Load, models: Sequence[str], method: str = AUTO, steps: int = SHORT) -> Any:
    """Return the page, a `gradio.Blocks` that is not launched yet."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio

    cached = functools.cache(load)

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
            return draw_for_page(cached, model, prompt, method, file, steps, seed, tell)
        except ElfattError as error:
            raise gradio.Error(str(error), duration=None, print_exception=False) from error

    with gradio.Blocks(title=TITLE, analytics_enabled=False) as page:
        gradio.Markdown(f"# {TITLE}\nLeft of the slider untouched, right of it patched: the same prompt and seed.")
        with gradio.Row():
            with gradio.Column(scale=1):
                prompt = gradio.Textbox(PROMPT, label="Prompt", elem_id="prompt")
                model = gradio.Dropdown(list(models), value=models[0], label="Model", allow_custom_value=True)
                names = [name for name in METHODS if name != UNTOUCHED]
                chosen = gradio.Dropdown([AUTO, *names], value=method, label="Method")
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


def draw_for_page(
    load: Load,
    model: str,
    prompt: str,
    method: str,
    file: str | Path | None = None,  # a saved configuration in the method's place
    steps: float | None = None,
    seed: float | None = 0,
    on_step: OnStep = lambda step, steps: None,
) -> tuple[tuple[Image.Image, Image.Image], str, str]:
    """Draw a patched image between two untouched ones; what the page's fields are wrong in is one line.

    Returns:
        the untouched and the patched image; how many times as fast, and how close; what was patched, in lines.
    """
    if seed is None:
        raise ElfattError("there is no seed; give a whole number, such as 0.")
    drawn = 0

    def tell(step: int, steps: int) -> None:
        nonlocal drawn
        on_step(drawn * steps + step, trial.images * steps)
        drawn += step == steps

    try:
        config = PatchConfig.load(file) if file else method_named(method)
        whole = None if steps is None else int(steps)
        request = Request((prompt,), config, model=model, steps=whole, seed=int(seed), compare=True)
        pipe = load(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            studio = Studio(pipe, request, Path(), tell)
            trial = Trial(studio, [studio.request.config], 1, again=True)
            trial.run()
        untouched, own, *said = pair(trial)
        planned = plan(pipe, studio.request.config, height=own.picture.height, width=own.picture.width)
    except Exception as error:
        raise ElfattError(in_plain_words(error)) from error
    own_warnings = dict.fromkeys(str(each.message) for each in caught if "elfatt-sd" in str(each.message))
    return (untouched.picture, own.picture), "\n".join(filter(None, [*said, *own_warnings])), str(planned)
