"""Managed collisions of TorchRec: raw ids are mapped after a restore as they would have been."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recpoint import (
    Checkpointer,
    KeyedEmbedding,
    LeastRecent,
    LeastUsed,
    Options,
    Seed,
    Staging,
)
from recpoint.errors import SettingsError
from tests.torchrec_collisions import DIM, MAPPED
from tests.torchrec_model import MISSING
from tests.torchrec_ranks import play
from tests.unit.trainer_plugin.test_torchrec import same

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.xdist_group("torchrec"),
]

#: Name of a run -> arguments of `torchrec_collisions.collided`, and the number of ranks.
LIVED: dict[str, dict[str, Any]] = {
    "EBC-LFU-2": {},
    "EC-LRU-2": {"bits": 8},
    "EBC-DistanceLFU-1": {"sharded": False},
    "EC-LRU-1": {"sharded": False},
}
NIGHTLY: dict[str, dict[str, Any]] = {
    f"{kind}-{policy}-{ranks}": {"sharded": ranks > 1}
    for kind, policy, ranks in product(("EBC", "EC"), ("LFU", "LRU", "DistanceLFU"), (1, 2))
    if f"{kind}-{policy}-{ranks}" not in LIVED
} | {
    "EBC-LFU-2-pipeline": {"pipeline": "TrainPipelineSparseDist"},
    "EC-LRU-2-pipeline": {"pipeline": "TrainPipelineSparseDist"},
    "EBC-LRU-2-every-batch": {"interval": 1},
    "EC-LRU-2-replicated": {"sharded": False, "replicated": "own buffers"},
    "EBC-LFU-1-sharded": {"sharded": True},
}
STEPS = 11


def _lives(name: str, arguments: dict[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the plays of one run: never killed; killed; restored."""
    kind, policy, ranks = name.split("-")[:3]
    common = {"play": "collided", "ranks": int(ranks), "kind": kind, "policy": policy}
    whole, cut = (
        {"run": str(folder / f"{name}.{life}"), "staging": str(folder / f"{name}-{life}")}
        for life in ("whole", "cut")
    )
    return {
        "whole": {**common, **arguments, **whole, "steps": STEPS},
        "killed": {**common, **arguments, **cut, "steps": STEPS, "die_at": 5},
        "restored": {**common, **arguments, **cut, "steps": STEPS},
    }


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], list[Any]]:
    """(run, life) -> what each rank returned, for the selected tests."""
    folder = tmp_path_factory.mktemp("collisions")
    selected = {item.name for item in request.session.items}
    plays: dict[tuple[str, str], dict[str, Any]] = {}
    for name, arguments in (LIVED | NIGHTLY).items():
        if name in LIVED or any(item.endswith(f"[{name}]") for item in selected):
            for life, arguments_of_life in _lives(name, arguments, folder).items():
                plays[name, life] = arguments_of_life
    changes: dict[str, dict[str, Any]] = {
        "to three ranks": {"ranks": 3},
        "to no shards": {"ranks": 1, "sharded": False},
        "to overwritten buffers": {"sharded": False, "replicated": "buffers of rank 0"},
        "to another policy": {"policy": "DistanceLFU"},
        "ahead": {
            "pipeline": "TrainPipelineSemiSync",
            "run": str(folder / "ahead"),
            "staging": str(folder / "of-ahead"),
        },
    }
    for name, change in changes.items():
        restored = _lives("EBC-LFU-2", {}, folder)["restored"]
        changed = {**restored, **change, "steps": STEPS + 1, "play": "collided_refused"}
        plays["refused", name] = changed
    for number, ranks in enumerate((4, 2, 1)):
        recut = _lives("EBC-LRU-4", {}, folder)["restored"]
        plays["recut", str(ranks)] = {**recut, "ranks": ranks, "steps": 5 + 3 * number}
    whole = _lives("EBC-DistanceLFU-1", {}, folder)["restored"]
    plays["parts", "whole"] = {
        "play": "mapped_parts", "ranks": 1, "run": whole["run"], "staging": whole["staging"]
    }  # fmt: skip
    plays["refused", "parts"] = {
        "play": "mapped_parts_refused", "ranks": 1, "run": recut["run"], "staging": recut["staging"]
    }  # fmt: skip
    plays["refused", "modules"] = {
        "play": "collisions_refused", "ranks": 1, "folder": str(folder)
    }  # fmt: skip
    results = play(list(plays.values()), folder)
    return {**dict(zip(plays, results, strict=True)), ("folder", ""): [folder]}


@pytest.mark.parametrize(
    "name", [*LIVED, *(pytest.param(name, marks=pytest.mark.nightly("loops")) for name in NIGHTLY)]
)
def test_killed_ranks_map_ids_and_evict_as_they_would_have(
    played: dict[tuple[str, str], list[Any]], name: str
) -> None:
    assert set(played[name, "killed"]) == {None}
    is_exact = "bits" not in LIVED.get(name, {})
    for whole, resumed in zip(played[name, "whole"], played[name, "restored"], strict=True):
        assert (whole["restored"], resumed["restored"]) == (None, 4)
        assert same(resumed["collisions"], whole["collisions"])
        for part in ("tables", "parameters", "optimizer") if is_exact else ():
            assert same(resumed[part], whole[part]), part
        # Ids have lost their rows after the kill, too.
        assert 0 < resumed["evictions"] <= whole["evictions"]
        assert whole["unmarked"] == resumed["unmarked"] == 0, "nothing changes what is not marked"


@pytest.mark.parametrize("name", LIVED)
def test_a_follower_maps_ids_as_the_trainer_did(
    played: dict[tuple[str, str], list[Any]], name: str
) -> None:
    rows = played[name, "restored"][0]["served"]
    assert len(rows["trained"].unique(dim=0)) > 60
    assert torch.equal(rows["decoded"], rows["quantized"])
    # Half a step of 8 bits between the ends of a row, and what float32 rounds.
    trained_rows = rows["trained"].view(-1, DIM)
    steps = (trained_rows.amax(1) - trained_rows.amin(1)) / 255
    largest_error = 0.51 * steps if "bits" in LIVED[name] else torch.zeros_like(steps)
    errors = (rows["decoded"].view(-1, DIM) - trained_rows).abs().amax(1)
    assert bool((errors <= largest_error).all())


def test_increments_hold_the_rows_whose_ids_or_counts_changed(
    played: dict[tuple[str, str], list[Any]],
) -> None:
    whole_rows = 140
    increments = played["EBC-LFU-2", "whole"][0]["increments"]
    assert len(increments) == 5
    assert sum(rows < whole_rows / 2 for rows in increments) >= 3


@pytest.mark.parametrize(("ranks", "fewer_ranks"), [(4, 2), (2, 1)])
def test_fewer_ranks_map_the_ids_of_several(
    played: dict[tuple[str, str], list[Any]], ranks: int, fewer_ranks: int
) -> None:
    states, later_states = (played["recut", str(number)] for number in (ranks, fewer_ranks))
    first_states = [rank["begun"] for rank in later_states]
    assert {rank["restored"] for rank in later_states} == {5 + (0 if ranks == 4 else 3)}
    assert _rows_of_ids(first_states) == _rows_of_ids(states)
    assert _histories(first_states) == _histories(states)
    assert sum(rank["evictions"] for rank in later_states) > 0
    assert _rows_of_ids(later_states), "no id is mapped on two ranks"


def _rows_of_ids(ranks: list[Any]) -> dict[tuple[str, int], tuple[Any, ...]]:
    """(module, raw id) -> its row, and what evictions know of it, of all ranks."""
    rows = {}
    for rank in ranks:
        for name, state in rank["collisions"].items():
            for position, raw_id in enumerate(state["_mch_sorted_raw_ids"].tolist()):
                if raw_id != torch.iinfo(torch.int64).max:
                    entry = (state["_mch_remapped_ids_mapping"], state["_mch_last_access_iter"])
                    assert (name, raw_id) not in rows
                    rows[name, raw_id] = tuple(int(values[position]) for values in entry)
    return rows


def _histories(ranks: list[Any]) -> dict[str, list[tuple[int, int]]]:
    """Module -> the ids since the last eviction with their batches, of all ranks."""
    histories: dict[str, list[tuple[int, int]]] = {}
    for rank in ranks:
        for name, state in rank["collisions"].items():
            batches = state["history of last_access_iter"].tolist()
            histories.setdefault(name, []).extend(
                zip(state["history"].tolist(), batches, strict=True)
            )
    return {name: sorted(history) for name, history in histories.items()}


def test_what_cannot_be_restored_is_named(played: dict[tuple[str, str], list[Any]]) -> None:
    (modules,) = played["refused", "modules"]
    assert "found a HashZchManagedCollisionModule, whose state recpoint" in modules["hash"]
    assert "expected LFU_EvictionPolicy or LRU_EvictionPolicy or Dist" in modules["policy"]
    assert "its operator fbgemm::zero_collision_hash only reads" in modules["hash"]
    # FBGEMM's own words: its hash modules cannot be trained on a CPU.
    readonly = "Expected readonly to be true, but got false"
    assert modules["hash on a CPU"].startswith(readonly)
    assert modules["hash operator"].startswith(readonly)
    assert modules["hash operator that reads"] == "no error"
    assert "to whose rows managed collisions map ids" in modules["look ahead"]
    refused = {name: played["refused", name][0] for life, name in played if life == "refused"}
    assert "TorchRec decides by a raw id which rank maps it" in refused["to three ranks"]
    assert "have the sharded False here and True in" in refused["to no shards"]
    assert "pass broadcast_buffers=False" in refused["to overwritten buffers"]
    assert "'collisions.last_access_iter': 'I64[]'} here and {" in refused["to another policy"]
    (parts,) = played["refused", "parts"]
    assert "has managed collisions, and its values alone would be rows" in parts["part"]
    assert "and those of its rows are not read from such a checkpoint" in parts["seeded"]
    assert "found managed collisions, which map ids to its rows" in parts["deleted"]
    assert "use apply_optimizer_in_backward on the tables before" in parts["kernel"]
    assert "t0' has managed collisions, and an import has none" in parts["imported"]
    assert "a TrainPipelineSemiSync: found a pipeline that may map ids" in refused["ahead"]


def test_rows_and_the_ids_of_these_rows_are_loaded_together(
    played: dict[tuple[str, str], list[Any]],
) -> None:
    (outcomes,) = played["parts", "whole"]
    for source in ("run", "file"):
        assert torch.equal(outcomes[source], outcomes["restored"])
        rows_alone = outcomes[f"{source}, rows alone"]
        for table in ("t0", "t1"):
            pattern = f"mapped._managed_collision_collection._managed_collision_modules.{table}.*"
            assert f'other ids without the dense tensors "{pattern}"' in rows_alone
        assert "t0' have, and the table is not named" in outcomes[f"{source}, ids alone"]
        other_ids = outcomes[f"{source}, ids of others"]
        assert "and its raw ids are not ('mapped._managed_coll" in other_ids


class _Marks:
    """Collects the rows that are marked."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def looked_up(self, ids: Tensor) -> None:
        raise AssertionError("these rows have changed already")

    def applied(self) -> None:
        raise AssertionError("nothing was looked up")

    def mark(self, ids: Tensor) -> None:
        self.rows.append(ids.tolist())

    def mark_all(self) -> None:
        raise AssertionError("the rows are known")


def _module(rows: int = 2) -> Any:
    from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule

    return MCHManagedCollisionModule(
        zch_size=rows,
        device=torch.device("cpu"),
        eviction_policy=LRU_EvictionPolicy(),
        eviction_interval=1,
        output_global_offset=10,
    )


def _look_up(module: Any, *ids: int) -> list[int]:
    from torchrec import JaggedTensor

    features = JaggedTensor(torch.tensor(ids), lengths=torch.tensor([len(ids)]))
    looked_up: list[int] = module({"t": features})["t"].values().tolist()
    module.evict()
    return looked_up


def test_a_row_whose_id_leaves_and_comes_back_between_two_cuts_is_marked() -> None:
    from recpoint.trainer_plugin.integrations.managed_collisions import CollisionRows

    module = _module()
    collisions = CollisionRows("t", module, range(10, 12))
    assert _look_up(module, 5) == [10]
    first_states = {name: state.clone() for name, state in collisions.states.items()}
    assert first_states["collisions.raw_id"].tolist() == [5, torch.iinfo(torch.int64).max]
    collisions.marker = marks = _Marks()
    for raw_id in (6, 5):
        # Its tensors are replaced, as by `load_state_dict(assign=True)`.
        module._mch_sorted_raw_ids = module._mch_sorted_raw_ids.clone()
        assert _look_up(module, raw_id) == [10]
        collisions.follow()
        collisions.follow()
    raw_ids = collisions.states["collisions.raw_id"]
    assert torch.equal(raw_ids, first_states["collisions.raw_id"])
    assert [rows for rows in marks.rows if 0 in rows] == [[0, 1], [0, 1]]
    assert len(marks.rows) == 2, "a look at what has not changed is not a look at all rows"


def test_rows_are_given_back_in_the_order_of_ids() -> None:
    from recpoint.trainer_plugin.integrations.managed_collisions import CollisionRows

    module, restored = _module(9), _module(9)
    for ids in ((700, 3, 41), (9, 3), (8, 1000, 2, 77), (5,), (6, 3, 9)):
        _look_up(module, *ids)
    stored = CollisionRows("t", module, range(10, 19)).states
    target = CollisionRows("t", restored, range(10, 19))
    for name, state in target.states.items():
        state.copy_(stored[name])
    target.write_back()
    for name, buffer in module.named_buffers():
        if name.startswith("_mch"):
            assert torch.equal(restored.get_buffer(name), buffer), name


def test_free_rows_out_of_order_are_named() -> None:
    from recpoint.trainer_plugin.integrations.managed_collisions import CollisionRows

    module = _module(4)
    collisions = CollisionRows("t", module, range(10, 14))
    module._mch_remapped_ids_mapping.copy_(torch.tensor([11, 10, 12, 13]))
    with pytest.raises(SettingsError, match="free rows are not in ascending order"):
        _ = collisions.states
    with pytest.raises(SettingsError, match="not mapped to rows 10 … 12, each once"):
        CollisionRows("t", module, range(10, 13))


def test_a_tensor_that_took_the_place_of_another_is_read() -> None:
    from recpoint.trainer_plugin.integrations.managed_collisions import CollisionRows

    module = _module(3)
    collisions = CollisionRows("t", module, range(10, 13))
    assert collisions.states["collisions.raw_id"][0] == torch.iinfo(torch.int64).max
    earlier_ids = module._mch_sorted_raw_ids
    module._mch_sorted_raw_ids = torch.cat([torch.tensor([7]), earlier_ids[1:]])
    assert module._mch_sorted_raw_ids._version == earlier_ids._version
    assert collisions.states["collisions.raw_id"][0] == 7


@pytest.mark.parametrize(
    ("name", "rule"),
    [("EBC-LFU-2", LeastUsed()), ("EBC-DistanceLFU-1", LeastRecent())],
    ids=["sharded by rows", "not sharded"],
)
def test_keyed_tables_begin_with_the_rows_of_raw_ids(
    played: dict[tuple[str, str], list[Any]], tmp_path: Path, name: str, rule: Any
) -> None:
    (folder,) = played["folder", ""]
    source = str(folder / f"{name}.whole")
    keyed = nn.ModuleDict(
        {table: KeyedEmbedding(DIM, rows, evict=rule) for table, (rows, _) in MAPPED.items()}
    )
    optimizer = torch.optim.Adagrad(keyed.parameters(), lr=0.1)
    stored = {table: f"mapped._embedding_module.embedding_bags.{table}" for table in MAPPED}
    with Checkpointer(
        keyed,
        optimizer,
        run=str(tmp_path / "keyed"),
        interval_batches=100,
        staging=Staging(directory=tmp_path / "staging"),
        options=Options(handle_sigterm=False, announce=False),
    ) as checkpoints:
        checkpoints.restore(seed=Seed(source, tables=stored))
        checkpoints.close(final=False)
    # As the trained model looks ids up in evaluation, one id in each bag of each feature.
    trained = played[name, "whole"][0]["served"]["trained"]
    ids = torch.cat([torch.arange(-40, 4040), torch.tensor([-(2**63), 2**62, 2**63 - 2])])
    features = [table for table, (_, names) in MAPPED.items() for _ in names]
    for number, table in enumerate(features):
        module = keyed[table]
        assert isinstance(module, KeyedEmbedding)
        has_row = module.has_row(ids)
        assert int(has_row.sum()) == module.rows_used > 20
        rows = trained[: len(ids)][has_row, number * DIM : (number + 1) * DIM]
        with torch.no_grad():
            assert torch.equal(module.eval()(ids[has_row]), rows)
