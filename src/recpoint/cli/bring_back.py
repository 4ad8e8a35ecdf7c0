"""The command that makes a lost `run.json` anew: `recpoint bring-back`."""

from __future__ import annotations

from recpoint.catalog.runs.run_record import remake_run_record
from recpoint.catalog.stores.store import open_store
from recpoint.cli.inspect import UrlArgument
from recpoint.cli.reporting import JsonOption, Result, command
from recpoint.dashboards import terminal
from recpoint.format.naming import RUN_KEY

__all__ = ["bring_back_run"]


@command
def bring_back_run(url: UrlArgument, json_output: JsonOption = False) -> Result:
    """Make a lost run.json anew, with the id that all other records of the run have.

    Put the object itself back instead where there is a copy of it.
    """
    store = open_store(url)
    record, told_by = remake_run_record(store)
    document = {"url": store.url, "run": record.run, "told_by": told_by}
    text = f"{store.url}/{RUN_KEY} is there again: run {record.run}, as {told_by} records say"
    return Result(document, terminal.shown(text, limit=2000))
