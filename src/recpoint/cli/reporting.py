"""Ends a command: prints its result as JSON or for people, or its error, and sets the exit code."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, ParamSpec

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from recpoint.catalog.run.facts import OnStep
from recpoint.catalog.store.run_url import naming_run
from recpoint.dashboards.terminal import error_text
from recpoint.errors import (
    EvaluationFailed,
    NothingToRestore,
    ObjectNotFound,
    RecpointError,
    RetentionRefused,
    SettingsError,
    SinkError,
    StagingError,
    StoreError,
)

__all__ = [
    "EXIT_CODES",
    "JsonOption",
    "MetricsAddressOption",
    "MetricsPortOption",
    "Result",
    "command",
    "exit_code",
    "output_console",
    "print_json",
    "progress_console",
    "showing_bytes",
    "showing_steps",
]

#: Exit codes, most specific class first; whatever is not listed is 4.
EXIT_CODES: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (NothingToRestore, 1),
    (RetentionRefused, 1),
    (ObjectNotFound, 1),  # no such checkpoint, or a damaged one lacks an object
    (SettingsError, 2),
    (StagingError, 2),
    (EvaluationFailed, 2),  # the user's function failed: that says nothing about the bytes
    (StoreError, 3),
    (SinkError, 3),
    (RecpointError, 4),
    (OSError, 2),  # about files that the user names: a store raises StoreError only
    (KeyboardInterrupt, 130),
)

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of tables.")
]

MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        metavar="PORT",
        help="Serve metrics for Prometheus here; 0: any free port, which is printed.",
        show_default="no metrics",
    ),
]
MetricsAddressOption = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Listen for --metrics-port at this address.")
]

_PIPE_COLUMNS = 120

_Parameters = ParamSpec("_Parameters")


class Result:
    """Holds what a command found out.

    Args:
        document: what `--json` prints; plain values only.
        views: what people see, printed one after another.
        code: exit code.
    """

    def __init__(self, document: dict[str, Any], *views: RenderableType, code: int = 0) -> None:
        self.document = document
        self.views = views
        self.code = code


def exit_code(error: BaseException) -> int:
    """Return the code that a command ends with after `error`."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 4)


def command(function: Callable[_Parameters, Result]) -> Callable[_Parameters, None]:
    """Turn a function from options to a result into a command that prints and exits.

    The function has a `json_output` option. Errors of recpoint, errors of files and an interrupt
    become one message; anything else is a bug and keeps its traceback.
    """

    @functools.wraps(function)
    def run(*args: _Parameters.args, **options: _Parameters.kwargs) -> None:
        as_json = bool(options["json_output"])
        try:
            result = function(*args, **options)
        except (RecpointError, OSError, KeyboardInterrupt) as error:
            _print_error(error, as_json=as_json, url=options.get("url"))
            raise typer.Exit(exit_code(error)) from None
        if as_json:
            print_json(result.document)
        else:
            console = output_console()
            for view in result.views:
                # Plain text is never wrapped: a JSON line, for instance, has to stay one line.
                console.print(view, soft_wrap=isinstance(view, Text))
        raise typer.Exit(result.code)

    # Typer reads the types of the function it is given. `wraps` gives `run` the wrapped function's;
    # only the return type differs, and typer does not read that.
    return run


def output_console() -> Console:
    """Return the console for results; wide enough for a listing if it is a file or a pipe."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_COLUMNS
    return console


def progress_console() -> Console:
    """Return the console for progress, on stderr, so that stdout has only results."""
    return Console(stderr=True)


@contextmanager
def showing_steps(*, quiet: bool) -> Iterator[OnStep]:
    """Show a bar on a terminal for things done one by one, such as reading manifests.

    Args:
        quiet: show no bar on a terminal either.
    """
    console = progress_console()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    ) as progress:
        task = progress.add_task("looking", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield show


@contextmanager
def showing_bytes(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal for bytes: how many were read, and how many there are to read.

    Args:
        what: what is being done, such as `reading`.
        quiet: show no bar on a terminal either.
    """
    console = progress_console()
    with Progress(
        TextColumn(what),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done_bytes, total: progress.update(task, completed=done_bytes, total=total)


def print_json(document: dict[str, Any]) -> None:
    """Print one line of JSON on stdout and flush it, so that a pipe's reader can act on each."""
    # ASCII only: names from a store cannot reach the terminal as control characters.
    print(json.dumps(document, ensure_ascii=True, allow_nan=False), flush=True)


def _print_error(error: BaseException, *, as_json: bool, url: object) -> None:
    if isinstance(error, RecpointError):
        error.next_step = naming_run(error.next_step, url)
    if isinstance(error, KeyboardInterrupt):
        document: dict[str, Any] = {"error": "KeyboardInterrupt", "found": "interrupted"}
        text = error_text(Exception("interrupted"))
    else:
        document = {"error": type(error).__name__, "found": str(error)}
        text = error_text(error if isinstance(error, Exception) else Exception(str(error)))
    if isinstance(error, RecpointError):
        document.update(
            subject=error.subject,
            found=error.found,
            expected=error.expected,
            next_step=error.next_step,
        )
    if as_json:
        print_json(document)
    else:
        Console(stderr=True).print(text, soft_wrap=True)
