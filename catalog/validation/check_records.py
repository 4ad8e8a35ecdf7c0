"""Whether the records beside manifests and generations are sound (format §4).

No restore needs them. Each says something that people or other commands go by: that a checkpoint is
kept, was validated, is published, or is to be deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.checked_read import read_checked
from recpoint.errors import ForeignObject, FormatError, ObjectNotFound
from recpoint.format.naming import (
    DELETION_KEY,
    PLAN_KEY,
    end_key,
    expired_key,
    is_end_key,
    lease_key,
    metric_key,
    parse_expired_key,
    parse_lease_key,
    parse_metric_key,
    parse_part_key,
    parse_pin_key,
    parse_publication_key,
    parse_rejections_key,
    parse_validation_key,
    part_key,
    pin_key,
    publication_key,
    rejections_key,
    validation_key,
)
from recpoint.format.part import RankPart
from recpoint.format.records import MAX_RECORD_BYTES, EndRecord, unpack_record
from recpoint.format.rejections import Rejections
from recpoint.format.retention_records import (
    Deletion,
    Lease,
    Mark,
    Metric,
    Pin,
    Plan,
    Publication,
)
from recpoint.format.validation import ValidationRecord

__all__ = ["is_side_record", "record_defect"]

_NEXT_STEP: Final = (
    "put it back from a replica or an older version; else remove it: no restore needs it"
)

_SideRecord = (
    Pin
    | Metric
    | ValidationRecord
    | Publication
    | EndRecord
    | Mark
    | Lease
    | Rejections
    | RankPart
    | Deletion
    | Plan
)


class _Kind(NamedTuple):
    """A kind of record: whether a key is of it, and the key that a record of it belongs under."""

    model: type[_SideRecord]
    has_key: Callable[[str], bool]


_KINDS: Final = (
    _Kind(Pin, lambda key: parse_pin_key(key) is not None),
    _Kind(Metric, lambda key: parse_metric_key(key) is not None),
    _Kind(ValidationRecord, lambda key: parse_validation_key(key) is not None),
    _Kind(Publication, lambda key: parse_publication_key(key) is not None),
    _Kind(EndRecord, is_end_key),
    _Kind(Mark, lambda key: parse_expired_key(key) is not None),
    _Kind(Lease, lambda key: parse_lease_key(key) is not None),
    _Kind(Rejections, lambda key: parse_rejections_key(key) is not None),
    _Kind(RankPart, lambda key: parse_part_key(key) is not None),
    _Kind(Deletion, lambda key: key == DELETION_KEY),
    _Kind(Plan, lambda key: key == PLAN_KEY),
)


def is_side_record(key: str) -> bool:
    """Whether `key` is that of a record which `record_defect` reads."""
    return _model_of(key) is not None


def record_defect(run: Run, key: str) -> FormatError | None:
    """What is wrong with the record under `key`; None: nothing, or it has been removed since.

    Raises:
        StoreError: the store cannot be read.
    """
    model = _model_of(key)
    if model is None:
        raise ValueError(f"{key!r} is not the key of a record beside manifests and generations")

    def parse(data: bytes) -> _SideRecord:
        record = unpack_record(model, data, name=key, next_step=_NEXT_STEP)
        belongs = _key_of(record, key)
        if record.run != run.id or belongs != key:
            raise ForeignObject(
                key,
                found=f"the record of {belongs} of run {record.run}",
                expected=f"what its key says, of run {run.id}",
                next_step=_NEXT_STEP,
            )
        return record

    try:
        read_checked(run.store, key, max_bytes=MAX_RECORD_BYTES, parse=parse)
    except FormatError as error:
        return error
    except ObjectNotFound:
        return None
    return None


def _model_of(key: str) -> type[_SideRecord] | None:
    return next((kind.model for kind in _KINDS if kind.has_key(key)), None)


def _key_of(record: _SideRecord, key: str) -> str:
    """The key that a record belongs under; `key` decides where the record does not tell."""
    match record:
        case Pin(checkpoint=of, name=name):
            return pin_key(of.step, of.generation, name)
        case Metric(checkpoint=of, name=name):
            return metric_key(of.step, of.generation, name)
        case ValidationRecord(checkpoint=of, level=level, result=result):
            named = parse_validation_key(key)
            assert named is not None  # which has chosen the model
            return validation_key(
                named._replace(step=of.step, generation=of.generation, level=level, result=result)
            )
        case Publication(number=number):
            return publication_key(number)
        case EndRecord(generation=generation):
            return end_key(generation)
        case Mark(manifest=manifest):
            try:
                return expired_key(manifest)
            except ValueError:
                return f"a mark of {manifest[:80]!r}"
        case Lease(owner=owner):
            return lease_key(owner)
        case Rejections(rank=rank):
            return rejections_key(rank)
        case RankPart(step=step, generation=generation, attempt=attempt, rank=rank):
            return part_key(step, generation, attempt, rank=rank)
        case Deletion():
            return DELETION_KEY
        case Plan():
            return PLAN_KEY
