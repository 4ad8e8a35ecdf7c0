"""Runs TorchRec's ModelDeltaTracker on the same ids as recpoint: row ids only, no values.

TorchRec and FBGEMM are measured against, and are not dependencies: see `INSTALL`.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

__all__ = ["INSTALL", "TorchRecTracker", "installed"]

#: Installs both without their dependencies, which would install another torch.
INSTALL = (
    "pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 torchmetrics==1.0.3 "
    "tensordict==0.15.3 pyre-extensions==0.0.32 pyvers==0.2.3 typing-inspect==0.9.0 tqdm==4.70.1 "
    "cloudpickle==3.1.2 lightning-utilities==0.15.3 mypy-extensions==1.2.0 packaging==26.3"
)


def installed() -> bool:
    """Whether TorchRec and FBGEMM can be imported."""
    return all(importlib.util.find_spec(name) for name in ("torchrec", "fbgemm_gpu"))


class TorchRecTracker:
    """A tracker of a sharded EmbeddingBagCollection on this CPU; `started` makes one."""

    def __init__(self, tracker: Any, names: Sequence[str]) -> None:
        self._tracker = tracker
        self._names = list(names)

    @classmethod
    @contextmanager
    def started(cls, tables: dict[str, int]) -> Iterator[TorchRecTracker]:
        """Yield a tracker of `tables` (name -> rows), in a process group of one."""
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.model_tracker.types import DeltaTrackerConfig
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        cpu = torch.device("cpu")
        with tempfile.TemporaryDirectory() as folder, _quiet():
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{Path(folder) / 'group'}", rank=0, world_size=1
            )
            try:
                bags = EmbeddingBagCollection(
                    device=cpu,
                    tables=[
                        EmbeddingBagConfig(
                            name=f"table_{name}",
                            embedding_dim=4,  # ids are tracked, not values
                            num_embeddings=rows,
                            feature_names=[name],
                        )
                        for name, rows in tables.items()
                    ],
                )
                # The tracker requires a model with a dense part.
                model = nn.ModuleDict({"sparse": bags, "dense": nn.Linear(1, 1)})
                sharded = DistributedModelParallel(model, device=cpu)
                yield cls(sharded.init_torchrec_delta_tracker(DeltaTrackerConfig()), list(tables))
            finally:
                torch.distributed.destroy_process_group()

    def batch(self, ids: Tensor) -> Any:
        """Convert ids I64 [n, tables] to the input of a sharded module."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        lengths = torch.ones(ids.numel(), dtype=torch.int32)
        batch = KeyedJaggedTensor.from_lengths_sync(self._names, ids.t().reshape(-1), lengths)
        batch.offset_per_key()  # computed here, because it is not the tracker's work
        return batch

    def record(self, batch: Any) -> None:
        """Make the calls that a sharded module and the step make for each batch."""
        self._tracker.record_lookup(batch, None)
        self._tracker.step()

    def stored_bytes(self) -> int:
        """Return the bytes of the ids that the tracker keeps."""
        lookups = self._tracker.store.per_fqn_lookups.values()
        return sum(lookup.ids.nbytes for of_table in lookups for lookup in of_table)

    def take(self) -> list[Tensor]:
        """Return the distinct ids of each table since the last call."""
        unique_ids = self._tracker.get_unique_ids()
        return [unique_ids[f"sparse.embedding_bags.table_{name}"] for name in self._names]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of TorchRec and FBGEMM about set-ups of many hosts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
