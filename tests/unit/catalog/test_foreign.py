"""Reading checkpoints of other tools, written by these tools: whole, in pieces, and damaged."""

from __future__ import annotations

import json
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from recpoint.catalog.foreign import contents
from recpoint.catalog.foreign.contents import ForeignCheckpoint
from recpoint.catalog.foreign.inert_pickle import unpickled
from recpoint.catalog.foreign.names import EntryNames
from recpoint.catalog.foreign.recognize import is_foreign, open_foreign
from recpoint.errors import ForeignObject, MalformedObject, ObjectNotFound

#: torch warns that it saves in a single process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

TENSORS = {
    "users.weight": torch.arange(203 * 6, dtype=torch.float32).reshape(203, 6),
    "half": torch.randn(7, 3).half(),
    "counts": torch.arange(5),
    "scale": torch.tensor(2.5),
    "none": torch.zeros(0, 4),
    "bf": torch.randn(3, 2, 2).bfloat16(),
}


def torch_file(folder: Path) -> Path:
    torch.save({"model": TENSORS, "epoch": 3, "who": Unknown()}, folder / "a.pt")
    return folder / "a.pt"


class Unknown:
    """A class that no reader knows."""

    def __reduce__(self) -> Any:
        return os.path.exists, ("/",)


def distributed(folder: Path) -> Path:
    save_distributed({"model": dict(TENSORS), "epoch": 3}, checkpoint_id=folder / "d", no_dist=True)
    return folder / "d"


def safetensors(folder: Path) -> Path:
    save_file(TENSORS, folder / "a.safetensors")
    return folder / "a.safetensors"


def indexed(folder: Path) -> Path:
    names = sorted(TENSORS)
    files = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, held in files.items():
        save_file({name: TENSORS[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


FORMS = [torch_file, distributed, safetensors, indexed]


@pytest.mark.parametrize("write", FORMS)
def test_each_form_is_recognized_and_read_bit_for_bit(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path)
    assert is_foreign(str(path))
    with open_foreign(str(path)) as checkpoint:
        prefix = "model." if write in (torch_file, distributed) else ""
        assert set(checkpoint.entries) == {f"{prefix}{name}" for name in TENSORS}
        for name, tensor in TENSORS.items():
            entry = checkpoint.entries[f"{prefix}{name}"]
            assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape))
            assert torch.equal(checkpoint.whole(entry.name), tensor), name
        assert checkpoint.scalars == ({"epoch": 3} if prefix else {})
        if write is torch_file:
            assert checkpoint.left_out == {"who": "an object of posix.exists"} or (
                "exists" in checkpoint.left_out["who"]
            )


@pytest.mark.parametrize("write", FORMS)
def test_rows_are_read_in_pieces(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "PIECE_BYTES", 1000)
    with open_foreign(str(write(tmp_path))) as checkpoint:
        (name,) = [name for name in checkpoint.entries if name.endswith("users.weight")]
        pieces = list(checkpoint.pieces(name, range(5, 200)))
        read = [checkpoint.read(name, piece) for piece in pieces]
        assert len(read) == 5 and all(values.nbytes <= 1000 for values in read)
        assert torch.equal(torch.cat(read), TENSORS["users.weight"][5:200])
        # Into memory of another dtype, and into columns of a wider tensor.
        for target in (torch.zeros(9, 6, dtype=torch.float64), torch.zeros(9, 8)[:, 1:7]):
            checkpoint.read_into(name, range(4, 13), target)
            assert torch.equal(target.float(), TENSORS["users.weight"][4:13])


def test_views_of_one_storage_and_parameters_are_read(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(6, 4)
    saved = {
        "view": base[2:5, 1:3],
        "turned": base.t(),
        "parameter": nn.Parameter(base[1:]),
        "small": torch.tensor([1, 2], dtype=torch.uint16),
    }
    torch.save(saved, tmp_path / "a.pt")
    with open_foreign(str(tmp_path / "a.pt")) as checkpoint:
        for name, tensor in saved.items():
            assert torch.equal(checkpoint.whole(name), tensor.detach()), name
            assert torch.equal(checkpoint.read(name, range(1, 2)), tensor.detach()[1:2])


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_tensors_whose_values_are_not_their_bytes_are_left_out(tmp_path: Path) -> None:
    values = torch.randn(4, 3)
    saved = {
        "kept": values,
        "negated": torch._neg_view(values),
        "complex": torch.zeros(3, dtype=torch.complex64),
        "quantized": torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
    }
    torch.save(saved, tmp_path / "a.pt")
    with open_foreign(str(tmp_path / "a.pt")) as checkpoint:
        assert torch.equal(checkpoint.whole("kept"), values) and len(checkpoint.entries) == 1
        assert checkpoint.left_out == {
            "negated": "a tensor whose values are changed by {'neg': True}",
            "complex": "a tensor in a torch.ComplexFloatStorage",
            "quantized": "an object of torch._utils._rebuild_qtensor",
        }
    tensors = {name: saved[name] for name in ("kept", "complex")}
    save_distributed(tensors, checkpoint_id=tmp_path / "d", no_dist=True)
    with open_foreign(str(tmp_path / "d")) as checkpoint:
        assert list(checkpoint.entries) == ["kept"]
        assert checkpoint.left_out == {"complex": "a tensor of torch.complex64"}


def test_a_module_saved_whole_is_left_out_and_not_made(tmp_path: Path) -> None:
    torch.save({"net": nn.Linear(2, 1)}, tmp_path / "a.pt")
    with open_foreign(str(tmp_path / "a.pt")) as checkpoint:
        assert not checkpoint.entries
        assert checkpoint.left_out == {"net": "an object of torch.nn.modules.linear.Linear"}


class Harm:
    """Would write a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_nothing_that_a_pickle_names_is_called(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "harm": Harm(tmp_path / "made")}, tmp_path / "a.pt")
    with open_foreign(str(tmp_path / "a.pt")) as checkpoint:
        assert list(checkpoint.entries) == ["w"] and "mkdir" in checkpoint.left_out["harm"]
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "made")))
    with pytest.raises(MalformedObject, match="the index that"):
        open_foreign(str(tmp_path / "d"))
    assert not (tmp_path / "made").exists()


def rewritten(path: Path, change: Any) -> None:
    """Write an archive anew, with its pickle changed."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, change(content) if name.endswith("data.pkl") else content)


def replaced(content: bytes, old: bytes, new: bytes) -> bytes:
    assert old in content
    return content.replace(old, new, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # The rows of the shape, the elements of the storage, and where the tensor begins.
        (lambda c: replaced(c, b"K\x07K\x03\x86", b"K\xffK\x03\x86"), "within the 42 bytes"),
        (lambda c: replaced(c, b"cpuq\x06K\x15", b"cpuq\x06K\xff"), "storage '0' of 510 bytes"),
        (lambda c: c[:-20], "a pickle that cannot be read"),
        (lambda c: replaced(c, b"\x01\x00\x00\x000q", b"\x01\x00\x00\x009q"), "storage '9'"),
    ],
)
def test_a_torch_file_that_lies_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    torch.save({"half": TENSORS["half"]}, tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", change)
    with pytest.raises(MalformedObject, match=message):
        open_foreign(str(tmp_path / "a.pt"))


@pytest.mark.parametrize("write", FORMS)
def test_a_file_cut_short_is_refused(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path)
    files = [path] if path.is_file() else [*path.glob("*.distcp"), *path.glob("*-1.safetensors")]
    for file in files:
        os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(MalformedObject, match=files[0].name):
        open_foreign(str(path))


@pytest.mark.parametrize("write", FORMS)
def test_any_changed_byte_is_read_or_refused(write: Any, tmp_path: Path) -> None:
    """Nothing but an error of recpoint comes out of a damaged file."""
    path = write(tmp_path)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    draw = random.Random(11)
    refused = 0
    for file in files:
        content = file.read_bytes()
        for _ in range(120):
            damaged = bytearray(content)
            for place in draw.choices(range(len(content)), k=draw.choice([1, 3])):
                damaged[place] = draw.randrange(256)
            file.write_bytes(damaged)
            try:
                with open_foreign(str(path)) as checkpoint:
                    for name in checkpoint.entries:
                        checkpoint.whole(name)
            except (MalformedObject, ForeignObject):
                refused += 1
        file.write_bytes(content)
    assert refused > 5  # most bytes are those of tensors


def test_a_pickle_cannot_ask_for_room_for_objects_that_it_does_not_have(tmp_path: Path) -> None:
    content = pickle.dumps([1, "abc", (2, "d")], protocol=2)
    place = content.index(b"q")  # notes an object under the number that is the next byte
    damaged = content[:place] + b"r" + (1 << 20).to_bytes(4, "little") + content[place + 2 :]
    assert unpickled(content, tmp_path / "a") == [1, "abc", (2, "d")]
    with pytest.raises(MalformedObject, match="object 1 is noted as number 1048576"):
        unpickled(damaged, tmp_path / "a")


def test_pickles_with_any_changed_byte_are_read_or_refused(tmp_path: Path) -> None:
    torch.save({"model": TENSORS, "list": [1, 2, {"a": (3, "b")}]}, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    draw = random.Random(12)

    def change(pickled: bytes) -> bytes:
        damaged = bytearray(pickled)
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        return bytes(damaged)

    refused = 0
    for _ in range(300):
        (tmp_path / "a.pt").write_bytes(content)
        rewritten(tmp_path / "a.pt", change)
        try:
            with open_foreign(str(tmp_path / "a.pt")) as checkpoint:
                for name in checkpoint.entries:
                    checkpoint.whole(name)
        except MalformedObject:
            refused += 1
    assert refused > 100


def test_an_index_that_names_what_is_not_there_is_refused(tmp_path: Path) -> None:
    index = indexed(tmp_path) / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    for change, message in (
        ({"half": "model-3.safetensors"}, "model-3.safetensors"),
        ({"half": "../model-1.safetensors"}, "names of files beside the index"),
        ({"other": "model-1.safetensors"}, "'other' in 'model-1.safetensors'"),
    ):
        changed = {**document, "weight_map": {**document["weight_map"], **change}}
        index.write_text(json.dumps(changed))
        with pytest.raises(MalformedObject, match=message):
            open_foreign(str(tmp_path))
    for text, message in (("{", "the JSON of an index"), ("{}", "no names of files")):
        index.write_text(text)
        with pytest.raises(MalformedObject, match=message):
            open_foreign(str(tmp_path))


def test_a_distributed_checkpoint_that_lies_is_refused(tmp_path: Path) -> None:
    index = distributed(tmp_path) / ".metadata"
    content = index.read_bytes()
    good: Any = pickle.loads(content)

    def refused(message: str) -> None:
        index.write_bytes(pickle.dumps(good))
        with pytest.raises(MalformedObject, match=message), open_foreign(str(index.parent)) as c:
            c.whole("model.half")

    described = good.state_dict_metadata["model.half"]
    described.size = torch.Size([9, 3])
    refused("chunks that fill each tensor once")
    described.chunks[0].sizes = torch.Size([9, 3])
    refused("chunk of 'model.half'")
    with open_foreign(str(index.parent)) as checkpoint:  # before anything is read
        checkpoint.check("model.half", range(0))
        checkpoint.check("model.users.weight")
        with pytest.raises(MalformedObject, match=r"chunk of 'model\.half'"):
            checkpoint.check("model.half")
    described.chunks[0].sizes = torch.Size([9, -3])
    refused("chunks that fill each tensor once")
    good = pickle.loads(content)
    key = next(key for key in good.storage_data if key.fqn == "model.half")
    good.storage_data[key].relative_path = "missing.distcp"
    refused("missing.distcp")
    good.storage_data[key].relative_path = "../a.distcp"
    refused("files within the directory")
    del good.storage_data[key]
    refused("the index that")


def test_an_object_in_another_form_is_left_out(tmp_path: Path) -> None:
    path = distributed(tmp_path)
    index: Any = pickle.loads((path / ".metadata").read_bytes())
    (place,) = (info for key, info in index.storage_data.items() if key.fqn == "epoch")
    with (path / place.relative_path).open("r+b") as file:
        file.seek(place.offset)
        file.write(bytes(place.length))
    with open_foreign(str(path)) as checkpoint:
        assert "cannot be read" in checkpoint.left_out["epoch"] and not checkpoint.scalars
        assert torch.equal(checkpoint.whole("model.half"), TENSORS["half"])


def test_overlapping_chunks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "d"
    save_distributed({"a": torch.arange(8.0).reshape(4, 2)}, checkpoint_id=path, no_dist=True)
    good: Any = pickle.loads((path / ".metadata").read_bytes())
    described = good.state_dict_metadata["a"]
    kind = type(described.chunks[0])
    described.size = torch.Size([4, 4])
    described.chunks = [
        kind(torch.Size([0, 0]), torch.Size([4, 2])),
        kind(torch.Size([0, 1]), torch.Size([4, 2])),
    ]
    (key,) = good.storage_data
    place = good.storage_data.pop(key)
    for chunk in described.chunks:
        good.storage_data[type(key)("a", chunk.offsets)] = place
    (path / ".metadata").write_bytes(pickle.dumps(good))
    with pytest.raises(MalformedObject, match="fill each tensor once"):
        open_foreign(str(path))


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"text of a file")
    torch.save({"a": torch.ones(1)}, tmp_path / "c", _use_new_zipfile_serialization=False)
    (tmp_path / "d.pt").write_bytes(b"PK\x03\x04" + bytes(60))
    (tmp_path / "e.safetensors").write_bytes(b"\xff" * 40)
    for name, error, message in (
        ("a", MalformedObject, "no bytes"),
        ("b", ForeignObject, "text of"),
        ("c", ForeignObject, "before 1.6"),
        ("d.pt", MalformedObject, "ZIP"),
        ("e.safetensors", MalformedObject, "safetensors"),
        (".", ForeignObject, "a directory with"),
        ("f", ObjectNotFound, "nothing"),
    ):
        with pytest.raises(error, match=message):
            open_foreign(str(tmp_path / name))
    assert not is_foreign("s3://bucket/a") and not is_foreign(str(tmp_path))
    assert is_foreign(f"file://{tmp_path}/a")
    with pytest.raises(ForeignObject, match="a URL of a store"):
        open_foreign("s3://bucket/a.pt")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ForeignObject, match="recpoint seed"):
        open_foreign(str(tmp_path))


def _names(names: list[str], model: list[str], renames: dict[str, str]) -> EntryNames:
    return EntryNames(names, model, renames)


def test_the_prefix_is_that_of_most_names() -> None:
    names = ["net.a.weight", "net.b.w", "opt.state.a.weight.sum", "ema.b.w", "other"]
    matches = _names(names, ["a.weight", "b.w"], {})
    assert matches.prefix == "net." and not matches.faults
    assert matches.entry_names == {"a.weight": "net.a.weight", "b.w": "net.b.w"}
    assert matches.entry("a") == "net.a.weight" and matches.entry("ema.b.w") == "ema.b.w"
    assert matches.entry("c") is None


def test_names_that_can_be_two_entries_are_faults() -> None:
    matches = _names(["net.a", "ema.a"], ["a"], {})
    assert matches.tie is not None and "both under 'ema.' and under 'net.'" in matches.tie
    assert not matches.entry_names and not matches.faults
    matches = _names(["net.a", "ema.a"], ["a"], {"ema.*": "*"})
    assert not matches.faults and matches.tie is None and matches.entry_names == {"a": "ema.a"}
    matches = EntryNames(["net.a", "ema.a"], [], {}, ["a"])
    assert matches.tie is not None and matches.entry("a") is None
    matches = _names(["old.a", "older.a"], ["a"], {"old.*": "*", "older.*": "*"})
    assert matches.faults == ["'old.a' and 'older.a' would both become 'a'"]


def test_patterns_are_matched_behind_the_prefix_too() -> None:
    matches = _names(["net.emb_u.weight", "net.top.w"], ["u.weight", "top.w"], {"emb_*": "*"})
    assert not matches.faults
    assert matches.entry_names == {"u.weight": "net.emb_u.weight", "top.w": "net.top.w"}
    matches = _names(["net.top.w"], ["top.w"], {"embed_*": "*"})
    assert matches.faults == ["no entry matches 'embed_*', which names= renames"]


def test_reading_is_bounded_by_a_piece(tmp_path: Path) -> None:
    """No reader keeps a table that it has read."""
    torch.save({"a": torch.zeros(1 << 22)}, tmp_path / "a.pt")
    with open_foreign(str(tmp_path / "a.pt")) as checkpoint:
        sizes = _piece_sizes(checkpoint, "a")
    assert sizes == [contents.PIECE_BYTES]


def _piece_sizes(checkpoint: ForeignCheckpoint, name: str) -> list[int]:
    values = [checkpoint.read(name, piece) for piece in checkpoint.pieces(name)]
    return [value.untyped_storage().nbytes() for value in values]
