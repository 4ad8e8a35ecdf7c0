"""TorchRec's own way: DCP of the sharded model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.faults.system import DIM, ROWS, Begin, Restored, Tags, Trainer, template, truth
from benchmarks.faults.systems.dcp import LACKS, DcpSync

__all__ = ["Torchrec"]

#: Named so because a module cannot have a table `items`.
_TABLES = ("table_users", "table_items")


class _Sharded(Trainer):
    def __init__(self, system: Torchrec, overwrite: bool) -> None:
        self._system = system
        self._overwrite = overwrite

    def save(self, tags: Tags) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        model = _model()
        _fill(model, truth(tags))
        state = {"model": model.state_dict(), "step": len(tags)}
        save(state, storage_writer=self._system.writer(len(tags), self._overwrite))


class Torchrec(DcpSync):
    """`dcp.save` of the state of a `DistributedModelParallel`, of one rank."""

    name = "torchrec"
    title = "TorchRec"
    distributions = ("torchrec", "fbgemm-gpu-cpu")
    modules = ("fbgemm_gpu", "torchrec.distributed.model_parallel")
    used = (
        "`dcp.save` of the `state_dict` of a `DistributedModelParallel` (row-wise tables, one "
        "rank); else as DCP"
    )
    lacks = {
        **LACKS,
        "worker killed": "the trainer itself writes",
        "503, throttling, time-outs, resets": "as DCP, whose writer it uses",
        "store dies in an upload": "as DCP, whose writer it uses",
    }

    @contextmanager
    def trainer(
        self, begin: Begin = "newest", *, keep: int | None = None, overwrite: bool = False
    ) -> Iterator[Trainer]:
        """See `System.trainer`."""
        self._meet()
        yield _Sharded(self, overwrite)

    def _meet(self) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            meeting = self.place.staging / "meeting"
            meeting.parent.mkdir(parents=True, exist_ok=True)
            meeting.unlink(missing_ok=True)
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)

    def restore(self) -> Restored:
        """See `System.restore`."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        self._meet()
        model = _model()
        _fill(model, template())
        state = {"model": model.state_dict(), "step": 0}
        load(state, storage_reader=FileSystemReader(self.folder(self.newest())))
        model.load_state_dict(state["model"])
        tensors = {
            _plain(name): _local(value).detach() for name, value in model.state_dict().items()
        }
        step = state["step"]
        assert isinstance(step, int)
        return step, tensors


def _model() -> Any:
    """Return the model of `system.Model` with its tables in TorchRec."""
    import torch
    import torchrec
    from torch import nn
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan

    warnings.filterwarnings("ignore")

    class Ranker(nn.Module):
        """Two tables and a dense layer."""

        def __init__(self) -> None:
            super().__init__()
            self.bags = torchrec.EmbeddingBagCollection(
                device=torch.device("cpu"),
                tables=[
                    torchrec.EmbeddingBagConfig(
                        name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name]
                    )
                    for name in _TABLES
                ],
            )
            self.top = nn.Linear(2 * DIM, 1)

    model = Ranker()
    sharder: Any = EmbeddingBagCollectionSharder()
    plan = plans.construct_module_sharding_plan(
        model.bags,
        {name: plans.row_wise() for name in _TABLES},
        sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"bags": plan}), sharders=[sharder]
    )


def _fill(model: Any, values: Mapping[str, Any]) -> None:
    import torch

    with torch.no_grad():
        for name, value in model.state_dict().items():
            _local(value).copy_(values[_plain(name)])


def _plain(name: str) -> str:
    return name.removeprefix("bags.embedding_bags.table_")


def _local(value: Any) -> Any:
    """Return the rows of a table that this rank, which is the only one, holds."""
    return value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
