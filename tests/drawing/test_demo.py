"""The demo: what it draws, and its page."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import elfatt_sd
from elfatt_sd.config import PatchConfig
from elfatt_sd.drawing.demo import draw_for_page
from elfatt_sd.errors import ElfattError


def test_both_images_and_their_figures(pipe: Any, tmp_path: Path) -> None:
    steps, saved = [], tmp_path / "saved.json"
    PatchConfig.preset("tome", ratio=0.3).save(saved)
    given: Any = (lambda name: {"small": pipe}[name], "small", "a cat", "elfatt")
    settings: Any = {"steps": 4, "seed": 3, "width": 48, "guidance": 2.0, "negative_prompt": "blue"}
    images, *captions, figures, lines, data, plan = draw_for_page(
        *given, **settings, on_step=lambda *done: steps.append(done)
    )
    assert images[0].width == 48 and [each.split(",")[0] for each in captions] == ["**untouched", "**elfatt"]
    assert lines.startswith("import elfatt_sd\n") and lines.endswith("\nelfatt_sd.apply_patch(pipe, 'elfatt')")
    assert PatchConfig.from_dict(json.loads(data)) == PatchConfig.preset("elfatt")
    assert images[0].size == images[1].size and not np.array_equal(*images)
    assert "times as fast (between two untouched runs" in figures and "PSNR" in figures and "down_blocks" in plan
    assert steps == sorted(steps) and steps[-1] == (12, 12), "three images of four steps"
    assert not elfatt_sd.is_patched(pipe)
    tuned, *_, lines, _, _ = draw_for_page(*given, saved, **settings)
    assert "PatchConfig.load('saved.json')" in lines
    assert np.array_equal(tuned[0], images[0])
    assert not np.array_equal(tuned[1], images[1]), "the file takes the method's place"


def test_what_is_wrong_with_a_field_is_one_line(pipe: Any) -> None:
    """What is to be known of the figures stands among them."""
    figures = draw_for_page(lambda _: pipe, "small", "a cat", "elfatt-fast", steps=1)[3]
    assert "PSNR" not in figures and "approximate" in figures

    def load(model: str) -> Any:
        raise OSError("no such weights\nand more")

    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"prompt": " "}, "empty prompt"),
        ({"method": "elfat"}, "elfat"),
        ({"steps": 0}, "steps=0"),
        ({"seed": None}, "seed=None"),
        ({"model": "large"}, "OSError: no such weights"),
    )
    for given, says in wrong:
        with pytest.raises(ElfattError, match=says) as caught:
            draw_for_page(load, **{"model": "small", "prompt": "a cat", "method": "tome", **given})
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="gradio is not installed")
def test_the_page_draws() -> None:
    """Through the interface that its own button uses, and without a request that leaves the machine."""
    from gradio_client import Client

    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = f"from elfatt_sd.cli import app; app(['demo', '--port', '{port}'])"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, env=environment) as process:
        try:
            for _ in range(1200):
                with closing(socket.socket()) as page:
                    if not page.connect_ex(("127.0.0.1", port)):
                        break
                time.sleep(0.1)
            address = f"http://127.0.0.1:{port}"
            client = Client(address, verbose=False)
            texts = [urllib.request.urlopen(f"{address}/{name}").read().decode() for name in ("", "theme.css")]
            given = ("toy", "a red star", "tome", None, 0, 3, 0, 64, 64, "")
            images, _, caption, figures, lines, *_, plan = client.predict(*given, api_name="/draw")
        finally:
            process.kill()
    links = re.findall(r"""(?:src=|href=|url\(|import)\s*["']?((?:https?:)?//[^"')\s]+)""", "".join(texts))
    assert {link for link in links if not link.startswith(address)} == set()
    assert "times as fast" in figures and "down_blocks" in plan and "tome" in caption and "'tome'" in lines
    assert not np.array_equal(*(np.asarray(Image.open(each)) for each in images))
