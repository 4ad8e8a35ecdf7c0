"""Pins: checkpoints that are kept whatever the rules say, and what was measured (format §6.6)."""

from __future__ import annotations

import getpass
import math
import socket
from collections.abc import Container, Iterable
from typing import Final

from recpoint.catalog.run.chain import resolve_chain
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.records import Records
from recpoint.errors import (
    ChainError,
    FormatError,
    NonFiniteValue,
    NothingToRestore,
    ObjectNotFound,
    RetentionRefused,
    SettingsError,
)
from recpoint.format.naming import DELETION_KEY, PIN_KEY, ManifestName, is_label
from recpoint.format.record_kinds import DELETION, MARK, METRIC, PIN
from recpoint.format.retention_records import Deletion, Metric, Pin

__all__ = [
    "DEFAULT_NAME",
    "hold",
    "pin",
    "pinned",
    "pinned_text",
    "read_deletion",
    "read_metrics",
    "record_metric",
    "unpin",
    "words",
]


#: What a pin is called when nobody names it.
DEFAULT_NAME = "pin"


def pinned_text(pins: Iterable[str]) -> str:
    """That a checkpoint is pinned, and the names that people gave its pins."""
    names = ", ".join(sorted(name for name in pins if name != DEFAULT_NAME))
    return f"pinned ({names})" if names else "pinned"


#: What says that a checkpoint goes, is gone, or does not restore: a pin of it is taken back.
_NOT_TO_BE_KEPT: Final = (RetentionRefused, ObjectNotFound, ChainError, FormatError)


def pin(
    run: Run,
    name: ManifestName,
    *,
    label: str = DEFAULT_NAME,
    who: str | None = None,
    why: str = "",
) -> Pin:
    """Keep a checkpoint until `unpin`; it holds once this returns (format §6.6).

    Args: see `hold`.

    Returns:
        The pin, or the one of that name that was there.

    Raises:
        FormatError: of that name there is one that cannot be read; it counts all the same.
        SettingsError, ObjectNotFound, ChainError, FormatError, RetentionRefused: see `hold`.
    """
    wish, created = hold(run, name, label=label, who=who, why=why)
    return wish if created else run.records(PIN).read(*name, label)


def hold(
    run: Run,
    name: ManifestName,
    *,
    label: str,
    who: str | None = None,
    why: str = "",
) -> tuple[Pin, bool]:
    """Keep a checkpoint, whatever a pin of that name says that is there: it counts by its key.

    Args:
        run: whose checkpoint it is.
        name: the checkpoint; its whole chain is kept with it.
        label: the pin's name; a checkpoint may have several, and each is removed by itself.
        who: who wants it; user and host when not given.
        why: for people.

    Returns:
        The pin as it was wished for, and whether that is what is stored: False, one was there.

    Raises:
        SettingsError: a label that no key can hold.
        ObjectNotFound: there is no such checkpoint.
        ChainError, FormatError: it does not restore.
        RetentionRefused: it is already being deleted.
        StoreError: the store cannot be reached or refuses; the pin may be set all the same.
    """
    _check_label("label", label)
    ref = run.manifest(*name).ref
    wish = Pin(
        run=run.id,
        checkpoint=ref,
        name=label,
        who=words(_whoami() if who is None else who, 255),
        why=words(why, 1024),
        created_ms=now_ms(),
    )
    key = PIN_KEY.of(*name, label)
    created = run.records(PIN).create(wish, *name, label) == "created"
    try:
        # The pin is there: whoever announces a deletion from here on sees it.
        chain = _chain_that_stays(run, key, name)
    except _NOT_TO_BE_KEPT:
        # Not where the store gave no answer: another holder may have found the pin meanwhile, and
        # count on it.
        if created:
            run.store.delete(key)
        raise
    for manifest in run.records(MARK).names():
        if manifest in chain:
            run.records(MARK).delete(manifest)
    return wish, created


def unpin(run: Run, name: ManifestName, *, label: str = DEFAULT_NAME) -> None:
    """Remove a pin; the checkpoint is from now on as any other.

    Raises:
        SettingsError: a label that no key can hold.
        NothingToRestore: there is no such pin.
    """
    _check_label("label", label)
    others = pinned(run).get(name, ())
    if label not in others:
        raise NothingToRestore(
            f"{run.url}, {name}",
            found=f"the pins {', '.join(others)}" if others else "no pin",
            expected=f"a pin called {label!r}",
            next_step=f"recpoint list {run.url}",
        )
    run.records(PIN).delete(*name, label)


def pinned(run: Run) -> dict[ManifestName, tuple[str, ...]]:
    """The names of the pins of each pinned checkpoint; one listing, no reads."""
    found: dict[ManifestName, tuple[str, ...]] = {}
    for step, generation, label in run.records(PIN).names():
        name = ManifestName(step, generation)
        found[name] = (*found.get(name, ()), label)
    return found


def record_metric(run: Run, name: ManifestName, metric: str, value: float) -> None:
    """Record what was measured of a checkpoint; a later value takes the place of an earlier one.

    Raises:
        SettingsError: a name that no key can hold.
        NonFiniteValue: no number can be compared with it.
        ObjectNotFound: there is no such checkpoint.
    """
    _check_label("metric", metric)
    if not math.isfinite(value):
        raise NonFiniteValue(
            f"metric {metric}", found=str(value), expected="a finite number", next_step="leave it"
        )
    record = Metric(
        run=run.id,
        checkpoint=run.manifest(*name).ref,
        name=metric,
        value=float(value).hex(),
        created_ms=now_ms(),
    )
    run.records(METRIC).put(record, *name, metric)


def read_metrics(
    run: Run, wanted: Iterable[str], *, of: Container[ManifestName]
) -> dict[str, dict[ManifestName, float]]:
    """Values of the metrics `wanted`, by metric and checkpoint; what cannot be read is left out.

    Args:
        run: the run.
        wanted: names of metrics.
        of: the checkpoints that are there; what is left of others is not read.
    """
    found: dict[str, dict[ManifestName, float]] = {metric: {} for metric in wanted}
    if not found:
        return found
    for named in run.records(METRIC).names():
        name = ManifestName(named.step, named.generation)
        if named.name not in found or name not in of:
            continue
        try:
            value = run.records(METRIC).read(*named).value
            found[named.name][name] = float.fromhex(value)
        except (FormatError, ObjectNotFound):
            continue
    return found


def read_deletion(run: Run) -> Deletion | None:
    """The manifests that are being deleted right now, or were when their deletion was killed.

    Raises:
        FormatError: it cannot be read.
    """
    try:
        # Also that of another run: what to think of one is for the callers.
        return Records(run.store, DELETION, run=None).read()
    except ObjectNotFound:
        return None


def _chain_that_stays(run: Run, key: str, name: ManifestName) -> set[str]:
    """Keys of the manifests that a restore reads, of which none is being deleted."""
    chain = _chain_keys(run, name)
    while True:
        _refuse_doomed(run, key, chain)
        # Deleted whole and forgotten between the two looks, or consolidated meanwhile?
        again = _chain_keys(run, name)
        if again == chain:
            return chain
        chain = again


def _refuse_doomed(run: Run, key: str, chain: set[str]) -> None:
    deletion = read_deletion(run)
    if deletion is None:
        return
    for manifest in deletion.manifests:
        if manifest in chain:
            raise RetentionRefused(
                key,
                found=f"{manifest} in {DELETION_KEY}, announced by process {deletion.pid} of "
                f"{deletion.host}: it is being deleted",
                expected="a checkpoint that no retention has begun to delete",
                next_step=f"choose another: recpoint list {run.url}; if that retention was killed, "
                f"recpoint retain {run.url} finishes what it began, half an hour after it was "
                "announced, and what is left then can be pinned",
            )


def _chain_keys(run: Run, name: ManifestName) -> set[str]:
    return {Representation.of(link).key for link in resolve_chain(run, name).manifests}


def _check_label(setting: str, label: str) -> None:
    if not is_label(label):
        raise SettingsError(
            setting,
            found=repr(label[:80]),
            expected="1 to 64 of a-z, 0-9, _, ., -, the first a letter or digit",
            next_step="choose another name",
        )


def words(text: str, most: int) -> str:
    """Text for people as a record can hold it: what a terminal gave that is no UTF-8 becomes ?."""
    return text[:most].encode(errors="replace").decode()


def _whoami() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no such user, as in some containers
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
