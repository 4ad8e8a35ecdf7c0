"""The home in files keeps the contract of homes, also while it merges and when its files fail."""

from __future__ import annotations

import logging
import os
import resource
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from recpoint.embeddings.home import homes
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.homes import FileLimits
from recpoint.errors import HomeError, SettingsError
from recpoint.kernels.row_blocks import BlockForm
from recpoint.testing.homes import HomeSuite, fetched, ids_of, records_of
from tests.polling import until
from tests.torch_interpreter import run_program

RECORD_BYTES = 64
BLOCKS = BlockForm.of(RECORD_BYTES)
#: Each block is written at once, and 100 rows fill the index.
SMALL = FileLimits(index_rows=100, segment_bytes=8_192, buffer_bytes=4_096)
#: Each block is written at once, and nothing is merged.
NO_MERGE = FileLimits(buffer_bytes=4_096)


class TestFileHome(HomeSuite):
    @pytest.fixture
    def home(self, tmp_path: Path) -> Iterator[Home]:
        with homes.local(tmp_path / "home") as home:
            yield home


class TestFileHomeThatMerges(HomeSuite):
    """Every few rows fill the index, and every block fills a buffer."""

    @pytest.fixture
    def home(self, tmp_path: Path) -> Iterator[Home]:
        limits = FileLimits(index_rows=20, segment_bytes=8_192, buffer_bytes=4_096)
        with homes.local(tmp_path / "home", limits=limits) as home:
            yield home


class TestFileHomeInMemory(HomeSuite):
    """On tmpfs, whose direct reads are copies."""

    @pytest.fixture
    def home(self) -> Iterator[Home]:
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
            homes.local(directory, limits=SMALL) as home,
        ):
            yield home


def _expected(rows: range, version: int = 0) -> dict[int, bytes]:
    records = records_of(rows, RECORD_BYTES, version=version)
    return {row: bytes(one.tolist()) for row, one in zip(rows, records, strict=True)}


def _write(home: Home, rows: range, batch: int) -> None:
    home.write_back("t", ids_of(rows), records_of(rows, RECORD_BYTES, version=batch), batch=batch)


def _fetched(home: Home, rows: range) -> dict[int, bytes]:
    return fetched(partial(home.fetch, "t"), rows, RECORD_BYTES)


def _files(directory: Path, pattern: str = "*.log") -> list[Path]:
    return sorted(directory.glob(pattern))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # merged since it was listed


def _merged(home: Home, rows: range) -> None:
    """Write rows, all of which are in the base afterwards."""
    assert len(rows) > SMALL.index_rows
    _write(home, rows, 0)
    _write(home, range(0, 1), 0)  # finds a full index, so it waits for the merge


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 16]), offset)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "home"


# --- where records are ---------------------------------------------------------------------------


def test_merged_rows_lie_in_the_base_and_take_no_memory(directory: Path) -> None:
    with homes.local(directory, limits=FileLimits(index_rows=100)) as home:
        home.add_table("t", rows=1_000_000, record_bytes=RECORD_BYTES)
        rows = range(0, 600_000, 3)
        _merged(home, rows)
        sizes = home.size_bytes()
        assert sizes["index"] < 100_000
        assert len(_files(directory)) <= 1
        assert _fetched(home, range(0, 3_000)) == _expected(range(0, 3_000, 3))
        assert _fetched(home, range(599_000, 600_500)).keys() == set(range(599_001, 600_000, 3))
        # A third of the rows, in all of the blocks up to the last of them.
        assert sizes["disk"] < BLOCKS.file_bytes(600_000) + (2 << 20)


def test_the_log_is_bounded_when_few_rows_are_written_often(directory: Path) -> None:
    limits = FileLimits(log_bytes=1 << 20, segment_bytes=1 << 16, buffer_bytes=4_096)
    with homes.local(directory, limits=limits) as home:
        home.add_table("t", rows=1_000, record_bytes=RECORD_BYTES)
        for batch in range(200):
            _write(home, range(0, 1_000), batch)
            in_log = sum(_size(path) for path in _files(directory))
            assert in_log < (1 << 20) + 2 * BLOCKS.file_bytes(1_000) + (1 << 16)
        assert _fetched(home, range(1_000)) == _expected(range(1_000), 199)


def test_write_backs_are_one_write_for_each_full_buffer(directory: Path) -> None:
    with homes.local(directory) as home:
        home.add_table("t", rows=100_000, record_bytes=RECORD_BYTES)
        slots = (1 << 20) // 4_096 * BLOCKS.slots
        _write(home, range(slots), 0)
        assert _files(directory) == []
        _write(home, range(slots, slots + 1), 0)
        assert [path.stat().st_size for path in _files(directory)] == [1 << 20]
        assert _fetched(home, range(slots + 1)) == _expected(range(slots + 1))


def test_frozen_rows_keep_their_files_and_no_longer(directory: Path) -> None:
    with homes.local(directory, limits=SMALL) as home:
        home.add_table("t", rows=1_000, record_bytes=RECORD_BYTES)
        _write(home, range(500), 0)
        frozen = home.freeze("t", range(1_000))
        for batch in range(1, 8):
            _write(home, range(batch, 1_000), batch)  # exceeds the bound: nothing may be merged
        assert home.size_bytes()["index"] >= 16 * 1_000
        assert fetched(frozen.fetch, range(1_000), RECORD_BYTES) == _expected(range(500))
        assert len(_files(directory)) > 50
        frozen.release()
        _write(home, range(1), 8)  # finds a full index, so it waits for merges
        until(lambda: len(_files(directory)) <= 1)
        assert home.size_bytes()["frozen"] == 0
        expected = _expected(range(7, 1_000), 7)
        assert _fetched(home, range(7, 1_000)) == expected


def test_reads_and_freezes_beside_merges(directory: Path) -> None:
    """Every record is whole and of a version that can be; frozen ones are of one version."""
    rows = range(0, 5_000, 2)
    ids = ids_of(rows)
    versions = [records_of(rows, RECORD_BYTES, version=version) for version in range(50)]
    ended = threading.Event()
    with homes.local(directory, limits=FileLimits(index_rows=3_000, buffer_bytes=4_096)) as home:
        home.add_table("t", rows=5_000, record_bytes=RECORD_BYTES)
        home.write_back("t", ids, versions[0], batch=0)

        def write() -> None:
            try:
                for batch in range(1, 50):
                    home.write_back("t", ids, versions[batch], batch=batch)
            finally:
                ended.set()

        def read() -> int:
            oldest, reads = 0, 0
            while not ended.is_set() or not reads:
                out = torch.zeros_like(versions[0])
                assert home.fetch("t", ids, out).all()
                same = torch.stack([(out == version).all(1) for version in versions])
                assert same.any(0).all()
                found = same.int().argmax(0)
                assert int(found.min()) >= oldest
                oldest = int(found.min())
                reads += 1
            return reads

        def freeze() -> int:
            reads = 0
            while not ended.is_set() or not reads:
                with home.freeze("t", range(5_000)) as frozen:
                    first = torch.zeros_like(versions[0])
                    assert frozen.fetch(ids, first).all()
                    assert any(torch.equal(first, version) for version in versions)
                    for _ in range(3):
                        out = torch.zeros_like(first)
                        assert frozen.fetch(ids, out).all()
                        assert torch.equal(out, first)
                reads += 1
            return reads

        with ThreadPoolExecutor(3) as threads:
            working = [threads.submit(work) for work in (write, read, freeze)]
            for one in working:
                one.result()
        assert _fetched(home, range(5_000)) == _expected(rows, 49)


def test_what_was_merged_under_a_fetch_is_given_up(directory: Path) -> None:
    ended = threading.Event()
    with homes.local(directory, limits=SMALL) as home:
        home.add_table("t", rows=5_000, record_bytes=RECORD_BYTES)

        def read() -> None:
            while not ended.is_set():
                _fetched(home, range(0, 5_000, 2))

        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(read)
            try:
                for batch in range(200):
                    _write(home, range(batch, 5_000, 50), batch)
            finally:
                ended.set()
            reading.result()
        assert home.size_bytes()["frozen"] == 0


# --- damage --------------------------------------------------------------------------------------


def test_a_flipped_byte_in_a_segment_is_named(directory: Path) -> None:
    with homes.local(directory, limits=NO_MERGE) as home:
        home.add_table("t", rows=1_000, record_bytes=RECORD_BYTES)
        _write(home, range(300, 700), 0)
        (segment,) = _files(directory)
        offset = BLOCKS.place(60)  # the log begins with row 300
        for at in (0, 5, 12, 16, 16 + RECORD_BYTES - 1):
            _flip(segment, offset + at)
            with pytest.raises(HomeError) as caught:
                _fetched(home, range(355, 365))
            for part in (str(segment), "table 't'", "row 360", "checksum", f"byte {offset}"):
                assert part in str(caught.value)
            assert len(_fetched(home, range(361, 700))) == 339
            _flip(segment, offset + at)
        assert _fetched(home, range(1_000)) == _expected(range(300, 700))


def test_a_flipped_byte_in_the_base_is_named(directory: Path) -> None:
    with homes.local(directory, limits=SMALL) as home:
        home.add_table("t", rows=1_000, record_bytes=RECORD_BYTES)
        _merged(home, range(0, 1_000, 2))
        (base,) = _files(directory, "*.base")
        for row in (400, 401):  # 401 was never written
            _flip(base, BLOCKS.place(row) + 20)
            with pytest.raises(HomeError, match=f"table-0001.base, table 't', row {row}: .*sum"):
                _fetched(home, range(1_000))
            assert len(_fetched(home, range(402, 1_000))) == 299
            _flip(base, BLOCKS.place(row) + 20)
        assert _fetched(home, range(1_000)) == _expected(range(0, 1_000, 2))


def test_a_record_in_the_wrong_place_is_named(directory: Path) -> None:
    with homes.local(directory, limits=SMALL) as home:
        for table in ("t", "u"):
            home.add_table(table, rows=1_000, record_bytes=RECORD_BYTES)
        _merged(home, range(1_000))
        base, other = _files(directory, "*.base")
        data = base.read_bytes()
        with base.open("r+b") as file:
            file.write(data[4_096:8_192])
        with pytest.raises(HomeError, match="table 't', row 1: found a record of another row"):
            _fetched(home, range(1, 10))
        other.write_bytes(data)
        with pytest.raises(HomeError, match="table 'u', row 3: found a record of another row"):
            home.fetch("u", ids_of([3]), torch.zeros(1, RECORD_BYTES, dtype=torch.uint8))


@pytest.mark.parametrize("pattern", ["*.base", "*.log"])
def test_a_truncated_file_is_named(directory: Path, pattern: str) -> None:
    limits = SMALL if pattern == "*.base" else NO_MERGE
    with homes.local(directory, limits=limits) as home:
        home.add_table("t", rows=1_000, record_bytes=RECORD_BYTES)
        _merged(home, range(1_000))
        (file,) = _files(directory, pattern)
        os.truncate(file, 4_096 + 100)
        assert _fetched(home, range(1, 50)) == _expected(range(1, 50))
        with pytest.raises(HomeError) as caught:
            _fetched(home, range(100, 200))
        assert f"{file}, table 't', row 1" in str(caught.value)
        assert "the end of the file" in str(caught.value)


def test_zeros_in_a_segment_are_no_missing_rows(directory: Path) -> None:
    with homes.local(directory, limits=NO_MERGE) as home:
        home.add_table("t", rows=1_000, record_bytes=RECORD_BYTES)
        _write(home, range(1_000), 0)
        (segment,) = _files(directory)
        size = segment.stat().st_size
        os.truncate(segment, 0)
        os.truncate(segment, size)
        with pytest.raises(HomeError, match="row 7: found zeros"):
            _fetched(home, range(7, 9))


# --- no room -------------------------------------------------------------------------------------


def test_a_write_without_room_loses_nothing(directory: Path) -> None:
    """A limit of the process stands for a full disk, in a segment."""
    with homes.local(directory, limits=NO_MERGE) as home:
        home.add_table("t", rows=500, record_bytes=RECORD_BYTES)
        _write(home, range(400), 0)
        before = _fetched(home, range(500))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (12 * 4_096, hard))
        try:
            with pytest.raises(HomeError) as caught:
                _write(home, range(0, 500), 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        said = str(caught.value)
        assert "table-0001.000001-0000.log" in said and "File too large" in said
        assert "free room" in said
        assert _fetched(home, range(500)) == before == _expected(range(400))
        with pytest.raises(HomeError, match="after a write that failed.*File too large"):
            _write(home, range(1), 2)
        with home.freeze("t", range(500)) as frozen:
            assert fetched(frozen.fetch, range(500), RECORD_BYTES) == before


def test_a_table_that_the_system_refuses_is_not_there(directory: Path) -> None:
    with homes.local(directory) as home:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(HomeError, match=r"table-0001.base: found .*File too large"):
                home.add_table("t", rows=1_000_000, record_bytes=RECORD_BYTES)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert _files(directory, "*.base") == []
        home.add_table("t", rows=1_000_000, record_bytes=RECORD_BYTES)


@pytest.fixture
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of the kind that the test names. Needs root."""
    kind, options = request.param
    at = tmp_path / "mounted"
    at.mkdir()
    tried = subprocess.run(["mount", "-t", kind, "-o", options, kind, str(at)], check=False)
    if tried.returncode:
        pytest.skip("cannot mount here")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.mark.parametrize("mounted", [("tmpfs", "size=1m")], indirect=True)
def test_a_disk_that_is_full_for_a_merge_loses_nothing(mounted: Path) -> None:
    """The base takes a block for each row, and there is no room for so many."""
    with homes.local(mounted / "home", limits=SMALL) as home:
        home.add_table("t", rows=1_000_000, record_bytes=RECORD_BYTES)
        rows = range(0, 1_000_000, 1_000)
        _write(home, rows, 0)
        with pytest.raises(HomeError, match="table-0001.base.*No space left on device"):
            for batch in range(1, 50):
                _write(home, range(1), batch)
        expected = _expected(rows)
        found = _fetched(home, rows)
        assert found.keys() == expected.keys()
        assert all(found[row] == expected[row] for row in rows[1:])
    assert [path.name for path in (mounted / "home").iterdir()] == ["home.lock"]


@pytest.mark.parametrize("mounted", [("ramfs", "mode=700")], indirect=True)
def test_a_file_system_without_direct_reads_is_told_once(
    mounted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "recpoint"),
        homes.local(mounted / "home", limits=SMALL) as home,
    ):
        home.add_table("t", rows=1_000, record_bytes=RECORD_BYTES)
        home.add_table("u", rows=1_000, record_bytes=RECORD_BYTES)
        _merged(home, range(1_000))
        assert _fetched(home, range(1_000)) == _expected(range(1_000))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "refuses direct reads" in said[0] and str(mounted) in said[0]


# --- the directory -------------------------------------------------------------------------------


def test_the_directory_is_private_and_empty_at_the_end(directory: Path) -> None:
    with homes.local(directory, limits=SMALL) as home:
        home.add_table("t", rows=1_000, record_bytes=RECORD_BYTES)
        _write(home, range(300), 0)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert len(_files(directory, "*")) > 2
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in directory.iterdir())
    assert [path.name for path in directory.iterdir()] == ["home.lock"]


def test_a_second_home_is_refused_and_changes_nothing(directory: Path) -> None:
    with homes.local(directory, limits=NO_MERGE) as home:
        home.add_table("t", rows=1_000, record_bytes=RECORD_BYTES)
        _write(home, range(300), 0)
        with pytest.raises(HomeError, match=f"process {os.getpid()}, this one"):
            homes.local(directory)
        code = f"from recpoint.embeddings.home import homes\nhomes.local({str(directory)!r})\n"
        ran = run_program(code)
        assert ran.returncode == 1
        said = f"HomeError: {directory}: found a home of process {os.getpid()};"
        assert said in ran.stderr
        assert _fetched(home, range(1_000)) == _expected(range(300))
    with homes.local(directory):
        home.close()  # again: the lock of the new home is left alone
        with pytest.raises(HomeError, match="this one"):
            homes.local(directory)


def test_a_directory_with_anything_else_is_refused(directory: Path) -> None:
    directory.mkdir()
    ours = [directory / name for name in ("table-0001.base", "table-0001.000002-0000.log")]
    for path in ours:
        path.write_bytes(b"left")
    for name in ("model.pt", ".hidden", "table-0001.base.bak", "table-1.base", "home.lock2"):
        (directory / name).write_bytes(b"mine")
        with pytest.raises(HomeError, match=f"entries that are not a home's, such as '{name}'"):
            homes.local(directory)
        assert all(path.exists() for path in ours)
        (directory / name).unlink()
    (directory / "table-0002.base").mkdir()
    with pytest.raises(HomeError, match="table-0002.base"):
        homes.local(directory)
    assert (directory / "table-0002.base").exists()


def test_a_directory_of_others_is_refused(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(HomeError, match="drwxrwxrwx, of user .*nobody else can write"):
        homes.local(directory)
    assert list(directory.iterdir()) == []
    directory.chmod(0o750)
    homes.local(directory).close()
    (directory / "home.lock").unlink()
    elsewhere = directory.parent / "elsewhere"
    elsewhere.write_text("")
    (directory / "home.lock").symlink_to(elsewhere)
    with pytest.raises(HomeError, match="home.lock"):
        homes.local(directory)
    assert elsewhere.read_text() == ""
    with pytest.raises(HomeError, match="elsewhere"):
        homes.local(elsewhere)


def test_what_a_killed_process_left_is_deleted_not_read(directory: Path) -> None:
    code = (
        "import os, signal\n"
        "from recpoint.embeddings.home import homes\n"
        "from recpoint.testing.homes import ids_of, records_of\n"
        "limits = homes.FileLimits(index_rows=200, segment_bytes=8192, buffer_bytes=4096)\n"
        f"home = homes.local({str(directory)!r}, limits=limits)\n"
        "home.add_table('t', rows=1000, record_bytes=64)\n"
        "rows = range(1000)\n"
        "for batch in range(3):\n"
        "    home.write_back('t', ids_of(rows), records_of(rows, 64), batch=batch)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run_program(code).returncode == -9
    left = {path.name for path in directory.iterdir()}
    assert "table-0001.base" in left and any(name.endswith(".log") for name in left)
    with homes.local(directory) as home:
        assert {path.name for path in directory.iterdir()} == {"home.lock"}
        home.add_table("t", rows=1_000, record_bytes=RECORD_BYTES)
        assert _fetched(home, range(1_000)) == {}


def test_settings_that_cannot_work_are_refused(directory: Path) -> None:
    with pytest.raises(SettingsError, match="index_rows: found 0"):
        FileLimits(index_rows=0)
    with pytest.raises(SettingsError, match="limits"):
        homes.local(limits=SMALL)
    with homes.local(directory) as home, pytest.raises(ValueError, match="record_bytes"):
        home.add_table("t", rows=10, record_bytes=2 << 20)
