"""Buffers of a cut on a GPU leave training the memory that its steps take."""

from __future__ import annotations

import random

import torch

from recpoint.trainer_plugin.snapshot.codes import SMALL_BYTES, DeviceDrain
from recpoint.trainer_plugin.snapshot.device_memory import DeviceMemory, MemoryReading

DEVICE = torch.device("cpu")  # in place of a GPU: nothing here launches a kernel
GB = 1 << 30


class Allocator:
    """Counts memory as torch's caching allocator does; refuses what the device does not have."""

    def __init__(self, total: int, others: int = 0) -> None:
        self.total, self.others = total, others
        self.allocated = self.peak = 0

    def take(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        if self.allocated + self.others > self.total:
            raise torch.OutOfMemoryError(f"{self.allocated} bytes of {self.total}")

    def free(self, size: int) -> None:
        self.allocated -= size

    def step(self, activations: int) -> None:
        self.take(activations)
        self.free(activations)

    def read(self, _device: torch.device) -> MemoryReading:
        return MemoryReading(self.total, self.others, self.peak)

    def free_and_cached(self) -> int:
        """What seems to be free between two batches, which recpoint once took for its buffers."""
        free = self.total - self.others - self.peak
        return free // 2 + (self.peak - self.allocated)


def test_buffers_stay_beyond_the_peak_of_training_for_ever() -> None:
    allocator = Allocator(80 * GB, others=GB)
    memory = DeviceMemory(allocator.read)
    allocator.take(40 * GB)
    allocator.step(30 * GB)
    memory.note_trained()
    assert allocator.allocated + allocator.free_and_cached() + 30 * GB > 80 * GB  # would run out
    chosen = random.Random(1)
    granted = []
    for cut in range(200):
        # The first is a full that would take all it can get. Later ones find room, too.
        wanted = 10 * GB if cut == 0 else chosen.randrange(GB // 4, 4 * GB)
        size = min(wanted, memory.spare_bytes(DEVICE))
        granted.append(size)
        allocator.take(size)
        memory.hold(DEVICE, size)
        for _ in range(chosen.randrange(4)):
            allocator.step(30 * GB)
        if chosen.random() < 0.2 and (more := memory.spare_bytes(DEVICE)):
            allocator.take(more)  # the next cut, before this one is on the host
            memory.hold(DEVICE, more)
            allocator.step(30 * GB)
            allocator.free(more)
            memory.release(DEVICE, more)
        allocator.free(size)
        memory.release(DEVICE, size)
        allocator.step(30 * GB)
    assert granted[0] == 2 * GB  # half of what is beyond the peak, without a sixteenth of 80 GB
    assert min(granted) >= GB // 4


def test_a_reset_of_the_peak_and_a_model_that_has_not_trained() -> None:
    allocator = Allocator(80 * GB)
    memory = DeviceMemory(allocator.read)
    allocator.take(10 * GB)
    allocator.step(GB)  # something else than a batch, such as the kernels of `warm_up`
    assert memory.spare_bytes(DEVICE) == 0
    allocator.step(60 * GB)
    memory.note_trained()
    spare = memory.spare_bytes(DEVICE)
    assert 0 < spare < 10 * GB
    allocator.peak = allocator.allocated  # torch.cuda.reset_peak_memory_stats()
    allocator.step(GB)
    assert memory.spare_bytes(DEVICE) == spare


def test_rows_go_to_the_host_piece_by_piece_if_buffers_have_no_room() -> None:
    allocator = Allocator(1 << 22)
    memory = DeviceMemory(allocator.read)
    allocator.take(1 << 20)
    allocator.step(1 << 20)
    memory.note_trained()
    spare = memory.spare_bytes(DEVICE)
    source = torch.randn(4 * spare // 16, 4)
    ids = torch.arange(spare // 16)
    first, second = torch.zeros(len(ids), 4), torch.zeros(len(ids), 4)
    assert spare > SMALL_BYTES
    drain = DeviceDrain(memory=memory)
    drain.gather(source, ids, first)
    assert not first.any() and memory.spare_bytes(DEVICE) == 0  # it waits in a buffer
    drain.gather(source, ids, second)
    assert torch.equal(second, source[: len(ids)])  # it has arrived
    drain.release()
    assert memory.spare_bytes(DEVICE) == spare
