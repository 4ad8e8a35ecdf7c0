"""Holds, renews and reads leases, which tell retention what is being read (format §6.6, §6.7)."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Clocks, stamp_now
from recpoint.errors import FormatError, ObjectNotFound, StoreError
from recpoint.format.record_kinds import LEASE
from recpoint.format.records import CheckpointRef
from recpoint.format.retention_records import MAX_LEASE_SECONDS, Lease
from recpoint.interrupts import start_thread

__all__ = ["Held", "HeldLease", "adopt", "read_leases", "reading"]


_LOG = logging.getLogger("recpoint.leases")

#: How long a lease outlives its owner; a living owner renews it.
_READING_SECONDS = 6 * 3600

#: Renewed this often, so that many renewals may fail before the lease expires.
_RENEW_SECONDS = _READING_SECONDS / 12

#: The longest wait at the end for a renewal that hangs in the store.
_LAST_RENEWAL_SECONDS = 10.0


class HeldLease:
    """A lease of this process; any thread may `renew` it, and `release` removes it.

    Args:
        run: the run that is read.
        purpose: `restore`, `consolidate`, `publish`, …
        covers: the checkpoints that must stay; None: everything that exists.
        ttl_seconds: how long the lease counts after its last renewal.

    Raises:
        StoreError: the lease could not be written.
    """

    def __init__(
        self,
        run: Run,
        *,
        purpose: str,
        covers: Iterable[CheckpointRef] | None = None,
        ttl_seconds: int = _READING_SECONDS,
    ) -> None:
        self._run = run
        self._writing = threading.Lock()
        self._record = Lease(
            run=run.id,
            owner=secrets.token_hex(16),
            purpose=purpose,
            covers=None if covers is None else tuple(covers),
            ttl_seconds=ttl_seconds,
            host=socket.gethostname()[:255],
            pid=os.getpid(),
            stamp=stamp_now(),
        )
        self.renew()

    def renew(self, *, covers: Iterable[CheckpointRef] | None = None) -> None:
        """Write the lease again with a new stamp and, if `covers` is given, other checkpoints."""
        update: dict[str, object] = {"stamp": stamp_now()}
        if covers is not None:
            update["covers"] = tuple(covers)
        with self._writing:  # otherwise an older record could replace a newer one
            self._record = self._record.model_copy(update=update)
            self._run.records(LEASE).put(self._record, self._record.owner)

    def release(self) -> None:
        """Remove the lease."""
        self._run.records(LEASE).delete(self._record.owner)


@contextmanager
def reading(
    run: Run,
    *,
    purpose: str,
    covers: Iterable[CheckpointRef] | None = None,
    renew_seconds: float = _RENEW_SECONDS,
) -> Iterator[HeldLease | None]:
    """Hold a lease while the block runs; yield None if it cannot be written or renewed.

    A reader that may not write, or whose store is full, or whose host has no thread left, must
    still be able to restore. Then only the grace period of retention protects what it reads. A
    thread renews the lease, so it holds however long the block takes, while the process lives.
    """
    lease: HeldLease | None = None
    try:
        lease = HeldLease(run, purpose=purpose, covers=covers)
    except StoreError as error:
        _LOG.info("reading without a lease: %s", error)
    if lease is None:
        yield None
        return
    ended = threading.Event()
    renewing = threading.Thread(
        target=_renew_until,
        args=(ended, lease, renew_seconds),
        name="recpoint-lease",
        daemon=True,  # a process that ends inside the block must not wait for this thread
    )
    try:
        start_thread(renewing)
    except (RuntimeError, MemoryError) as error:  # python's: can't start new thread
        _LOG.info("reading without a lease: %s", error)
        _release(lease)  # without renewals it would only keep checkpoints until it expires
        lease = None
    if lease is None:  # outside the except, so that errors of the block have no false context
        yield None
        return
    try:
        yield lease
    finally:
        ended.set()
        renewing.join(_LAST_RENEWAL_SECONDS)
        _release(lease)


def _release(lease: HeldLease) -> None:
    try:
        lease.release()
    except StoreError as error:
        _LOG.info("a lease was not removed and stays until it expires: %s", error)


def _renew_until(ended: threading.Event, lease: HeldLease, every_seconds: float) -> None:
    while not ended.wait(every_seconds):
        try:
            lease.renew()
        except StoreError as error:
            _LOG.info("a lease was not renewed; trying again later: %s", error)


class Held(NamedTuple):
    """A lease as retention sees it.

    Attributes:
        key: its key.
        who: its owner, for people.
        covers: the checkpoints that must stay; None: everything.
        alive: whether it counts.
        from_the_future: its stamp lies in the future, so it would count for too long.
        lease: the record; None: it cannot be read.
        modified_ms: when it was last written, by the store's clock.
    """

    key: str
    who: str
    covers: tuple[CheckpointRef, ...] | None
    alive: bool
    from_the_future: bool
    lease: Lease | None
    modified_ms: int


def read_leases(run: Run, clocks: Clocks) -> list[Held]:
    """Return all leases of a run, expired ones too."""
    leases = []
    for owner, info in run.records(LEASE).listed():
        try:
            lease = run.records(LEASE).read(owner)
        except ObjectNotFound:
            continue  # released meanwhile
        except FormatError as error:
            # Its writer may be reading, so the lease counts; only the store's clock gives its age.
            store_ms = clocks.store_ms if clocks.store_ms is not None else clocks.wall_ms
            alive = store_ms - info.modified_ms <= 1000 * MAX_LEASE_SECONDS
            reader_text = f"unreadable: {error.found}"
            leases.append(Held(info.key, reader_text, None, alive, False, None, info.modified_ms))
            continue
        age = clocks.age_seconds(lease.stamp, modified_ms=info.modified_ms)
        reader_text = f"{lease.purpose} by process {lease.pid} of {lease.host}"
        ahead = lease.stamp.written_ms > clocks.wall_ms
        alive = age <= lease.ttl_seconds
        leases.append(
            Held(info.key, reader_text, lease.covers, alive, ahead, lease, info.modified_ms)
        )
    return leases


def adopt(run: Run, held: Held) -> None:
    """Give a lease from the future this host's stamp, so that it expires in time.

    If its owner lives, the next renewal writes the owner's stamp again. If its owner has just
    ended, this write brings the lease back for one more period.
    """
    if held.lease is not None:
        record = held.lease.model_copy(update={"stamp": stamp_now()})
        run.records(LEASE).put(record, record.owner)
