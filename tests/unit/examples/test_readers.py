"""The readers of the examples: exact resumption, and what they make of their data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import Batch, Reader
from criteo import CriteoReader, CriteoShapeReader, MalformedLine, load_shape
from recpoint.format.state_tree import flatten, unflatten
from retail import RetailReader
from tests.example_counts import examples


def criteo_line(number: int, *, label: str | None = None, hexadecimal: str | None = None) -> str:
    integers = [str(number * column - 3) if column % 5 else "" for column in range(13)]
    categories = [
        "" if (number + column) % 7 == 0 else f"{(number * 40_503 + column * 7) % 2**32:08x}"
        for column in range(26)
    ]
    if hexadecimal is not None:
        categories[4] = hexadecimal
    return "\t".join([label or str(number % 2), *integers, *categories]) + "\n"


@pytest.fixture(scope="module")
def criteo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("criteo") / "train.txt"
    path.write_text("".join(criteo_line(number) for number in range(103)))
    return path


@pytest.fixture(params=["retail", "keyed-retail", "criteo", "criteo-shape"])
def make_reader(request: pytest.FixtureRequest, criteo_file: Path) -> Callable[[int], Reader]:
    """Build the same reader again and again; the seed is what a restart may change."""
    makers: dict[str, Callable[[int], Reader]] = {
        "retail": lambda seed: RetailReader(lines=50_000, rows=1000, seed=seed),
        "keyed-retail": lambda seed: RetailReader(lines=50_000, rows=1000, seed=seed, keyed=True),
        "criteo": lambda seed: CriteoReader(criteo_file, lines=10, rows=500),
        "criteo-shape": lambda seed: CriteoShapeReader(lines=20, rows=500, batches=11, seed=seed),
    }
    return makers[request.param]


def same(left: Batch, right: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_every_split_of_a_pass_gives_the_same_batches(
    make_reader: Callable[[int], Reader],
) -> None:
    whole = list(make_reader(0))
    assert len(whole) == 11
    for split in range(len(whole) + 1):
        first = make_reader(0)
        head = list(itertools.islice(first, split))
        # Through the bytes of a checkpoint, into a reader that was built with another seed.
        state = unflatten(*flatten(first.state_dict()))
        second = make_reader(1)
        second.load_state_dict(state)
        resumed = [*head, *second]
        assert len(resumed) == len(whole)
        assert all(map(same, resumed, whole))


def test_batches_are_within_the_tables_the_reader_announces(
    make_reader: Callable[[int], Reader],
) -> None:
    reader = make_reader(0)
    keyed: frozenset[str] = getattr(reader, "keyed_tables", frozenset())
    of_rows = torch.tensor([name not in keyed for name in reader.tables])
    for batch in reader:
        rows = torch.tensor(list(reader.tables.values()))
        assert batch.sparse.dtype == torch.int64
        ids = batch.sparse[:, of_rows]
        assert (ids >= 0).all() and (ids < rows[of_rows]).all()
        assert batch.dense.shape == (len(batch.label), reader.dense_width)
        assert batch.dense.isfinite().all()
        assert set(batch.label.tolist()) <= {0.0, 1.0}


def test_keys_of_the_log_are_its_own_numbers_and_tell_pairs_apart() -> None:
    keyed, mapped = (
        next(iter(RetailReader(lines=5000, rows=1 << 18, keyed=keyed))).sparse
        for keyed in (True, False)
    )
    assert keyed[0, 0] == 17850  # the first customer, as the shop numbers them
    for column in range(8):  # as many keys as rows; crossed columns have more, since rows collide
        keys, rows = (len(sparse[:, column].unique()) for sparse in (keyed, mapped))
        assert keys == rows if column < 6 else keys >= rows
    pairs = len(torch.unique(keyed[:, [0, 1]], dim=0))
    assert len(keyed[:, 6].unique()) == pairs


def test_a_state_that_is_none_is_refused(make_reader: Callable[[int], Reader]) -> None:
    reader = make_reader(0)
    for name in ("batches_done", "lines_done", "offset_bytes"):
        if name in reader.state_dict():
            with pytest.raises(ValueError):
                reader.load_state_dict({**reader.state_dict(), name: -1})


# --- retail ------------------------------------------------------------------------------------


def test_retail_keeps_the_log_in_order_and_draws_negatives_from_its_window() -> None:
    reader = RetailReader(lines=1000, rows=1 << 18)
    batches = list(itertools.islice(reader, 40))
    items = torch.cat([batch.sparse[:1000, 1] for batch in batches])
    for number, batch in enumerate(batches):
        assert torch.equal(batch.label, torch.cat([torch.ones(1000), torch.zeros(1000)]))
        positive, negative = batch.sparse[:1000], batch.sparse[1000:]
        for column in (0, 2, 3, 4, 5):
            assert torch.equal(positive[:, column], negative[:, column])
        start = number * 1000
        allowed = set(items[max(0, start - 20_000) : start + 1000].tolist())
        assert set(negative[:, 1].tolist()) <= allowed
    # Purchases only, one pass, each line once.
    assert reader.total_batches == -(-531_285 // 1000)


def purchases(batch: Batch) -> list[list[int]]:
    return batch.sparse[batch.label == 1].tolist()


def test_retail_purchases_go_to_other_ranks_without_one_lost_or_doubled() -> None:
    alone = RetailReader(lines=60_000, rows=1000)
    expected = [line for batch in alone for line in purchases(batch)]
    found: list[list[int]] = []
    states: list[dict[str, object]] = []
    # A step is 60,000 purchases, whatever the number of ranks.
    for ranks, steps in ((4, 2), (2, 1), (1, 3), (3, 1)):
        readers = [
            RetailReader(lines=60_000 // ranks, rows=1000, rank=rank, ranks=ranks)
            for rank in range(ranks)
        ]
        for rank, reader in enumerate(readers if states else ()):
            reader.load_state_dicts(states, rank, ranks)
        for _, *batches in zip(range(steps), *readers, strict=False):
            found += [line for batch in batches for line in purchases(batch)]
        states = [unflatten(*flatten(reader.state_dict())) for reader in readers]
    assert len(found) == 7 * 60_000
    assert found == expected[: len(found)]
    # One rank goes on to the very end; several stop where one of them would have less than a batch.
    last = RetailReader(lines=60_000, rows=1000)
    last.load_state_dicts(states, 0, 1)
    assert found + [line for batch in last for line in purchases(batch)] == expected
    several = RetailReader(lines=30_000, rows=1000, rank=1, ranks=2)
    several.load_state_dicts(states, 1, 2)
    (only,) = several
    assert purchases(only) == expected[len(found) + 30_000 : len(found) + 60_000]


def test_retail_ranks_draw_negatives_of_their_own_and_refuse_to_go_on_from_a_mixture() -> None:
    one, other = (RetailReader(lines=500, rows=1000, rank=rank, ranks=2) for rank in range(2))
    first, second = next(iter(one)), next(iter(other))
    assert first.sparse[500:, 1].tolist() != second.sparse[500:, 1].tolist()
    next(iter(other))
    with pytest.raises(ValueError, match="different lines: .*1000.*2000"):
        RetailReader(lines=500, rows=1000).load_state_dicts(
            [one.state_dict(), other.state_dict()], 0, 1
        )
    with pytest.raises(ValueError, match="the reader of rank 0 of 1, not 1 of 3"):
        RetailReader(lines=500, rows=1000).load_state_dicts([one.state_dict()], 1, 3)


def test_retail_ids_do_not_lie_in_the_order_of_time() -> None:
    batch = next(iter(RetailReader(lines=2000)))
    seen = batch.sparse[:2000, 1].unique()
    # In the file the first 2,000 lines use the lowest ids only.
    assert seen.max() > 3000 and len(seen) < 1500


def test_retail_crosses_are_functions_of_their_two_columns() -> None:
    batch = next(iter(RetailReader(lines=5000)))
    for left, cross in ((0, 6), (2, 7)):
        pairs: dict[tuple[int, int], int] = {}
        for row in batch.sparse.tolist():
            assert pairs.setdefault((row[left], row[1]), row[cross]) == row[cross]
        assert len(set(pairs.values())) > 0.95 * len(pairs)


# --- Criteo's files ----------------------------------------------------------------------------


def one_batch(tmp_path: Path, text: str, **options: bool) -> Batch:
    path = tmp_path / "lines.txt"
    path.write_bytes(text.encode())
    return next(iter(CriteoReader(path, lines=100, rows=1 << 30, **options)))


def test_criteo_fields_become_features(tmp_path: Path) -> None:
    line = "\t".join(["1", "5", "-2", "", *["0"] * 10, "", "68fd1e64", "68FD1E64", *["0" * 8] * 23])
    same_values = line.replace("68FD1E64", "68fd1e64").replace("1\t", "0\t", 1)
    batch = one_batch(tmp_path, line + "\r\n" + same_values)  # no line end after the last
    assert batch.label.tolist() == [1, 0]
    assert batch.dense[0, :4].tolist() == pytest.approx([np.log1p(5), 0, 0, 0])
    assert torch.equal(batch.sparse[0], batch.sparse[1])
    missing, first, second, zero = batch.sparse[0, :4].tolist()
    # The same value in two columns, missing, and zero are four different things.
    assert len({missing, first, second, zero}) == 4
    assert len(set(batch.sparse[0, 3:].tolist())) == 23


def test_criteo_missing_and_zero_differ_within_a_column(tmp_path: Path) -> None:
    batch = one_batch(
        tmp_path, criteo_line(1, hexadecimal="") + criteo_line(1, hexadecimal="00000000")
    )
    assert (batch.sparse[0] != batch.sparse[1]).tolist() == [c == 4 for c in range(26)]


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ("\n", "1 fields"),
        ("0\t1\t2\n", "3 fields"),
        (criteo_line(3).rstrip("\n") + "\textra\n", "41 fields"),
        (criteo_line(3, label="2"), "label b'2'"),
        (criteo_line(3, label="-1"), "label b'-1'"),
        (criteo_line(3, hexadecimal="68fd1e6g"), "not hexadecimal digits"),
        (criteo_line(3, hexadecimal="68fd"), "categorical value b'68fd'"),
        (criteo_line(3, hexadecimal="\u00b2" * 4), "not hexadecimal digits"),
        (criteo_line(3).replace("\t0\t", "\tone\t", 1), "integer b'one'"),
        (criteo_line(3).replace("\t0\t", "\t1.5\t", 1), "integer b'1.5'"),
        (criteo_line(3).replace("\t0\t", "\t" + "9" * 30 + "\t", 1), "integer b'999"),
        ("0" * 70_000 + "\n", "bytes without a line end"),
    ],
)
def test_criteo_malformed_lines_are_named_or_left_out(tmp_path: Path, bad: str, found: str) -> None:
    good = [criteo_line(number) for number in range(3)]
    text = good[0] + good[1] + bad + good[2]
    with pytest.raises(MalformedLine, match=rf"lines\.txt.*byte {len(good[0] + good[1])}: .*"):
        one_batch(tmp_path, text)
    with pytest.raises(MalformedLine) as caught:
        one_batch(tmp_path, text)
    assert found in str(caught.value)
    assert "(skip_malformed)" in str(caught.value)
    assert same(one_batch(tmp_path, text, skip_malformed=True), one_batch(tmp_path, "".join(good)))


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=400))
def test_criteo_never_fails_otherwise(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "lines.txt"
    path.write_bytes(data + b"\n" + criteo_line(5).encode())
    reader = CriteoReader(path, skip_malformed=True)
    assert sum(len(batch.label) for batch in reader) == 1
    assert reader.malformed_lines >= 1


def test_criteo_refuses_a_position_behind_the_end(criteo_file: Path, tmp_path: Path) -> None:
    reader = CriteoReader(criteo_file)
    next(iter(reader))
    shorter = tmp_path / "shorter.txt"
    shorter.write_text(criteo_line(1))
    with pytest.raises(ValueError, match="shorter.txt, which has"):
        CriteoReader(shorter).load_state_dict(reader.state_dict())


# --- the generator -----------------------------------------------------------------------------


def test_generated_columns_have_the_published_frequencies() -> None:
    draws = 400_000
    generator = np.random.default_rng(5)
    for shape in load_shape():
        ids = shape.draw(generator, draws)
        assert ids.min() >= 0 and ids.max() <= len(shape.head) + shape.k
        counts = np.bincount(np.minimum(ids, len(shape.head) + 1), minlength=len(shape.head) + 2)
        present = 1 - shape.p_missing
        expected = np.array(
            [shape.p_missing, *(present * p for p in shape.head), present * shape.p_tail]
        )
        # Five standard deviations of a binomial count, and the rounding of the published numbers.
        tolerance = 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-5
        assert (np.abs(counts / draws - expected) <= tolerance).all(), shape.name


def test_generated_tails_follow_their_density() -> None:
    draws = 500_000
    generator = np.random.default_rng(6)
    for shape in load_shape():
        if shape.k < 100 or shape.p_tail < 0.2:
            continue
        tail = shape.draw(generator, draws) - len(shape.head)
        tail = tail[tail >= 1]
        for upper in (2, 10, shape.k // 50 + 2, shape.k // 3 + 2):
            # The share of ids below `upper`, by numerical integration, not by the inverse.
            share = integral(shape.s, shape.q, upper) / integral(shape.s, shape.q, shape.k + 1)
            tolerance = 5 * np.sqrt(share * (1 - share) / len(tail)) + 1e-4
            assert abs((tail < upper).mean() - share) <= tolerance, (shape.name, upper)


def integral(s: float, q: float, upper: int) -> float:
    x = np.geomspace(1, upper, 200_001)
    density = (x + q) ** -s
    return float(((density[1:] + density[:-1]) / 2 * np.diff(x)).sum())


def test_generated_log_meets_as_many_distinct_ids_as_the_shape_implies() -> None:
    # C10's cardinality is published for 45.84 million lines; in fewer lines fewer ids turn up.
    shape = next(shape for shape in load_shape() if shape.name == "C10")
    ids = shape.draw(np.random.default_rng(7), 2_000_000)
    x = np.arange(1, shape.k + 1, dtype=np.float64) + shape.q
    power = 1 - shape.s
    p = ((x + 1) ** power - x**power) / ((x[-1] + 1) ** power - x[0] ** power)
    expected = len(shape.head) + (1 - (1 - p * shape.p_tail) ** len(ids)).sum()
    assert len(np.unique(ids)) == pytest.approx(expected, rel=0.01)


def test_generated_rows_of_small_columns_are_never_shared() -> None:
    reader = CriteoShapeReader(lines=20_000, rows=1 << 16)
    sparse = reader.batch(0).sparse
    for column, shape in enumerate(load_shape()):
        if shape.cardinality < 1000:
            assert len(sparse[:, column].unique()) <= len(shape.head) + shape.k + 1
            assert list(reader.tables.values())[column] == len(shape.head) + shape.k + 1


def test_scale_multiplies_the_large_columns_only() -> None:
    once, thrice = load_shape(), load_shape(scale=3)
    published = json.loads(
        (Path(__file__).parents[3] / "examples/data/criteo_shape.json").read_text()
    )
    for before, after, entry in zip(once, thrice, published, strict=True):
        factor = 3 if entry["card"] > 100_000 else 1
        assert after.cardinality == factor * before.cardinality
        assert after.k == factor * before.k


def test_generated_labels_can_be_learnt_and_are_as_rare_as_clicks() -> None:
    reader = CriteoShapeReader(lines=50_000)
    label = reader.batch(3).label
    assert 0.15 < label.mean().item() < 0.4
    assert same(reader.batch(3), CriteoShapeReader(lines=50_000).batch(3))
    assert not same(reader.batch(3), reader.batch(4))
