"""Reads and creates `run.json`, also again after a loss (format §6.1, write order, rule 1)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from recpoint.catalog.store.contract import Store, now_ms
from recpoint.catalog.store.records import Records
from recpoint.errors import (
    ForeignObject,
    FormatError,
    NothingToRestore,
    ObjectNotFound,
    RunRecordLost,
)
from recpoint.format.naming import RUN_KEY
from recpoint.format.record_kinds import CONSOLIDATED, GENERATION, MANIFEST, RUN, AnyKind
from recpoint.format.records import RunRecord

__all__ = [
    "create_run_record",
    "read_run_record",
    "remake_run_record",
]


#: Records that say the run's id. Generation records come first, because they are few, and each
#: start of a trainer makes one.
_TELLING: tuple[AnyKind, ...] = (GENERATION, MANIFEST, CONSOLIDATED)


def read_run_record(store: Store) -> RunRecord:
    """Return the record that makes this URL a run (format §6.3, read order, rule 1).

    Raises:
        NothingToRestore: there is no run.
        RunRecordLost: there is a run that has lost its record.
        FormatError: the record is damaged or of an unknown version.
    """
    record = _found(store)
    if record is None:
        raise NothingToRestore(
            store.url,
            found=f"no {RUN_KEY}",
            expected="the URL of a run that a trainer has started",
            next_step="correct the URL; or start the trainer, which creates the run",
        )
    return record


def create_run_record(store: Store) -> RunRecord:
    """Return the run record, or create it if there is no run.

    If a run has lost its record, none is created: a new id would make all its objects foreign for
    ever.

    Raises:
        RunRecordLost: there is no record, but there are objects of a run.
        FormatError: the record is damaged or of an unknown version.
    """
    record = _found(store)
    return _created(store, secrets.token_hex(16)) if record is None else record


def remake_run_record(store: Store) -> tuple[RunRecord, int]:
    """Create a lost run record again, with the id that the run's other records have.

    Returns:
        The record, and in how many records its id was found.

    Raises:
        ForeignObject: there is a run record already, or there are records of several runs.
        NothingToRestore: no readable record says the id.
    """
    try:
        there = Records(store, RUN, run=None).read()
    except ObjectNotFound:
        pass
    else:
        raise ForeignObject(
            f"{store.url}/{RUN_KEY}",
            found=f"the record of run {there.run}",
            expected="no record, because only a lost one is created again",
            next_step=f"recpoint check {store.url}",
        )
    ids: list[str] = []
    for kind, key in _keys(store):
        # Every generation record is read, but only one manifest that says the id: they are many.
        if not ids or kind is GENERATION:
            run = _id_in(store, kind, key)
            ids += [] if run is None else [run]
    if len(set(ids)) > 1:
        raise ForeignObject(
            f"{store.url}/{RUN_KEY}",
            found=f"records of {len(set(ids))} runs: {', '.join(sorted(set(ids)))}",
            expected="records of one run",
            next_step="find out which records do not belong here, and move them away",
        )
    if not ids:
        raise NothingToRestore(
            store.url,
            found="no readable generation record or manifest that tells the run's id",
            expected="at least one",
            next_step="correct the URL; or put run.json back from a backup",
        )
    return _created(store, ids[0]), len(ids)


def _found(store: Store) -> RunRecord | None:
    """Return the run record; None if there is no run at all.

    Raises:
        RunRecordLost: there is a run, and its record is lost.
    """
    for looked_twice in (False, True):
        try:
            return Records(store, RUN, run=None).read()
        except ObjectNotFound:
            telling = next(_keys(store), None)
        if telling is None:
            return None
        if looked_twice:  # after one look, both may have been created between read and listing
            kind, key = telling
            run = _id_in(store, kind, key)
            raise RunRecordLost(
                f"{store.url}/{RUN_KEY}",
                found=f"none, but {key}" + (f" of run {run}" if run else ", which is damaged too"),
                expected="the record with the id of this run; without it nothing here is known to "
                "belong together",
                next_step=f"put {RUN_KEY} back from a backup; if there is none, rebuild it from "
                f"the other records: recpoint bring-back {store.url}",
            )
    raise AssertionError("unreachable")


def _keys(store: Store) -> Iterator[tuple[AnyKind, str]]:
    """Yield the kinds and keys of the records that say the id of their run."""
    for kind in _TELLING:
        for _, info in Records(store, kind, run=None).listed():
            yield kind, info.key


def _id_in(store: Store, kind: AnyKind, key: str) -> str | None:
    try:
        return str(Records(store, kind, run=None).read_key(key).run)
    except (FormatError, ObjectNotFound):
        return None


def _created(store: Store, run: str) -> RunRecord:
    record, records = RunRecord(run=run, created_ms=now_ms()), Records(store, RUN, run=None)
    return record if records.create(record) == "created" else records.read()
