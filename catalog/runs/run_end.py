"""The word of a trainer that it has ended by itself: silence is then no trouble (format §5)."""

from __future__ import annotations

import logging
import threading
from typing import Literal

from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.checked_read import read_checked
from recpoint.catalog.stores.elapsed import now_ms
from recpoint.errors import ForeignObject, ObjectNotFound, StoreError
from recpoint.format.naming import end_key
from recpoint.format.records import MAX_RECORD_BYTES, EndRecord, pack_record, unpack_record

__all__ = ["read_end", "tell_ended"]

_log = logging.getLogger("recpoint")

#: How long the end of training waits for a store to take this word; nothing depends on it.
_WAIT_SECONDS = 10.0


def tell_ended(
    run: Run, generation: int, *, step: int, reason: Literal["finished", "terminated"]
) -> None:
    """Write the end record of a generation, replacing its earlier one.

    Waits for the store a few seconds at most; what goes wrong is logged and never raised.

    Args:
        run: the run.
        generation: of the trainer that ends.
        step: batches that are worth keeping.
        reason: `finished`: the training script is done; `terminated`: somebody sent SIGTERM.
    """
    record = EndRecord(
        run=run.id,
        generation=generation,
        step=step,
        reason=reason,
        ended_ms=now_ms(),
    )

    def write() -> None:
        try:
            run.store.put(end_key(generation), pack_record(record))
        except StoreError as error:
            _log.info("no word in the store that training has ended: %s", error)

    # A daemon: a store that hangs must not keep the process.
    writing = threading.Thread(target=write, name="recpoint-end", daemon=True)
    try:
        writing.start()
    except RuntimeError as error:  # python's: can't start new thread
        _log.info("no word in the store that training has ended: %s", error)
        return
    writing.join(_WAIT_SECONDS)


def read_end(run: Run, generation: int) -> EndRecord | None:
    """What the trainer of a generation said at its end; None: nothing.

    Raises:
        FormatError: the record is damaged, or another's.
        StoreError: it cannot be read.
    """
    key = end_key(generation)

    def parse(data: bytes) -> EndRecord:
        next_step = f"nothing: it is for people; remove it if it disturbs: {run.url}/{key}"
        record = unpack_record(EndRecord, data, name=key, next_step=next_step)
        if (record.run, record.generation) != (run.id, generation):
            raise ForeignObject(
                key,
                found=f"the end of run {record.run}, generation {record.generation}",
                expected=f"run {run.id}, generation {generation}",
                next_step=next_step,
            )
        return record

    try:
        return read_checked(run.store, key, max_bytes=MAX_RECORD_BYTES, parse=parse)
    except ObjectNotFound:
        return None
