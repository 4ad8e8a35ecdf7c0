"""Tables that TorchRec has sharded, in real processes of one and two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.torchrec_model import BAGS, DIM, MISSING, ROWS
from tests.torchrec_plays import NEW_ROWS
from tests.torchrec_ranks import play

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.xdist_group("torchrec"),  # one process imports it, for all of these
]

TABLES = {f"bags.embedding_bags.{name}": rows for name, (rows, _) in BAGS.items()} | {
    f"rows.embeddings.{name}": rows for name, (rows, _) in ROWS.items()
}


def each(kind: str) -> dict[str, str]:
    """All tables sharded in one way."""
    return {name: kind for name in (*BAGS, *ROWS)}


#: What is sharded how, on how many ranks, and by which fused optimizer trained.
PLANS: dict[str, tuple[int, dict[str, str], str]] = {
    "table_wise": (2, each("table_wise"), "RowWiseAdagrad"),
    "row_wise": (2, each("row_wise"), "Adagrad"),
    "column_wise": (2, each("column_wise"), "RowWiseAdagrad"),
    "table_row_wise": (2, each("table_wise") | {"t0": "table_row_wise"}, "SGD"),
    "columns_of_one_rank": (1, each("column_wise"), "SGD"),
    "data_parallel": (2, each("data_parallel"), "SGD"),
    "more_ranks_than_rows": (4, each("row_wise"), "Adagrad"),
}
#: Of which FBGEMM looks all up on a CPU: with tables that have no row on a rank it reads beyond its
#: arrays in backward ("more than 2B rows", now and then).
TRACKED = [plan for plan in PLANS if plan not in ("data_parallel", "more_ranks_than_rows")]
#: What is trained, killed and restored, on how many ranks.
LIVED = {
    "row_wise": (2, "RowWiseAdagrad"),
    "column_wise": (2, "RowWiseAdagrad"),
    "data_parallel": (2, "Adagrad"),
}
#: How a run shards tables that begins with a checkpoint of TorchRec, by their optimizer.
WARM = {"Adagrad": "column_wise", "RowWiseAdagrad": "table_wise"}
#: The plans of one run, one life after the other.
RESHARDED = [
    (4, each("row_wise") | {"t2": "table_wise"}),
    (2, each("table_wise")),
    (2, each("column_wise")),
    (1, each("column_wise")),
    (3, each("table_wise") | {"t0": "table_row_wise", "s0": "row_wise"}),
]
#: Lives of a run whose tables get more rows: ranks, plan, and rows that tables have by then.
GROWN: list[tuple[int, dict[str, str], dict[str, int]]] = [
    (2, each("row_wise"), {}),
    (2, each("row_wise"), {"t0": 61, "s1": 30}),
    (2, each("table_wise") | {"t0": "column_wise"}, {"t0": 61, "s1": 77, "t2": 9}),
    (1, each("column_wise"), {"t0": 61, "s1": 77, "t2": 9}),
]
_COPIED = each("table_wise") | dict.fromkeys(BAGS, "data_parallel")
#: Lives of one run: ranks, plan (None: no TorchRec, one process; CACHED: this, with the tables in a
#: cache), and whether tables that torch trains have an optimizer of their own.
CACHED: dict[str, str] = {}
RETRAINED: dict[str, list[tuple[int, dict[str, str] | None, bool]]] = {
    "Adagrad": [
        (2, each("row_wise"), False),
        (2, _COPIED, False),
        (1, None, False),
        (2, each("column_wise") | {"t0": "dense"}, False),
        (1, CACHED, False),
        (3, each("table_wise") | {"t0": "dense"}, False),
        (2, each("row_wise"), False),
    ],
    "RowWiseAdagrad": [
        (2, _COPIED, True),
        (2, each("table_wise"), False),
        (1, None, True),
        (3, each("row_wise"), False),
        (1, CACHED, True),
        (2, each("row_wise"), False),
    ],
    "SGD": [(2, each("row_wise"), False), (2, _COPIED, True), (2, each("table_wise"), False)],
}
STATES: dict[str, Any] = {
    "RowWiseAdagrad": lambda table: {"sum": (table["rows"][1],)},
    "Adagrad": lambda table: {"sum": (table["rows"][1], table["dim"])},
    "SGD": lambda _: {},
}


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], list[Any]]:
    """(play, plan) -> what each rank returned; of retrained tables, for the selected tests."""
    plays: dict[tuple[str, str], dict[str, Any]] = {}
    for name, (ranks, kinds, optimizer) in PLANS.items():
        common = {"ranks": ranks, "kinds": kinds, "optimizer": optimizer}
        plays["found", name] = {"play": "found", **common}
        if name in TRACKED:
            plays["tracked", name] = {"play": "tracked", **common}
    plays["theirs", ""] = {"play": "tracker_of_theirs", "ranks": 1}
    plays["refused", ""] = {"play": "refused", "ranks": 1}
    folder = tmp_path_factory.mktemp("torchrec")
    for kind, (ranks, optimizer) in LIVED.items():
        common = {"play": "lived", "ranks": ranks, "kinds": each(kind), "optimizer": optimizer}
        whole, cut = (
            {"run": str(folder / f"{kind}.{life}"), "staging": str(folder / life), "steps": 9}
            for life in ("whole", "cut")
        )
        plays["whole", kind] = {**common, **whole}
        plays["killed", kind] = {**common, **cut, "die_at": 5}
        plays["restored", kind] = {**common, **cut}
        if kind == "row_wise":
            ahead = {"run": str(folder / "ahead"), "staging": str(folder / "of-ahead")}
            ahead_lives = {**common, **ahead, "steps": 9, "fulls_ahead": True}
            plays["killed", "ahead"] = {**ahead_lives, "die_at": 5}
            plays["restored", "ahead"] = ahead_lives
    place = {"run": str(folder / "resharded"), "staging": str(folder / "staging")}
    for number, (ranks, kinds) in enumerate(RESHARDED):
        common = {"play": "lived", "ranks": ranks, "kinds": kinds, "optimizer": "Adagrad"}
        plays["resharded", str(number)] = {**common, **place, "steps": 3 + 2 * number}
    place = {"run": str(folder / "grown"), "staging": str(folder / "of-grown")}
    for number, (ranks, kinds, more_rows) in enumerate(GROWN):
        common = {"play": "lived", "ranks": ranks, "kinds": kinds, "optimizer": "RowWiseAdagrad"}
        grown = {**place, "steps": 3 + 2 * number, "more_rows": more_rows}
        plays["grown", str(number)] = {**common, **grown}
    selected = {item.name for item in request.session.items}
    for optimizer, retrained in RETRAINED.items():
        if not any(name.endswith(f"[retrained {optimizer}]") for name in selected):
            continue
        place = {"run": str(folder / optimizer), "staging": str(folder / f"of-{optimizer}")}
        for number, (ranks, plan, apart) in enumerate(retrained):
            plays["retrained", f"{optimizer}{number}"] = {
                "play": "lived", "ranks": ranks, "kinds": plan or None, "in_cache": plan == CACHED,
                "optimizer": optimizer, "apart": apart, "steps": 3 + 2 * number, **place,
            }  # fmt: skip
    twins = {"run": str(folder / "twins"), "staging": str(folder / "of-twins")}
    for life in ("first", "again"):
        plays["twins", life] = {"play": "same_names", "ranks": 2, **twins}
    place = {"run": str(folder / "resharded"), "staging": str(folder / "staging")}
    sequences = {"run": str(folder / "sequences"), "staging": str(folder / "of-sequences")}
    for life in ("first", "again"):
        plays["sequences", life] = {
            "play": "replicated_sequences", "ranks": 2, "steps": 5, **sequences
        }  # fmt: skip
    plays["plain", ""] = {"play": "plain", "ranks": 1, **place, "into": str(folder / "plain")}
    for optimizer, kind in WARM.items():
        place = {name: str(folder / f"warm.{kind}.{name}") for name in ("folder", "run", "staging")}
        common = {"ranks": 2, "kinds": each(kind), "optimizer": optimizer}
        plays["warm", optimizer] = {"play": "warm", **common, **place}
    results = play(list(plays.values()), folder)
    return dict(zip(plays, results, strict=True))


@pytest.mark.parametrize("plan", PLANS)
def test_shards_are_the_plain_model_cut_into_pieces(
    played: dict[tuple[str, str], list[Any]], plan: str
) -> None:
    ranks, kinds, optimizer = PLANS[plan]
    held = {name: torch.zeros(rows, DIM) for name, rows in TABLES.items()}
    for tables in played["found", plan]:
        assert not any(table["rows"][1] == 0 for table in tables)
        for table in tables:
            first, rows, whole = table["rows"]
            column, of = table["columns"] or (0, DIM)
            assert (whole, of) == (TABLES[table["name"]], DIM)
            assert table["same"], "a new object would look like another weight"
            assert table["fused"] == ("data_parallel" not in kinds.values())
            if table["fused"]:
                assert table["states"] == STATES[optimizer](table)
            held[table["name"]][first : first + rows, column : column + table["dim"]] += 1
            expected = _initial(first, rows, column, table["dim"], table["name"])
            assert torch.equal(table["values"], expected)
    copies = ranks if plan == "data_parallel" else 1
    for name, times in held.items():
        if plan == "data_parallel" and name.startswith("rows."):
            continue  # FBGEMM's dense sequence lookups return pooled rows on a CPU: left out there
        assert torch.equal(times, torch.full_like(times, copies)), name


def _initial(first: int, rows: int, column: int, dim: int, name: str) -> Tensor:
    ids = torch.arange(first, first + rows).unsqueeze(1)
    columns = torch.arange(column, column + dim).unsqueeze(0)
    return torch.sin(1.0 + ids + 0.37 * columns + len(name))


@pytest.mark.parametrize("plan", TRACKED)
def test_what_is_marked_is_what_training_changed_and_what_torchrecs_tracker_has(
    played: dict[tuple[str, str], list[Any]], plan: str
) -> None:
    seen = 0
    for trained, evaluated, empty, again in played["tracked", plan]:
        for ours, theirs in (trained, empty, again):
            for name, marked, changed in ours.values():
                assert marked == changed
                assert marked == sorted(theirs[name])
                seen += len(marked)
        assert not any(marked for _, marked, _ in empty[0].values())
        # A difference: it takes what an evaluation looks up for changed too.
        ours, theirs = evaluated
        assert not any(marked or changed for _, marked, changed in ours.values())
        assert any(theirs[name] for name, _, _ in ours.values())
    assert seen > 100


def test_where_torchrecs_tracker_fails_and_this_one_does_not(
    played: dict[tuple[str, str], list[Any]],
) -> None:
    (result,) = played["theirs", ""]
    # Read twice without a batch between.
    assert "non-empty list" in result["read_twice"]
    # A model without dense parameters, which TorchRec does not wrap in DDP.
    assert "no attribute 'module'" in result["no_dense"]
    assert result["no_dense_ours"] == sorted(TABLES)


def test_what_is_not_supported_is_named(played: dict[tuple[str, str], list[Any]]) -> None:
    (refused,) = played["refused", ""]
    assert "found a OwnWrapper, whose own state cannot be saved" in refused["optimizer"]
    assert "LARS_SGD" in refused["fused"] and "EXACT_ROWWISE_ADAGRAD" in refused["fused"]
    tables = "tables 'bags.embedding_bags.t0' and 'bags.embedding_bags.t1' were trained with lr 0.1"
    assert refused["rates"].startswith(tables) and "and 0.3, and are in one" in refused["rates"]
    assert "trained with max_gradient 0.0001, and its module here has 0.0" in refused["clipped"]
    # FBGEMM's own words: what it has on a GPU only is never seen here.
    assert refused["adam"] == "Optimizer adam is not supported in CPU mode."
    assert refused["partial"] == "Optimizer partial_row_wise_adam is not supported in CPU mode."


def test_what_torchrec_lacks_is_named_and_no_version_is_refused_by_its_number(
    played: dict[tuple[str, str], list[Any]],
) -> None:
    (refused,) = played["refused", ""]
    bags = "of module 'bags'"
    missing_names = {
        "lacks_class": "without torchrec.optim.keyed.KeyedOptimizerWrapper",
        "lacks_base": "without torchrec.distributed.embedding_types.ShardedEmbeddingModule",
        "lacks_method": "without SplitTableBatchedEmbeddingBagsCodegen.get_optimizer_state",
        "lacks_environment": f"without ShardedEmbeddingBagCollection._env {bags}",
        "lacks_lookups": f"without ShardedEmbeddingBagCollection._lookups {bags}",
        "lacks_modules": f"without GroupedPooledEmbeddingsLookup._emb_modules {bags}",
        "lacks_kernel": f"without BatchedFusedEmbeddingBag._feature_table_map {bags}",
        "lacks_arguments": (f"without SplitTableBatchedEmbeddingBagsCodegen.optimizer_args {bags}"),
        "lacks_offsets": f"without ShardMetadata.shard_offsets {bags}",
        "lacks_parameter": (
            "without parameter 0 'indices' of SplitTableBatchedEmbeddingBagsCodegen.forward"
        ),
        "lacks_count": f"without SplitTableBatchedEmbeddingBagsCodegen.iter_cpu {bags}",
    }
    for name, missing in missing_names.items():
        assert refused[name].startswith("torchrec: found torchrec "), refused[name]
        assert missing in refused[name], refused[name]
    assert refused["other_version"] == "no error"


def test_replicated_tables_of_sequences_go_on_bit_for_bit(
    played: dict[tuple[str, str], list[Any]],
) -> None:
    for before, after in zip(
        played["sequences", "first"], played["sequences", "again"], strict=True
    ):
        assert {name for name, _, _ in before["tables"]} == TABLES.keys()
        assert (before["restored"], after["restored"]) == (None, 5)
        for part in ("tables", "dense", "optimizer"):
            assert same(after["begun"][part], before[part]), part
            assert not same(before["begun"][part], before[part]), part
        # TorchRec cannot look them up on a CPU: FBGEMM pools there.
        assert "split_with_sizes expects split_sizes to sum exactly" in before["lookup"]
    # Of each table a row a batch: two in the increment after two, one in the last.
    assert played["sequences", "first"][0]["increments"] == [2 * len(TABLES), len(TABLES)]


@pytest.mark.parametrize("kind", LIVED)
def test_killed_ranks_go_on_bit_for_bit(
    played: dict[tuple[str, str], list[Any]], kind: str
) -> None:
    ranks, _ = LIVED[kind]
    assert played["killed", kind] == [None] * ranks
    for expected, found in zip(played["whole", kind], played["restored", kind], strict=True):
        assert (expected["restored"], found["restored"]) == (None, 4)
        for part in ("tables", "fused", "dense", "optimizer"):
            assert same(found[part], expected[part]), part
        assert found["lacks"] == [kind != "data_parallel", False]
        assert expected["unmarked"] == found["unmarked"] == 0, "nothing changes what is not marked"
    # Increments hold what was looked up, and no table as a whole; a row once in each of its pieces.
    rows = sum(TABLES.values()) * (2 if kind == "column_wise" else 1)
    increments = played["restored", kind][0]["increments"]
    assert increments and all(0 < dirty < rows / 2 for dirty in increments)


def test_fulls_that_are_copied_before_their_cuts_restore_bit_for_bit(
    played: dict[tuple[str, str], list[Any]],
) -> None:
    assert played["killed", "ahead"] == [None, None]
    reasons = []
    for expected, found in zip(
        played["whole", "row_wise"], played["restored", "ahead"], strict=True
    ):
        assert found["restored"] == 4 and found["unmarked"] == 0
        for part in ("tables", "fused", "dense", "optimizer"):
            assert same(found[part], expected[part]), part
        reasons += found["plain_reasons"]
    # A batch may be shorter than the plan of a window, and than the store of a checkpoint.
    assert None in reasons
    expected_reasons = ("it was not planned in time", "no slot was free")
    assert all(reason is None or reason.startswith(expected_reasons) for reason in reasons)
    assert played["restored", "ahead"][0]["increments"] == []


def test_a_run_goes_on_with_other_ranks_and_plans_bit_for_bit(
    played: dict[tuple[str, str], list[Any]],
) -> None:
    lives = [played["resharded", str(number)] for number in range(len(RESHARDED))]
    for number, (before, after) in enumerate(pairwise(lives)):
        begun = [rank["begun"] for rank in after]
        assert {rank["restored"] for rank in after} == {3 + 2 * number}
        expected, found = whole(before), whole(begun)
        assert len(expected) == 2 * len(TABLES)  # values and the sums of squares
        assert same(found, expected)
        for rank in begun:
            assert same(rank["dense"], before[0]["dense"])
            assert same(rank["optimizer"], before[0]["optimizer"])


def test_tables_get_more_rows_on_other_ranks_and_plans(
    played: dict[tuple[str, str], list[Any]],
) -> None:
    lives = [played["grown", str(number)] for number in range(len(GROWN))]
    for number, ((before, after), (_, _, rows)) in enumerate(
        zip(pairwise(lives), GROWN[1:], strict=True)
    ):
        assert {rank["restored"] for rank in after} == {3 + 2 * number}
        old = whole(before)
        new = whole([rank["begun"] for rank in after])
        assert old.keys() == new.keys() and len(old) == 2 * len(TABLES)
        for (table, kind), values in new.items():
            stored = len(old[table, kind])
            assert len(values) == rows.get(table.rpartition(".")[2], TABLES[table])
            assert torch.equal(values[:stored], old[table, kind])
            ids = torch.arange(stored, len(values))
            first = NEW_ROWS(table, ids, DIM, torch.float32)
            assert torch.equal(values[stored:], first if kind == "weight" else 0 * first)
    # The second life has the ranks of the first: its checkpoint is a full because tables grew.
    assert [len(life[0]["increments"]) for life in lives] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(
            optimizer,
            id=f"retrained {optimizer}",
            marks=[] if optimizer == "Adagrad" else [pytest.mark.nightly("loops")],
        )
        for optimizer in RETRAINED
    ],
)
def test_a_table_goes_on_with_the_same_optimizer_fused_or_of_torch(
    played: dict[tuple[str, str], list[Any]], optimizer: str
) -> None:
    lives = [played["retrained", f"{optimizer}{n}"] for n in range(len(RETRAINED[optimizer]))]
    for number, (before, after) in enumerate(pairwise(lives)):
        assert {rank["restored"] for rank in after} == {3 + 2 * number}
        begun = [rank["begun"] for rank in after]
        expected = whole(before)
        assert len(expected) == len(TABLES) * (1 if optimizer == "SGD" else 2)
        assert same(whole(begun), expected)
        assert {key for key in expected if expected[key].isnan().all()} == set()
        rates = {table: rate for rank in before for table, rate in rank["rates"].items()}
        assert rates.keys() == TABLES.keys()
        for rank in begun:
            assert same(rank["dense"], before[0]["dense"])
            assert same(rank["optimizer"], before[0]["optimizer"])
            for table, found in rank["rates"].items():
                # FBGEMM keeps a rate in float32.
                assert torch.equal(torch.tensor(found), torch.tensor(rates[table]))
            assert set(rank["steps"].values()) <= {3 + 2 * number}
    # And training has gone on from there, with increments of the rows that were looked up.
    assert not same(whole(lives[-1]), whole(lives[-2]))
    increments = lives[-1][0]["increments"]
    assert increments and all(0 < rows < sum(TABLES.values()) for rows in increments)


def test_tables_of_one_name_in_two_modules(played: dict[tuple[str, str], list[Any]]) -> None:
    """One of them gets no new rows (TorchEasyRec#607)."""
    for before, after in zip(played["twins", "first"], played["twins", "again"], strict=True):
        assert before["names"] == ["first.embedding_bags.t", "second.embedding_bags.t"]
        assert (before["begun"], after["begun"]) == (0, 6)
        # The last batches looked up rows of the first table only.
        assert before["weights"][0] != before["initial"][0]
        assert after["initial"] == before["weights"]


def test_the_plain_model_takes_tables_over_and_gives_them_back(
    played: dict[tuple[str, str], list[Any]],
) -> None:
    (plain,) = played["plain", ""]
    last = played["resharded", str(len(RESHARDED) - 1)]
    values = {key: value for key, value in whole(last).items() if key[1] == "weight"}
    assert same(whole([plain]), values)
    back = {key: value for key, value in whole([plain["back"]]).items() if key[1] == "weight"}
    assert same(back, values)
    assert same(plain["dense"], last[0]["dense"]) and same(plain["back"]["dense"], plain["dense"])


@pytest.mark.parametrize("optimizer", WARM)
def test_a_run_begins_with_a_checkpoint_that_torchrec_wrote(
    played: dict[tuple[str, str], list[Any]], optimizer: str
) -> None:
    ranks = played["warm", optimizer]
    stored, begun = (whole([rank[side] for rank in ranks]) for side in ("source", "begun"))
    assert len(stored) == 2 * len(TABLES) and same(stored, begun)
    assert any(bool((stored[name, "sum"] > 0).any()) for name in TABLES)
    for rank in ranks:
        assert same(rank["source"]["dense"], rank["begun"]["dense"])
        assert same(rank["source"]["optimizer"], rank["begun"]["optimizer"])
    # Where one rank does not find the checkpoint, none has begun with it.
    lost, missing = (rank["refusal"] for rank in ranks)
    assert "ranks 1" in lost or "rank 1" in lost, lost
    assert "nothing" in missing and all(rank["untouched"] for rank in ranks)
    # After `recpoint import`, a plain restore() loads the same without row states.
    imported = [rank["imported"] for rank in ranks]
    assert {start["step"] for start in imported} == {0}
    fresh, plain = (whole([start[side] for start in imported]) for side in ("fresh", "begun"))
    for key, values in plain.items():
        assert torch.equal(values, stored[key] if key[1] == "weight" else fresh[key]), key
    for rank in ranks:
        assert same(rank["imported"]["begun"]["dense"], rank["source"]["dense"])
        assert same(rank["imported"]["begun"]["optimizer"], rank["imported"]["fresh"]["optimizer"])


def whole(ranks: Sequence[Any]) -> dict[tuple[str, str], Tensor]:
    """(table, "weight" or row state) -> [rows, DIM], put together from what the ranks hold."""
    found: dict[tuple[str, str], Tensor] = {}
    sizes: dict[str, int] = {}
    for rank in ranks:
        for (name, row, _), tensors in rank["tables"].items():
            sizes[name] = max(sizes.get(name, 0), row + len(tensors["weight"]))
    for rank in ranks:
        for (name, row, column), tensors in rank["tables"].items():
            for kind, part in tensors.items():
                into = found.setdefault((name, kind), torch.full((sizes[name], DIM), float("nan")))
                # One value a row: in each column.
                columns = tensors["weight"].shape[1]
                wide = part if part.dim() == 2 else part.unsqueeze(1).expand(-1, columns)
                into[row : row + wide.shape[0], column : column + wide.shape[1]] = wide
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two nested dicts are equal, tensors bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Tensor):
        return bool(a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes())
    return bool(a == b)
