"""Follows a run in a serving process: moves to the version to serve, and says what it serves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final, Self

from torch import nn

from recpoint.catalog.restore.order import Skipped
from recpoint.catalog.run.chain import DAMAGE, PassedOver
from recpoint.catalog.run.leases import reading as lease
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import ForeignObject, RecpointError, SettingsError, UnsupportedVersion
from recpoint.format.manifest import Manifest
from recpoint.format.naming import RUN_KEY, ManifestName
from recpoint.format.records import CheckpointRef
from recpoint.serving.goal import CHANNELS, Channel, FollowerGoal, find_pinned, find_wanted
from recpoint.serving.lookups import replace_lookups
from recpoint.serving.model import Copies
from recpoint.serving.standing import FollowerStanding, Standings
from recpoint.serving.update import OnProgress, Updater
from recpoint.serving.version import Version

__all__ = ["Follower", "Status"]


@dataclass(frozen=True, kw_only=True)
class Status:
    """A follower at one moment.

    Attributes:
        serving: the checkpoint that requests see; None: nothing yet.
        committed_ms, served_ms: when the checkpoint was committed and first served, in Unix
            milliseconds by the agent's and this host's clock; 0 while nothing is served.
        newest: step of the newest checkpoint of the live line at the last look.
        lag_seconds: how long a checkpoint better than the served one has existed, by the clocks of
            agent and this host; 0.0: the last look found no better one. None: never looked.
        lag_checkpoints: how many better checkpoints there are.
        lag_batches: batches between the served checkpoint and the newest; None while nothing is
            served.
        pinned: step that the follower is pinned to.
        versions_applied: versions put into service since the start.
        increments_applied, fulls_applied: manifests read for these versions.
        bytes_read: bytes of chunks read.
        skipped: checkpoints ahead of the served one that the last look passed over, and why.
        passed_over: damaged manifests that the way to the version in service avoided.
        doubt: what validations have against the served checkpoint, at the last look. It is served
            nevertheless because it was published or pinned, or because there is no other.
        error: what went wrong at the last look; None: nothing.
        looked_seconds_ago: since the last look that reached the store; None: there was none.
        memory_bytes: of tables, both copies.
    """

    serving: CheckpointRef | None
    committed_ms: int
    served_ms: int
    newest: int | None
    lag_seconds: float | None
    lag_checkpoints: int
    lag_batches: int | None
    pinned: int | None
    versions_applied: int
    increments_applied: int
    fulls_applied: int
    bytes_read: int
    skipped: tuple[Skipped, ...]
    passed_over: tuple[PassedOver, ...]
    doubt: str | None
    error: str | None
    looked_seconds_ago: float | None
    memory_bytes: int


_log = logging.getLogger("recpoint.serving")

#: How long a checkpoint that could not be read is left alone.
_RETRY_SECONDS: Final = 60.0


class Follower:
    """Keeps the newest checkpoint of a run in memory, for requests to look at.

    Requests run inside `with follower.reading() as version:`. Tables and dense layers of a version
    are of one checkpoint, and stay so until the block ends. Meanwhile a later version is put
    together in a second copy of the model. Requests that begin after that are given the later
    version. So **a follower holds two copies of the model** (only the tables named in `tables`),
    and while it reads, some chunks. An increment is read and decoded once; the copy that is
    replaced takes over the changed rows from the other copy.

    Keyed tables are looked up by key, and a key without a row gets zeros. In a model, lookups take
    the place of `KeyedEmbedding` and `KeyedEmbeddingBag`, whatever their capacity.

    Args:
        url: the run. It need not exist yet: until it does, the log says so from the first look on,
            and so does the error that `reading` raises.
        model: a model as the trainer builds it. It becomes one of the two copies: it is put into
            evaluation mode, its weights are replaced, and it must only be used through `reading`.
            None: tables and dense layers are given by name.
        tables: without a model: names of the tables that are followed; None: all.
        channel: `newest`; `validated`: only checkpoints that passed a validation; `published`: the
            checkpoint that `recpoint publish` or the flow `publish` has chosen, even an older one.
        quantized: keep quantized rows as they are stored, and decode them when they are looked up.
        poll_seconds: how long the background thread waits between two looks.
        reader_wait_seconds: how long an update waits for requests that still look at the version
            before the one in service.
        threads: chunks read at once.

    Raises:
        SettingsError: a setting that cannot work, or a URL that names no store.
        IncompatibleModel: a keyed embedding whose lookups do more than look rows up; with
            `quantized`: an embedding that cannot be kept as codes.
    """

    def __init__(
        self,
        url: str,
        *,
        model: nn.Module | None = None,
        tables: Collection[str] | None = None,
        channel: Channel = "newest",
        quantized: bool = False,
        poll_seconds: float = 5.0,
        reader_wait_seconds: float = 30.0,
        threads: int = 2,
    ) -> None:
        _check(model, tables, channel, poll_seconds, reader_wait_seconds, threads)
        self._store = open_store(url)
        if model is not None:
            replace_lookups(model, coded=quantized)
        self._copies = Copies(model, self._store.url)
        self._tables = None if tables is None else frozenset(tables)
        self._channel: Channel = channel
        self._quantized = quantized
        self._poll_seconds = poll_seconds
        self._reader_wait_seconds = reader_wait_seconds
        self._threads = threads
        self._updating = threading.Lock()
        self._updater: Updater | None = None
        self._run: Run | None = None
        self._pinned: tuple[int, int | None] | None = None
        self._failed: dict[ManifestName, tuple[float, str]] = {}
        self._standings = Standings()
        self._looked_at: float | None = None
        self._passed_over: tuple[PassedOver, ...] = ()
        self._versions = 0
        self._error: str | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def reading(self) -> AbstractContextManager[Version]:
        """The version in service, in a `with` block: nothing in the version changes in the block.

        This never waits for the store, and works while the store is away.

        Raises:
            NotServing: on entering, before the first version is there.
        """
        return self._copies.reading(lambda: self._error)

    @property
    def version(self) -> int | None:
        """Step of the version that requests are given; None before the first."""
        version = self._copies.version
        return None if version is None else version.step

    @property
    def lag_seconds(self) -> float | None:
        """See `Status.lag_seconds`."""
        _, standing = self._at_once()
        return None if standing is None else standing.lag_seconds

    @property
    def status(self) -> Status:
        """What is served, how far behind that is, and what went wrong."""
        version, standing = self._at_once()
        updater, goal = self._updater, None if standing is None else standing.wanted
        newest = None if goal is None or goal.newest is None else goal.newest.step
        failed = [Skipped(name, text) for name, (_, text) in list(self._failed.items())]
        doubted = () if goal is None else goal.skipped
        if version is not None:
            served = ManifestName(version.step, version.checkpoint.generation)
            doubted = [doubt for doubt in doubted if doubt.name > served]
        looked = self._looked_at
        return Status(
            serving=None if version is None else version.checkpoint,
            committed_ms=0 if version is None else version.committed_ms,
            served_ms=0 if version is None else version.served_ms,
            newest=newest,
            lag_seconds=None if standing is None else standing.lag_seconds,
            lag_checkpoints=0 if goal is None else len(goal.names),
            lag_batches=None if version is None or newest is None else newest - version.step,
            pinned=None if self._pinned is None else self._pinned[0],
            versions_applied=self._versions,
            increments_applied=0 if updater is None else updater.increments,
            fulls_applied=0 if updater is None else updater.fulls,
            bytes_read=0 if updater is None else updater.bytes_read,
            skipped=(*failed, *doubted),
            passed_over=self._passed_over,
            doubt=None if standing is None else standing.doubt,
            error=self._error,
            looked_seconds_ago=None if looked is None else time.monotonic() - looked,
            memory_bytes=self._copies.nbytes,
        )

    def _at_once(self) -> tuple[Version | None, FollowerStanding | None]:
        """Return the served version with its own standing, even if a move happens meanwhile."""
        while True:
            version = self._copies.version
            standing = self._standings.of(None if version is None else _name(version.checkpoint))
            if self._copies.version is version:
                return version, standing

    def wait(self, *, seconds: float, step: int | None = None) -> bool:
        """Wait until something is served.

        Args:
            seconds: how long to wait at most.
            step: wait until this step, or a later one, is served; None: any.

        Returns:
            Whether it is served.
        """
        copies = self._copies

        def there() -> bool:
            version = copies.version
            return version is not None and (step is None or version.step >= step)

        with copies.changed:
            return copies.changed.wait_for(there, timeout=seconds)

    def pin(self, step: int, generation: int | None = None) -> None:
        """Serve this checkpoint from the next look on, until `unpin`; it may be older.

        Retention does not know of this pin: `recpoint pin` keeps a checkpoint in the store.

        Args:
            step: of the checkpoint.
            generation: for a checkpoint that is not on the live line.
        """
        self._pinned = (step, generation)
        self._wake.set()

    def unpin(self) -> None:
        """Follow the channel again from the next look on."""
        self._pinned = None
        self._wake.set()

    def start(self) -> Self:
        """Look again and again, in a thread; errors are in `status` and in the log.

        Raises:
            RuntimeError: this host has no thread left; call it again.
        """
        if self._thread is None:
            self._stop.clear()
            thread = threading.Thread(target=self._follow, name="recpoint-follow", daemon=True)
            thread.start()
            self._thread = thread
        return self

    def stop(self) -> None:
        """End the thread; the served version stays in service."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def poll(self, *, on_progress: OnProgress | None = None) -> bool:
        """Look once, and move to a better checkpoint if there is one; return whether it moved.

        Damaged checkpoints are passed over, and named in `status`.

        Args:
            on_progress: called with bytes read so far and bytes to read, from this thread.

        Raises:
            NothingToRestore: the run or the pinned checkpoint does not exist.
            IncompatibleModel: the checkpoint does not fit the model.
            NotServing: requests still hold an older version.
            FormatError, ChainError: the run's records, or the pinned checkpoint, are damaged, or
                of a later release; or another run has taken this run's place.
            StoreError: the store cannot be read. The served version stays in service.
        """
        with self._updating:
            try:
                moved = self._poll(on_progress)
            except RecpointError as error:
                self._error = f"{type(error).__name__}: {error}"
                raise
            self._error = None
            return moved

    def _follow(self) -> None:
        last_error: str | None = None
        while not self._stop.is_set():
            self._wake.clear()
            try:
                self.poll()
            except RecpointError:
                if self._error != last_error:
                    self._log_error()
            except Exception as error:  # a bug must not end the following silently
                self._error = f"{type(error).__name__}: {error}"
                _log.exception("following %s", self._store.url)
            if last_error is not None and self._error is None:
                _log.info("following %s again", self._store.url)
            last_error = self._error
            self._wake.wait(self._poll_seconds)

    def _log_error(self) -> None:
        if self.version is not None:
            _log.warning("serving step %s still: %s", self.version, self._error)
            return
        _log.warning(
            "serving nothing yet: %s; looking again every %g s", self._error, self._poll_seconds
        )

    def _poll(self, on_progress: OnProgress | None) -> bool:
        run, updater = self._opened()
        self._note_wanted(run, updater)
        pinned = self._pinned
        if pinned is None:
            return self._follow_channel(run, updater, on_progress)
        name = find_pinned(run, *pinned)
        if name == _served(updater):
            return False
        # Seen from the pinned checkpoint: after a move back, newer checkpoints are ahead.
        self._move(run, updater, name, self._wanted_from(run, name), on_progress)
        return True

    def _note_wanted(self, run: Run, updater: Updater) -> None:
        served = _served(updater)
        goal = self._wanted_from(run, served)
        self._looked_at = time.monotonic()
        self._note_failed(goal)
        self._standings.note(served, goal, run, updater)

    def _wanted_from(self, run: Run, served: ManifestName | None) -> FollowerGoal:
        goal = find_wanted(run, self._channel, served)
        if self._pinned is not None and served is not None and self._channel != "published":
            return goal.after(served)
        return goal

    def _follow_channel(self, run: Run, updater: Updater, on_progress: OnProgress | None) -> bool:
        now = time.monotonic()
        goal = self._wanted
        for place, name in enumerate(goal.names):
            failed_at, _ = self._failed.get(name, (None, ""))
            if failed_at is not None and now - failed_at < _RETRY_SECONDS:
                continue
            try:
                published_ms = goal.published_ms if place else None
                ahead = replace(goal, names=goal.names[:place], published_ms=published_ms)
                self._move(run, updater, name, ahead, on_progress)
            except UnsupportedVersion:
                raise
            except DAMAGE as error:
                self._failed[name] = (now, f"{type(error).__name__}: {error}")
                _log.warning("passing over %s: %s", name, self._failed[name][1])
                continue
            return True
        return False

    def _move(
        self,
        run: Run,
        updater: Updater,
        name: ManifestName,
        ahead: FollowerGoal,
        on_progress: OnProgress | None,
    ) -> None:
        """Serve a checkpoint; `ahead` is what is wanted once it is served."""
        manifest = run.manifest(*name)
        line = self._wanted.names
        well = False
        with lease(run, purpose="follow", covers=[manifest.ref]):
            self._standings.moving(name, ahead, run, updater)
            try:
                self._passed_over = updater.move(
                    name, committed_ms=manifest.committed_ms, line=line, on_progress=on_progress
                )
                well = True
            finally:
                self._standings.moved(well=well)
        self._versions += 1
        self._note_failed(ahead)

    @property
    def _wanted(self) -> FollowerGoal:
        standing = self._standings.last
        assert standing is not None  # there is a look before every move
        return standing.wanted

    def _note_failed(self, goal: FollowerGoal) -> None:
        self._failed = {name: reason for name, reason in self._failed.items() if name in goal.names}

    def _opened(self) -> tuple[Run, Updater]:
        # Opened at each look: a local store whose mount is gone lists as empty, as if without news.
        run = Run.open(self._store)
        if self._run is not None and run.id != self._run.id:
            raise ForeignObject(
                f"{run.url}/{RUN_KEY}",
                found=f"run {run.id}",
                expected=f"run {self._run.id}, which is followed",
                next_step="start the serving process anew, if this is the run to serve now",
            )
        if self._run is None or self._updater is None:
            self._run = run
            self._updater = Updater(
                self._run,
                self._copies,
                tables=self._tables,
                coded=self._quantized,
                threads=self._threads,
                reader_wait_seconds=self._reader_wait_seconds,
            )
        return self._run, self._updater


def _served(updater: Updater) -> ManifestName | None:
    return None if updater.served is None else _name(updater.served)


def _name(checkpoint: CheckpointRef | Manifest) -> ManifestName:
    return ManifestName(checkpoint.step, checkpoint.generation)


def _check(
    model: nn.Module | None,
    tables: Collection[str] | None,
    channel: str,
    poll_seconds: float,
    reader_wait_seconds: float,
    threads: int,
) -> None:
    wrong: tuple[str, object, str] | None = None
    if model is not None and tables is not None:
        wrong = ("tables", tables, "none beside a model, of which all tables are followed")
    elif channel not in CHANNELS:
        wrong = ("channel", channel, f"one of {', '.join(CHANNELS)}")
    elif not 0.01 <= poll_seconds <= 86400:
        wrong = ("poll_seconds", poll_seconds, "0.01 seconds to a day")
    elif not 0 <= reader_wait_seconds <= 86400:
        wrong = ("reader_wait_seconds", reader_wait_seconds, "0 seconds to a day")
    elif threads < 1:
        wrong = ("threads", threads, "1 or more")
    for name, tensor in (
        () if model is None else (*model.named_parameters(), *model.named_buffers())
    ):
        if tensor.is_inference():
            raise SettingsError(
                f"{name!r} of the model",
                found="a tensor made under torch.inference_mode(), which no update can write to",
                expected="one made outside it",
                next_step="build the model outside torch.inference_mode(); requests may look at it "
                "under it",
            )
    if wrong is not None:
        setting, actual, expected = wrong
        raise SettingsError(
            setting,
            found=f"{actual!r:.200}",
            expected=expected,
            next_step="see the docstring of recpoint.Follower",
        )
