from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recpoint.format import naming
from recpoint.format.record_kinds import kind_of
from tests.example_counts import examples

ATTEMPT = "ab" * 16
STEPS = st.integers(0, naming.MAX_STEP)
GENERATIONS = st.integers(1, naming.MAX_GENERATION)
RANKS = st.integers(0, naming.MAX_RANK)
NUMBERS = st.integers(0, naming.MAX_CHUNK)


@given(STEPS, GENERATIONS, RANKS, st.integers(0, naming.MAX_TABLE), NUMBERS)
def test_keys_say_what_they_were_built_from(
    step: int, generation: int, rank: int, table: int, number: int
) -> None:
    assert naming.GENERATION_KEY.parse(naming.GENERATION_KEY.of(generation)) == generation
    assert naming.MANIFEST_KEY.parse(naming.MANIFEST_KEY.of(step, generation)) == (step, generation)
    stem = naming.job_stem(generation, step, rank)
    assert naming.parse_job_stem(stem) == (generation, step, rank)
    rows = naming.row_chunk_key(step, generation, ATTEMPT, rank=rank, table=table, number=number)
    state = naming.state_chunk_key(step, generation, ATTEMPT, rank=rank, number=number)
    sample = naming.sample_chunk_key(step, generation, ATTEMPT, rank=rank, number=number)
    assert naming.parse_chunk_name(rows) == ("rows", rank, table, number)
    assert naming.parse_chunk_name(state) == ("state", rank, None, number)
    assert naming.parse_chunk_name(sample) == ("sample", rank, None, number)
    for key in (rows, state, sample):
        assert naming.parse_chunk_key(key) == (step, generation, ATTEMPT)
        assert key.startswith(naming.attempt_prefix(step, generation, ATTEMPT))


LABELS = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,63}", fullmatch=True)


@given(STEPS.filter(bool), GENERATIONS, LABELS)
def test_keys_of_retention_say_what_they_were_built_from(
    step: int, generation: int, label: str
) -> None:
    pin, metric = (
        build(step, generation, label) for build in (naming.PIN_KEY.of, naming.METRIC_KEY.of)
    )
    assert naming.PIN_KEY.parse(pin) == naming.METRIC_KEY.parse(metric) == (step, generation, label)
    assert naming.PIN_KEY.parse(metric) is None and naming.METRIC_KEY.parse(pin) is None
    stem = f"{step:012d}-{generation:08d}"
    for manifest in (
        naming.MANIFEST_KEY.of(step, generation),
        f"consolidated/{stem}-full.json",
        f"consolidated/{stem}-after-{step - 1:012d}.json",
    ):
        mark = naming.EXPIRED_KEY.of(manifest)
        assert naming.EXPIRED_KEY.parse(mark) == manifest
    lease = naming.LEASE_KEY.of(ATTEMPT)
    assert naming.LEASE_KEY.parse(lease) == ATTEMPT
    number = naming.PUBLICATION_KEY.of(generation)
    assert naming.PUBLICATION_KEY.parse(number) == generation


@given(st.integers(0, naming.MAX_RANK))
def test_keys_of_rejections(rank: int) -> None:
    key = naming.REJECTIONS_KEY.of(rank)
    assert naming.REJECTIONS_KEY.parse(key) == rank
    assert naming.REJECTIONS_KEY.parse(key + "\n") is None
    with pytest.raises(ValueError, match="rank"):
        naming.REJECTIONS_KEY.of(naming.MAX_RANK + 1)


@given(STEPS, GENERATIONS)
def test_keys_of_pages(step: int, generation: int) -> None:
    digest = "0d" * 16
    key = naming.PAGE_KEY.of(step, generation, ATTEMPT, digest)
    assert key.startswith(naming.attempt_prefix(step, generation, ATTEMPT))
    assert naming.PAGE_KEY.parse(key) == (step, generation, ATTEMPT, digest)
    assert naming.parse_chunk_key(key) == (step, generation, ATTEMPT)
    assert naming.parse_chunk_name(key) is None  # no manifest may name it as a chunk
    assert naming.generation_in_key(key) == generation
    for other in (key + "\n", key.replace(digest, digest[:-1]), key.replace(digest, "0D" * 16)):
        assert naming.PAGE_KEY.parse(other) is None and naming.parse_chunk_key(other) is None


@given(STEPS, GENERATIONS, st.none() | STEPS)
def test_keys_of_consolidated_manifests(step: int, generation: int, after: int | None) -> None:
    if after is not None and after >= step:
        with pytest.raises(ValueError):
            naming.CONSOLIDATED_KEY.of(step, generation, after)
        return
    key = naming.CONSOLIDATED_KEY.of(step, generation, after)
    assert naming.CONSOLIDATED_KEY.parse(key) == (step, generation, after)
    assert key.startswith(naming.CONSOLIDATED_KEY.under(step, generation))
    assert naming.MANIFEST_KEY.parse(key) is None


@pytest.mark.parametrize("after", ["000000000007", "000000000008", "99", "00000000000x", ""])
def test_a_consolidated_key_with_no_earlier_parent_is_not_ours(after: str) -> None:
    key = f"consolidated/000000000007-00000001-after-{after}.json"
    assert naming.CONSOLIDATED_KEY.parse(key) is None


@given(STEPS, STEPS)
def test_manifest_keys_sort_by_step(one: int, other: int) -> None:
    assert (one < other) == (naming.MANIFEST_KEY.of(one, 1) < naming.MANIFEST_KEY.of(other, 1))


@pytest.mark.parametrize(
    "build",
    [
        lambda: naming.GENERATION_KEY.of(0),
        lambda: naming.GENERATION_KEY.of(10**8),
        lambda: naming.MANIFEST_KEY.of(-1, 1),
        lambda: naming.MANIFEST_KEY.of(10**12, 1),
        lambda: naming.attempt_prefix(1, 1, "AB" * 16),
        lambda: naming.attempt_prefix(1, 1, "ab" * 15),
        lambda: naming.attempt_prefix(1, 1, "../" + "a" * 29),
        lambda: naming.attempt_prefix(1, 1, ATTEMPT + "/x/"),
        lambda: naming.row_chunk_key(1, 1, ATTEMPT, rank=10**5, table=0, number=0),
        lambda: naming.row_chunk_key(1, 1, ATTEMPT, rank=0, table=10**5, number=0),
        lambda: naming.state_chunk_key(1, 1, ATTEMPT, rank=0, number=10**6),
        lambda: naming.job_stem(0, 1, 0),
        lambda: naming.PIN_KEY.of(1, 1, "../x"),
        lambda: naming.PIN_KEY.of(1, 0, "x"),
        lambda: naming.METRIC_KEY.of(10**12, 1, "x"),
        lambda: naming.METRIC_KEY.of(1, 1, "x\n"),
        lambda: naming.EXPIRED_KEY.of("run.json"),
        lambda: naming.EXPIRED_KEY.of("manifests/000000000001-00000001-full.json"),
        lambda: naming.EXPIRED_KEY.of("manifests/000000000001-00000000.json"),
        lambda: naming.EXPIRED_KEY.of("consolidated/000000000001-00000001-after-000000000001.json"),
        lambda: naming.LEASE_KEY.of("x"),
    ],
)
def test_what_no_key_can_say(build: Callable[[], str]) -> None:
    with pytest.raises(ValueError):
        build()


@given(st.text(max_size=60))
def test_other_keys_are_not_ours(key: str) -> None:
    assert naming.GENERATION_KEY.parse(key) is None
    assert naming.MANIFEST_KEY.parse("manifests/" + key) is None
    assert naming.CONSOLIDATED_KEY.parse("consolidated/" + key) is None
    assert naming.parse_chunk_name("chunks/" + key) is None
    assert naming.parse_job_stem(key) is None


@pytest.mark.parametrize("end", ["\n", "\x00", " ", "/", ".tmp"])
def test_nothing_may_follow_a_key(end: str) -> None:
    assert naming.MANIFEST_KEY.parse(naming.MANIFEST_KEY.of(1, 1) + end) is None
    for after in (None, 0):
        assert naming.CONSOLIDATED_KEY.parse(naming.CONSOLIDATED_KEY.of(1, 1, after) + end) is None
    assert naming.GENERATION_KEY.parse(naming.GENERATION_KEY.of(1) + end) is None
    assert naming.END_KEY.parse(naming.END_KEY.of(1) + end) is None
    key = naming.state_chunk_key(1, 1, ATTEMPT, rank=0, number=0)
    assert naming.parse_chunk_key(key + end) is None
    assert naming.parse_job_stem(naming.job_stem(1, 1, 0) + end) is None


# --- what a parser lets through, and nothing else, is a key --------------------------------------


def chunk_key(key: str) -> str | None:
    of, name = naming.parse_chunk_key(key), naming.parse_chunk_name(key)
    assert (of is None) == (name is None)
    if of is None or name is None:
        return None
    if name.content == "state":
        return naming.state_chunk_key(*of, rank=name.rank, number=name.number)
    if name.content == "sample":
        return naming.sample_chunk_key(*of, rank=name.rank, number=name.number)
    assert name.table is not None
    return naming.row_chunk_key(*of, rank=name.rank, table=name.table, number=name.number)


def again(keys: naming.KeyPattern[..., Any]) -> Callable[[str], str | None]:
    def of_its_own(key: str) -> str | None:
        name = keys.parse(key)
        if name is None:
            return None
        return keys.of(*name) if isinstance(name, tuple) else keys.of(name)

    return of_its_own


#: Each takes a key apart and builds it again; None: it is not one of its kind.
AGAIN: dict[str, Callable[[str], str | None]] = {
    "chunks": chunk_key,
    "jobs": lambda stem: (n := naming.parse_job_stem(stem)) and naming.job_stem(*n),
    "generations": again(naming.GENERATION_KEY),
    "ends": again(naming.END_KEY),
    "parts": again(naming.PART_KEY),
    "manifests": again(naming.MANIFEST_KEY),
    "consolidated": again(naming.CONSOLIDATED_KEY),
    "pins": again(naming.PIN_KEY),
    "metrics": again(naming.METRIC_KEY),
    "expired": again(naming.EXPIRED_KEY),
    "validations": again(naming.VALIDATION_KEY),
    "published": again(naming.PUBLICATION_KEY),
    "rejections": again(naming.REJECTIONS_KEY),
    "leases": again(naming.LEASE_KEY),
}


def numbers(digits: int) -> st.SearchStrategy[str]:
    """Text that is a number of so many digits, or nearly."""
    edges = [0, 1, 10**digits - 1, 10**digits]
    return st.one_of(
        st.sampled_from([f"{number:0{digits}d}" for number in edges]),
        st.from_regex(rf"[0-9]{{{digits}}}", fullmatch=True),
        st.sampled_from(["", "-1", "1" * (digits - 1), "\u0661" * digits, "x" * digits]),
    )


@st.composite
def near_keys(draw: st.DrawFn) -> str:
    """Keys of every kind, and what differs from one a little."""
    kind = draw(st.sampled_from(sorted(AGAIN)))
    step, g, rank, n = (draw(numbers(digits)) for digits in (12, 8, 5, 6))
    attempt = draw(st.sampled_from([ATTEMPT, "0" * 32, "AB" * 16, "ab" * 15]))
    label = draw(LABELS | st.sampled_from(["", "-x", "a" * 65]))
    after = draw(st.just(step) | numbers(12))
    table = draw(numbers(5).map(lambda text: f"t{text}") | st.sampled_from(["state", "sample"]))
    level = draw(st.sampled_from(["metadata", "sample", "full", "none"]))
    result = draw(st.sampled_from(["passed", "failed", "stateless", ""]))
    end = draw(st.sampled_from(["", f"-{label}", "-full", f"-after-{after}"]))
    if kind == "jobs":
        key = f"{g}-{step}-r{rank}"
    elif kind in ("generations", "ends", "published"):
        key = f"{kind}/{g}.json"
    elif kind == "chunks":
        key = f"chunks/{step}-{g}-{attempt}/r{rank}-{table}-{n}.safetensors"
    elif kind == "parts":
        key = f"parts/{step}-{g}-{attempt}/r{rank}.json"
    elif kind == "validations":
        key = f"validations/{step}-{g}-{n}-{level}-{result}.json"
    elif kind == "rejections":
        key = f"rejections/r{rank}.json"
    elif kind == "leases":
        key = f"leases/{attempt}.json"
    else:
        key = f"{kind}/{step}-{g}{end}.json"
    return key + draw(st.sampled_from(["", "", "", ".bak", "\n", "/"]))


@settings(max_examples=examples(500))
@given(near_keys() | st.text(max_size=60))
def test_what_a_parser_lets_through_is_built_again(key: str) -> None:
    kinds = {kind: again for kind, parse in AGAIN.items() if (again := parse(key)) is not None}
    assert not kinds or kinds == {"jobs" if "/" not in key else key.partition("/")[0]: key}
    generation = naming.generation_in_key(key)
    if generation is not None:
        assert kinds and 1 <= generation <= naming.MAX_GENERATION
        assert f"{generation:08d}" in key
    named = kinds.keys() - {"published", "rejections", "leases", "jobs"}
    assert bool(named) == (generation is not None)
    assert (kind_of(key) is not None) == bool(kinds.keys() - {"chunks", "jobs"})


ZERO = [
    "generations/00000000.json",
    "ends/00000000.json",
    f"chunks/000000000001-00000000-{ATTEMPT}/r00000-state-000000.safetensors",
    f"chunks/000000000001-00000000-{ATTEMPT}/r00000-t00000-000000.safetensors",
    f"parts/000000000001-00000000-{ATTEMPT}/r00000.json",
    "manifests/000000000001-00000000.json",
    "consolidated/000000000001-00000000-full.json",
    "pins/000000000001-00000000-best.json",
    "metrics/000000000001-00000000-auc.json",
    "expired/000000000001-00000000.json",
    "expired/000000000001-00000000-full.json",
    "validations/000000000001-00000000-000001-full-passed.json",
    "validations/000000000001-00000001-000000-full-passed.json",
    "published/00000000.json",
    "00000000-000000000001-r00000",
]


@pytest.mark.parametrize("key", ZERO)
def test_generation_zero_is_nobodys(key: str) -> None:
    assert all(parse(key) is None for parse in AGAIN.values())
