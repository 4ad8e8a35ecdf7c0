"""What a selection may be, and what is said of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recpoint.catalog.restore.order import NEWEST, Selection
from recpoint.errors import SettingsError
from recpoint.format.naming import ManifestName


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"step": "3"}, "step"),
        ({"step": 10**12}, "step"),
        ({"generation": 1}, "generation"),
        ({"step": 3, "generation": 0}, "generation"),
        ({"step": 3, "generation": 1.0}, "generation"),
        ({"validated_within": -1}, "validated_within"),
        ({"validated_within": np.float64(3)}, "validated_within"),
        ({"validated_only": "no"}, "validated_only"),
    ],
)
def test_what_cannot_be_selected(given: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Selection(**given)
    assert caught.value.subject == field
    assert caught.value.found and caught.value.expected
    assert caught.value.next_step.startswith("recpoint list URL --all")


def test_numbers_of_numpy_become_plain_ones() -> None:
    given: dict[str, Any] = {"step": np.int64(3), "generation": np.uint8(2)}
    selection = Selection(**given)
    assert selection == Selection.of(ManifestName(3, 2))
    assert type(selection.step) is int and type(selection.generation) is int


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (NEWEST, "the newest checkpoint"),
        (Selection(validated_only=True), "the newest validated checkpoint"),
        (
            Selection(validated_within=9),
            "the newest checkpoint, or a validated one within 9 batches",
        ),
        (Selection(step=8, validated_only=True), "step 8"),
        (Selection(step=8, generation=2), "step 8 (generation 2)"),
    ],
)
def test_in_words(selection: Selection, words: str) -> None:
    assert selection.in_words == words
    assert selection.named == words.startswith("step")
