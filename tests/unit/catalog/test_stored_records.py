"""Records of every kind: read with all checks, created once, replaced where that is allowed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recpoint.catalog.store.local import LocalStore
from recpoint.catalog.store.records import Records
from recpoint.errors import ForeignObject, MalformedObject, ObjectNotFound
from recpoint.format.naming import PLAN_KEY
from recpoint.format.record_kinds import PIN, PLAN, PUBLICATION, REJECTIONS, RUN, kind_of
from recpoint.format.records import StoredRecord, pack_record
from recpoint.testing.faults import Fault, FaultStore

V1 = Path(__file__).parents[2] / "golden" / "v1"
RUN_ID = "5eed" * 8
KEYS = sorted(
    key
    for path in V1.rglob("*.json")
    if kind_of(key := path.relative_to(V1).as_posix()) is not None
)
#: Of each of these kinds nothing in the key tells its records apart.
ALONE = ("run.json", "deletion.json", "retention.json")


def golden(key: str) -> bytes:
    return (V1 / key).read_bytes()


def read(store: LocalStore, key: str, *, run: str | None = RUN_ID) -> StoredRecord:
    kind = kind_of(key)
    assert kind is not None
    record: StoredRecord = Records(store, kind, run=run).read_key(key)
    return record


def test_each_kind_has_a_golden_record() -> None:
    kinds = {id(kind_of(key)) for key in KEYS}
    assert len(kinds) == 15 and all(kind_of(key) is not None for key in ALONE)


@pytest.mark.parametrize("key", KEYS)
def test_what_is_there_is_listed_and_read(key: str, tmp_path: Path) -> None:
    store, kind = LocalStore(tmp_path), kind_of(key)
    assert kind is not None
    store.put(key, golden(key))
    store.put(f"{key}.bak", golden(key))
    ((name, info),) = Records(store, kind, run=RUN_ID).listed()
    assert (name, info.key) == (kind.keys.parse(key), key)
    record = read(store, key)
    assert isinstance(record, kind.model) and pack_record(record) == golden(key)


@pytest.mark.parametrize("key", KEYS)
def test_a_record_of_another_run_is_foreign(key: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(key, golden(key))
    other = "0b" * 16
    with pytest.raises(ForeignObject, match=f"{re.escape(key)}, run {RUN_ID}.*, run {other}"):
        read(store, key, run=other)
    assert read(store, key, run=None).run == RUN_ID


@pytest.mark.parametrize("key", sorted(set(KEYS).difference(ALONE)))
def test_a_record_under_the_key_of_another_is_foreign(key: str, tmp_path: Path) -> None:
    digits = re.search(r"[0-9a-f]{5,}", key)
    assert digits is not None
    moved = f"{key[: digits.end() - 1]}9{key[digits.end() :]}"
    assert moved != key and kind_of(moved) is kind_of(key)
    store = LocalStore(tmp_path)
    store.put(moved, golden(key))
    with pytest.raises(ForeignObject, match=f"record of {re.escape(key)}.*record of {moved}"):
        read(store, moved)


def test_of_two_that_create_one_is_stored(tmp_path: Path) -> None:
    store = FaultStore(LocalStore(tmp_path), [Fault.lost_reply(key_contains="published/")])
    key = "published/00000007.json"
    record = PUBLICATION.unpack(golden(key), key, run=RUN_ID, url="")
    records = Records(store, PUBLICATION, run=RUN_ID)
    assert records.create(record, 7) == "same"  # the answer of the first try got lost
    assert records.create(record.model_copy(update={"why": "another"}), 7) == "other"
    assert records.create(record.model_copy(update={"number": 8}), 8) == "created"
    assert records.read(7) == record and sorted(records.names()) == [7, 8]
    records.delete(7)
    with pytest.raises(ObjectNotFound):
        records.read(7)


def test_only_what_may_be_replaced_is(tmp_path: Path) -> None:
    store, key = LocalStore(tmp_path), "rejections/r00003.json"
    rejections = REJECTIONS.unpack(golden(key), key, run=RUN_ID, url="")
    again = rejections.model_copy(update={"count": rejections.count + 1})
    for record in (rejections, again):
        Records(store, REJECTIONS, run=RUN_ID).put(record, 3)
    assert read(store, key) == again
    key = "pins/000000000100-00000001-release-7.json"
    pin = PIN.unpack(golden(key), key, run=RUN_ID, url="")
    with pytest.raises(ValueError, match="written once"):
        Records(store, PIN, run=RUN_ID).put(pin, 100, 1, "release-7")
    assert not list(Records(store, PIN, run=RUN_ID).listed(100, 1))


def test_a_record_larger_than_its_kind_may_be_is_damaged(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(PLAN_KEY, golden(PLAN_KEY) + b" " * PLAN.max_bytes)
    with pytest.raises(MalformedObject):
        Records(store, PLAN, run=RUN_ID).read()


def test_advice_names_the_run_and_what_the_key_says(tmp_path: Path) -> None:
    key = "pins/000000000100-00000001-best.json"
    assert PIN.when_damaged(key, "/runs/a") == (
        "recpoint unpin /runs/a 100 --name best, and pin it again"
    )
    (tmp_path / "run.json").write_bytes(b"{}")
    with pytest.raises(MalformedObject, match=f"bring-back {re.escape(str(tmp_path))}"):
        Records(LocalStore(tmp_path), RUN, run=None).read()
