"""The word of a trainer that it has ended by itself: silence is then no trouble (format §5)."""

from __future__ import annotations

import logging
import threading
from typing import Literal

from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.elapsed import now_ms
from recpoint.errors import ObjectNotFound, StoreError
from recpoint.format.record_kinds import END
from recpoint.format.records import EndRecord
from recpoint.interrupts import start_thread

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
            run.records(END).put(record, generation)
        except StoreError as error:
            _log.info("no word in the store that training has ended: %s", error)

    # A daemon: a store that hangs must not keep the process.
    writing = threading.Thread(target=write, name="recpoint-end", daemon=True)
    try:
        start_thread(writing)
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
    try:
        return run.records(END).read(generation)
    except ObjectNotFound:
        return None
