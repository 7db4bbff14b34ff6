"""What all commands share: one-line errors and exit codes, groups of options, and what is printed on stderr."""

from __future__ import annotations

import functools
import inspect
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from elfatt_sd.errors import PACKAGES, ElfattError, ElfattFailure, in_plain_words, install_line

DONE, FAILURE, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
process = {"own": False}  # whether it runs the command line alone; `main` says so
_told: set[str] = set()  # warnings of this command


class OneLineErrors(TyperGroup):
    """The root command: every error is one line on stderr and an exit code; `--debug` adds the traceback."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **_: Any) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        if debug := "--debug" in words[:end]:  # wherever it stands
            words.remove("--debug")
        _told.clear()
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: complain(str(message), "warning")
            try:
                result = super().main(words, prog_name=prog_name, standalone_mode=False)
                code = result if isinstance(result, int) else DONE
            except (KeyboardInterrupt, typer.Abort):
                code = INTERRUPTED
            except Exception as error:
                if debug:
                    traceback.print_exc()
                code = _report(error, debug)
        if code == INTERRUPTED:
            complain("stopped; what was finished stays")
        sys.exit(code)


def _report(error: Exception, debug: bool) -> int:
    if isinstance(error, ElfattError):
        complain(str(error))
        return FAILURE if isinstance(error, ElfattFailure) else WRONG_USE
    if hasattr(error, "format_message"):  # wrong use that the parser found
        if error.format_message():  # empty after it has shown the help
            complain(error.format_message())
        return WRONG_USE
    missing = (getattr(error, "name", None) or "").partition(".")[0]
    names = [name for name, package in PACKAGES.items() if package.module == missing]
    if isinstance(error, ImportError) and names:
        complain(f"{error.name} is not installed: {install_line(*names)}")
        return WRONG_USE
    complain(in_plain_words(error) + ("" if debug else " (--debug shows where)"))
    return FAILURE


def optional(kind: Any, *names: str, default: Any = None, **details: Any) -> tuple[Any, Any]:
    return Annotated[kind | None if default is None else kind, typer.Option(*names, **details)], default


def adds_options(
    receives: str, options: Mapping[str, tuple[Any, Any]], build: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command more options, and hands it what is built of them."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        only = inspect.Parameter.KEYWORD_ONLY
        own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != receives]
        added = [
            inspect.Parameter(name, only, default=value, annotation=kind) for name, (kind, value) in options.items()
        ]
        parameters = [*(each.replace(kind=only) for each in own), *added]

        @functools.wraps(command)
        def wrapper(**given: Any) -> Any:
            return command(**{receives: build(**{name: given.pop(name) for name in options})}, **given)

        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {item.name: item.annotation for item in parameters}
        return wrapper

    return decorate


def name_and_value(text: str) -> tuple[str, Any]:
    """Read `NAME=VALUE`, the value as JSON where it is some."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ElfattError(f"set={text!r} is not accepted; give NAME=VALUE.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def one_line(message: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in " ".join(message.split()))


def complain(message: str, kind: str = "error") -> None:
    line = one_line(message).removeprefix("elfatt-sd: ")
    if kind == "warning":
        said = line.removesuffix(".")
        if said in _told:
            return
        _told.add(said)
    typer.secho(f"{kind}: {line}", err=True, fg="red" if kind == "error" else "yellow")


def output() -> Console:
    return Console(highlight=False, markup=False, emoji=False, width=None if Console().is_terminal else 200)


def quiet_libraries() -> None:
    """Switch off the progress bars and chatter of diffusers, transformers and Pillow; errors are still raised."""
    if process["own"]:
        from elfatt_sd.devices import keep_freed_memory

        keep_freed_memory()
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of odd EXIF data and large images
    warnings.filterwarnings("ignore", "Already found a `peft_config`")  # of a second LoRA
