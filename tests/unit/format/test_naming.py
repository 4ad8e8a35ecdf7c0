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
    sample = naming.sample_chunk_key(step, generation, ATTEMPT, rank=rank, number=number)
    assert naming.parse_chunk_name(rows) == ("rows", rank, table, number)
    assert naming.parse_chunk_name(state) == ("state", rank, None, number)
    assert naming.parse_chunk_name(sample) == ("sample", rank, None, number)
    for key in (rows, state, sample):
        assert naming.is_chunk_key(key)
        assert naming.parse_chunk_key(key) == (step, generation, ATTEMPT)
        assert naming.parse_attempt_prefix(key) == (step, generation, ATTEMPT)
        assert key.startswith(naming.attempt_prefix(step, generation, ATTEMPT))


LABELS = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,63}", fullmatch=True)


@given(STEPS, GENERATIONS, LABELS)
def test_keys_of_retention_say_what_they_were_built_from(
    step: int, generation: int, label: str
) -> None:
    pin, metric = (build(step, generation, label) for build in (naming.pin_key, naming.metric_key))
    assert naming.parse_pin_key(pin) == naming.parse_metric_key(metric) == (step, generation, label)
    assert naming.parse_pin_key(metric) is None and naming.parse_metric_key(pin) is None
    stem = f"{step:012d}-{generation:08d}"
    for manifest in (
        naming.manifest_key(step, generation),
        f"consolidated/{stem}-full.json",
        f"consolidated/{stem}-after-{step:012d}.json",
    ):
        mark = naming.expired_key(manifest)
        assert naming.parse_expired_key(mark) == manifest
        assert naming.is_retention_key(mark) and not naming.is_retention_key(manifest)
    lease = naming.lease_key(ATTEMPT)
    assert naming.parse_lease_key(lease) == ATTEMPT
    for key in (pin, metric, lease, naming.DELETION_KEY, naming.publication_key(generation)):
        assert naming.is_retention_key(key)
        assert not naming.is_retention_key(key + "\n")


@given(st.integers(0, naming.MAX_RANK))
def test_keys_of_rejections(rank: int) -> None:
    key = naming.rejections_key(rank)
    assert naming.parse_rejections_key(key) == rank
    assert naming.parse_rejections_key(key + "\n") is None
    with pytest.raises(ValueError, match="rank"):
        naming.rejections_key(naming.MAX_RANK + 1)


@given(STEPS, GENERATIONS, st.none() | STEPS)
def test_keys_of_consolidated_manifests(step: int, generation: int, after: int | None) -> None:
    if after is not None and after >= step:
        with pytest.raises(ValueError):
            naming.consolidated_key(step, generation, after)
        return
    key = naming.consolidated_key(step, generation, after)
    assert naming.parse_consolidated_key(key) == (step, generation, after)
    assert key.startswith(naming.consolidated_prefix(step, generation))
    assert naming.parse_manifest_key(key) is None


@pytest.mark.parametrize("after", ["000000000007", "000000000008", "99", "00000000000x", ""])
def test_a_consolidated_key_with_no_earlier_parent_is_not_ours(after: str) -> None:
    key = f"consolidated/000000000007-00000001-after-{after}.json"
    assert naming.parse_consolidated_key(key) is None


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
        lambda: naming.pin_key(1, 1, "../x"),
        lambda: naming.pin_key(1, 0, "x"),
        lambda: naming.metric_key(10**12, 1, "x"),
        lambda: naming.metric_key(1, 1, "x\n"),
        lambda: naming.expired_key("run.json"),
        lambda: naming.expired_key("manifests/000000000001-00000001-full.json"),
        lambda: naming.expired_key("manifests/000000000001-00000000.json"),
        lambda: naming.lease_key("x"),
    ],
)
def test_what_no_key_can_say(build: Callable[[], str]) -> None:
    with pytest.raises(ValueError):
        build()


@given(st.text(max_size=60))
def test_other_keys_are_not_ours(key: str) -> None:
    assert naming.parse_generation_key(key) is None
    assert naming.parse_manifest_key("manifests/" + key) is None
    assert naming.parse_consolidated_key("consolidated/" + key) is None
    assert naming.parse_chunk_name("chunks/" + key) is None
    assert naming.parse_job_stem(key) is None


@pytest.mark.parametrize("end", ["\n", "\x00", " ", "/", ".tmp"])
def test_nothing_may_follow_a_key(end: str) -> None:
    assert naming.parse_manifest_key(naming.manifest_key(1, 1) + end) is None
    for after in (None, 0):
        assert naming.parse_consolidated_key(naming.consolidated_key(1, 1, after) + end) is None
    assert naming.parse_generation_key(naming.generation_key(1) + end) is None
    assert naming.is_end_key(naming.end_key(1)) and not naming.is_end_key(naming.end_key(1) + end)
    key = naming.state_chunk_key(1, 1, ATTEMPT, rank=0, number=0)
    assert naming.parse_chunk_key(key + end) is None
    assert naming.parse_job_stem(naming.job_stem(1, 1, 0) + end) is None


def test_generation_zero_is_nobodys() -> None:
    assert naming.parse_generation_key("generations/00000000.json") is None
    assert not naming.is_end_key("ends/00000000.json")
    assert naming.parse_manifest_key("manifests/000000000001-00000000.json") is None
    assert naming.parse_consolidated_key("consolidated/000000000001-00000000-full.json") is None
