"""The demo: what it draws, and its page in a browser."""

from __future__ import annotations

import base64
import importlib.util
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checks import set_clock

import elfatt_sd
from elfatt_sd.config import PatchConfig
from elfatt_sd.drawing.demo import Demo
from elfatt_sd.errors import ElfattError

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_both_images_and_their_figures(pipe: Any, tmp_path: Path) -> None:
    steps, saved = [], tmp_path / "saved.json"
    PatchConfig.preset("tome", ratio=0.3).save(saved)
    demo, given = Demo({"small": pipe}.__getitem__), {"steps": 4, "seed": 3}
    images, figures, plan = demo.draw("small", "a cat", "elfatt", **given, on_step=lambda *done: steps.append(done))
    assert images[0].size == images[1].size and not np.array_equal(*images)
    assert "times as fast (between two untouched runs" in figures and "PSNR" in figures and "down_blocks" in plan
    assert steps == sorted(steps) and steps[-1] == (12, 12), "three images of four steps"
    assert not elfatt_sd.is_patched(pipe)
    tuned, *_ = demo.draw("small", "a cat", "elfatt", file=saved, **given)
    assert np.array_equal(tuned[0], images[0])
    assert not np.array_equal(tuned[1], images[1]), "the file takes the method's place"


def test_what_is_to_be_known_of_the_figures_is_said(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, figures, _ = Demo(lambda _: pipe).draw("small", "a cat", "elfatt-fast", steps=1)
    assert "PSNR" not in figures and "approximate" in figures
    set_clock(monkeypatch, [9, 9, 2, 1, 6])  # two warm-ups, then the patched image between untouched ones
    _, figures, _ = Demo(lambda _: pipe).draw("small", "a cat", "tome", steps=1)
    assert "4.00 (2.00 to 6.00) times as fast" in figures
    assert "the machine was busy: equal runs took 2.00 to 6.00 s" in figures


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompt": " "}, "empty prompt"),
        ({"method": "elfat"}, "elfat"),
        ({"steps": 0}, "steps=0"),
        ({"seed": -1}, "seed"),
        ({"seed": None}, "no seed"),
        ({"model": "large"}, "OSError: no such weights"),
    ],
)
def test_what_is_wrong_with_a_field_is_one_line(given: dict[str, Any], says: str) -> None:
    def load(model: str) -> Any:
        raise OSError("no such weights\nand more")

    with pytest.raises(ElfattError, match=says) as caught:
        Demo(load).draw(**{"model": "small", "prompt": "a cat", "method": "tome", **given})
    assert "\n" not in str(caught.value)


class Browser:
    """A page in Chromium, through its debugging protocol."""

    def __init__(self, address: str, folder: Path) -> None:
        from websockets.sync.client import connect

        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        self._process = subprocess.Popen(
            [str(CHROMIUM), *options, f"--user-data-dir={folder}", "--window-size=1400,1000", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port = wait(lambda: (folder / "DevToolsActivePort").read_text().split()[0])
        pages = wait(lambda: json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list")))
        target = next(page for page in pages if page["type"] == "page")
        self._open = ExitStack()
        self._socket = self._open.enter_context(connect(target["webSocketDebuggerUrl"], max_size=None))
        self._numbers = itertools.count(1)

    def call(self, method: str, **given: Any) -> Any:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": given}))
        while (said := json.loads(self._socket.recv())).get("id") != number:
            pass
        return said["result"]

    def run(self, code: str) -> Any:
        return self.call("Runtime.evaluate", expression=code)["result"].get("value")

    def close(self) -> None:
        self._open.close()
        self._process.kill()
        self._process.wait()


def wait(look: Callable[[], Any]) -> Any:
    """Return what is found, as soon as it is there."""
    for _ in range(1200):
        try:
            if found := look():
                return found
        except (OSError, IndexError, ValueError):
            pass
        time.sleep(0.1)
    raise AssertionError("it never came")


@contextmanager
def served(*options: str) -> Iterator[str]:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = "from elfatt_sd.cli import main; main()"
    command = [sys.executable, "-c", program, "demo", "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    address = f"http://127.0.0.1:{port}"
    try:
        wait(lambda: urllib.request.urlopen(address).status == 200)
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="gradio is not installed")
def test_the_page_draws_in_a_browser(tmp_path: Path) -> None:
    with served("--steps", "3") as address, closing(Browser(address, tmp_path / "profile")) as browser:
        wait(lambda: browser.run("document.querySelector('#draw') !== null"))
        browser.run("document.querySelector('#draw').click()")
        said = wait(lambda: browser.run("document.querySelector('#figures textarea').value"))
        assert "times as fast" in said
        assert wait(lambda: browser.run("document.querySelectorAll('#images img').length")) >= 2
        shot = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
        (tmp_path / "page.png").write_bytes(shot)
        outside = browser.run(
            "performance.getEntriesByType('resource').map(r => r.name).filter(n => !n.startsWith(location.origin)"
            " && !n.startsWith('data:') && !n.startsWith('blob:')).join(' ')"
        )
        assert not outside, "it asks nothing of the network"
