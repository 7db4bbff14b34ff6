"""A pytest plugin that patches what diffusers' own tests build, and records how each test ends.

`diffusers_tests.py` runs pytest with it. Pipelines with a UNet get the method as soon as their parts are registered. In
tests of models, where there is no schedule, every UNet gets exact attention through our processors.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
from diffusers import DiffusionPipeline
from transformers import CLIPTokenizer

from elfatt_sd import ElfattError, PatchConfig, apply_patch, known_method

EXACT = "exact"  # our processors in all layers, which compute what was there before
_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # of an object, which differs between tests
_SHAPE = re.compile(r"(?<!re)shape")
_NUMBERS = re.compile(r"close|diff|slice|expected|tol|mean|ssim|psnr|simil|equal\(|\d\.\d|\de-\d", re.IGNORECASE)


def configuration(method: str) -> PatchConfig:
    """Return the configuration of `exact`, or of a method."""
    return (
        PatchConfig(EXACT, attention_backend="native") if method == EXACT else PatchConfig.preset(known_method(method))
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options to pytest."""
    group = parser.getgroup("elfatt")
    group.addoption("--elfatt-method", default="", help="patch everything with this method; untouched if empty")
    group.addoption("--elfatt-results", type=Path, help="file for the results, a JSON object a line")
    group.addoption("--elfatt-only", type=Path, help="file with the tests to run, one a line")
    group.addoption("--elfatt-offline", action="store_true", help="stand in for the tokenizers of tests")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to patch and to record."""
    config.pluginmanager.register(_Recorder(config), "elfatt-recorder")
    if config.getoption("--elfatt-offline"):
        _stand_in_for_tokenizers()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that are asked for."""
    only = config.getoption("--elfatt-only")
    if only is not None:
        wanted = set(only.read_text(encoding="utf-8").splitlines())
        items[:] = [item for item in items if item.nodeid in wanted]


def failure_kind(error: BaseException, statement: str) -> str:
    """Tell differences of values from structural failures; what is not clear is structural.

    Args:
        error: that ended the test.
        statement: of the test, that raised it.
    """
    if not isinstance(error, AssertionError):
        return "structural"
    said = f"{statement}\n{_first_line(error)}"
    return "value" if _NUMBERS.search(said) and not _SHAPE.search(said) else "structural"


def _first_line(error: BaseException) -> str:
    return _ADDRESS.sub("", (str(error).strip().splitlines() or [""])[0])


class _Recorder:
    """Patches in the test that runs, and writes a line for each part of it."""

    def __init__(self, config: pytest.Config) -> None:
        self._tests = config.rootpath / "tests"
        self._results: Path | None = None if hasattr(config, "workerinput") else config.getoption("--elfatt-results")
        self._is_of_models = False
        self._patched = 0
        self._refused: list[str] = []
        method = config.getoption("--elfatt-method")
        if method:
            self._patch_pipelines(configuration(method))
            for kind in _unets():
                self._patch_models(kind, configuration(EXACT))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin to count again."""
        self._is_of_models = "models" in Path(item.nodeid.partition("::")[0]).parts
        self._patched, self._refused = 0, []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Add to a report what was patched, and of which kind a failure is."""
        outcome: Any = yield
        report = outcome.get_result()
        found: dict[str, Any] = {"patched": self._patched, "refused": self._refused}
        if report.failed and call.excinfo is not None:
            error = call.excinfo.value
            own = [entry for entry in call.excinfo.traceback if self._tests in Path(entry.path).parents]
            statement = str(own[-1].statement) if own else ""
            message = f"{type(error).__name__}: {_first_line(error)}"[:200]
            found |= {"kind": failure_kind(error, statement), "message": message}
        report.user_properties = [*report.user_properties, ("elfatt", found)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a line."""
        if self._results is None:
            return
        found: Any = dict(report.user_properties).get("elfatt", {})
        line = {"test": report.nodeid, "when": report.when, "outcome": report.outcome, **found}
        with open(self._results, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _patch_pipelines(self, config: PatchConfig) -> None:
        pipelines: Any = DiffusionPipeline
        register: Callable[..., None] = pipelines.register_modules

        @functools.wraps(register)
        def register_modules(pipe: Any, **modules: Any) -> None:
            register(pipe, **modules)
            if not self._is_of_models and modules.get("unet") is not None:
                self._patch(pipe, config)

        pipelines.register_modules = register_modules

    def _patch_models(self, kind: Any, config: PatchConfig) -> None:
        build: Callable[..., None] = kind.__init__

        @functools.wraps(build)
        def init(model: Any, *args: Any, **kwargs: Any) -> None:
            build(model, *args, **kwargs)
            if self._is_of_models and type(model) is kind:
                self._patch(model, config)

        kind.__init__ = init

    def _patch(self, target: Any, config: PatchConfig) -> None:
        try:
            apply_patch(target, config)
            self._patched += 1
        except ElfattError as error:  # no layer that we know: it stays untouched
            self._refused.append(str(error))


def _unets() -> list[Any]:
    """Return diffusers' classes of UNets."""
    names = [name for name in dir(diffusers) if "UNet" in name and not name.startswith("Flax")]
    found = [getattr(diffusers, name) for name in names]
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)]


def _stand_in_for_tokenizers() -> None:
    """Give tests that want a tokenizer from the hub one that spells; without a network they would get an empty one."""
    tokenizers: Any = CLIPTokenizer
    load: Callable[..., Any] = tokenizers.from_pretrained

    def from_pretrained(name: Any, *args: Any, **kwargs: Any) -> Any:
        is_of_tests = str(name).startswith("hf-internal-testing/")
        return _spelling_tokenizer() if is_of_tests else load(name, *args, **kwargs)

    tokenizers.from_pretrained = from_pretrained


def _spelling_tokenizer() -> Any:
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        vocabulary.write_text(json.dumps({word: index for index, word in enumerate(words)}), encoding="utf-8")
        merges.write_text("#version: 0.2\n", encoding="utf-8")
        return CLIPTokenizer(str(vocabulary), str(merges), model_max_length=77)
