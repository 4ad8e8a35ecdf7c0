"""Loader workers are forked after a restore from S3: clients of the trainer do not hang in them."""

from __future__ import annotations

from pathlib import Path

import fsspec
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from recpoint import Checkpointer, Options, ResumableLoader, Timeouts
from recpoint.catalog.store.store import open_store
from tests.polling import PATIENCE_SECONDS
from tests.training_builder import Place

BATCHES = 6


class Stored(Dataset[Tensor]):
    """Reads each sample from the bucket in the worker: with s3fs, and with a store of recpoint.

    Args:
        url: URL of a store with the samples.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, number: int) -> Tensor:
        data: bytes = fsspec.filesystem("s3").cat_file(f"{self._url}/{number}")
        assert open_store(self._url).get(str(number), max_bytes=9) == data
        return torch.tensor(int(data))


def test_workers_of_a_restored_training_read_the_bucket(s3_run_url: str, tmp_path: Path) -> None:
    samples = open_store(f"{s3_run_url}-samples")
    for number in range(BATCHES):
        samples.put(str(number), str(number).encode())
    # The trainer has a client of s3fs, too, as a script that reads its settings from there.
    assert fsspec.filesystem("s3").cat_file(f"{s3_run_url}-samples/3") == b"3"
    place = Place(s3_run_url, tmp_path / "staging")
    numbers: list[int] = []
    for end in (2, BATCHES):
        model = nn.ModuleDict({"table": nn.Embedding(BATCHES, 2)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: DataLoader[Tensor] = DataLoader(
            Stored(samples.url),
            num_workers=1,
            timeout=PATIENCE_SECONDS,
            multiprocessing_context="fork",
        )
        with (
            place.agent(),
            Checkpointer(
                model,
                optimizer,
                run=place.run,
                staging=place.staging,
                reader=ResumableLoader(loader),
                interval_batches=100,
                timeouts=Timeouts(close_seconds=60.0),
                options=Options(handle_sigterm=False, announce=False),
            ) as checkpoints,
        ):
            assert (checkpoints.restore() is None) == (end == 2)
            for batch in checkpoints.batches(total=end):
                optimizer.zero_grad()
                model["table"](batch).sum().backward()
                optimizer.step()
                numbers += batch.tolist()
    assert numbers == list(range(BATCHES))
