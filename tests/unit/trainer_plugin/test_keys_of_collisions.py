"""Keyed tables begin with the rows that TorchRec's managed collisions gave to raw ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from recpoint import LeastRecent, LeastUsed, Seed, Seen
from recpoint.catalog.restore.keyed_rows import LAST_USE, USES
from recpoint.catalog.run.run import Run
from recpoint.cli.application import app
from recpoint.embeddings.tables.managed_collisions import NO_ID
from recpoint.errors import IncompatibleModel, NothingToRestore
from tests.catalog_builder import Table, build, new_run, publish
from tests.keyed_training import DIM, KeyedTraining, keyed_checkpointer
from tests.training_builder import Place
from tests.unit.trainer_plugin.test_keyed_tables import commit

ROWS = 12
TABLE = "mapped._embedding_module.embedding_bags.t0"
MODULE = "mapped._managed_collision_collection._managed_collision_modules.t0"
OTHER = "other._managed_collision_collection._managed_collision_modules.t0"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"), tmp_path / "staging")


class _Mapped:
    """What a checkpoint has of one table: raw ids of most rows, in an order that is not theirs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.values = torch.randn(ROWS, DIM, generator=generator)
        self.raw_ids = torch.full((ROWS,), NO_ID)
        self.raw_ids[[0, 2, 3, 5, 7, 8, 10]] = torch.tensor([40, 7, 0, 3900, -(2**63), 5, 2**62])
        self.last_access = torch.randint(0, 9, (ROWS,), generator=generator)
        self.counts = torch.randint(1, 20, (ROWS,), generator=generator)

    @property
    def rows(self) -> dict[int, Tensor]:
        """Raw id -> its row."""
        used = (self.raw_ids != NO_ID).nonzero().flatten().tolist()
        return {int(self.raw_ids[row]): self.values[row] for row in used}

    def use_states(self, policy: str) -> dict[str, Tensor]:
        """Tensor of the module -> entries by row."""
        use_states = {"last_access_iter": self.last_access, "counts": self.counts}
        names = {"LRU": ("last_access_iter",), "LFU": ("counts",)}.get(policy, tuple(use_states))
        return {name: use_states[name] for name in names}

    def commit(
        self,
        run: Run,
        policy: str,
        *,
        sharded: bool,
        replaced: bool = False,
        forged: tuple[str, int] | None = None,
        step: int = 3,
        more: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Commit the table as it is stored of a table that was sharded by rows, or was not."""
        use_states = self.use_states(policy)
        table = Table(TABLE, self.values)
        dense: dict[str, Tensor] = {"top.weight": torch.zeros(1), **more}
        sources: dict[str, Any] = {}
        if sharded:
            table.states = (self.raw_ids, *use_states.values())
            table.state_names = (
                "collisions.raw_id",
                *[f"collisions.{name}" for name in use_states],
            )
        else:
            order = self.raw_ids.argsort(stable=True)
            in_order = {name: entries[order] for name, entries in use_states.items()}
            if replaced:  # the buffers are old, and evictions went on with other tensors
                live = {f"collisions.{name}": entries for name, entries in in_order.items()}
                in_order = {name: torch.full_like(e, 3) for name, e in in_order.items()}
                sources = {"managed_collisions": {MODULE: {"replaced": live}}}
            buffers = {"sorted_raw_ids": self.raw_ids[order], "remapped_ids_mapping": order}
            buffers |= in_order
            if forged is not None:
                buffers[forged[0]][self.raw_ids[order].tolist().index(40)] = forged[1]
            dense = {f"{MODULE}._mch_{name}": e for name, e in buffers.items()} | dense
        state = {"model": {"tensors": dense, "extra": {}}, "sources": sources}
        publish(run, build(run, [table], step=step, generation=1, state=state))


@pytest.fixture
def source(tmp_path: Path) -> Run:
    run = new_run(tmp_path / "mapped")
    run.claim(None)
    return run


def begun(
    place: Place, source: Run, capacity_rows: int = 20, *, table: str = TABLE, **rules: Any
) -> KeyedTraining:
    training = KeyedTraining(capacity_rows, **rules)
    with keyed_checkpointer(training, place) as ckpt:
        ckpt.restore(seed=Seed(source.url, tables={"users": table}))
        commit(ckpt, place)
    return training


def rows_of(training: KeyedTraining, keys: list[int]) -> Tensor:
    table = training.model.users
    return table.weight.detach()[table.slots.find(torch.tensor(keys))]


@pytest.mark.parametrize("form", ["sharded", "whole", "replaced"])
@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        ("LRU", LeastRecent()),
        ("LFU", LeastUsed()),
        ("DistanceLFU", LeastRecent()),
        ("DistanceLFU", LeastUsed()),
    ],
    ids=str,
)
def test_raw_ids_become_keys(
    place: Place, source: Run, form: str, policy: str, rule: LeastRecent | LeastUsed
) -> None:
    mapped = _Mapped()
    mapped.commit(source, policy, sharded=form == "sharded", replaced=form == "replaced")
    training = KeyedTraining(20, evict=rule, admit=Seen(times=1))
    table = training.model.users
    with keyed_checkpointer(training, place) as ckpt:
        ckpt.restore(seed=Seed(source.url, tables={"users": TABLE}))
        slots, states = table.slots, table.slots.row_states
        keys = list(mapped.rows)
        assert sorted(keys) == table.keys().tolist()
        assert torch.equal(rows_of(training, keys), torch.stack(list(mapped.rows.values())))
        assert not table.weight[0].any() and not table.has_row(torch.tensor([NO_ID, 6])).any()
        places = slots.find(torch.tensor(keys))
        used = mapped.raw_ids != NO_ID
        has_last_use = policy != "LFU"
        last_use = mapped.last_access[used] if has_last_use else torch.zeros(7, dtype=torch.int64)
        assert torch.equal(states[LAST_USE][places], last_use)
        assert slots.steps == int(last_use.max()) + 1
        if isinstance(rule, LeastUsed):
            assert torch.equal(states[USES][places], mapped.counts[used])
        training.batch()
        ckpt.step()
        commit(ckpt, place)
    # The rows of the run that begins here are restored as those of any keyed table.
    resumed = KeyedTraining(20, evict=rule, admit=Seen(times=1))
    with keyed_checkpointer(resumed, place) as ckpt:
        ckpt.restore()
        assert ckpt.batches_done == 1
    assert torch.equal(resumed.model.users.weight, table.weight)
    assert set(keys) <= set(resumed.model.users.keys().tolist())


@pytest.mark.parametrize(
    ("policy", "rule"), [("LRU", LeastRecent()), ("LFU", LeastUsed())], ids=str
)
def test_the_rule_of_eviction_chooses_among_too_many_ids(
    place: Place, source: Run, policy: str, rule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mapped = _Mapped()
    mapped.commit(source, policy, sharded=True)
    caplog.set_level(logging.INFO, logger="recpoint")
    training = KeyedTraining(4, evict=rule)
    with keyed_checkpointer(training, place) as ckpt:
        ckpt.restore(seed=Seed(source.url, tables={"users": TABLE}))
        entries = next(iter(mapped.use_states(policy).values()))
        used = (mapped.raw_ids != NO_ID).nonzero().flatten().tolist()
        order = sorted((int(entries[row]), int(mapped.raw_ids[row])) for row in used)
        kept_keys = [key for _, key in order[3:]]
        assert training.model.users.keys().tolist() == sorted(kept_keys)
        expected = torch.stack([mapped.rows[key] for key in kept_keys])
        assert torch.equal(rows_of(training, kept_keys), expected)
        commit(ckpt, place)
    assert "4 keys of the checkpoint go to 4 slots, and 3 keys were evicted" in caplog.text
    assert f"4 raw ids of {TABLE!r} have become keys" in caplog.text


@pytest.mark.parametrize(
    ("policy", "rule", "text"),
    [
        ("LRU", LeastUsed(), r"evicts by uses \(LeastUsed\), and of the ids of .* has last use"),
        ("LFU", LeastRecent(), r"evicts by last use \(LeastRecent\), .* the checkpoint has uses"),
    ],
    ids=str,
)
@pytest.mark.parametrize("sharded", [True, False])
def test_what_the_rule_goes_by_must_be_there(
    place: Place, source: Run, policy: str, rule: Any, text: str, sharded: bool
) -> None:
    _Mapped().commit(source, policy, sharded=sharded)
    with pytest.raises(IncompatibleModel, match=text):
        begun(place, source, evict=rule)


def test_a_plain_table_and_states_to_carry_are_refused(place: Place, source: Run) -> None:
    _Mapped().commit(source, "LRU", sharded=True)
    with (
        keyed_checkpointer(KeyedTraining(20), place) as ckpt,
        pytest.raises(IncompatibleModel, match="optimizer states begin anew"),
    ):
        ckpt.restore(seed=Seed(source.url, tables={"users": TABLE}, optimizer_states="carry"))
    state: dict[str, Any] = {"model": {"tensors": {}, "extra": {}}}
    plain = [Table("items", torch.zeros(ROWS, DIM))]
    publish(source, build(source, plain, step=4, generation=1, state=state))
    with pytest.raises(IncompatibleModel, match="has no raw ids"):
        begun(place, source, table="items")


def test_ids_of_another_collection_are_not_taken(place: Place, source: Run) -> None:
    mapped = _Mapped()
    other_ids = {f"{OTHER}._mch_sorted_raw_ids": torch.arange(ROWS)}
    mapped.commit(source, "LRU", sharded=False, more=other_ids)
    training = begun(place, source)
    assert set(mapped.rows) <= set(training.model.users.keys().tolist())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("sorted_raw_ids", 7, "key 7 in two rows"),
        ("remapped_ids_mapping", ROWS, "rows that are not in 0 … 11"),
        ("remapped_ids_mapping", -1, "rows that are not in 0 … 11"),
        ("remapped_ids_mapping", 2, "two raw ids in one row"),
        ("last_access_iter", -5, "last use below 0"),
    ],
)
def test_forged_ids_are_refused_before_a_row_is_written(
    place: Place, source: Run, name: str, value: int, text: str
) -> None:
    _Mapped().commit(source, "LRU", sharded=False, forged=(name, value))
    training = KeyedTraining(20)
    weight = training.model.users.weight.detach().clone()
    with keyed_checkpointer(training, place) as ckpt, pytest.raises(NothingToRestore, match=text):
        ckpt.restore(seed=Seed(source.url, tables={"users": TABLE}))
    assert torch.equal(training.model.users.weight, weight)
    assert not training.model.users.rows_used


def test_tensors_of_another_form_are_refused(place: Place, source: Run) -> None:
    _Mapped().commit(source, "LRU", sharded=False)
    short = {f"{MODULE}._mch_remapped_ids_mapping": torch.arange(3)}
    _Mapped().commit(source, "LRU", sharded=False, step=4, more=short)
    with pytest.raises(IncompatibleModel, match=r"and not int64 \[12\] each"):
        begun(place, source)


def test_a_checkpoint_of_torchrec_alone_is_imported_first(place: Place, tmp_path: Path) -> None:
    mapped = _Mapped()
    order = mapped.raw_ids.argsort(stable=True)
    old = {
        f"{TABLE}.weight": mapped.values,
        f"{MODULE}._mch_sorted_raw_ids": mapped.raw_ids[order],
        f"{MODULE}._mch_remapped_ids_mapping": order,
        f"{MODULE}._mch_counts": mapped.counts[order],
    }
    torch.save({"model": old}, tmp_path / "old.pt")
    imported, path = str(tmp_path / "imported"), str(tmp_path / "old.pt")
    seed = Seed(path, tables={"users": TABLE})
    with (
        keyed_checkpointer(KeyedTraining(20), place) as ckpt,
        pytest.raises(IncompatibleModel, match="a run that recpoint import makes"),
    ):
        ckpt.restore(seed=seed)
    options = ["--map", "model.*=*", "--table", TABLE, "--scratch", str(tmp_path)]
    ended = CliRunner().invoke(app, ["import", path, imported, *options])
    assert ended.exit_code == 0, ended.output
    training = KeyedTraining(20, evict=LeastUsed())
    with keyed_checkpointer(training, place) as ckpt:
        ckpt.restore(seed=Seed(imported, tables={"users": TABLE}))
        keys = list(mapped.rows)
        assert sorted(keys) == training.model.users.keys().tolist()
        assert torch.equal(rows_of(training, keys), torch.stack(list(mapped.rows.values())))
        commit(ckpt, place)
