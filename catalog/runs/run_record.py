"""`run.json`: reading it, making it, and making it anew where it was lost (format §6.1 W1)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from recpoint.catalog.stores.elapsed import now_ms
from recpoint.catalog.stores.store_contract import Store
from recpoint.catalog.stores.stored_records import Records
from recpoint.errors import (
    ForeignObject,
    FormatError,
    NothingToRestore,
    ObjectNotFound,
    RunRecordLost,
)
from recpoint.format.naming import RUN_KEY
from recpoint.format.record_kinds import CONSOLIDATED, GENERATION, MANIFEST, RUN, AnyKind
from recpoint.format.records import (
    RunRecord,
)

__all__ = ["create_run_record", "read_run_record", "remake_run_record"]

#: Generation records first: there are few, and each start of a trainer makes one.
_TELLING: tuple[AnyKind, ...] = (GENERATION, MANIFEST, CONSOLIDATED)


def read_run_record(store: Store) -> RunRecord:
    """What makes this URL a run (format §6.3 R1).

    Raises:
        NothingToRestore: there is none: no run.
        RunRecordLost: there is one, which has lost it.
        FormatError: it is damaged or of an unknown version.
    """
    record = _found(store)
    if record is None:
        raise NothingToRestore(
            store.url,
            found=f"no {RUN_KEY}",
            expected="the URL of a run that a trainer has started",
            next_step="correct the URL; or start the trainer, which makes the run",
        )
    return record


def create_run_record(store: Store) -> RunRecord:
    """The one that is there, or a new one where there is no run.

    A new id beside what another run has left would make all of that foreign, for good.

    Raises:
        RunRecordLost: there is none, but objects of a run are there.
        FormatError: it is damaged or of an unknown version.
    """
    record = _found(store)
    return _created(store, secrets.token_hex(16)) if record is None else record


def remake_run_record(store: Store) -> tuple[RunRecord, int]:
    """Make it anew with the id that the run's records have; also how many of them have it.

    Raises:
        ForeignObject: there is one already; or there are records of several runs.
        NothingToRestore: nothing tells the id.
    """
    try:
        there = Records(store, RUN, run=None).read()
    except ObjectNotFound:
        pass
    else:
        raise ForeignObject(
            f"{store.url}/{RUN_KEY}",
            found=f"that of run {there.run}",
            expected="none: it is made anew where it was lost",
            next_step=f"recpoint check {store.url}",
        )
    ids: list[str] = []
    for kind, key in _keys(store):
        # Every generation record; of manifests, which are many, the first that tells.
        if not ids or kind is GENERATION:
            run = _id_in(store, kind, key)
            ids += [] if run is None else [run]
    if len(set(ids)) > 1:
        raise ForeignObject(
            f"{store.url}/{RUN_KEY}",
            found=f"records of {len(set(ids))} runs: {', '.join(sorted(set(ids)))}",
            expected="those of one",
            next_step="find out which do not belong here, and move them away",
        )
    if not ids:
        raise NothingToRestore(
            store.url,
            found="no generation record or manifest that can be read, and tells the run's id",
            expected="one at least",
            next_step="correct the URL; or put run.json back from a backup",
        )
    return _created(store, ids[0]), len(ids)


def _found(store: Store) -> RunRecord | None:
    """None: there is no run at all.

    Raises:
        RunRecordLost: there is one, and its record is lost.
    """
    for looked_twice in (False, True):
        try:
            return Records(store, RUN, run=None).read()
        except ObjectNotFound:
            telling = next(_keys(store), None)
        if telling is None:
            return None
        if looked_twice:  # else it may have been made between the two, before what was found
            kind, key = telling
            run = _id_in(store, kind, key)
            raise RunRecordLost(
                f"{store.url}/{RUN_KEY}",
                found=f"none, but {key}" + (f" of run {run}" if run else ", which is damaged too"),
                expected="the record that says which run this is: without it nothing here is known "
                "to belong together",
                next_step=f"put {RUN_KEY} back from a backup; or, if there is none, make it anew "
                f"from what the others say: recpoint bring-back {store.url}",
            )
    raise AssertionError("unreachable")


def _keys(store: Store) -> Iterator[tuple[AnyKind, str]]:
    """Of the records that tell the id of their run."""
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
