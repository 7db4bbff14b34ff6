"""The demo page."""

from __future__ import annotations

import functools
import json
import os
import threading
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
from elfatt_sd.toy import EMBEDDED, PROMPT

TITLE = "elfatt-sd: untouched and patched"
STEPS, SHORT = 50, 12
Load = Callable[[str], Any]  # returns a pipeline by its name, as `load_pipeline` does
SETTINGS = ("steps", "guidance", "height", "width", "negative_prompt")  # of `Request`, in the page's order


def make_page(load: Load, models: Sequence[str], method: str = AUTO, steps: int = SHORT) -> Any:
    """Return the page, a `gradio.Blocks` that is not launched yet."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio

    cached, stop = functools.lru_cache(1)(load), threading.Event()

    def draw(bar: Any = gradio.Progress(), *given: Any) -> Any:  # noqa: B008  # how Gradio hands a bar over
        def tell(step: int, of: int) -> None:
            bar((step, of), desc="drawing", unit="steps")
            if stop.is_set():
                raise ElfattError("stopped")

        stop.clear()
        asked: dict[str, Any] = {name: value or None for name, value in zip(SETTINGS, given[5:], strict=True)}
        try:
            return draw_for_page(cached, *given[:5], on_step=tell, **asked)
        except ElfattError as error:
            if stop.is_set():
                gradio.Info("stopped")
                return gradio.skip()
            raise gradio.Error(str(error), duration=None, print_exception=False) from error

    number = functools.partial(gradio.Number, 0, minimum=0, min_width=100)
    code = functools.partial(gradio.Code, interactive=False, wrap_lines=True, show_line_numbers=False, max_lines=16)
    with gradio.Blocks(title=TITLE, analytics_enabled=False) as page:
        gradio.Markdown(f"# {TITLE}\nThe same prompt and seed: left of the slider untouched, right of it patched.")
        with gradio.Row():
            with gradio.Column(scale=1):
                prompt = gradio.Textbox(PROMPT, label="Prompt", elem_id="prompt")
                model = gradio.Dropdown(list(models), value=models[0], label="Model", allow_custom_value=True)
                names = [name for name in METHODS if name != UNTOUCHED]
                chosen = gradio.Dropdown([*dict.fromkeys([AUTO, *names, method])], value=method, label="Method")
                with gradio.Row():
                    button = gradio.Button("Draw", variant="primary", elem_id="draw", min_width=100)
                    halt = gradio.Button("Stop", elem_id="stop", min_width=100)
                count = gradio.Slider(1, STEPS, value=steps, step=1, label="Steps")
                with gradio.Accordion("More settings", open=False):
                    gradio.Markdown("0 is the model's own height, width or guidance.")
                    with gradio.Row():
                        sizes = [number(label=name, precision=0, step=8) for name in ("Height", "Width")]
                    with gradio.Row():
                        guidance, seed = number(label="Guidance", step=0.5), number(label="Seed", precision=0)
                    negative = gradio.Textbox(label="Negative prompt", info="What guidance leads away from.")
                    file = gradio.File(label="A saved configuration, as the method", file_types=[".json"], height=140)
            with gradio.Column(scale=2):
                images = gradio.ImageSlider(show_label=False, type="pil", elem_id="images", max_height=560)
                with gradio.Row():
                    captions = [gradio.Markdown(elem_id=name, min_width=100) for name in ("untouched", "patched")]
                figures = gradio.Markdown(elem_id="figures", line_breaks=True)
                with gradio.Accordion("The same in Python", open=False):
                    lines = code(label="Python", language="python")
                    saved = code(label="The method as JSON: a file for --config and PatchConfig.load", language="json")
                with gradio.Accordion("What is patched", open=False):
                    planned = code(label="plan", language=None)
        given = [model, prompt, chosen, file, seed, count, guidance, *sizes, negative]
        shown = [images, *captions, figures, lines, saved, planned]
        button.click(draw, given, shown, show_progress_on=images)
        page.unload(stop.set)  # nobody waits for it any more
        halt.click(stop.set, queue=False, api_visibility="private")
        if models[0] in EMBEDDED:  # an example, for others can take minutes
            page.load(draw, given, shown, show_progress_on=images, api_visibility="private")
    return page.queue(default_concurrency_limit=1)


def draw_for_page(
    load: Load,
    model: str,
    prompt: str,
    method: str,
    file: str | Path | None = None,  # a saved configuration in the method's place
    seed: int = 0,
    *,
    on_step: OnStep = lambda step, steps: None,
    **settings: Any,  # further fields of `Request`
) -> tuple[tuple[Image.Image, Image.Image], str, str, str, str, str, str]:
    """Draw a patched image between two untouched ones; what the page's fields are wrong in is one line.

    Returns:
        the untouched and the patched image; a caption of each; how many times as fast, and how close; the lines of
        Python that patch likewise; the configuration as JSON; what was patched, in lines.
    """
    drawn = 0

    def tell(step: int, steps: int) -> None:
        nonlocal drawn
        on_step(drawn * steps + step, trial.images * steps)
        drawn += step == steps

    try:
        config = PatchConfig.load(file) if file else method_named(method)
        request = Request((prompt,), config, model=model, seed=seed, compare=True, **settings)
        pipe = load(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            studio = Studio(pipe, request, Path(), tell)
            trial = Trial(studio, [studio.request.config], 1, again=True)
            trial.run()
        untouched, own, *said = pair(trial)
        height, width = own.picture.height, own.picture.width
        planned = plan(pipe, studio.request.config, height=height, width=width, steps=studio.steps)
    except Exception as error:
        raise ElfattError(in_plain_words(error)) from error
    own_warnings = dict.fromkeys(str(each.message) for each in caught if "elfatt-sd" in str(each.message))
    left, right = (f"**{row.caption()[0]}**" for row in (untouched, own))
    source = f"elfatt_sd.PatchConfig.load({Path(file).name!r})" if file else repr(method)
    lines = f"import elfatt_sd\n\npipe = elfatt_sd.load_pipeline({model!r})\nelfatt_sd.apply_patch(pipe, {source})"
    figures = "\n".join(filter(None, [*said, *own_warnings]))
    saved = json.dumps(config.to_dict(origin=True), indent=2)
    return (untouched.picture, own.picture), left, right, figures, lines, saved, str(planned)
