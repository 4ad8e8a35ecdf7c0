"""Records of keeping and deleting that lie: refused by name (format §9)."""

from __future__ import annotations

from typing import Any

import pytest

from recpoint.errors import MalformedObject
from recpoint.format import naming
from recpoint.format.records import EndRecord, Record, unpack_record
from recpoint.format.rejections import Rejections
from recpoint.format.retention_records import Deletion, Lease, Mark, Metric, Pin, Plan, Publication
from recpoint.format.validation import ValidationRecord
from tests.hostile.forged import MIB, body, cost, envelope

PIN = naming.PIN_KEY.of(100, 1, "release-7")
METRIC = naming.METRIC_KEY.of(100, 1, "auc")
PUBLISHED = naming.PUBLICATION_KEY.of(7)
PLAN = naming.PLAN_KEY
REJECTIONS = naming.REJECTIONS_KEY.of(3)
MARK = naming.EXPIRED_KEY.of(naming.MANIFEST_KEY.of(100, 1))
DELETION = naming.DELETION_KEY
LEASE = naming.LEASE_KEY.of("5f" * 16)


VALIDATION = naming.VALIDATION_KEY.of(100, 1, 3, "full", "failed")
DIGESTS = {"table": 0, "values": "0" * 16, "row_states": []}

VALIDATION_FIELDS: list[tuple[str, object]] = [
    ("level", "everything"),
    ("result", "good"),
    ("findings", []),
    ("findings", [{}] * 1001),
    ("findings", [{}] * 100_000),
    ("findings.0.row", -1),
    ("findings.0.row", 2**48),
    ("findings.0.subject", "x" * 1001),
    ("findings.0.bound", 0),
    ("digests", [DIGESTS, DIGESTS]),
    ("digests", [{}] * 100_000),
    ("digests.0.values", "0" * 15),
    ("digests.0.values", "0" * 15 + "G"),
    ("digests.0.row_states", ["0" * 16] * 65),
    ("worst_ppm", 2**63),
    ("worst_ppm", 0.5),
    ("links_read", 1_000_001),
    ("checkpoint", None),
    ("evaluated_by", "x" * 1001),
]


@pytest.mark.parametrize(("field", "value"), VALIDATION_FIELDS, ids=lambda value: str(value)[:20])
def test_validation_records(field: str, value: object) -> None:
    fields: Any = body(VALIDATION)
    target = fields
    *above, last = [int(part) if part.isdigit() else part for part in field.split(".")]
    for part in above:
        target = target[part]
    target[last] = value
    data = envelope(fields)
    peak_bytes, seconds, error = cost(
        lambda: unpack_record(ValidationRecord, data, name=VALIDATION, next_step="recpoint check")
    )
    assert isinstance(error, MalformedObject) and len(str(error)) < 800
    assert peak_bytes < 128 * MIB and seconds < 20


RETENTION_FIELDS: list[tuple[type[Record], str, str, object]] = [
    (EndRecord, "ends/00000002.json", "reason", "killed"),
    (EndRecord, "ends/00000002.json", "step", 10**12),
    (EndRecord, "ends/00000002.json", "generation", 0),
    (EndRecord, "ends/00000002.json", "ended_ms", "now"),
    (Pin, PIN, "name", "../x"),
    (Pin, PIN, "name", "x" * 65),
    (Pin, PIN, "name", "A"),
    (Pin, PIN, "why", "x" * 1025),
    (Pin, PIN, "who", None),
    (Pin, PIN, "checkpoint", None),
    (Pin, PIN, "created_ms", 2**53),
    (Publication, PUBLISHED, "number", 0),
    (Publication, PUBLISHED, "number", 10**8),
    (Publication, PUBLISHED, "number", "7"),
    (Publication, PUBLISHED, "held", 1),
    (Publication, PUBLISHED, "held", None),
    (Publication, PUBLISHED, "checkpoint", {"step": 1}),
    (Publication, PUBLISHED, "why", "x" * 1025),
    (Publication, PUBLISHED, "more", 1),
    (Plan, PLAN, "rules", None),
    (Plan, PLAN, "rules", {"last": 1}),
    (Plan, PLAN, "delete", -1),
    (Plan, PLAN, "keep", True),
    (Plan, PLAN, "manifests", [{"manifest": "../x", "action": "keep", "reason": ""}] * 100_000),
    (Plan, PLAN, "manifests", None),
    (Plan, PLAN, "grace_ms", 0.5),
    (Rejections, REJECTIONS, "newest", []),
    (Rejections, REJECTIONS, "newest", [{"error": "x"}] * 100_000),
    (Rejections, REJECTIONS, "count", 0),
    (Rejections, REJECTIONS, "rank", 10**5),
    (Rejections, REJECTIONS, "host", "x" * 256),
    (Metric, METRIC, "value", "nan"),
    (Metric, METRIC, "value", "inf"),
    (Metric, METRIC, "value", "0.5"),
    (Metric, METRIC, "value", "0x1.0p+99999999999999"),
    (Metric, METRIC, "value", 1),
    (Metric, METRIC, "value", "x" * 41),
    (Mark, MARK, "manifest", "../../etc/passwd"),
    (Mark, MARK, "manifest", "manifests/000000000100-00000001.json\n"),
    (Mark, MARK, "manifest", "chunks/000000000100-00000001.json"),
    (Mark, MARK, "manifest", "manifests/000000000100-00000000.json"),
    (Mark, MARK, "reason", "x" * 1025),
    (Mark, MARK, "stamp", None),
    (Mark, MARK, "stamp", {"written_ms": 1, "boot": "x", "boot_ms": 1}),
    (Deletion, DELETION, "manifests", []),
    (Deletion, DELETION, "manifests", ["run.json"]),
    (Deletion, DELETION, "manifests", ["run.json"] * 100_000),
    (Deletion, DELETION, "token", "x"),
    (Lease, LEASE, "covers", [{}]),
    (Lease, LEASE, "covers", [{}] * 10_000),
    (Lease, LEASE, "covers", [{}] * 100_000),
    (Lease, LEASE, "covers", 1),
    (Lease, LEASE, "ttl_seconds", 0),
    (Lease, LEASE, "ttl_seconds", 604_801),
    (Lease, LEASE, "ttl_seconds", True),
    (Lease, LEASE, "purpose", "Restore"),
    (Lease, LEASE, "owner", "5F" * 16),
]


@pytest.mark.parametrize(
    ("kind", "path", "field", "value"), RETENTION_FIELDS, ids=lambda value: str(value)[:20]
)
def test_pins_metrics_marks_deletions_and_leases(
    kind: type[Record], path: str, field: str, value: object
) -> None:
    data = envelope(body(path) | {field: value})
    peak_bytes, seconds, error = cost(
        lambda: unpack_record(kind, data, name=path, next_step="recpoint check URL")
    )
    assert isinstance(error, MalformedObject) and len(str(error)) < 800
    assert peak_bytes < 128 * MIB and seconds < 20
