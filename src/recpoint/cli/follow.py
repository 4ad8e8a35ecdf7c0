"""Defines the commands about serving: follow and publish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from recpoint.catalog.restore.order import skipped_lines, skipped_text
from recpoint.catalog.run import publications
from recpoint.catalog.store.run_url import naming_run, parse_run_url
from recpoint.cli.following import (
    ChannelOption,
    LookResult,
    PollOption,
    TablesOption,
    channel_named,
    keep_looking,
)
from recpoint.cli.inspect import GenerationOption, UrlArgument, find_checkpoint, open_run
from recpoint.cli.reporting import JsonOption, Result, command, showing_bytes
from recpoint.dashboards import terminal
from recpoint.errors import ChainError, FormatError, NothingToRestore, NotServing, StoreError
from recpoint.units import bytes_text, counted, duration_text

if TYPE_CHECKING:
    from recpoint.serving.follower import Follower, Status

__all__ = ["follow", "publish"]


#: The command that brings a checkpoint into a channel.
_NEXT = {"validated": "validate URL", "published": "publish URL"}


@command
def follow(
    url: UrlArgument,
    channel: ChannelOption = "newest",
    table: TablesOption = None,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Keep rows as codes: less memory.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    poll_seconds: PollOption = 5.0,
    json_output: JsonOption = False,
) -> Result:
    """Follow a run as a serving process does: read each new version, check it, print it.

    Holds two copies of the tables in memory. Runs until it is interrupted, unless --once is given.
    """
    from recpoint.serving.follower import Follower

    names = table or None
    follower = Follower(
        url,
        tables=names,
        channel=channel_named(channel),
        quantized=quantized,
        poll_seconds=poll_seconds,
    )
    if not once:
        keep_looking(
            lambda: _look(follower, url, quiet=json_output),
            poll_seconds=poll_seconds,
            as_json=json_output,
        )
    with showing_bytes("reading", quiet=json_output) as on_progress:
        follower.poll(on_progress=on_progress)
    status = follower.status
    if status.serving is None:
        raise NothingToRestore(
            parse_run_url(url).url,
            found=skipped_text(status.skipped) or "nothing to serve",
            expected=f"a good checkpoint of the channel {channel}",
            next_step=f"recpoint {_next(status, channel)}",
        )
    return Result(_document(status, url), *_lines(status, url))


def _next(status: Status, channel: str) -> str:
    if channel in _NEXT:
        return _NEXT[channel]
    return "check URL --level full" if status.skipped else "list URL"


def _look(follower: Follower, url: str, *, quiet: bool) -> LookResult:
    """Look once, with a bar of bytes unless `quiet`."""
    # Only the first read, of a whole model, has a bar: during increments it would flicker.
    quiet = quiet or follower.version is not None
    try:
        with showing_bytes("reading", quiet=quiet) as on_progress:
            follower.poll(on_progress=on_progress)
    except (StoreError, NotServing, NothingToRestore, FormatError, ChainError):
        pass  # the status has the error; the served version stays served
    status = follower.status
    subject = (status.serving, status.error, status.skipped, status.doubt)
    return LookResult(subject, _document(status, url), _lines(status, url))


def _document(status: Status, url: str) -> dict[str, Any]:
    serving = status.serving
    return {
        "step": None if serving is None else serving.step,
        "generation": None if serving is None else serving.generation,
        "attempt": None if serving is None else serving.attempt,
        "committed_ms": status.committed_ms,
        "served_ms": status.served_ms,
        "newest": status.newest,
        "lag_seconds": status.lag_seconds,
        "lag_checkpoints": status.lag_checkpoints,
        "lag_batches": status.lag_batches,
        "versions_applied": status.versions_applied,
        "increments_applied": status.increments_applied,
        "fulls_applied": status.fulls_applied,
        "bytes_read": status.bytes_read,
        "memory_bytes": status.memory_bytes,
        "skipped": [
            {"step": name.step, "generation": name.generation, "error": naming_run(error, url)}
            for name, error in status.skipped
        ],
        "passed_over": [
            {"key": key, "error": naming_run(error, url)} for key, error in status.passed_over
        ],
        "doubt": status.doubt,
        "error": None if status.error is None else naming_run(status.error, url),
    }


def _lines(status: Status, url: str) -> list[Any]:
    lines: list[Any] = []
    for line in skipped_lines(status.skipped):
        text = f"skipped {naming_run(line, url)}"
        lines.append(terminal.shown(text, limit=2000, style="yellow"))
    if status.error is not None:
        lines.append(terminal.shown(naming_run(status.error, url), limit=2000, style="red"))
    if status.serving is None:
        return [*lines, terminal.shown("nothing is served yet")]
    if status.doubt is not None:
        text = f"{status.serving} is served although {status.doubt}"
        lines.append(terminal.shown(text, limit=2000, style="red"))
    delay_seconds = (status.served_ms - status.committed_ms) / 1000
    lag = "none" if not status.lag_seconds else duration_text(status.lag_seconds)
    text = (
        f"{status.serving}: served {duration_text(delay_seconds)} after its commit, lag {lag}, "
        f"{counted(status.increments_applied, 'increment')} and "
        f"{counted(status.fulls_applied, 'full')} applied, "
        f"{bytes_text(status.bytes_read)} read"
    )
    return [*lines, terminal.shown(text, limit=2000)]


@command
def publish(
    url: UrlArgument,
    step: Annotated[
        int | None, typer.Option(help="This checkpoint; an older one rolls back. Default: newest.")
    ] = None,
    generation: GenerationOption = None,
    validated: Annotated[
        bool, typer.Option("--validated", help="Without a step: the newest that was validated.")
    ] = False,
    hold: Annotated[
        bool | None,
        typer.Option(
            "--hold/--no-hold",
            help="Keep it published until --release. Default: with --step.",
        ),
    ] = None,
    release: Annotated[bool, typer.Option("--release", help="Replace a held one.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Publish it even if a validation failed.")
    ] = False,
    why: Annotated[str, typer.Option(help="The reason, kept in the record.")] = "",
    json_output: JsonOption = False,
) -> Result:
    """Make a checkpoint the one that followers of --channel published serve."""
    if step is not None and validated:
        # Whoever asks for both may believe that a checkpoint without a validation is refused.
        raise typer.BadParameter("goes without --step", param_hint="--validated")
    run = open_run(url)
    if step is not None:
        name = find_checkpoint(run, step, generation)
    elif generation is not None:
        raise typer.BadParameter("needs --step", param_hint="--generation")
    else:
        name = publications.choose(run, validated_only=validated)
    publication = publications.publish(
        run,
        name,
        held=step is not None if hold is None else hold,
        release=release,
        force=force,
        why=why,
    )
    record = publication.record
    document = {
        "number": record.number,
        "created": publication.created,
        "step": record.checkpoint.step,
        "generation": record.checkpoint.generation,
        "attempt": record.checkpoint.attempt,
        "held": record.held,
        "doubt": publication.doubt,
        "who": record.who,
        "why": record.why,
    }
    state = "is published" if publication.created else "was published already,"
    held_text = ", held until --release" if record.held else ""
    text = f"{record.checkpoint} {state} as publication {record.number}{held_text}"
    views = [terminal.shown(text)]
    if publication.doubt is not None:
        views.append(terminal.shown(f"although {publication.doubt}", style="yellow"))
    return Result(document, *views)
