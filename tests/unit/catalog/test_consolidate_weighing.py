"""Which merge of a chain costs least: hand-made tables, and chains that grow for long."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from recpoint.catalog.consolidate.choice import cheapest, weigh
from recpoint.catalog.consolidate.merge_sizes import MergeSizes
from recpoint.catalog.consolidate.plan import ConsolidationTriggers

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]

LINKS = ConsolidationTriggers(links=8, restore_ratio=99, dead_share=1)
BYTES = ConsolidationTriggers(links=99)
TRIGGERS = ConsolidationTriggers()


def merges_of(full: int, links: Sequence[int], written: Sequence[int]) -> list[MergeSizes]:
    """All merges of a chain whose rows take a byte each.

    Args:
        full: rows of the full.
        links: rows of its increments, oldest first.
        written: rows that merging the newest 2, 3, … of these gives.
    """
    found = []
    before = full + sum(links)
    for merged in range(2, len(links) + 2):
        into_full = merged == len(links) + 1
        read = before if into_full else sum(links[-merged:])
        write = full if into_full else written[merged - 2]
        found.append(
            MergeSizes(
                merged=merged,
                links_before=len(links) + 1,
                links_after=len(links) + 2 - merged,
                read_bytes=read,
                write_bytes=write,
                write_rows=write,
                merged_rows=read,
                restore_bytes_before=before,
                restore_bytes_after=before - read + write,
                restore_rows_after=before - read + write,
                most_manifest_bytes=0,
            )
        )
    return found


def chosen(merges: Sequence[MergeSizes], triggers: ConsolidationTriggers) -> int | str | None:
    """How many newest manifests, or "full"."""
    best = cheapest(weigh(merges, triggers))
    return None if best is None else "full" if best.sizes.into_full else best.sizes.merged


@pytest.mark.parametrize(
    ("full", "links", "written", "triggers", "expected"),
    [
        # One short of the trigger.
        (1000, [1] * 6, [2, 3, 4, 5, 6], LINKS, None),
        # Too many links of one size, which share nothing, or everything: all increments.
        (1000, [1] * 7, [2, 3, 4, 5, 6, 7], LINKS, 7),
        (1000, [1] * 7, [1] * 6, LINKS, 7),
        # The oldest is what was merged before: 24 bytes for 5 of 7, against 38 and more for 6.
        (1000, [7, *[2] * 6], [4, 6, 8, 10, 12, 19], LINKS, 6),
        # … unless it shares all of its rows with the others, and is no larger than they are.
        (1000, [2, *[2] * 6], [2] * 6, LINKS, 7),
        # Two that were merged before; four manifests after it are the most that half the way is.
        (1000, [9, 9, *[2] * 5], [4, 6, 8, 10, 19, 28], LINKS, 5),
        (1000, [9, 9, 9, *[2] * 4], [4, 6, 8, 17, 26, 35], LINKS, 5),
        # A full as small as its increments: all of it costs less for each manifest.
        (2, [2] * 7, [4, 6, 8, 10, 12, 14], LINKS, "full"),
        # Too many bytes, and the links share their rows.
        (100, [10] * 6, [10] * 5, BYTES, 6),
        # The oldest has none of these rows: it costs its bytes twice, and saves none.
        (100, [5, *[10] * 5], [10, 10, 10, 10, 15], BYTES, 5),
        # With less left alone, more than half of what is too much would stay.
        (100, [16, *[10] * 5], [10, 10, 10, 10, 26], BYTES, "full"),
        # Links that have nothing in common.
        (100, [10] * 6, [20, 30, 40, 50, 60], BYTES, "full"),
        # Dead rows alone; and the links would leave as many.
        (100, [10] * 6, [10] * 5, ConsolidationTriggers(restore_ratio=9, dead_share=0.3), 6),
        (100, [25] * 2, [25], ConsolidationTriggers(restore_ratio=9, dead_share=0.3), "full"),
        # Both: of 8 links 2 stay, and the share of the bytes decides.
        (100, [8] * 7, [8] * 6, ConsolidationTriggers(links=8), 7),
        # A chain that may have one manifest only has nothing but a full.
        (1000, [1, 1], [1], ConsolidationTriggers(links=2, restore_ratio=99), "full"),
        (1000, [1], [], ConsolidationTriggers(links=2, restore_ratio=99), "full"),
        (1000, [1, 1], [1], ConsolidationTriggers(links=3, restore_ratio=99), 2),
        (1000, [1, 1], [1], ConsolidationTriggers(links=99, restore_ratio=1), "full"),
    ],
)
def test_the_choice(
    full: int,
    links: list[int],
    written: list[int],
    triggers: ConsolidationTriggers,
    expected: int | str | None,
) -> None:
    assert chosen(merges_of(full, links, written), triggers) == expected


def test_costs_by_hand() -> None:
    weighed = weigh(merges_of(1000, [7, *[2] * 6], [4, 6, 8, 10, 12, 19]), LINKS)
    costs = [one.cost_bytes for one in weighed]
    # 8 manifests; 4 stay after merging 5, and 7 links are gone only with a full.
    assert costs[:3] == [None] * 3
    expected = [20 / (4 / 7), 24 / (5 / 7), 38 / (6 / 7), 1019 + 1000]
    assert costs[3:] == pytest.approx(expected)
    assert {one.why_not for one in weighed[:3]} == {"leaves many manifests"}
    by_bytes = weigh(merges_of(100, [5, *[10] * 5], [10, 10, 10, 10, 15]), BYTES)
    assert [one.cost_bytes for one in by_bytes[-3:]] == pytest.approx(
        [60 / (40 / 55), 70 / (40 / 55), 155 + 100]
    )


def test_a_full_alone_has_no_merge() -> None:
    assert weigh((), TRIGGERS) == () and cheapest(()) is None


# --- chains that grow for long -------------------------------------------------------------------

ROWS = 20_000
Draw = Callable[[np.random.Generator, int], Ids]


def grown(draw: Draw, *, every_k: bool, checkpoints: int = 300) -> tuple[float, float, int]:
    """Consolidate after each checkpoint where that pays.

    Args:
        draw: the rows of each checkpoint.
        every_k: choose among all merges; else among those of all increments and into a full.
        checkpoints: how many.

    Returns:
        bytes read and written for it, and read by a restore on average, in fulls; and the most
        manifests that a restore has read.
    """
    generator = np.random.default_rng(7)
    chain: list[Ids] = []
    moved = restores = longest = 0
    for number in range(checkpoints):
        chain.append(draw(generator, number))
        # Spans that overlap by their ends: the bound on what an increment takes (`LiveRows`).
        bounds = []
        for merged in range(2, len(chain) + 1):
            newest = chain[-merged:]
            ids = max(int(one[-1]) for one in newest) - min(int(one[0]) for one in newest) + 1
            bounds.append(min(sum(map(len, newest)), ids))
        merges = merges_of(ROWS, [len(one) for one in chain], bounds)
        if not every_k:
            merges = merges[-2:]
        best = cheapest(weigh(merges, TRIGGERS))
        if best is not None:
            moved += best.sizes.read_bytes
            if best.sizes.into_full:
                moved, chain = moved + ROWS, []
            else:
                one = np.unique(np.concatenate(chain[-best.sizes.merged :]))
                moved, chain = moved + len(one), [*chain[: -best.sizes.merged], one]
        restores += ROWS + sum(map(len, chain))
        longest = max(longest, len(chain) + 1)
    return moved / ROWS, restores / ROWS / checkpoints, longest


def scattered(share: float) -> Draw:
    """Rows that have nothing to do with one another."""
    return lambda generator, _: np.sort(generator.choice(ROWS, int(ROWS * share), replace=False))


def moving(share: float, step: float) -> Draw:
    """Rows that lie together, each time a little further on: ids in the order of time."""
    width = int(ROWS * share)
    return lambda _, number: int(ROWS * step) * number % (ROWS - width) + np.arange(width)


@pytest.mark.parametrize(
    ("draw", "all_increments", "every_k"),
    [
        (scattered(0.001), 5.99, 3.34),
        (scattered(0.01), 21.56, 17.15),
        (scattered(0.05), 75.0, 75.0),
        (moving(0.01, 0.005), 16.3, 12.08),
        (moving(0.02, 0.002), 14.92, 13.13),
        (moving(0.05, 0.0), 18.15, 18.15),
    ],
    ids=["scattered 0.1%", "scattered 1%", "scattered 5%", "moving 1%", "moving 2%", "the same 5%"],
)
def test_what_leaving_older_links_alone_saves(
    draw: Draw, all_increments: float, every_k: float
) -> None:
    without, with_it = grown(draw, every_k=False), grown(draw, every_k=True)
    # The table of decision 39.
    assert without[0] == pytest.approx(all_increments, abs=0.1)
    assert with_it[0] == pytest.approx(every_k, abs=0.1)
    assert with_it[1] <= without[1] + 0.03  # restores read as much
    assert with_it[2] < TRIGGERS.links
