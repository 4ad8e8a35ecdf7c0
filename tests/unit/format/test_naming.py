from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
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
        assert naming.parse_chunk_key(key) == (step, generation, ATTEMPT)
        assert key.startswith(naming.attempt_prefix(step, generation, ATTEMPT))


LABELS = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,63}", fullmatch=True)


@given(STEPS.filter(bool), GENERATIONS, LABELS)
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
        f"consolidated/{stem}-after-{step - 1:012d}.json",
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
        lambda: naming.expired_key("consolidated/000000000001-00000001-after-000000000001.json"),
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


def part_key(key: str) -> str | None:
    part = naming.parse_part_key(key)
    return part and naming.part_key(*part.checkpoint, rank=part.rank)


def expired_key(key: str) -> str | None:
    manifest = naming.parse_expired_key(key)
    return manifest and naming.expired_key(manifest)


def validation_key(key: str) -> str | None:
    name = naming.parse_validation_key(key)
    return name and naming.validation_key(name)


def rejections_key(key: str) -> str | None:
    rank = naming.parse_rejections_key(key)
    return None if rank is None else naming.rejections_key(rank)


def end_key(key: str) -> str | None:
    return naming.end_key(int(key[5:13])) if naming.is_end_key(key) else None


#: Each takes a key apart and builds it again; None: it is not one of its kind.
AGAIN: dict[str, Callable[[str], str | None]] = {
    "generations": lambda key: (
        naming.generation_key(n) if (n := naming.parse_generation_key(key)) else None
    ),
    "ends": end_key,
    "chunks": chunk_key,
    "parts": part_key,
    "manifests": lambda key: (n := naming.parse_manifest_key(key)) and naming.manifest_key(*n),
    "consolidated": lambda key: (
        (n := naming.parse_consolidated_key(key)) and naming.consolidated_key(*n)
    ),
    "pins": lambda key: (n := naming.parse_pin_key(key)) and naming.pin_key(*n),
    "metrics": lambda key: (n := naming.parse_metric_key(key)) and naming.metric_key(*n),
    "expired": expired_key,
    "validations": validation_key,
    "published": lambda key: (
        naming.publication_key(n) if (n := naming.parse_publication_key(key)) else None
    ),
    "rejections": rejections_key,
    "leases": lambda key: (n := naming.parse_lease_key(key)) and naming.lease_key(n),
    "jobs": lambda stem: (n := naming.parse_job_stem(stem)) and naming.job_stem(*n),
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


@settings(max_examples=500)
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
    assert naming.is_retention_key(key) == bool(
        kinds.keys() & {"pins", "metrics", "expired", "leases", "published"}
    )


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
