"""A directory of Parquet files: what other programs read there, and what is left of attempts."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from recpoint.errors import SinkError
from recpoint.format.dtypes import torch_dtype
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.records import SinkTable, SinkVersion
from recpoint.testing.sinks import bring, ids_of, of_step, served_rows, sink_version


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "I64"])
def test_rows_of_each_dtype_come_back_bit_for_bit(tmp_path: Path, dtype: Any) -> None:
    table = SinkTable(name="users", rows=9, dim=3, dtype=dtype, ids="rows")
    version = sink_version(1)
    random_bytes = torch.randint(0, 256, (9, table.row_bytes), dtype=torch.uint8)
    rows = random_bytes.view(torch_dtype(dtype))  # NaN of any kind, too
    with open_sink(f"parquet:{tmp_path}") as sink:
        sink.begin(
            SinkVersion(run=version.run, checkpoint=version.checkpoint, tables=(table,)), None
        )
        sink.put("users", torch.arange(4), rows[:4])
        sink.put("users", torch.arange(4, 9), rows[4:])
        sink.commit({}, [])
        with sink.reading() as reading:
            found_rows, present = reading.lookup("users", torch.arange(9))
    assert bool(present.all())
    assert torch.equal(found_rows.view(torch.uint8), random_bytes)


def test_other_programs_read_what_a_version_changed(tmp_path: Path) -> None:
    with open_sink(f"parquet:{tmp_path}") as sink:
        bring(sink, 1, {"users": ids_of(1, 2), "items": ids_of(7)}, parent=None)
        bring(sink, 2, {"users": ids_of(2, 5)}, parent=1, deleted={"users": ids_of(1)})
    newest = sorted((tmp_path / "versions").iterdir())[-1]
    names = sorted(path.name for path in newest.iterdir())
    assert names == ["0.deleted.parquet", "0.rows.parquet", "dense.safetensors"]
    assert pq.read_table(newest / "0.rows.parquet").to_pydict() == {
        "id": [2, 5],
        "row": [[2002.0, 2002.125, 2002.25], [2005.0, 2005.125, 2005.25]],
    }
    assert pq.read_table(newest / "0.deleted.parquet").to_pydict() == {"id": [1]}
    assert [path.name for path in (tmp_path / "index").iterdir() if "2" in path.name] == [
        "000000000002.json"
    ]


def test_files_of_an_attempt_are_removed_by_the_next(tmp_path: Path) -> None:
    with open_sink(f"parquet:{tmp_path}") as sink:
        bring(sink, 1, {"users": ids_of(1), "items": ids_of()}, parent=None)
        sink.begin(sink_version(2), sink_version(1).checkpoint)
        sink.put("users", ids_of(1), torch.zeros(1, 3))
        (tmp_path / "versions" / "notes").mkdir()
    assert len(list((tmp_path / "versions").iterdir())) == 3
    with open_sink(f"parquet:{tmp_path}") as sink:
        bring(sink, 2, {"users": ids_of(4)}, parent=1)
        assert served_rows(sink, "users") == of_step(1, 1) | of_step(2, 4)
    assert len(list((tmp_path / "versions").iterdir())) == 3


def test_a_reader_goes_on_with_its_version(tmp_path: Path) -> None:
    with open_sink(f"parquet:{tmp_path}") as sink, open_sink(f"parquet:{tmp_path}") as readers:
        bring(sink, 1, {"users": ids_of(1, 2), "items": ids_of()}, parent=None)
        with readers.reading() as old:
            bring(sink, 2, {"users": ids_of(2)}, parent=1)
            assert served_rows(readers, "users") == of_step(1, 1) | of_step(2, 2)
            assert old.lookup("users", ids_of(2))[0][0, 0] == 1002.0


def test_a_version_that_is_missing_is_named(tmp_path: Path) -> None:
    with open_sink(f"parquet:{tmp_path}") as sink:
        bring(sink, 1, {"users": ids_of(1), "items": ids_of()}, parent=None)
        bring(sink, 2, {"users": ids_of(2)}, parent=1)
        (tmp_path / "index" / "000000000001.json").unlink()
        with pytest.raises(SinkError, match=r"index/000000000001\.json"):
            served_rows(sink, "users")


def test_a_disk_that_was_full_locks_no_publisher_out(tmp_path: Path) -> None:
    with open_sink(f"parquet:{tmp_path}") as sink:
        bring(sink, 1, {"users": ids_of(1), "items": ids_of()}, parent=None)
        sink.begin(sink_version(2), sink_version(1).checkpoint)
        for name in ("users", "items"):
            sink.put(name, torch.arange(90), torch.rand(90, 3))
        most_bytes, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard_limit))
        try:
            with pytest.raises(SinkError, match="File too large"):
                sink.commit({}, [])
            sink.discard()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard_limit))
        assert served_rows(sink, "users") == of_step(1, 1)
        bring(sink, 2, {"users": ids_of(4)}, parent=1)
        assert served_rows(sink, "users") == of_step(1, 1) | of_step(2, 4)


@pytest.mark.parametrize(
    "foreign_path",
    ["index/99.json", "index/notes.json", "versions/2026-notes/a", "versions/0notes-b/a"],
)
def test_what_others_have_put_there_stays(tmp_path: Path, foreign_path: str) -> None:
    with open_sink(f"parquet:{tmp_path}") as sink:
        bring(sink, 1, {"users": ids_of(1), "items": ids_of()}, parent=None)
        foreign_file = tmp_path / foreign_path
        foreign_file.parent.mkdir(exist_ok=True)
        foreign_file.write_text("{}")
        bring(sink, 2, {"users": ids_of(4)}, parent=1)
        assert served_rows(sink, "users") == of_step(1, 1) | of_step(2, 4)
        assert foreign_file.read_text() == "{}"
