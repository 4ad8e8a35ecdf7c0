"""Two sharded modules have a table of one name; one of them gets no new rows (TorchEasyRec#607)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torchrec_model import MISSING
from tests.torchrec_ranks import play

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.xdist_group("torchrec"),
]


def test_tables_of_one_name_in_two_modules(tmp_path: Path) -> None:
    job = {
        "play": "same_names",
        "ranks": 2,
        "run": str(tmp_path / "run"),
        "staging": str(tmp_path / "staging"),
    }
    first, again = play([job, job], tmp_path)
    for before, after in zip(first, again, strict=True):
        assert before["names"] == ["first.embedding_bags.t", "second.embedding_bags.t"]
        assert (before["begun"], after["begun"]) == (0, 6)
        # The last batches looked up rows of the first table only.
        assert before["weights"][0] != before["initial"][0]
        assert after["initial"] == before["weights"]
