"""The page of `elfatt-sd demo`, in Gradio: it asks nothing of the network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from elfatt_sd.demo import Demo
from elfatt_sd.errors import ElfattError
from elfatt_sd.presets import METHODS, UNTOUCHED
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
