"""Publishes checkpoints by numbered records, of which the highest counts (format §6.10)."""

from __future__ import annotations

import re
from typing import NamedTuple

from recpoint.catalog.run import pins
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import Doubts
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import FormatError, NothingToRestore, RetentionRefused, StoreUnavailable
from recpoint.format.naming import MAX_PUBLICATION, PUBLICATION_KEY, ManifestName
from recpoint.format.record_kinds import PIN, PUBLICATION
from recpoint.format.retention_records import Publication

__all__ = [
    "Published",
    "choose",
    "doubt_about",
    "newest_publication",
    "publication_numbers",
    "publish",
]


_TRIES = 100

#: How many records are kept; older ones are removed, because each look of a follower lists all.
_KEPT_RECORDS = 100
_LABEL = re.compile(r"published-([0-9]{8})\Z")


class Published(NamedTuple):
    """The record that counts, whether this call wrote it, and why validations speak against it."""

    record: Publication
    created: bool
    doubt: str | None = None


def publish(
    run: Run,
    name: ManifestName,
    *,
    held: bool = False,
    release: bool = False,
    force: bool = False,
    who: str | None = None,
    why: str = "",
) -> Published:
    """Publish a checkpoint; publishing an older one rolls followers back.

    A pin keeps the checkpoint and its chain, from before the record is written until another
    checkpoint is published.

    Args:
        run: the run of the checkpoint.
        name: the checkpoint.
        held: hold this publication: only a call with `release` can publish another checkpoint.
        release: replace a publication that is held, or whose record is damaged.
        force: publish even if a validation of the checkpoint, or of one that it needs, has failed.
            `Published.doubt` says which.
        who: who wants it; user and host when not given.
        why: the reason, for people.

    Raises:
        ObjectNotFound: there is no such checkpoint.
        ChainError, FormatError: it does not restore, or the record that counts is damaged.
        RetentionRefused: it is being deleted, a validation speaks against it, another publication
            is held, or there is no higher number.
        StoreUnavailable: so many processes publish at once that no number was free.
    """
    doubts = Doubts(run, validated_only=False)
    doubt = doubts.about(name)
    if doubt is not None and not force:
        raise _doubted(run, name, doubt)
    for _ in range(_TRIES):
        numbers = publication_numbers(run)
        number = numbers[-1] + 1 if numbers else 1
        if number > MAX_PUBLICATION:
            last = PUBLICATION_KEY.of(MAX_PUBLICATION)
            raise RetentionRefused(
                last,
                found="the highest number that there is",
                expected="a lower number, so that another can follow",
                next_step=f"find out what wrote {run.url}/{last}, and remove it",
            )
        current = _replaced(run, numbers[-1], release) if numbers else None
        if current is not None and current.checkpoint == run.manifest(*name).ref:
            if current.held == held or (current.held and not release):
                return Published(current, created=False, doubt=doubt)
        elif current is not None and current.held and not release:
            ref = current.checkpoint
            against = doubts.about(ManifestName(ref.step, ref.generation))
            raise RetentionRefused(
                PUBLICATION_KEY.of(current.number),
                found=f"{ref}, held by {current.who}"
                + ("" if against is None else f"; by now {against}"),
                expected="a published checkpoint that is not held",
                next_step=f"recpoint publish {run.url} --step {name.step} --release; without "
                "--step it publishes the newest",
            )
        label = f"published-{number:08d}"
        # A pin with this name may be there already; its key keeps the checkpoint whatever it says.
        pin, _ = pins.hold(run, name, label=label, who=who, why=why)
        record = Publication(
            run=run.id,
            number=number,
            checkpoint=pin.checkpoint,
            held=held,
            who=pin.who,
            why=pins.words(why, 1024),
            created_ms=now_ms(),
        )
        if run.records(PUBLICATION).create(record, number) != "other":
            _let_go(run, record)
            return Published(record, created=True, doubt=doubt)
    raise StoreUnavailable(
        f"{run.url}/{PUBLICATION_KEY.prefix}",
        found=f"{_TRIES} numbers in a row taken by other publishers",
        expected="one publisher at a time",
        next_step="stop the process that keeps publishing this run, and try again",
    )


def doubt_about(run: Run, record: Publication) -> str | None:
    """Return why validations speak against a published checkpoint; None if they do not."""
    checkpoint = record.checkpoint
    return Doubts(run, validated_only=False).about(
        ManifestName(checkpoint.step, checkpoint.generation)
    )


def choose(run: Run, *, validated_only: bool) -> ManifestName:
    """Return the newest checkpoint of the live line that no validation speaks against.

    Args:
        run: the run.
        validated_only: also pass over checkpoints that were not validated.

    Raises:
        NothingToRestore: there is no such checkpoint.
    """
    doubts = Doubts(run, validated_only=validated_only)
    for name in run.live_line():
        if doubts.about(name) is None:
            return name
    raise NothingToRestore(
        run.url,
        found="no such checkpoint on the live line",
        expected="a validated checkpoint" if validated_only else "a checkpoint",
        next_step=f"recpoint {'validate' if validated_only else 'list'} {run.url}",
    )


def publication_numbers(run: Run) -> list[int]:
    """Return the numbers of all publications, ascending; one listing, no reads."""
    return sorted(run.records(PUBLICATION).names())


def newest_publication(run: Run) -> Publication | None:
    """Return the publication that counts; None if nothing was ever published.

    Raises:
        FormatError: its record is damaged, or of another run.
    """
    numbers = publication_numbers(run)
    return run.records(PUBLICATION).read(numbers[-1]) if numbers else None


def _doubted(run: Run, name: ManifestName, doubt: str) -> RetentionRefused:
    return RetentionRefused(
        f"{run.url}, {name}",
        found=doubt,
        expected="a checkpoint to publish that no validation speaks against",
        next_step=f"recpoint validate {run.url} --step {name.step} says what is wrong; recpoint "
        "publish --validated publishes another; --force, or force=True, publishes this one",
    )


def _replaced(run: Run, number: int, release: bool) -> Publication | None:
    """Return the record that counts so far; None if it is damaged and `release` allows that."""
    try:
        return run.records(PUBLICATION).read(number)
    except FormatError:
        if not release:  # the damaged record may have been held
            raise
        return None


def _let_go(run: Run, record: Publication) -> None:
    """Remove old records, and pins of earlier publications and of publications never finished."""
    for named in run.records(PIN).names():
        label = _LABEL.match(named.name)
        if label is None:
            continue
        number = int(label[1])
        named_key = (named.step, named.generation)
        newest_key = (record.checkpoint.step, record.checkpoint.generation)
        if number < record.number or (number == record.number and named_key != newest_key):
            run.records(PIN).delete(*named)
    for number in publication_numbers(run):
        if number <= record.number - _KEPT_RECORDS:
            run.records(PUBLICATION).delete(number)
