"""Lists the kinds of records that a run stores: key, contents, bound, advice (format §2, §4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from recpoint.errors import ForeignObject
from recpoint.format.manifest import Manifest, ManifestHead
from recpoint.format.manifest_root import ManifestRoot, Page
from recpoint.format.naming import (
    CONSOLIDATED_KEY,
    DELETION_KEY,
    END_KEY,
    EXPIRED_KEY,
    GENERATION_KEY,
    LEASE_KEY,
    MANIFEST_KEY,
    METRIC_KEY,
    PAGE_KEY,
    PART_KEY,
    PIN_KEY,
    PLAN_KEY,
    PUBLICATION_KEY,
    REJECTIONS_KEY,
    RUN_KEY,
    VALIDATION_KEY,
    ConsolidatedName,
    KeyPattern,
    ManifestName,
)
from recpoint.format.part import RankPart
from recpoint.format.records import (
    MAX_RECORD_BYTES,
    CheckpointRef,
    EndRecord,
    GenerationRecord,
    RunRecord,
    StoredRecord,
    unpack_record,
)
from recpoint.format.rejections import MAX_REJECTIONS_BYTES, Rejections
from recpoint.format.retention_records import (
    MAX_PLAN_BYTES,
    Deletion,
    Lease,
    Mark,
    Metric,
    Pin,
    Plan,
    Publication,
)
from recpoint.format.validation import ValidationRecord

__all__ = [
    "AnyKind",
    "CONSOLIDATED",
    "DELETION",
    "END",
    "GENERATION",
    "LEASE",
    "MANIFEST",
    "MARK",
    "METRIC",
    "PAGE",
    "PART",
    "PIN",
    "PLAN",
    "PUBLICATION",
    "REJECTIONS",
    "RUN",
    "SIDE_KINDS",
    "VALIDATION",
    "RecordKind",
    "kind_of",
]

P = ParamSpec("P")
NameT = TypeVar("NameT", covariant=True)
RecordT = TypeVar("RecordT", bound=StoredRecord)


@dataclass(frozen=True, kw_only=True)
class RecordKind(Generic[P, NameT, RecordT]):
    """One kind of record.

    Attributes:
        keys: the keys of its records.
        model: the contents of a record.
        written: `once`: created, and never written again; `replaced`: may be overwritten any time.
        next_step: what a person should do about a damaged record; `{url}` stands for the run's
            URL, `{key}` for the record's key, `{name}` for the name that `keys` parses from it.
        key_of: computes the key under which a record belongs, from the record and the key that it
            was read from. The latter decides what the record does not say.
        max_bytes: a larger object is damaged.
        later: the contents of a record of the next version; None: there is only one.
    """

    keys: KeyPattern[P, NameT]
    model: type[RecordT]
    written: Literal["once", "replaced"]
    next_step: str
    key_of: Callable[[RecordT, str], str]
    max_bytes: int = MAX_RECORD_BYTES
    later: type[RecordT] | None = None

    def when_damaged(self, key: str, url: str = "URL") -> str:
        """Return what a person should do about the damaged record under `key`."""
        return self.next_step.format(url=url, key=key, name=self.keys.parse(key))

    def unpack(self, data: bytes, key: str, *, run: str | None, url: str) -> RecordT:
        """Return the record in `data`, fully checked.

        Args:
            data: the object's bytes, in full.
            key: the key it was read from.
            run: the id of the run it was read from; None: run and key are not checked.
            url: the URL of that run, for errors.

        Raises:
            MalformedObject, DigestMismatch, UnsupportedVersion: as `unpack_record`.
            ForeignObject: the record belongs to another run or under another key.
        """
        next_step = self.when_damaged(key, url)
        record = unpack_record(self.model, data, name=key, next_step=next_step, later=self.later)
        if run is None:
            return record
        belongs = self.key_of(record, key)
        if (record.run, belongs) != (run, key):
            raise ForeignObject(
                key,
                found=f"the record of {belongs}, run {record.run}",
                expected=f"the record of {key}, run {run}",
                next_step=next_step,
            )
        return record


def _key_of_manifest(manifest: ManifestHead, _: str) -> str:
    if manifest.stands_for is None:
        return MANIFEST_KEY.of(manifest.step, manifest.generation)
    parent_step = None if manifest.parent is None else manifest.parent.step
    return CONSOLIDATED_KEY.of(manifest.step, manifest.generation, parent_step)


def _key_of_page(page: Page, key: str) -> str:
    # Whoever reads a page has compared its bytes with the digest in the key.
    name = PAGE_KEY.parse(key)
    digest = page.attempt if name is None else name.digest
    return PAGE_KEY.of(page.step, page.generation, page.attempt, digest)


def _key_of_validation(record: ValidationRecord, key: str) -> str:
    name, checkpoint = VALIDATION_KEY.parse(key), record.checkpoint
    number = 1 if name is None else name.number
    return VALIDATION_KEY.of(
        checkpoint.step, checkpoint.generation, number, record.level, record.result
    )


def _place(ref: CheckpointRef) -> tuple[int, int]:
    return ref.step, ref.generation


def _nothing() -> tuple[()]:
    return ()


_RESTORE_OLDER = "recpoint check {url}, and restore an older checkpoint"

RUN = RecordKind(
    keys=KeyPattern(_nothing, RUN_KEY),
    model=RunRecord,
    written="once",
    next_step="put run.json back from a backup; if there is none, move it away and rebuild it from "
    "the other records: recpoint bring-back {url}",
    key_of=lambda run, _: RUN_KEY,
)
GENERATION = RecordKind(
    keys=GENERATION_KEY,
    model=GenerationRecord,
    written="once",
    # relink accepts a generation only if its record is missing; it never replaces a record.
    next_step="put it back from a backup; if there is none, move it out of the run and say which "
    "checkpoint that trainer restored: recpoint relink {url} {name} --step STEP, or --from-nothing",
    key_of=lambda record, _: GENERATION_KEY.of(record.generation),
)
END = RecordKind(
    keys=END_KEY,
    model=EndRecord,
    written="replaced",
    next_step="nothing: this record is only for people; you may remove {url}/{key}",
    key_of=lambda end, _: END_KEY.of(end.generation),
)
MANIFEST: RecordKind[..., ManifestName, ManifestHead] = RecordKind(
    keys=MANIFEST_KEY,
    model=Manifest,
    later=ManifestRoot,
    written="once",
    next_step=_RESTORE_OLDER,
    key_of=_key_of_manifest,
)
CONSOLIDATED: RecordKind[..., ConsolidatedName, ManifestHead] = RecordKind(
    keys=CONSOLIDATED_KEY,
    model=Manifest,
    later=ManifestRoot,
    written="once",
    next_step=_RESTORE_OLDER,
    key_of=_key_of_manifest,
)
PAGE = RecordKind(
    keys=PAGE_KEY,
    model=Page,
    written="once",
    next_step=_RESTORE_OLDER,
    key_of=_key_of_page,
)
PART = RecordKind(
    keys=PART_KEY,
    model=RankPart,
    written="once",
    next_step="nothing: the checkpoint is rejected, and the trainer writes another one",
    key_of=lambda part, _: PART_KEY.of(part.step, part.generation, part.attempt, part.rank),
)
PIN = RecordKind(
    keys=PIN_KEY,
    model=Pin,
    written="once",
    next_step="recpoint unpin {url} {name.step} --name {name.name}, and pin it again",
    key_of=lambda pin, _: PIN_KEY.of(*_place(pin.checkpoint), pin.name),
)
METRIC = RecordKind(
    keys=METRIC_KEY,
    model=Metric,
    written="replaced",
    next_step="recpoint metric {url} {name.step} {name.name}=NUMBER",
    key_of=lambda metric, _: METRIC_KEY.of(*_place(metric.checkpoint), metric.name),
)
MARK = RecordKind(
    keys=EXPIRED_KEY,
    model=Mark,
    written="replaced",
    next_step="recpoint retain {url} writes it again",
    key_of=lambda mark, _: EXPIRED_KEY.of(mark.manifest),
)
VALIDATION = RecordKind(
    keys=VALIDATION_KEY,
    model=ValidationRecord,
    written="once",
    next_step="recpoint validate {url} --step {name.step} writes a new record in place of this one",
    key_of=_key_of_validation,
)
PUBLICATION = RecordKind(
    keys=PUBLICATION_KEY,
    model=Publication,
    written="once",
    next_step="recpoint publish {url} --step STEP --release",
    key_of=lambda publication, _: PUBLICATION_KEY.of(publication.number),
)
REJECTIONS = RecordKind(
    keys=REJECTIONS_KEY,
    model=Rejections,
    written="replaced",
    next_step="nothing: the next rejected checkpoint writes it again",
    key_of=lambda rejections, _: REJECTIONS_KEY.of(rejections.rank),
    max_bytes=MAX_REJECTIONS_BYTES,
)
LEASE = RecordKind(
    keys=LEASE_KEY,
    model=Lease,
    written="replaced",
    next_step="nothing: it is removed when it has expired",
    key_of=lambda lease, _: LEASE_KEY.of(lease.owner),
)
DELETION = RecordKind(
    keys=KeyPattern(_nothing, DELETION_KEY),
    model=Deletion,
    written="replaced",
    next_step="recpoint retain {url}",
    key_of=lambda deletion, _: DELETION_KEY,
)
PLAN = RecordKind(
    keys=KeyPattern(_nothing, PLAN_KEY),
    model=Plan,
    written="replaced",
    next_step="recpoint retain {url} writes it again; nothing else needs it",
    key_of=lambda plan, _: PLAN_KEY,
    max_bytes=MAX_PLAN_BYTES,
)

AnyKind = RecordKind[..., Any, Any]

#: The kinds of records that no restore needs.
SIDE_KINDS: tuple[AnyKind, ...] = (
    END,
    PART,
    PIN,
    METRIC,
    MARK,
    VALIDATION,
    PUBLICATION,
    REJECTIONS,
    LEASE,
    DELETION,
    PLAN,
)

_KINDS: tuple[AnyKind, ...] = (RUN, GENERATION, MANIFEST, CONSOLIDATED, PAGE, *SIDE_KINDS)
_BY_PREFIX = {kind.keys.prefix: kind for kind in _KINDS}


def kind_of(key: str) -> AnyKind | None:
    """Return the kind of the record under `key`; None if `key` is not the key of a record."""
    kind = _BY_PREFIX.get(key[: key.find("/") + 1] or key)
    return None if kind is None or kind.keys.parse(key) is None else kind
