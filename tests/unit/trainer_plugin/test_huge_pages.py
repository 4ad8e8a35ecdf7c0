"""Large pages change where a table lies in memory, and nothing that can be read from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recpoint.trainer_plugin.snapshot import large_pages


def _table(megabytes: int) -> torch.Tensor:
    return torch.arange(megabytes << 18, dtype=torch.int32).view(-1, 16)


def _policy(folder: Path, text: str) -> Path:
    path = folder / "enabled"
    path.write_text(text, encoding="ascii")
    return path


def test_a_moved_table_keeps_address_and_contents_and_stays_writable() -> None:
    table = _table(48)
    address, before = table.data_ptr(), table.clone()
    moved = large_pages.advise([table])
    assert 0 <= moved <= table.nbytes
    assert table.data_ptr() == address
    assert torch.equal(table, before)
    table[-1] = 7
    assert torch.equal(table[:-1], before[:-1])


def test_nothing_is_moved_where_large_pages_are_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_pages, "_POLICY", _policy(tmp_path, "always madvise [never]\n"))
    assert large_pages.advise([_table(48)]) == 0
    monkeypatch.setattr(large_pages, "_POLICY", tmp_path / "no such file")
    assert large_pages.advise([_table(48)]) == 0


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("always [madvise] never\n", "madvise"),
        ("[always] madvise never\n", "always"),
        ("always madvise [never]\n", "never"),
        ("something else\n", "none"),
    ],
)
def test_the_policy_is_the_chosen_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, policy: str
) -> None:
    monkeypatch.setattr(large_pages, "_POLICY", _policy(tmp_path, text))
    assert large_pages.policy() == policy


def test_small_shared_and_strided_tensors_are_left_alone() -> None:
    shared = _table(33).share_memory_()
    strided = _table(80)[:, ::2]
    assert large_pages.advise([_table(1), shared, strided, torch.zeros(0)]) == 0
