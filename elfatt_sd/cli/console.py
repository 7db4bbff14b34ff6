"""What all commands share: one-line errors and exit codes, groups that load late, and the options of a patch."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from elfatt_sd.cli.names import BACKENDS, BLOCK_ORDERS, DEFAULT, METHODS
from elfatt_sd.errors import ElfattError, ElfattFailure, in_plain_words, remedy

if TYPE_CHECKING:
    from elfatt_sd.config import PatchConfig

DONE, FAILURE, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def optional(kind: Any, *names: str, **details: Any) -> tuple[Any, None]:
    return Annotated[kind | None, typer.Option(*names, **details)], None


_option = functools.partial(optional, rich_help_panel="The patch")


PATCH_OPTIONS: dict[str, tuple[Any, Any]] = {
    "method": _option(
        str,
        autocompletion=lambda: list(METHODS),
        help=f"One of {', '.join(METHODS)}, or package.module:Class; {DEFAULT} if nothing is given.",
    ),
    "config_file": _option(
        Path, "--config", metavar="FILE", help="Instead of a method, what `patch --save` or `tune --save` wrote."
    ),
    "ratio": _option(float, help="Fraction of the tokens that are merged, 0 to less than 1."),
    "stride": _option(int, help="One merge destination for each cell of this many tokens a side."),
    "block_size": _option(int, help="Tokens in a block; for sampled keys, how many every query sees."),
    "block_order": _option(str, help=f"Which tokens share a block: {', '.join(BLOCK_ORDERS)}."),
    "agents": _option(int, help="Number of agent tokens, where they are pooled."),
    "active_fraction": _option(
        float, help="Fraction of the run in which the method's own attention is active, 0 to 1."
    ),
    "max_downsample": _option(int, help="Deepest level to patch: 1, 2, 4 or 8."),
    "patch_seed": _option(int, help="Seed of random merge destinations, blocks and sampled keys."),
    "rand": _option(bool, "--rand/--no-rand", help="Random or fixed merge destinations."),
    "attention_backend": _option(str, help=f"One of {', '.join(BACKENDS)}."),
    "autotune": _option(bool, "--autotune", help="Leave alone the layers that measure slower on this device."),
    "set": _option(list[str], metavar="NAME=VALUE", help="Any other setting, such as fp32_logits=true."),
}
_NAMES = {"patch_seed": "seed", "rand": "use_rand"}


@dataclass(frozen=True)
class Chosen:
    """A patch from the command line."""

    config: PatchConfig  # the method and its settings
    arguments: str  # those of `apply_patch` that say the same in Python
    autotune: bool = False  # as for `apply_patch`


class OneLineErrors(TyperGroup):
    """The root command: every error is one line on stderr and an exit code; `--debug` adds the traceback."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **_: Any) -> Any:  # type: ignore[override]
        """Run the command line and exit."""
        words = list(sys.argv[1:] if args is None else args)
        debug = _take_debug(words)
        _told.clear()
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
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


class LazyGroup(TyperGroup):
    """A group whose commands are imported when one of them, or their list, is wanted."""

    home: str  # `module:name` of the `typer.Typer` that holds the commands

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._load().list_commands(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._load().get_command(ctx, cmd_name)

    def _load(self) -> Any:
        module, _, name = self.home.partition(":")
        return typer.main.get_group(getattr(importlib.import_module(module), name))


def lazy_group(home: str) -> typer.Typer:
    kind = type("LazyGroup", (LazyGroup,), {"home": home})
    return typer.Typer(cls=kind, no_args_is_help=True, callback=lambda: None)


def adds_options(
    receives: str, options: Mapping[str, tuple[Any, Any]], build: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command more options."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [item for item in inspect.signature(command, eval_str=True).parameters.values() if item.name != receives]
        parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own] + [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in options.items()
        ]

        @functools.wraps(command)
        def wrapper(**given: Any) -> Any:
            values = {name: given.pop(name) for name in options}
            return command(**{receives: build(**values)}, **given)

        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {item.name: item.annotation for item in parameters}
        return wrapper

    return decorate


def choose(
    method: str | None = None,
    config_file: Path | None = None,
    set: list[str] | None = None,
    autotune: bool | None = None,
    **options: Any,
) -> Chosen:
    """Build a configuration from options."""
    from elfatt_sd.config import PatchConfig, known_method

    settings = {_NAMES.get(name, name): value for name, value in options.items() if value is not None}
    settings |= dict(name_and_value(text) for text in set or ())
    written = "".join(f", {name}={value!r}" for name, value in settings.items()) + ", autotune=True" * bool(autotune)
    if config_file is None:
        known = known_method(DEFAULT if method is None else method)
        base = PatchConfig.preset(known)
        source = json.dumps(method if ":" in (method or "") else known)  # a class is registered by its import
    elif method is None:
        base, source = PatchConfig.load(config_file), from_file(config_file)
    else:
        raise ElfattError(f"method={method!r} and config={str(config_file)!r} exclude each other; give one of them.")
    config = base.with_settings(**settings)
    return Chosen(config, source + written, bool(autotune))


takes_patch = adds_options("chosen", PATCH_OPTIONS, choose)


_told: set[str] = set()  # warnings of this command


def from_file(path: Path) -> str:
    return f"elfatt_sd.PatchConfig.load({str(path)!r})"


def one_line(message: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in " ".join(message.split()))


def complain(message: str, kind: str = "error") -> None:
    """Print one line on stderr, a warning once."""
    line = one_line(message).removeprefix("elfatt-sd: ")
    if kind == "warning":
        said = line.removesuffix(".")
        if said in _told:
            return
        _told.add(said)
    typer.secho(f"{kind}: {line}", err=True, fg="red" if kind == "error" else "yellow")


def output() -> Console:
    plain = functools.partial(Console, highlight=False, markup=False, emoji=False)
    console = plain()
    return console if console.is_terminal else plain(width=200)


process = {"own": False}  # whether it runs the command line alone; `main` says so


def quiet_libraries() -> None:
    """Switch off the progress bars and chatter of diffusers and transformers; errors are still raised."""
    if process["own"]:
        from elfatt_sd.devices import keep_freed_memory

        keep_freed_memory()
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def _take_debug(words: list[str]) -> bool:
    """Remove `--debug` from the command line, wherever it stands before a `--`; tell whether it was there."""
    end = words.index("--") if "--" in words else len(words)
    if "--debug" not in words[:end]:
        return False
    words.remove("--debug")
    return True


def _report(error: Exception, debug: bool) -> int:
    """Print an error as one line and return its exit code."""
    if isinstance(error, ElfattError):
        complain(str(error))
        return FAILURE if isinstance(error, ElfattFailure) else WRONG_USE
    if hasattr(error, "format_message"):  # wrong use that the parser found
        if error.format_message():  # empty after it has shown the help
            complain(error.format_message())
        return WRONG_USE
    if isinstance(error, ImportError) and (install := remedy(error)):
        complain(f"{error.name} is not installed: {install}")
        return WRONG_USE
    hint = "" if debug else " (--debug shows where)"
    complain(f"{in_plain_words(error)}{hint}")
    return FAILURE


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    complain(str(message), "warning")


def name_and_value(text: str) -> tuple[str, Any]:
    """Read `NAME=VALUE`, the value as JSON where it is some."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ElfattError(f"set={text!r} is not accepted; give NAME=VALUE.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
