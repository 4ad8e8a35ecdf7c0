"""Records that a trainer ended by itself, so its silence is no trouble (format §5)."""

from __future__ import annotations

import logging
import threading

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import ObjectNotFound, StoreError
from recpoint.format.record_kinds import END
from recpoint.format.records import EndRecord
from recpoint.interrupts import start_thread

__all__ = [
    "read_end",
    "tell_ended",
]


_log = logging.getLogger("recpoint")

#: How long the end of training waits for the store to take the end record, on which nothing
#: depends.
_WAIT_SECONDS = 10.0


def tell_ended(run: Run, generation: int, *, step: int, reason: str) -> None:
    """Write the end record of a generation, replacing an earlier one.

    Waits at most 10 seconds for the store. Errors are logged and never raised.

    Args:
        run: the run.
        generation: the generation of the trainer that ends.
        step: how many batches are worth keeping.
        reason: `finished`: the training script is done; `terminated`: it got SIGTERM;
            `superseded`: it trains on, and a later generation owns the run; `failed: …`: an
            exception ended it. At most 1,024 characters are kept.
    """
    record = EndRecord(
        run=run.id,
        generation=generation,
        step=step,
        reason=reason[:1024],
        ended_ms=now_ms(),
    )

    def write() -> None:
        try:
            run.records(END).put(record, generation)
        except StoreError as error:
            _log.info("no word in the store that training has ended: %s", error)

    # A daemon thread, because a store that hangs must not keep the process alive.
    writing = threading.Thread(target=write, name="recpoint-end", daemon=True)
    try:
        start_thread(writing)
    except RuntimeError as error:  # python's: can't start new thread
        _log.info("no word in the store that training has ended: %s", error)
        return
    writing.join(_WAIT_SECONDS)


def read_end(run: Run, generation: int) -> EndRecord | None:
    """Return the end record of a generation; None if there is none.

    Raises:
        FormatError: the record is damaged, or belongs to another run or key.
        StoreError: it cannot be read.
    """
    try:
        return run.records(END).read(generation)
    except ObjectNotFound:
        return None
