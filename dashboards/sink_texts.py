"""Words what a page says about sinks: which checkpoint their readers see, and what they lack. Pure.

Lag is against the newest checkpoint that the page knows of. A publisher of another channel, such as
`validated`, brings that one later or never; its metrics say how far it is behind its channel.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from recpoint.catalog.overview.overview import CheckpointFacts, RunOverview
from recpoint.dashboards.texts import NONE, Alert, plain
from recpoint.dashboards.watched_runs import WatchedRun
from recpoint.dashboards.watched_sinks import SinkView, WatchedSink
from recpoint.serving.sinks.records import CommittedVersion
from recpoint.units import bytes_text, counted, duration_text, time_text

__all__ = ["SINK_HEADINGS", "SinkLag", "sink_lag", "sink_row", "sink_state", "sink_trouble"]

SINK_HEADINGS = (
    *("State", "Sink", "Run", "Readers see step", "Version", "Behind the newest"),
    *("Deferred", "Published (UTC)", "Seen"),
)
#: As the alert `RecpointSinkBehind` has it.
_LATE_SECONDS: Final = 600.0


class SinkLag(NamedTuple):
    """What a sink lacks of its run.

    Attributes:
        checkpoints: so many that can be read are newer; 0: none.
        seconds: since when the first of them has been committed; 0: there is none.
        has_more: whether older ones that the page does not know of may be missing, too.
    """

    checkpoints: int
    seconds: float
    has_more: bool


def sink_lag(overview: RunOverview, committed: CommittedVersion) -> SinkLag:
    """Return what a sink lacks of the run that it holds."""
    checkpoint = committed.version.checkpoint
    missing: list[CheckpointFacts] = []
    is_listed = False
    for facts in overview.checkpoints:
        if (facts.step, facts.generation) == (checkpoint.step, checkpoint.generation):
            is_listed = True
            break
        # A later generation may begin at an earlier step.
        if (facts.generation, facts.step) > (checkpoint.generation, checkpoint.step):
            missing.append(facts)
    readable = [facts for facts in missing if facts.error is None]
    if not readable:
        return SinkLag(0, 0.0, False)
    first_ms = min(facts.committed_ms for facts in readable)
    has_more = (
        not is_listed
        and len(missing) == len(overview.checkpoints)
        and overview.live_checkpoints > len(overview.checkpoints)
    )
    return SinkLag(len(readable), max(0.0, time.time() - first_ms / 1000), has_more)


def sink_row(sink: WatchedSink, runs: Sequence[WatchedRun]) -> tuple[str, ...]:
    """Return the texts of a sink's row, as `SINK_HEADINGS`.

    Args:
        sink: the sink.
        runs: the runs that the page watches; the sink may hold another one.
    """
    view, committed = sink.seen, sink.seen.committed
    seen = NONE if view.looked is None else f"{duration_text(time.monotonic() - view.looked)} ago"
    if committed is None:
        return (_standing(view, None), plain(sink.name), *[NONE] * 6, seen)
    run = _run_of(committed, runs)
    lag = _lag_of(committed, run)
    return (
        _standing(view, lag),
        plain(sink.name),
        f"not watched ({committed.version.run[:12]})" if run is None else plain(run.name),
        f"{committed.version.checkpoint.step:,}",
        f"{committed.number:,}",
        NONE if lag is None else _lag_text(lag),
        _deferred_text(committed),
        time_text(committed.committed_ms),
        seen,
    )


def sink_state(sink: WatchedSink, runs: Sequence[WatchedRun]) -> Literal["good", "bad", ""]:
    """Return the colour of a sink's state: `good`, `bad` or none."""
    view, committed = sink.seen, sink.seen.committed
    if view.has_no_answer:
        return "bad"
    lag = None if committed is None else _lag_of(committed, _run_of(committed, runs))
    if lag is None:
        return ""
    if not lag.checkpoints:
        return "good"
    return "bad" if lag.seconds >= _LATE_SECONDS else ""


def sink_trouble(sink: WatchedSink) -> Alert | None:
    """Return why a sink cannot be read, and what to do next; None: it can."""
    error = sink.seen.error
    if error is not None:
        cause = f"{error.subject}: found {error.found}; expected {error.expected}"
        return Alert(f"No answer: {plain(cause)}.", plain(error.next_step))
    if sink.seen.has_no_answer:
        cause = "No answer: a look at the store has begun and has not come back."
        return Alert(cause, "check that this host still reaches the store")
    return None


def _run_of(committed: CommittedVersion, runs: Sequence[WatchedRun]) -> WatchedRun | None:
    for run in runs:
        overview = run.seen.overview
        if overview is not None and overview.run == committed.version.run:
            return run
    return None


def _lag_of(committed: CommittedVersion, run: WatchedRun | None) -> SinkLag | None:
    if run is None or run.seen.overview is None:
        return None
    return sink_lag(run.seen.overview, committed)


def _standing(view: SinkView, lag: SinkLag | None) -> str:
    if view.has_no_answer:
        return "NO ANSWER"
    if view.looked is None:
        return "reading"
    if view.committed is None:
        return "empty"
    if lag is None:
        return "in service"
    return "behind" if lag.checkpoints else "up to date"


def _lag_text(lag: SinkLag) -> str:
    if not lag.checkpoints:
        return "0 s"
    more = "more than " if lag.has_more else ""
    return f"{more}{duration_text(lag.seconds)}, {counted(lag.checkpoints, 'checkpoint')}"


def _deferred_text(committed: CommittedVersion) -> str:
    deferred = committed.deferred
    if deferred is None:
        return "0 rows"
    size = f"{counted(deferred.rows, 'row')}, {bytes_text(deferred.size_bytes)}"
    return f"{size}, the oldest at step {deferred.oldest.step:,}"
