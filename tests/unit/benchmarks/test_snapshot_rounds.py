"""The snapshot benchmark measures all sizes in each round."""

from __future__ import annotations

from functools import partial

from benchmarks import snapshot


def test_each_round_measures_all_sizes() -> None:
    calls: list[tuple[str, bool]] = []

    def measure(size: str, kept: bool) -> None:
        calls.append((size, kept))

    snapshot.in_turn([partial(measure, size) for size in "abc"], warm_up=1, rounds=2)
    assert calls == [(size, kept) for kept in (False, True, True) for size in "abc"]
