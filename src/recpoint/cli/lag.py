"""The command that says what would be lost now: `recpoint lag`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.live import Live

from recpoint.catalog.overview.overview import RunOverview, alarms
from recpoint.catalog.overview.run_watch import RunWatch
from recpoint.catalog.stores.run_url import naming_run, parse_run_url
from recpoint.cli.reporting import JsonOption, Result, command, exit_code, output_console
from recpoint.dashboards.catalog_watch import current_watch
from recpoint.dashboards.lag import RunLag, lag_table
from recpoint.errors import RecpointError

__all__ = ["lag"]


@command
def lag(
    urls: Annotated[
        list[str], typer.Argument(metavar="URL...", help="Runs: local paths, s3://bucket/prefix, …")
    ],
    max_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="End with 1 if more training than that would be lost now.",
        ),
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Look again so often, until it is interrupted."
        ),
    ] = None,
    json_output: JsonOption = False,
) -> Result:
    """What each run would lose if its trainer died now, from its catalog alone.

    Exit codes: 0 all could be read, and none is above --max-seconds; 1 one is, or a run is not
    there; 2 a wrong URL; 3 a store cannot be reached; 4 a catalog is damaged. Of several, the
    highest. A run that has ended, with everything stored, would lose nothing.
    """
    if watch is not None and json_output:
        raise typer.BadParameter("it does not go with --json", param_hint="--watch")
    lags = _Lags(urls, max_seconds)
    if watch is not None:
        with Live(console=output_console(), auto_refresh=False) as live:
            while True:
                live.update(lag_table(lags.refresh()), refresh=True)
                time.sleep(watch)
    found = lags.refresh()
    code = max(
        exit_code(one.found) if isinstance(one.found, RecpointError) else int(one.above)
        for one in found
    )
    return Result({"runs": [_document(one) for one in found]}, lag_table(found), code=code)


class _Lags:
    """Looks at runs again and again; one that cannot be read keeps nobody from the others."""

    def __init__(self, urls: Sequence[str], max_seconds: float | None) -> None:
        self._urls = urls
        self._max_seconds = max_seconds
        self._watches: dict[str, RunWatch] = {}

    def refresh(self) -> list[RunLag]:
        return [self._one(url) for url in self._urls]

    def _one(self, url: str) -> RunLag:
        try:
            # A URL that is refused may carry a credential: it is shown as its error shows it.
            named = parse_run_url(url).url
        except RecpointError as error:
            return RunLag("", error)
        try:
            self._watches[url] = current_watch(url, self._watches.get(url))
            seen = self._watches[url].refresh()
        except RecpointError as error:
            self._watches.pop(url, None)
            error.next_step = naming_run(error.next_step, named)
            return RunLag(named, error)
        limit = self._max_seconds
        return RunLag(named, seen, limit is not None and seen.lag.at_risk_seconds > limit)


def _document(one: RunLag) -> dict[str, Any]:
    if isinstance(one.found, RecpointError):
        error = one.found
        return {
            "url": one.url,
            "error": type(error).__name__,
            "subject": error.subject,
            "found": error.found,
            "expected": error.expected,
            "next_step": error.next_step,
        }
    return {"url": one.url, "above": one.above, **_figures(one.found)}


def _figures(seen: RunOverview) -> dict[str, Any]:
    lag, newest, restore, ended = seen.lag, seen.newest, seen.restore, seen.ended
    validated = seen.last_validated
    verdict = None if validated is None else validated.verdict
    return {
        "run": seen.run,
        "lag_seconds": lag.seconds,
        "at_risk_seconds": lag.at_risk_seconds,
        "at_risk_batches": lag.at_risk_batches,
        "interval_seconds": lag.interval_seconds,
        "step": None if newest is None else newest.step,
        "stall_seconds": None if newest is None else newest.stall_seconds,
        "checkpoints": seen.live_checkpoints,
        "restarts": seen.restarts,
        "manifests_to_read": None if restore is None else restore.manifests_to_read,
        "bytes_to_read": None if restore is None else restore.bytes_to_read,
        "ended": None if ended is None else ended.reason,
        "validated": None
        if validated is None or verdict is None
        else {"step": validated.step, "result": verdict.result, "level": verdict.level},
        "alarms": [
            {"trouble": alarm.trouble, "text": alarm.text, "next_step": alarm.next_step}
            for alarm in alarms(seen)
        ],
    }
