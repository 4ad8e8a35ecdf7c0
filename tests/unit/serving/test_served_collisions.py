"""A follower maps raw ids of tables that were sharded as each shard's module did at that step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recpoint import Follower
from recpoint.embeddings.tables.managed_collisions import NO_ID, RAW_ID, IdShards
from recpoint.errors import IncompatibleModel
from recpoint.format.manifest import Manifest
from tests.catalog_builder import Table, build, new_run, publish
from tests.torchrec_model import MISSING

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.xdist_group("torchrec"),
]

ROWS, DIM, HASH_SIZE = 23, 4, 1000
TABLE = "mapped._embedding_module.embedding_bags.t"
MODULE = "mapped._managed_collision_collection._managed_collision_modules.t"
IDS = torch.cat(
    [torch.arange(-30, 1030), torch.tensor([-(2**63), 2**62 + 1, NO_ID - 1, NO_ID], device="cpu")]
)


def _shards_by_fbgemm(ids: Tensor, hash_size: int, count: int) -> Tensor:
    """Return the shard to which TorchRec sends each id."""
    from torchrec.distributed import embedding_sharding  # noqa: F401  # loads FBGEMM

    unique_ids, places = ids.unique(return_inverse=True)
    lengths, values = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.tensor([len(unique_ids)]),
        unique_ids,
        bucketize_pos=False,
        sequence=True,
        block_sizes=torch.tensor([-(-hash_size // count)]),
        total_num_blocks=torch.tensor([count]),
        my_size=count,
        keep_orig_idx=True,
    )[:2]
    shards = torch.arange(count).repeat_interleave(lengths)
    return shards[values.argsort()][places]


def test_ids_are_divided_as_fbgemm_divides_them() -> None:
    generator = torch.Generator().manual_seed(1)
    anywhere = torch.randint(-(2**63), NO_ID, (300,), generator=generator)
    ends = torch.tensor([-(2**63), -(2**63) + 1, -(2**63) + 6, -1, 0, 1, NO_ID - 1, NO_ID])
    for hash_size in (1, 10, 1000, 2**40 + 3, NO_ID):
        for count in (1, 2, 3, 4, 7):
            shards = IdShards(hash_size, count)
            edges = torch.tensor([min(k * shards.block, NO_ID) for k in range(count + 1)])
            ids = torch.cat([anywhere, ends, IDS, edges, edges - 1])
            assert torch.equal(shards.of(ids), _shards_by_fbgemm(ids, hash_size, count))


def _collection(hash_size: int = HASH_SIZE) -> Any:
    """Return a model with one table, as a trainer builds it before it is sharded."""
    import torchrec
    from torchrec.modules import mc_embedding_modules, mc_modules

    config = torchrec.EmbeddingBagConfig(
        name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"]
    )
    module = mc_modules.MCHManagedCollisionModule(
        zch_size=ROWS,
        device=torch.device("cpu"),
        eviction_policy=mc_modules.LRU_EvictionPolicy(),
        eviction_interval=1,
        input_hash_size=hash_size,
    )
    model = nn.Module()
    model.mapped = mc_embedding_modules.ManagedCollisionEmbeddingBagCollection(
        torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("cpu")),
        mc_modules.ManagedCollisionCollection({"t": module}, [config]),
    )
    return model


class _Shards:
    """Trains the managed collisions of a table in shards of rows; rows are their own values."""

    def __init__(self, first_rows: list[int], *, bits: int | None = None) -> None:
        whole: Any = _collection().get_submodule(MODULE)
        self.edges = [*first_rows, ROWS]
        self.modules = [
            whole.rebuild_with_output_id_range((first, stop), output_segments=self.edges)
            for first, stop in zip(self.edges, self.edges[1:], strict=False)
        ]
        self._random = torch.Generator().manual_seed(len(first_rows))
        self.table = Table(
            TABLE,
            torch.randn(ROWS, DIM, generator=self._random),
            (self._raw_ids(),),
            bits=bits,
            state_names=(RAW_ID,),
        )

    def _raw_ids(self) -> Tensor:
        raw_ids = torch.empty(ROWS, dtype=torch.int64)
        for module in self.modules:
            raw_ids[module._mch_remapped_ids_mapping] = module._mch_sorted_raw_ids
        return raw_ids

    def look_up(self, ids: Tensor, *, training: bool) -> Tensor:
        """Return the row of each id; in training, each module learns ids and evicts others."""
        from torchrec import JaggedTensor

        shards = _shards_by_fbgemm(ids, HASH_SIZE, len(self.modules))
        rows = torch.empty_like(ids)
        for number, module in enumerate(self.modules):
            of_shard = ids[shards == number]
            features = JaggedTensor(of_shard, lengths=torch.tensor([len(of_shard)]))
            rows[shards == number] = module.train(training)({"f": features})["f"].values()
        return rows

    def train(self) -> Tensor:
        """Learn some ids, and return the rows whose id or values have changed."""
        ids = IDS[torch.randint(0, len(IDS) - 1, (4,), generator=self._random)]
        self.look_up(ids, training=True)
        raw_ids, (stored_ids,) = self._raw_ids(), self.table.states
        changed = raw_ids != stored_ids
        changed[int(torch.randint(0, ROWS, (1,), generator=self._random))] = True
        rows = changed.nonzero().flatten()
        self.table.values[rows] = torch.randn(len(rows), DIM, generator=self._random)
        stored_ids.copy_(raw_ids)
        return rows

    def states(self) -> list[dict[str, Any]]:
        """Return the state tree of each rank."""
        return [
            {
                "model": {"tensors": {}, "extra": {}},
                "sources": {
                    "managed_collisions": {
                        MODULE: {
                            "settings": {"input hash size": HASH_SIZE},
                            "first_row": first,
                            "rows": stop - first,
                            "shard": number,
                            "shards": len(self.modules),
                        }
                    }
                },
            }
            for number, (first, stop) in enumerate(zip(self.edges, self.edges[1:], strict=False))
        ]


def _rows_served(follower: Follower) -> tuple[Tensor, Tensor]:
    """Return the row of each of `IDS` as a follower maps it, and the values that it looks up."""
    from torchrec import KeyedJaggedTensor

    features = KeyedJaggedTensor.from_lengths_sync(
        ["f"], IDS, torch.ones(len(IDS), dtype=torch.int32)
    )
    with torch.no_grad(), follower.reading() as version:
        model: Any = version.model
        mapped = model.mapped._managed_collision_collection(features).values()
        values: Tensor = model.mapped(features)[0].values()
        assert torch.equal(values, version.lookup(TABLE, mapped))
    return mapped, values


@pytest.mark.parametrize(("bits", "quantized"), [(None, False), (8, False), (8, True)])
def test_each_version_maps_each_id_as_the_shards_did(
    tmp_path: Path, bits: int | None, quantized: bool
) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    follower = Follower(run.url, model=_collection(), quantized=quantized)
    known_rows, step = set(), 0
    # Other numbers of shards begin with a full.
    for first_rows in ([0, 8, 16], [0], [0, 12]):
        trained, parent = _Shards(first_rows, bits=bits), None
        for _ in range(5):
            dirty, step = trained.train(), step + 1
            checkpoint = build(
                run,
                [trained.table],
                step=step,
                generation=1,
                parent=parent,
                dirty=None if parent is None else [dirty],
                states=trained.states(),
            )
            parent = publish(run, checkpoint)
            assert follower.poll()
            mapped, values = _rows_served(follower)
            expected_rows = trained.look_up(IDS, training=False)
            assert torch.equal(mapped, expected_rows)
            tolerance = 0.0 if bits is None else 0.02
            expected_values = trained.table.values[expected_rows]
            torch.testing.assert_close(values, expected_values, rtol=0, atol=tolerance)
            known_rows |= set(mapped.tolist())
    assert len(known_rows) > 15, "few ids had rows"
    assert follower.status.increments_applied == 12


def _commit(path: Path, trained: _Shards, states: list[Any]) -> Manifest:
    run = new_run(path)
    run.claim(None)
    return publish(run, build(run, [trained.table], step=1, generation=1, states=states))


def test_ids_that_cannot_be_mapped_as_in_training_are_refused(tmp_path: Path) -> None:
    trained = _Shards([0, 8, 16])
    states = trained.states()
    malformed = trained.states()
    malformed[1]["sources"]["managed_collisions"][MODULE]["rows"] = "8"
    without_module: Any = _collection()
    without_module.mapped = nn.Module()
    without_module.mapped._embedding_module = _collection().mapped._embedding_module
    for name, stored, model, text in (
        ("lost", [states[0], states[2]], _collection(), "shards that make up 23 rows"),
        ("order", [*states[:2], states[1]], _collection(), "numbered in their order"),
        ("form", malformed, _collection(), "found 2 shards"),
        ("hash", states, _collection(999), "input hash size 1000 in the checkpoint and 999"),
        ("module", states, without_module, "no module of the model maps them"),
    ):
        _commit(tmp_path / name, trained, stored)
        follower = Follower(str(tmp_path / name), model=model)
        with pytest.raises(IncompatibleModel, match=text):
            follower.poll()
        assert follower.version is None


def test_versions_of_a_whole_module_follow_those_of_shards(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    follower = Follower(run.url, model=_collection())
    trained, whole = _Shards([0, 12]), _Shards([0])
    for step in (1, 2, 3, 4):
        shards = trained if step in (1, 3) else whole
        shards.train()
        table, states = shards.table, shards.states()
        if shards is whole:  # as a model that is not sharded stores it
            table, module = Table(TABLE, table.values), shards.modules[0]
            tensors = {
                f"{MODULE}.{name}": tensor.detach().clone()
                for name, tensor in (*module.named_parameters(), *module.named_buffers())
                if not name.startswith("_history")
            }
            states = [{"model": {"tensors": tensors, "extra": {}}}]
        publish(run, build(run, [table], step=step, generation=1, states=states))
        assert follower.poll()
        mapped, _ = _rows_served(follower)
        assert torch.equal(mapped, shards.look_up(IDS, training=False))
