"""The live line of any set of records and keys, hostile ones included."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recpoint.catalog.run.lineage import live_line
from recpoint.errors import MalformedObject, MissingLink
from recpoint.format.naming import ManifestName
from recpoint.format.records import CheckpointRef, GenerationRecord

GENERATIONS = 6
references = st.none() | st.builds(
    CheckpointRef,
    step=st.integers(0, 9),
    generation=st.integers(1, GENERATIONS),
    attempt=st.just("a" * 32),
)
names = st.sets(
    st.builds(ManifestName, step=st.integers(0, 9), generation=st.integers(1, GENERATIONS))
)


def records(restored: dict[int, CheckpointRef | None]) -> dict[int, GenerationRecord]:
    return {
        number: GenerationRecord(
            run="0" * 32,
            generation=number,
            token="1" * 32,
            restored=reference,
            host="",
            pid=0,
            created_ms=0,
        )
        for number, reference in restored.items()
    }


@given(st.dictionaries(st.integers(1, GENERATIONS), references), names)
def test_steps_descend_generations_never_rise_and_the_walk_ends(
    restored: dict[int, CheckpointRef | None], there: set[ManifestName]
) -> None:
    newest = max(restored, default=0)
    try:
        line = live_line(newest, records(restored), there)
    except (MalformedObject, MissingLink):
        return
    assert set(line) <= there
    assert all(
        after.step < before.step and after.generation <= before.generation
        for before, after in zip(line, line[1:], strict=False)
    )


@given(st.dictionaries(st.integers(1, GENERATIONS), references, min_size=1), names)
def test_what_is_of_no_generation_on_the_way_makes_no_difference(
    restored: dict[int, CheckpointRef | None], there: set[ManifestName]
) -> None:
    newest = max(restored)
    known = records(restored)
    way: set[int] = set()
    at: int | None = newest
    while at is not None and at in known and at not in way:
        way.add(at)
        reference = known[at].restored
        at = reference.generation if reference else None
    try:
        line = live_line(newest, known, there)
    except (MalformedObject, MissingLink):
        return
    assert line == live_line(
        newest,
        {number: known[number] for number in way},
        {name for name in there if name.generation in way},
    )


@given(st.dictionaries(st.integers(1, GENERATIONS), references, min_size=1), names)
def test_a_new_generation_keeps_the_line_up_to_what_it_restored(
    restored: dict[int, CheckpointRef | None], there: set[ManifestName]
) -> None:
    newest = max(restored)
    known = records(restored)
    try:
        line = live_line(newest, known, there)
    except (MalformedObject, MissingLink):
        return
    for index, name in enumerate(line):
        reference = CheckpointRef(step=name.step, generation=name.generation, attempt="a" * 32)
        later = known | records({newest + 1: reference})
        others = {other for other in there if other.generation <= newest}
        assert live_line(newest + 1, later, others) == line[index:]
