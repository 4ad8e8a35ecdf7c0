from __future__ import annotations

import json
import random
import struct
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recpoint.errors import MalformedObject, SettingsError
from recpoint.format.state_tree import flatten, unflatten
from recpoint.format.state_values import unflatten_keys
from tests.example_counts import examples


def back(value: object) -> Any:
    return unflatten(*flatten(value))


def same(one: object, other: object) -> bool:
    """Equal in type and value, bit for bit, the order of dict keys included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and isinstance(other, float) and type(one) is float:
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return same(list(one.items()), list(other.items()))
    return one == other


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
KEYS = st.text(st.characters(exclude_categories=["Cs"])) | st.integers(min_value=2) | st.booleans()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(max_examples=examples(200), deadline=None)
@given(VALUES)
def test_python_values_come_back_exactly(value: object) -> None:
    assert same(back(value), value) or "nan" in repr(value)


@pytest.mark.parametrize(
    "value",
    [
        0.1,
        -0.0,
        float("inf"),
        5e-324,
        1.7976931348623157e308,
        2**63 - 1,
        2**63,
        -(2**63) - 1,
        10**10_000,
        -(7**20_000),
        {"b": 1, "a": 2, 10: 3, 2: 4, True: 5},
        {2**100: "key"},
        'ü\u0000\U0001f600"\\',
        b"",
        bytes(range(256)),
        ((), [], {}, [[]], ({},)),
        random.getstate(),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_values_at_the_edges(value: object) -> None:
    assert same(back(value), value)


def test_nan_comes_back_as_nan() -> None:
    value = back([float("nan")])[0]
    assert type(value) is float and value != value


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3), (1, 1, 1, 4)], ids=str)
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
    found = back({"x": tensor})["x"]
    assert found.dtype == dtype and found.shape == shape
    assert found.tolist() == tensor.tolist()


def test_tensors_in_pieces_and_of_other_strides() -> None:
    tensor = torch.arange(12).reshape(3, 4).t()
    text, tensors = flatten(tensor)
    assert tensors[0].data_ptr() == tensor.data_ptr()
    assert unflatten(text, [tensors[0].contiguous().reshape(-1)]).equal(tensor)


def test_the_tensors_taken_are_live_and_those_given_back_are_not() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    array = np.zeros(3, dtype=np.uint32)
    text, tensors = flatten([tensor, array])
    assert not tensors[0].requires_grad
    with torch.no_grad():
        tensor[0] = 1
    array[0] = 2
    assert [part[0].item() for part in tensors] == [1, 2]
    found = unflatten(text, tensors)
    with torch.no_grad():
        tensor[0] = 5
    array[0] = 5
    assert [found[0][0].item(), found[1][0]] == [1, 2]
    found[0][0], found[1][0] = 7, 7
    assert [tensor[0].item(), array[0]] == [5, 5]


def test_parameters_and_lazily_negated_views_come_back_as_tensors() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg()
    found = back([parameter, negated])
    assert type(found[0]) is torch.Tensor and found[0].tolist() == [1, 1]
    assert found[1].tolist() == [-2]


@pytest.mark.parametrize(
    "dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]
)
def test_numpy_arrays_and_scalars(dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    for value in (array, array.T, array[::-1], array[:0], np.array(1, dtype=dtype)):
        found = back([value])[0]
        assert type(found) is np.ndarray and found.dtype == value.dtype
        assert found.shape == value.shape and found.tobytes() == value.tobytes()
        assert found.flags.writeable
    scalar = array[1, 1]
    found = back(scalar)
    assert type(found) is type(scalar) and found.tobytes() == scalar.tobytes()


def test_bits_of_nan_survive_in_arrays_and_scalars() -> None:
    array = np.array([0x7FC00001, 0xFFC00002], dtype=np.uint32).view(np.float32)
    assert back(array).tobytes() == array.tobytes()
    assert back(array[1]).tobytes() == array[1].tobytes()


def test_a_read_only_array_is_taken_without_a_warning() -> None:
    array = np.frombuffer(b"\x01\x02", dtype=np.uint8)
    assert back(array).tolist() == [1, 2]


def test_random_generators_go_on_where_they_were() -> None:
    python, legacy, modern = random.Random(1), np.random.RandomState(1), np.random.default_rng(1)
    generator = torch.Generator().manual_seed(1)
    legacy.standard_normal()  # leaves a cached value behind
    state = back(
        {
            "python": python.getstate(),
            "legacy": legacy.get_state(legacy=False),
            "legacy tuple": legacy.get_state(),
            "modern": modern.bit_generator.state,
            "torch": generator.get_state(),
        }
    )
    python2, legacy2, modern2 = random.Random(), np.random.RandomState(), np.random.default_rng()
    legacy3, generator2 = np.random.RandomState(), torch.Generator()
    python2.setstate(state["python"])
    legacy2.set_state(state["legacy"])
    legacy3.set_state(state["legacy tuple"])
    modern2.bit_generator.state = state["modern"]
    generator2.set_state(state["torch"])
    assert python2.random() == python.random()
    assert legacy2.standard_normal() == legacy3.standard_normal() == legacy.standard_normal()
    assert modern2.random() == modern.random()
    assert torch.rand(3, generator=generator2).equal(torch.rand(3, generator=generator))


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_tensors_keep_their_entries_as_they_are(coalesced: bool) -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 2], [1, 0, 0]]),
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        (4, 3, 2),
        check_invariants=True,
    )
    if coalesced:
        sparse = sparse.coalesce()
    found = back(sparse)
    assert found.shape == sparse.shape and found.is_coalesced() is coalesced
    assert found._indices().equal(sparse._indices()) and found._values().equal(sparse._values())


def sparse(
    indices: Any, shape: tuple[int, ...], *, coalesced: bool = False, dtype: Any = torch.float32
) -> torch.Tensor:
    """One of which nothing is checked; `indices` int [sparse dimensions, entries]."""
    where = torch.tensor(indices, dtype=torch.int64)
    values = torch.ones(where.shape[1], *shape[where.shape[0] :]).to(dtype)
    return torch.sparse_coo_tensor(
        where, values, shape, is_coalesced=coalesced, check_invariants=False
    )


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same, entry by entry of a sparse one."""
    if (one.layout, one.shape, one.dtype) != (other.layout, other.shape, other.dtype):
        return False
    if one.layout is torch.strided:
        return one.equal(other)
    return (
        one.is_coalesced() == other.is_coalesced()
        and one._indices().equal(other._indices())
        and one._values().equal(other._values())
    )


@pytest.mark.parametrize(
    "shape",
    [(2_000_000_000, 1_000_000_000), (2**62, 1), (2**31, 2**32 - 1), (1, 2**63 - 1)],
    ids=str,
)
def test_a_sparse_tensor_may_have_any_shape_that_torch_lets_it_have(shape: tuple[int, int]) -> None:
    tensor = sparse([[0, 0], [0, shape[1] - 1]], shape)
    assert alike(back(tensor), tensor)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (sparse([[5, 1]], (10,), coalesced=True), "coalesced"),
        (sparse([[1, 1]], (10,), coalesced=True), "coalesced"),
        (sparse([[10]], (10,)), r"within \[10\]"),
        (sparse([[-1]], (10,)), r"within \[10\]"),
        (torch.empty(2**60, 0), "2^60"),
        (torch.empty(0, 2**30, 2**30, dtype=torch.uint8), "2^60"),
        (np.empty((2**60, 0), "u1"), "2^60"),
        (torch.empty([1] * 33), "32 dimensions"),
        (np.empty([1] * 33), "32 dimensions"),
        (sparse([[0]] * 33, (1,) * 33), "32 dimensions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_reader_takes_is_refused_with_its_path(value: object, expected: str) -> None:
    with pytest.raises(SettingsError, match=expected.replace("^", r"\^")) as caught:
        flatten({"model": [value]})
    assert caught.value.subject == 'state["model"][0]'


SIZES = st.sampled_from([0, 1, 2, 3, 2**20, 2**30, 2**59, 2**60, 2**62, 2**63 - 1])
SOME = st.sampled_from([0, 1, 2, 3])


@st.composite
def strange_tensors(draw: st.DrawFn) -> Any:
    """Tensors and arrays of a few values, their shapes and indices as odd as torch allows."""
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["few", "none", "array", "sparse"]))
    if kind == "few":
        count = draw(SOME)
        return torch.randint(0, 2, (count, 2)).to(dtype)
    try:
        if kind != "sparse":
            shape = draw(st.permutations([0, *draw(st.lists(SIZES, max_size=3))]))
            return np.empty(shape, "i4") if kind == "array" else torch.empty(shape, dtype=dtype)
        wide, narrow = draw(st.lists(SIZES, max_size=3)), draw(st.lists(SOME, max_size=2))
        entries = draw(SOME)
        at = [
            [draw(st.sampled_from([0, 1, 2, max(size - 1, 0)])) for _ in range(entries)]
            for size in wide
        ]
        where = torch.tensor(at, dtype=torch.int64).reshape(len(wide), entries)
        return torch.sparse_coo_tensor(
            where,
            torch.randint(0, 2, (entries, *narrow)).to(dtype),
            (*wide, *narrow),
            is_coalesced=draw(st.booleans()),
            check_invariants=False,
        )
    except (RuntimeError, ValueError):  # no tensor, no array has that shape
        return None


@settings(max_examples=examples(400), deadline=None)
@given(strange_tensors())
def test_what_flatten_takes_comes_back(value: Any) -> None:
    try:
        text, tensors = flatten([value])
    except SettingsError as error:
        assert error.subject == "state[0]"
        return
    found = unflatten(text, tensors)[0]
    if isinstance(value, torch.Tensor):
        assert alike(found, value)
    elif isinstance(value, np.ndarray):
        assert found.shape == value.shape and found.dtype == value.dtype
    else:
        assert found is None


def test_booleans_have_the_bytes_0_and_1() -> None:
    raw = torch.tensor([[0, 1, 2], [3, 0, 255]], dtype=torch.uint8)
    want = [[False, True, True], [True, False, True]]
    for value in (raw.view(torch.bool), raw.numpy().view(np.bool_), raw.view(torch.bool).t()):
        text, tensors = flatten(value)
        assert int(tensors[0].view(torch.uint8).max()) == 1
        found = unflatten(text, tensors)
        assert (found.T if tuple(found.shape) == (3, 2) else found).tolist() == want
    own = torch.tensor([True, False])
    assert flatten(own)[1][0].data_ptr() == own.data_ptr()


def test_an_empty_sparse_tensor() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (5,), check_invariants=True
    )
    assert back(sparse).to_dense().equal(torch.zeros(5))


def test_containers_that_come_back_as_plain_ones() -> None:
    value = [OrderedDict(b=1, a=2), defaultdict(list, x=[1]), torch.Size([2, 3])]
    assert same(back(value), [{"b": 1, "a": 2}, {"x": [1]}, (2, 3)])


def test_an_optimizer_resumes_from_it() -> None:
    def build() -> tuple[torch.nn.Linear, torch.optim.Adam]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.Adam(model.parameters())

    def train(model: torch.nn.Linear, optimizer: torch.optim.Adam) -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()

    model, optimizer = build()
    train(model, optimizer)
    state = back({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer)
    model2, optimizer2 = build()
    model2.load_state_dict(state["model"])
    optimizer2.load_state_dict(state["optimizer"])
    train(model2, optimizer2)
    assert all(map(torch.equal, model2.parameters(), model.parameters()))


class Pair(NamedTuple):
    one: int


class Level(IntEnum):
    LOW = 1


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "value",
    [
        1j,
        {1, 2},
        frozenset(),
        object(),
        bytearray(b"x"),
        len,
        int,
        Pair(1),
        Level.LOW,
        Counter("x"),
        np.str_("x"),
        np.complex64(1),
        np.datetime64("2020-01-01"),
        np.array(["x"]),
        np.array([None]),
        np.array([1], dtype=">i4"),
        np.zeros(1, dtype=[("a", "i4")]),
        np.ma.masked_array([1]),
        torch.zeros(1, dtype=torch.complex64),
        torch.empty(2, device="meta"),
        torch.device("cpu"),
        torch.float32,
        torch.Generator(),
        "half a pair \ud800",
        nested(60),
        CYCLE,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_stored_is_refused_with_its_path(value: object) -> None:
    with pytest.raises(SettingsError) as caught:
        flatten({"state": {"sampler": (0, value)}}, path="reader")
    assert caught.value.subject.startswith('reader["state"]["sampler"][1]')
    assert len(str(caught.value)) < 2000


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_other_sparse_layouts_are_refused() -> None:
    with pytest.raises(SettingsError, match="sparse_csr"):
        flatten(torch.zeros(2, 2).to_sparse_csr())


@pytest.mark.parametrize("key", [None, 1.5, (1,), b"x", np.int64(3), Level.LOW])
def test_keys_that_cannot_be_stored(key: object) -> None:
    with pytest.raises(SettingsError, match="as keys") as caught:
        flatten({"groups": {key: 1}})
    assert caught.value.subject == 'state["groups"]'


def test_the_deepest_tree_that_can_be_written_can_be_read() -> None:
    value = nested(47)
    assert same(back(value), value)
    with pytest.raises(SettingsError):
        flatten(nested(49))


def test_a_sequence_that_is_too_long_is_told_to_be_a_tensor() -> None:
    with pytest.raises(SettingsError, match="torch tensor or a numpy array"):
        flatten([1] * 8_000_001)


def node(value: object) -> bytes:
    return json.dumps(value).encode()


F = {"tensor": 0, "shape": [2], "dtype": "F32"}
INDICES = {"tensor": 0, "shape": [1, 2], "dtype": "I64"}
SPARSE = {"indices": INDICES, "values": F | {"tensor": 1}, "shape": [3], "coalesced": False}
ONE = [torch.zeros(2)]


@pytest.mark.parametrize(
    ("tree", "tensors"),
    [
        (b"", []),
        (b"[]", []),
        (b"{}", []),
        (b"1.5", []),
        (b'{"list": 1}', []),
        (b'{"list": [], "tuple": []}', []),
        (b'{"object": "os.system"}', []),
        (b'{"float": "0x1.8p0"}', []),
        (b'{"float": "1.5"}', []),
        (b'{"float": "0x1p99999"}', []),
        (b'{"float": "NaN"}', []),
        (b'{"float": 1}', []),
        (b'{"int": "12"}', []),
        (b'{"int": "0x"}', []),
        (b'{"int": "0x1_0"}', []),
        (b'{"dict": [["a", 1], ["a", 2]]}', []),
        (b'{"dict": [[1, 1], [true, 2]]}', []),
        (b'{"dict": [["a"]]}', []),
        (b'{"dict": [[null, 1]]}', []),
        (b'{"dict": [[{"list": []}, 1]]}', []),
        (b'{"dict": {"a": 1}}', []),
        (b'"\\ud800"', []),
        (b'{"scalar": "00", "dtype": "F32"}', []),
        (b'{"scalar": "02", "dtype": "BOOL"}', []),
        (b'{"scalar": "zz", "dtype": "U8"}', []),
        (b'{"scalar": "00", "dtype": "O"}', []),
        (b"null", ONE),
        (node(F), []),
        (node({"list": [F, F]}), ONE),
        (node(F | {"tensor": -1}), ONE),
        (node(F | {"tensor": True}), [*ONE, *ONE]),
        (node(F | {"tensor": 10**30}), ONE),
        (node(F | {"shape": [3]}), ONE),
        (node(F | {"shape": [-2]}), ONE),
        (node(F | {"shape": [True, 2]}), ONE),
        (node(F | {"shape": "2"}), ONE),
        (node(F | {"shape": [0, 2**62, 2**62]}), [torch.zeros(0)]),
        (node(F | {"shape": [2] + [1] * 40}), ONE),
        (node(F | {"dtype": "I32"}), ONE),
        (node(F | {"dtype": "F31"}), ONE),
        (node(F | {"dtype": ["F32"]}), ONE),
        (node(F | {"more": 1}), ONE),
        (node({"ndarray": 0, "shape": [2], "dtype": "BF16"}), ONE),
        (node({"bytes": 0}), ONE),
        (node({"sparse_coo": []}), []),
        (node({"sparse_coo": {"indices": 1}}), []),
        (node({"sparse_coo": SPARSE | {"shape": [2]}}), [torch.tensor([0, 2]), *ONE]),
        (node({"sparse_coo": SPARSE}), [torch.tensor([0, -1]), *ONE]),
        (node({"sparse_coo": SPARSE | {"shape": []}}), [torch.tensor([0, 1]), *ONE]),
        (node({"sparse_coo": SPARSE | {"shape": [3, 1]}}), [torch.tensor([0, 1]), *ONE]),
        (node({"sparse_coo": SPARSE | {"coalesced": 1}}), [torch.tensor([0, 1]), *ONE]),
        (node({"sparse_coo": SPARSE | {"coalesced": True}}), [torch.tensor([1, 1]), *ONE]),
        (node({"sparse_coo": SPARSE | {"coalesced": True}}), [torch.tensor([1, 0]), *ONE]),
        (node({"sparse_coo": SPARSE | {"values": None}}), [torch.tensor([1, 0])]),
        (node({"sparse_coo": SPARSE | {"shape": [2**63]}}), [torch.tensor([0, 1]), *ONE]),
        (node({"sparse_coo": SPARSE | {"shape": [2**70]}}), [torch.tensor([0, 1]), *ONE]),
        (node({"sparse_coo": SPARSE | {"shape": [0, 2**62, 2]}}), [torch.tensor([0, 1]), *ONE]),
        (node(F | {"shape": [2**60, 0]}), [torch.zeros(0)]),
        (b'{"list": [' * 60 + b"]}" * 60, []),
    ],
)
def test_trees_that_no_writer_made(tree: bytes, tensors: list[torch.Tensor]) -> None:
    with pytest.raises(MalformedObject) as caught:
        unflatten(tree, tensors, name="chunk 7")
    assert caught.value.subject == "chunk 7"
    assert len(str(caught.value)) < 1000


def test_some_keys_need_only_the_tensors_that_they_name() -> None:
    tree, tensors = flatten({"a": [torch.arange(2), b"x"], 7: torch.zeros(3), "b": 1.5})
    some = unflatten_keys(tree, {0: tensors[0], 1: tensors[1]}, ("a", "b", "c"))
    assert some is not None and some.keys() == {"a", "b"} and some["b"] == 1.5
    assert torch.equal(some["a"][0], torch.arange(2)) and some["a"][1] == b"x"
    assert unflatten_keys(tree, {1: tensors[1]}, ("a",)) is None
    assert unflatten_keys(flatten([1])[0], {}, ("a",)) == {}


@pytest.mark.parametrize(
    "items",
    [
        '["a",{"bytes":0}],["a",{"bytes":1}]',
        '["a",{"list":[{"bytes":0},{"bytes":0}]}]',
        '["a",{"bytes":"0"}]',
        '["a"]',
        '["a",{"set":[]}]',
    ],
)
def test_what_is_under_some_keys_is_checked(items: str) -> None:
    given = {number: torch.zeros(1, dtype=torch.uint8) for number in range(2)}
    with pytest.raises(MalformedObject):
        unflatten_keys(f'{{"dict":[{items}]}}'.encode(), given, ("a",))
