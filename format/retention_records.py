"""Defines the records of keeping, deleting and publishing (format §4, §6.6, §6.10)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field

from recpoint.format.naming import EXPIRED_KEY, MAX_PUBLICATION, is_label
from recpoint.format.records import (
    CheckpointRef,
    HexFloat,
    HexToken,
    Milliseconds,
    Part,
    StoredRecord,
)

__all__ = [
    "MAX_LEASE_SECONDS",
    "MAX_PLANNED",
    "MAX_PLAN_BYTES",
    "Deletion",
    "Lease",
    "Mark",
    "Metric",
    "Pin",
    "Plan",
    "PlanAction",
    "PlannedManifest",
    "PlannedRules",
    "Publication",
    "RuleBest",
    "Stamp",
]

#: The longest time for which a lease counts without being renewed.
MAX_LEASE_SECONDS = 7 * 86400

#: How many manifests a plan names.
MAX_PLANNED = 1000

#: Bound of a plan: 1,000 reasons of 1,024 characters, with keys and rules, take at most 4 MiB.
MAX_PLAN_BYTES = 8 << 20

#: What happens to a manifest; `wait`: it is marked but may not be deleted yet.
PlanAction = Literal["keep", "mark", "wait", "delete"]


def _label(name: str) -> str:
    if not is_label(name):
        raise ValueError("must be 1 to 64 of a-z, 0-9, _, ., -, the first a letter or digit")
    return name


def _manifest(key: str) -> str:
    EXPIRED_KEY.of(key)
    return key


_Label = Annotated[str, Field(max_length=64), AfterValidator(_label)]
_ManifestKey = Annotated[str, Field(max_length=80), AfterValidator(_manifest)]
_Host = Annotated[str, Field(max_length=255)]
_Pid = Annotated[int, Field(ge=0, lt=2**32)]
_Count = Annotated[int, Field(ge=0, le=10**9)]


def _not_too_many(value: object) -> object:
    # Runs before the entries are checked: a hundred thousand bad entries would be as many errors.
    if isinstance(value, list | tuple) and len(value) > 10_000:
        raise ValueError("at most 10,000 references")
    return value


_Covers = Annotated[
    Annotated[tuple[CheckpointRef, ...], Field(strict=False)] | None,
    BeforeValidator(_not_too_many),
]


class Stamp(Part):
    """When a record was written, by two clocks of its writer (format §6.7)."""

    written_ms: Milliseconds
    boot: HexToken | None
    boot_ms: Milliseconds


class Pin(StoredRecord):
    """A wish to keep one checkpoint, whatever the rules say."""

    format: Literal["recpoint/pin"] = "recpoint/pin"
    checkpoint: CheckpointRef
    name: _Label
    who: Annotated[str, Field(max_length=255)]
    why: Annotated[str, Field(max_length=1024)]
    created_ms: Milliseconds


class Publication(StoredRecord):
    """The checkpoint that followers of the channel `published` serve from now on.

    `held`: no later publication takes its place unless a person asks for that.
    """

    format: Literal["recpoint/published"] = "recpoint/published"
    number: Annotated[int, Field(ge=1, le=MAX_PUBLICATION)]
    checkpoint: CheckpointRef
    held: bool
    who: Annotated[str, Field(max_length=255)]
    why: Annotated[str, Field(max_length=1024)]
    created_ms: Milliseconds


class Metric(StoredRecord):
    """A measured value of a checkpoint; `value` is the `float.hex()` of a finite number."""

    format: Literal["recpoint/metric"] = "recpoint/metric"
    checkpoint: CheckpointRef
    name: _Label
    value: HexFloat
    created_ms: Milliseconds


class Mark(StoredRecord):
    """Announces a manifest's deletion; the manifest counts as before until the grace is over."""

    format: Literal["recpoint/expired"] = "recpoint/expired"
    manifest: _ManifestKey
    attempt: HexToken
    reason: Annotated[str, Field(max_length=1024)]
    stamp: Stamp


class Deletion(StoredRecord):
    """The manifests that are being deleted; nothing may begin to rely on one of them."""

    format: Literal["recpoint/deletion"] = "recpoint/deletion"
    token: HexToken
    host: _Host
    pid: _Pid
    manifests: Annotated[
        tuple[_ManifestKey, ...],
        Field(min_length=1, max_length=1_000_000, strict=False),
        FailFast(),
    ]
    stamp: Stamp


class RuleBest(Part):
    """The rule that keeps the `count` best checkpoints by a metric."""

    metric: _Label
    direction: Literal["max", "min"]
    count: _Count


class PlannedRules(Part):
    """The rules of a plan; 0 means that the rule is not set."""

    last: _Count
    within_ms: Milliseconds
    hourly: _Count
    daily: _Count
    weekly: _Count
    monthly: _Count
    best: Annotated[tuple[RuleBest, ...], Field(max_length=100, strict=False), FailFast()]
    require_validated: bool


class PlannedManifest(Part):
    """What happens to one manifest, and why."""

    manifest: _ManifestKey
    action: PlanAction
    reason: Annotated[str, Field(max_length=1024)]


class Plan(StoredRecord):
    """The newest retention plan; the counts cover all manifests, `manifests` only the newest."""

    format: Literal["recpoint/plan"] = "recpoint/plan"
    rules: PlannedRules
    grace_ms: Milliseconds
    keep: _Count
    mark: _Count
    wait: _Count
    delete: _Count
    manifests: Annotated[
        tuple[PlannedManifest, ...], Field(max_length=MAX_PLANNED, strict=False), FailFast()
    ]
    host: _Host
    pid: _Pid
    planned_ms: Milliseconds


class Lease(StoredRecord):
    """Says that a process is reading; `covers` names the checkpoints, None: all that exist."""

    format: Literal["recpoint/lease"] = "recpoint/lease"
    owner: HexToken
    purpose: Annotated[str, Field(pattern=r"\A[a-z][a-z0-9_]{0,31}\z")]
    covers: _Covers
    ttl_seconds: Annotated[int, Field(ge=1, le=MAX_LEASE_SECONDS)]
    host: _Host
    pid: _Pid
    stamp: Stamp
