"""Names say what they hold, and each class has its own (`tests/names.py` counts).

A count may not exceed its bound. Whoever lowers a count lowers the bound with it; none is raised.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import names

#: The bound of today, and the goal, of each count.
BOUNDS: dict[str, tuple[float, float]] = {
    "pronouns, percent of assignments": (2, 2),
    "pronouns, percent of parameters": (1.9, 1),
    "names of several classes": (9, 9),
    "banners inside modules": (0, 0),
    "docstrings that begin with `Returns`": (0, 0),
}


SOURCE = '''"""A module."""

# A part of the module.


# The comment of a class.
class _Part:

    def take(self, there, ids):
        """Returns nothing."""
        found = there
        missing_ids = [one for one in found if one]
        self._its = missing_ids

    # --- the other methods -----------------

    def leave(self):
        """Return 1."""
        return 1
'''


@pytest.fixture(scope="module")
def counted() -> names.Names:
    return names.count(names.sources())


@pytest.mark.parametrize("subject", BOUNDS)
def test_names_stay_within_their_bounds(counted: names.Names, subject: str) -> None:
    counts = {
        "pronouns, percent of assignments": counted.pronoun_percent,
        "pronouns, percent of parameters": counted.pronoun_parameter_percent,
        "names of several classes": len(counted.namesakes),
        "banners inside modules": len(counted.banners),
        "docstrings that begin with `Returns`": len(counted.descriptive_docstrings),
    }
    bound, goal = BOUNDS[subject]
    assert goal <= counts[subject] or bound == goal, f"lower the bound of {subject} to its goal"
    assert counts[subject] <= bound, "`python -m tests.names --list` shows what was counted"


def test_each_kind_of_name_is_counted(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(SOURCE)
    (tmp_path / "second.py").write_text("class Part:\n    size = 0\n")
    counted = names.count([tmp_path / "first.py", tmp_path / "second.py"], tmp_path)
    assert counted.pronouns == ["first.py:11 found", "first.py:13 _its", "first.py:12 one"]
    assert (counted.assigned, counted.pronoun_percent) == (5, 60)
    assert counted.pronoun_parameters == ["first.py:9 there"]
    assert counted.namesakes == {"Part": ["first.py:7 _Part", "second.py:1 Part"]}
    assert counted.banners == ["first.py:3", "first.py:15"]
    assert counted.descriptive_docstrings == ["first.py:9 take: Returns"]
