"""Says what the commands share that follow a run: their options, and how they look again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from recpoint.cli.reporting import output_console, print_json

if TYPE_CHECKING:
    from recpoint.serving.goal import Channel

__all__ = [
    "ChannelOption",
    "LookResult",
    "PollOption",
    "TablesOption",
    "channel_named",
    "keep_looking",
]

ChannelOption = Annotated[
    str, typer.Option(help="newest, validated, or published: see recpoint publish.")
]
TablesOption = Annotated[
    list[str] | None,
    typer.Option("--table", help="Only this table; may be repeated. Default: all."),
]
PollOption = Annotated[float, typer.Option(help="Seconds between two looks.")]


class LookResult(NamedTuple):
    """What one look at a run has come to.

    Attributes:
        subject: is printed if it differs from that of the look before.
        document: with --json, what is printed.
        views: without, lines of text.
    """

    subject: object
    document: dict[str, Any]
    views: Sequence[Any]


def channel_named(channel: str) -> Channel:
    """Return the channel of this name.

    Raises:
        BadParameter: there is none.
    """
    from recpoint.serving.goal import CHANNELS

    if channel not in CHANNELS:
        raise typer.BadParameter(
            f"{channel!r} is none of {', '.join(CHANNELS)}", param_hint="--channel"
        )
    return channel


def keep_looking(look: Callable[[], LookResult], *, poll_seconds: float, as_json: bool) -> NoReturn:
    """Look until interrupted, and print what is new.

    Args:
        look: looks once; errors that end the command are raised.
        poll_seconds: how long to wait between two looks.
        as_json: print documents.
    """
    console = output_console()
    last_subject: object = None
    while True:
        subject, document, views = look()
        if subject != last_subject:
            last_subject = subject
            if as_json:
                print_json(document)
            else:
                for view in views:
                    console.print(view, soft_wrap=True)
        time.sleep(poll_seconds)
