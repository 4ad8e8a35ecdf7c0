"""Which run URLs are taken, how they are spelled, and that credentials in them are refused."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from recpoint.catalog.store.local import LocalStore
from recpoint.catalog.store.store import open_store
from recpoint.errors import SettingsError


@pytest.mark.parametrize(
    "url",
    [
        "",
        "   ",
        "s3://",
        "s3:///prefix",
        "s3://a",
        "s3://bucket/../other",
        "s3://bucket/a/./b",
        "s3://bucket/a\\b",
        "s3://buck et/a",
        "nosuchscheme://bucket/run",
        "simplecache::s3://bucket/run",
        "file://host/run",
        "file:relative",
        "file:///a/../b",
        "file:///",
        "/",
        "a\0b",
        "s3://[bucket/run",
        os.fsdecode(b"/data/mod\xe8le"),
        os.fsdecode(b"s3://bucket/mod\xe8le"),
    ],
)
def test_urls_that_cannot_work_are_refused(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        open_store(url)
    assert "run URL" in caught.value.subject
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("url", "found", "next_step"),
    [
        ("s3://my_bucket!/run", "the bucket 'my_bucket!'", "correct the bucket's name"),
        ("s3://a/run", "the bucket 'a'", "correct the bucket's name"),
        ("s3:///run", "no bucket", "s3://BUCKET/PREFIX"),
        ("https://minio:9000/bucket/run", "the address of a web server", "AWS_ENDPOINT_URL"),
        ("https:///run", "the address of a web server", "AWS_ENDPOINT_URL"),
        ("http://10.0.0.1:9000/bucket/run", "the address of a web server", "AWS_ENDPOINT_URL"),
        pytest.param(
            "gs://bucket/run", "no package for gs://", "pip install gcsfs",
            marks=pytest.mark.skipif(find_spec("gcsfs") is not None, reason="gcsfs is installed"),
        ),
        pytest.param(
            "abfs://box@account.dfs.core.windows.net/run", "no package for abfs://",
            "pip install adlfs",
            marks=pytest.mark.skipif(find_spec("adlfs") is not None, reason="adlfs is installed"),
        ),
        ("ftp://host/run", "the scheme 'ftp', which needs host besides", "mount that store"),
        ("nosuchscheme://bucket/run", "the scheme 'nosuchscheme'", "correct the run URL"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(url: str, found: str, next_step: str) -> None:
    with pytest.raises(SettingsError) as caught:
        open_store(url)
    assert found in caught.value.found and next_step in caught.value.next_step
    assert caught.value.subject.startswith("run URL ")


@pytest.mark.parametrize("url", ["http://x/run", "https://bucket/run"])
def test_the_host_of_a_web_server_is_no_bucket(url: str) -> None:
    assert open_store(url).url == url


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:HIDDEN@bucket/run",
        "s3://HIDDEN@bucket/run",
        "s3://bucket/run?key=KEY&secret=HIDDEN",
        "s3://bucket/run#HIDDEN",
        "abfs://container:HIDDEN@account.dfs.core.windows.net/run",
        "file://user:HIDDEN@host/run",
        "s3::HIDDEN@://bucket",
        "gs://u:HIDDEN@/run",
        "s3://KEY:HIDDEN#x@bucket/run",
        "s3://KEY:HIDDEN?x@bucket/run",
        "https://user:HIDDEN?x#y@host/run",
        "https://user:x#HIDDEN@host/run",
        "s3://KEY:HIDDEN/x@bucket/run",
        "s3://KEY/HIDDEN\\x@bucket/run",
        "s3://KEY:HIDDEN%40bucket/run",
        "s3:KEY:HIDDEN#x@bucket/run",
        "s3::HIDDEN#x@://bucket",
        "file://user:HIDDEN#x@host/run",
        "s3://KEY:HIDDEN/bucket/run",
        "https://KEY:HIDDEN/bucket/run",
        "s3://KEY:x/HIDDEN/bucket/run",
        "s3://KEY:x#HIDDEN/bucket/run",
        "s3:KEY:HIDDEN/bucket/run",
        "gs://:HIDDEN/run",
        "file://KEY:HIDDEN/run",
        "KEY:HIDDEN@bucket/run",
        "KEY:HIDDEN%40bucket",
        "KEY:x/HIDDEN@bucket/run",
    ],
)
def test_credentials_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        open_store(url)
    assert "HIDDEN" not in str(caught.value) + repr(caught.value)


def test_a_path_with_these_characters_further_on_is_one(tmp_path: Path) -> None:
    for path in (tmp_path / "a:b@c", "./a:b@c", "a@b:c", "day/12:00@home"):
        assert isinstance(open_store(str(path)), LocalStore)


def test_one_place_has_one_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = str(tmp_path / "a b" / "run")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c").mkdir()
    quoted = f"file://{tmp_path}/a%20b/run"
    for url in [wanted, wanted + "/", quoted, quoted + "/", "a b/run", "c/../a b//run"]:
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.url == wanted
    assert open_store("s3://bucket//a/b/").url == "s3://bucket/a/b"
    assert open_store("S3://bucket").url == "s3://bucket"
    assert open_store("memory://x/y/").url == "memory://x/y"


def test_a_relative_path_begins_from_a_directory_that_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (unnamed := tmp_path / os.fsdecode(b"mod\xe8les")).mkdir()
    monkeypatch.chdir(unnamed)
    with pytest.raises(SettingsError, match="not UTF-8 .* the directory that it is relative to"):
        open_store("run")


def test_the_home_directory_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/run").url == str(tmp_path / "run")


def test_opening_a_store_touches_nothing(tmp_path: Path) -> None:
    open_store(str(tmp_path / "run"))
    open_store("s3://bucket-that-is-nowhere/run")
    assert os.listdir(tmp_path) == []
