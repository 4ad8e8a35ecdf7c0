"""Manifests and stored states that lie about keyed tables: refused by name (format §3.8, §4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from recpoint import LeastUsed, Seen
from recpoint.catalog.restore.keyed_rows import (
    KEY,
    LAST_USE,
    USES,
    require_own_keys,
    rows_by_key,
)
from recpoint.errors import MalformedObject
from recpoint.trainer_plugin.integrations.keyed import KeyedSource, find
from tests.hostile.forged import body, envelope, unpack
from tests.keyed_training import KeyedTraining


def _keyed_body() -> dict[str, Any]:
    """Return a manifest of a keyed table of 40 rows that is right."""
    fields = body()
    fields["tables"][0]["row_states"] = [_state(name) for name in (KEY, LAST_USE, USES)]
    fields["keyed"] = [_use()]
    return fields


def _state(name: str, **changed: Any) -> dict[str, Any]:
    return {"dtype": "I64", "name": name, "optimizer": 0, "shape": []} | changed


def _use(**changed: Any) -> dict[str, Any]:
    return {"table": 0, "used": 39, "inserted": 2**63 - 1, "evicted": 0, "refused": 0} | changed


def test_the_manifest_that_is_changed_here_is_right() -> None:
    assert unpack(envelope(_keyed_body())).keyed is not None


@pytest.mark.parametrize(
    "uses",
    [
        None,
        {},
        [],
        [_use(), _use()],
        [_use()] * 100_001,
        [_use(table=1)],
        [_use(table=-1)],
        [_use(table=100_000)],
        [_use(table=True)],
        [_use(used=40)],
        [_use(used=2**63 - 1)],
        [_use(used=-1)],
        [_use(used="3")],
        [_use(inserted=2**63)],
        [_use(evicted=10**400)],
        [_use(refused=-1)],
        [_use(refused=1.0)],
        [_use(name="users")],
        [{"table": 0}],
    ],
    ids=lambda uses: str(uses)[:40],
)
def test_counts_that_cannot_be(uses: object) -> None:
    with pytest.raises(MalformedObject) as caught:
        unpack(envelope(_keyed_body() | {"keyed": uses}))
    assert len(str(caught.value)) < 600


def test_counts_of_a_table_without_keys() -> None:
    with pytest.raises(MalformedObject, match="has no keys"):
        unpack(envelope(body() | {"keyed": [_use()]}))


@pytest.mark.parametrize(
    "states",
    [
        [_state(KEY)],
        [_state(LAST_USE)],
        [_state(USES)],
        [_state(KEY), _state(USES)],
        [_state(KEY, dtype="F64"), _state(LAST_USE)],
        [_state(KEY), _state(LAST_USE, dtype="I32")],
        [_state(KEY), _state(LAST_USE, shape=[1])],
        [_state(KEY), _state(LAST_USE), _state(USES, shape=[5])],
        [_state(KEY), _state(LAST_USE), _state(KEY)],
    ],
    ids=lambda states: " ".join(f"{s['name']}:{s['dtype']}{s['shape']}" for s in states),
)
def test_row_states_that_are_not_those_of_keys(states: list[dict[str, Any]]) -> None:
    fields = _keyed_body()
    fields["tables"][0]["row_states"] = states
    with pytest.raises(MalformedObject, match="keyed"):
        unpack(envelope(fields))


@pytest.mark.parametrize(
    "changed",
    [{"rows": 1}, {"rows": 2**31 + 1}, {"rows": 2**53}, {"columns": {"first": 0, "of": 10}}],
    ids=str,
)
def test_tables_that_no_map_of_keys_holds(changed: dict[str, Any]) -> None:
    fields = _keyed_body()
    fields["tables"][0] |= changed
    with pytest.raises(MalformedObject):
        unpack(envelope(fields))


@pytest.mark.parametrize(
    ("keys", "last_use", "text"),
    [
        ([0, 5, 6, 5], [-1, 0, 0, 9], "key 5 in two rows"),
        ([7, 5, 6, 0], [0, 0, 0, -1], "a key in row 0"),
        ([0, 0, 0, 0], [-1, 0, 0, -1], "key 0 in two rows"),
    ],
)
def test_rows_whose_keys_cannot_be(keys: list[int], last_use: list[int], text: str) -> None:
    with pytest.raises(MalformedObject, match=f"keyed table 'users': found {text}"):
        rows_by_key("users", torch.tensor(keys), torch.tensor(last_use))


def test_free_rows_may_hold_any_key() -> None:
    last_use = torch.tensor([-1, 0, -5, 2])
    assert rows_by_key("users", torch.tensor([9, 9, 9, -1]), last_use).tolist() == [3, 1]
    nothing = torch.empty(0, dtype=torch.int64)
    require_own_keys("users", nothing, nothing)


def _source(training: KeyedTraining) -> KeyedSource:
    source = find(training.model)
    assert source is not None
    return source


def _changed(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    def change(state: dict[str, Any]) -> object:
        first, _, second = name.partition(".")
        if second:
            return state | {first: {**state[first], second: value}}
        return state | {first: value}

    return change


_SKETCHES: list[object] = [
    torch.zeros(4, 80),
    torch.zeros(3, 80, dtype=torch.uint8),
    torch.zeros(4, 0, dtype=torch.uint8),
    torch.zeros(320, dtype=torch.uint8),
    [[0] * 80] * 4,
    None,
]


@pytest.mark.parametrize(
    "change",
    [
        lambda state: None,
        lambda state: [],
        lambda state: {},
        *[_changed("steps", value) for value in (-1, 2**63, 1.0, True, None, "3")],
        *[_changed(name, -1) for name in ("inserted", "evicted", "refused")],
        *[_changed(name, None) for name in ("settings", "admission")],
        *[_changed("admission.counts", value) for value in _SKETCHES],
        # An absurd number would have counts halved for ever.
        *[_changed("admission.added", value) for value in (-1, 2**62, 2 * 1024, None, True, "0")],
    ],
)
def test_states_that_cannot_be_are_refused_before_a_row_is_written(
    change: Callable[[dict[str, Any]], object],
) -> None:
    training = KeyedTraining(20, admit=Seen(times=2))
    for _ in range(3):
        training.batch()
    source = _source(training)
    stored = source.state_dict()
    assert source.differences([stored]) == []
    texts = source.differences([{"users": change(stored["users"])}])
    assert texts and all("keyed table 'users'" in text and len(text) < 300 for text in texts)


@pytest.mark.parametrize("stored", [None, 5, [], {}, {"items": {}}], ids=str)
def test_states_of_no_table_are_refused(stored: Any) -> None:
    texts = _source(KeyedTraining(20)).differences([stored])
    assert texts == ["the checkpoint has no keys of table 'users'"]


@pytest.mark.parametrize("rules", [{}, {"evict": LeastUsed()}], ids=["last use", "uses"])
def test_rows_with_one_key_are_refused_in_a_restore(rules: dict[str, Any]) -> None:
    training = KeyedTraining(20, **rules)
    for _ in range(3):
        training.batch()
    source = _source(training)
    stored, states = source.state_dict(), training.model.users.slots.row_states
    first, second = (states[LAST_USE] >= 0).nonzero().flatten()[:2].tolist()
    states[KEY][second] = states[KEY][first]
    with pytest.raises(MalformedObject, match="keyed table 'users'"):
        source.load_state_dicts([stored])
