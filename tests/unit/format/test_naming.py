from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recpoint.format import naming

ATTEMPT = "ab" * 16
STEPS = st.integers(0, naming.MAX_STEP)
GENERATIONS = st.integers(1, naming.MAX_GENERATION)
RANKS = st.integers(0, naming.MAX_RANK)
NUMBERS = st.integers(0, naming.MAX_CHUNK)


@given(STEPS, GENERATIONS, RANKS, st.integers(0, naming.MAX_TABLE), NUMBERS)
def test_keys_say_what_they_were_built_from(
    step: int, generation: int, rank: int, table: int, number: int
) -> None:
    assert naming.parse_generation_key(naming.generation_key(generation)) == generation
    assert naming.parse_manifest_key(naming.manifest_key(step, generation)) == (step, generation)
    stem = naming.job_stem(generation, step, rank)
    assert naming.parse_job_stem(stem) == (generation, step, rank)
    rows = naming.row_chunk_key(step, generation, ATTEMPT, rank=rank, table=table, number=number)
    state = naming.state_chunk_key(step, generation, ATTEMPT, rank=rank, number=number)
    assert naming.parse_chunk_name(rows) == (rank, table, number)
    assert naming.parse_chunk_name(state) == (rank, None, number)
    for key in (rows, state):
        assert naming.is_chunk_key(key)
        assert naming.parse_chunk_key(key) == (step, generation, ATTEMPT)
        assert naming.parse_attempt_prefix(key) == (step, generation, ATTEMPT)
        assert key.startswith(naming.attempt_prefix(step, generation, ATTEMPT))


@given(STEPS, STEPS)
def test_manifest_keys_sort_by_step(one: int, other: int) -> None:
    assert (one < other) == (naming.manifest_key(one, 1) < naming.manifest_key(other, 1))


@pytest.mark.parametrize(
    "build",
    [
        lambda: naming.generation_key(0),
        lambda: naming.generation_key(10**8),
        lambda: naming.manifest_key(-1, 1),
        lambda: naming.manifest_key(10**12, 1),
        lambda: naming.attempt_prefix(1, 1, "AB" * 16),
        lambda: naming.attempt_prefix(1, 1, "ab" * 15),
        lambda: naming.attempt_prefix(1, 1, "../" + "a" * 29),
        lambda: naming.attempt_prefix(1, 1, ATTEMPT + "/x/"),
        lambda: naming.row_chunk_key(1, 1, ATTEMPT, rank=10**5, table=0, number=0),
        lambda: naming.row_chunk_key(1, 1, ATTEMPT, rank=0, table=10**5, number=0),
        lambda: naming.state_chunk_key(1, 1, ATTEMPT, rank=0, number=10**6),
        lambda: naming.job_stem(0, 1, 0),
    ],
)
def test_what_no_key_can_say(build: Callable[[], str]) -> None:
    with pytest.raises(ValueError):
        build()


@given(st.text(max_size=60))
def test_other_keys_are_not_ours(key: str) -> None:
    assert naming.parse_generation_key(key) is None
    assert naming.parse_manifest_key("manifests/" + key) is None
    assert naming.parse_chunk_name("chunks/" + key) is None
    assert naming.parse_job_stem(key) is None


@pytest.mark.parametrize("end", ["\n", "\x00", " ", "/", ".tmp"])
def test_nothing_may_follow_a_key(end: str) -> None:
    assert naming.parse_manifest_key(naming.manifest_key(1, 1) + end) is None
    assert naming.parse_generation_key(naming.generation_key(1) + end) is None
    key = naming.state_chunk_key(1, 1, ATTEMPT, rank=0, number=0)
    assert naming.parse_chunk_key(key + end) is None
    assert naming.parse_job_stem(naming.job_stem(1, 1, 0) + end) is None


def test_generation_zero_is_nobodys() -> None:
    assert naming.parse_generation_key("generations/00000000.json") is None
    assert naming.parse_manifest_key("manifests/000000000001-00000000.json") is None
