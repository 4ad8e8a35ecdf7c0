"""Measures the map of keyed tables on one thread, against a dictionary and against sorted arrays.

Keys are random, and tables are full. Lookups ask for random keys that have a slot. Inserts bring
new keys. Both come in batches of 50,000. The dictionary is Python's. The sorted arrays are searched
with `torch.searchsorted` and get new keys by sorting all keys anew, as in TorchRec's managed
collisions (MCH). Seconds are those of the thread's processor time, because figures are for a core.

The benchmark `keyed` calls `measure`; `python -m benchmarks.key_map` runs it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from time import thread_time

import torch
from torch import Tensor

from benchmarks.machine import watch
from benchmarks.report import Report, Spread, alternate, print_report, ratio, spread_of
from recpoint.kernels.key_map import KeyMap, reference

__all__ = ["KEYS", "measure"]

KEYS = (
    "map_lookups_per_second",
    "map_inserts_per_second",
    "map_vs_mch",
    "map_vs_dict",
    "map_bytes_per_slot",
    "map_growth_ms",
)

_BATCH = 50_000
#: New keys of a batch while a map grows.
_NEW = 500


def measure(report: Report, *, smoke: bool) -> None:
    """Add the figures KEYS, each the worst of all sizes, and rows of all sizes."""
    sizes, batch = ((20_000, 40_000), 2_000) if smoke else ((1_000_000, 10_000_000), _BATCH)
    _gate()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        spreads: dict[str, list[Spread]] = {key: [] for key in KEYS}
        for size in sizes:
            _measure_size(report, spreads, size, batch, rounds=3 if smoke else 21)
    finally:
        torch.set_num_threads(threads)
    for key, sized in spreads.items():
        report.put(key, (max if key in ("map_bytes_per_slot", "map_growth_ms") else min)(sized))


def _gate() -> None:
    keys = torch.randperm(3_000) - 1_500
    both = [kind(torch.zeros(2_001, dtype=torch.int64)) for kind in (KeyMap, reference.KeyMap)]
    for slots in both:
        slots.insert(keys[:2_000], torch.arange(1, 2_001))
        slots.remove(keys[500:900])
        slots.insert(keys[2_000:2_300], slots.free_slots(300))
    if not torch.equal(both[0].find(keys), both[1].find(keys)):
        raise AssertionError("key_map: other slots than the reference's")


def _measure_size(
    report: Report, spreads: dict[str, list[Spread]], size: int, batch: int, *, rounds: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    keys = _random_keys(size, generator)
    slots = torch.arange(1, size + 1)
    slot_map = KeyMap(torch.zeros(size + 1, dtype=torch.int64))
    slot_map.insert(keys, slots)
    slots_by_key = dict(zip(keys.tolist(), slots.tolist(), strict=True))
    arrays = _SortedArrays(keys, slots)
    asked = [keys[torch.randint(size, (batch,), generator=generator)] for _ in range(rounds + 1)]
    if not torch.equal(slot_map.find(asked[0]), arrays.find(asked[0])):
        raise AssertionError("sorted arrays: other slots than the map's")
    lookups = [
        seconds[1:]
        for seconds in alternate(
            rounds + 1,
            _of_each(asked, slot_map.find),
            _of_each(asked, arrays.find),
            _of_each(asked, lambda batch: [slots_by_key.get(key, 0) for key in batch.tolist()]),
            clock=thread_time,
        )
    ]
    inserts = _insert_seconds(slot_map, arrays, slots_by_key, batch, generator)
    for does, seconds in (("lookups", lookups), ("inserts", inserts)):
        medians = [
            report.timed(f"{does} of {side}, {size:,} slots", side_seconds)
            for side, side_seconds in zip(
                ("key_map", "sorted arrays", "dict"), seconds, strict=True
            )
        ]
        report.rows.append((does, size, *(batch / middle / 1e6 for middle in medians)))
        spreads[f"map_{does}_per_second"].append(spread_of([batch / s for s in seconds[0]]))
    spreads["map_vs_mch"].append(ratio(lookups[1], lookups[0]))
    spreads["map_vs_dict"].append(ratio(lookups[2], lookups[0]))
    spreads["map_bytes_per_slot"].append(spread_of([slot_map.nbytes / size]))
    spreads["map_growth_ms"].append(_growth_ms(report, slot_map, generator))


def _insert_seconds(
    slot_map: KeyMap,
    arrays: _SortedArrays,
    slots_by_key: dict[int, int],
    batch: int,
    generator: torch.Generator,
) -> list[list[float]]:
    """Time inserts of new keys into slots that other keys have lost just before."""
    seconds: list[list[float]] = [[], [], []]
    for _ in range(6):
        gone = slot_map.slot_keys[1:][torch.randperm(slot_map.capacity, generator=generator)]
        gone = gone[:batch]
        slots = slot_map.remove(gone)
        for key in gone.tolist():
            del slots_by_key[key]
        keys = _random_keys(batch, generator)
        inserts = (
            partial(slot_map.insert, keys, slots),
            partial(arrays.replace, slots, keys),
            partial(_put, slots_by_key, keys, slots),
        )
        for times, more in zip(seconds, alternate(1, *inserts, clock=thread_time), strict=True):
            times += more
    return [times[1:] for times in seconds]


def _growth_ms(report: Report, slot_map: KeyMap, generator: torch.Generator) -> Spread:
    """Return the shortest call and twice the longest while the map grows to twice its size.

    Each call inserts _NEW keys. The call of `grow` itself is noted beside: its caller has copied
    the keys and rows of the whole table before.
    """
    capacity = slot_map.capacity
    larger = torch.zeros(2 * capacity + 1, dtype=torch.int64)
    larger[: capacity + 1] = slot_map.slot_keys
    grow_seconds = alternate(1, partial(slot_map.grow, larger), clock=thread_time)[0]
    report.timed(f"grow, {capacity:,} slots", grow_seconds)
    calls: list[float] = []
    while slot_map.is_growing:
        keys = _random_keys(_NEW, generator)
        first = len(slot_map) + 1
        slots = torch.arange(first, first + _NEW)
        calls += alternate(1, partial(slot_map.insert, keys, slots), clock=thread_time)[0]
    longest = 1e3 * max(calls)
    return Spread(longest, 1e3 * min(calls), longest, len(calls))


class _SortedArrays:
    """Keys in ascending order and their slots, as TorchRec's managed collisions hold them."""

    def __init__(self, keys: Tensor, slots: Tensor) -> None:
        self._keys, order = keys.sort()
        self._slots = slots[order]

    def find(self, keys: Tensor) -> Tensor:
        places = torch.searchsorted(self._keys, keys).clamp_(max=len(self._keys) - 1)
        return torch.where(self._keys[places] == keys, self._slots[places], 0)

    def replace(self, slots: Tensor, keys: Tensor) -> None:
        """Give these slots to other keys."""
        stays = ~torch.isin(self._slots, slots)
        self._keys, order = torch.cat([self._keys[stays], keys]).sort()
        self._slots = torch.cat([self._slots[stays], slots])[order]


def _put(slots_by_key: dict[int, int], keys: Tensor, slots: Tensor) -> None:
    slots_by_key.update(zip(keys.tolist(), slots.tolist(), strict=True))


def _random_keys(size: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)


def _of_each(batches: list[Tensor], function: Callable[[Tensor], object]) -> Callable[[], object]:
    """Return a function that calls `function` with one batch after another."""
    turns = count()
    return lambda: function(batches[next(turns) % len(batches)])


if __name__ == "__main__":
    alone = Report(name="key_map", columns=("does", "slots", "key_map", "sorted arrays", "dict"))
    with watch() as watched:
        measure(alone, smoke=False)
    print_report(alone, smoke=False, busy=watched.busy)
