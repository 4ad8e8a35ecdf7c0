"""Pins checkpoints, which retention then keeps (format §6.6)."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Iterable
from typing import Final

from recpoint.catalog.run.chain import resolve_chain
from recpoint.catalog.run.deletions import read_deletion
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import (
    ChainError,
    FormatError,
    NothingToRestore,
    ObjectNotFound,
    RetentionRefused,
    SettingsError,
)
from recpoint.format.naming import DELETION_KEY, PIN_KEY, ManifestName, is_label
from recpoint.format.record_kinds import MARK, PIN
from recpoint.format.retention_records import Pin

__all__ = [
    "DEFAULT_NAME",
    "hold",
    "pin",
    "pinned",
    "pinned_text",
    "require_label",
    "unpin",
    "words",
]


#: The name of a pin when the caller gives none.
DEFAULT_NAME = "pin"


def pinned_text(pins: Iterable[str]) -> str:
    """Say that a checkpoint is pinned, with the names of its pins; a default pin alone has none."""
    names = sorted(pins)
    return "pinned" if {*names} <= {DEFAULT_NAME} else f"pinned ({', '.join(names)})"


#: Errors of a checkpoint that is being deleted, is gone, or does not restore: its pin is removed.
_NOT_TO_BE_KEPT: Final = (RetentionRefused, ObjectNotFound, ChainError, FormatError)


def pin(
    run: Run,
    name: ManifestName,
    *,
    label: str = DEFAULT_NAME,
    who: str | None = None,
    why: str = "",
) -> Pin:
    """Keep a checkpoint until `unpin`; the pin holds once this returns (format §6.6).

    Args: see `hold`.

    Returns:
        The pin, or an earlier pin of the same name.

    Raises:
        FormatError: a pin of this name is there and cannot be read; it keeps the checkpoint too.
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
    """Keep a checkpoint; an earlier pin of this name is enough, whatever its record says.

    Args:
        run: the run of the checkpoint.
        name: the checkpoint; its whole chain is kept too.
        label: the pin's name; a checkpoint may have several pins, each removed by itself.
        who: who wants it; user and host when not given.
        why: the reason, for people.

    Returns:
        The pin with these values, and whether it was stored; False: a pin was there before.

    Raises:
        SettingsError: no key can hold the label.
        ObjectNotFound: there is no such checkpoint.
        ChainError, FormatError: it does not restore.
        RetentionRefused: it is already being deleted.
        StoreError: the store cannot be reached or refuses; the pin may have been set.
    """
    require_label("label", label)
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
        # The pin is stored, so a retention that announces a deletion from now on sees it.
        chain = _chain_that_stays(run, key, name)
    except _NOT_TO_BE_KEPT:
        # After a StoreError the pin stays: another holder may have found it meanwhile and rely on
        # it.
        if created:
            run.store.delete(key)
        raise
    for manifest in run.records(MARK).names():
        if manifest in chain:
            run.records(MARK).delete(manifest)
    return wish, created


def unpin(run: Run, name: ManifestName, *, label: str = DEFAULT_NAME) -> None:
    """Remove a pin; from now on the rules decide about the checkpoint.

    Raises:
        SettingsError: no key can hold the label.
        NothingToRestore: there is no such pin.
    """
    require_label("label", label)
    labels = pinned(run).get(name, ())
    if label not in labels:
        raise NothingToRestore(
            f"{run.url}, {name}",
            found=f"the pins {', '.join(labels)}" if labels else "no pin",
            expected=f"a pin called {label!r}",
            next_step=f"recpoint list {run.url}",
        )
    run.records(PIN).delete(*name, label)


def pinned(run: Run) -> dict[ManifestName, tuple[str, ...]]:
    """Return the names of the pins of each pinned checkpoint; one listing, no reads."""
    labels_of: dict[ManifestName, tuple[str, ...]] = {}
    for step, generation, label in run.records(PIN).names():
        name = ManifestName(step, generation)
        labels_of[name] = (*labels_of.get(name, ()), label)
    return labels_of


def _chain_that_stays(run: Run, key: str, name: ManifestName) -> set[str]:
    """Return the keys of the manifests that a restore reads; refuse if any is being deleted."""
    chain = _chain_keys(run, name)
    while True:
        _refuse_doomed(run, key, chain)
        # Between the two looks a deletion may have begun and ended, or a consolidation.
        chain_now = _chain_keys(run, name)
        if chain_now == chain:
            return chain
        chain = chain_now


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
                f"recpoint retain {run.url} finishes its deletion half an hour after the "
                "announcement, and checkpoints that are left then can be pinned",
            )


def _chain_keys(run: Run, name: ManifestName) -> set[str]:
    return {Representation.of(link).key for link in resolve_chain(run, name).manifests}


def require_label(setting: str, label: str) -> None:
    """Refuse a name that no key can hold.

    Raises:
        SettingsError: names the setting and what is expected.
    """
    if not is_label(label):
        raise SettingsError(
            setting,
            found=repr(label[:80]),
            expected="1 to 64 of a-z, 0-9, _, ., -, the first a letter or digit",
            next_step="choose another name",
        )


def words(text: str, most: int) -> str:
    """Return at most `most` characters of a text; a character that UTF-8 cannot hold becomes ?."""
    return text[:most].encode(errors="replace").decode()


def _whoami() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # some containers run as a user without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
