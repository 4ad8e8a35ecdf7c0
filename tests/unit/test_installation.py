"""The advice to install an extra works with the place that recpoint was installed from."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from recpoint.installation import install_command

BY_NAME = "pip install 'recpoint[flows]'"


def installed(directory: Path, origin: object) -> metadata.Distribution:
    """An installation that pip has recorded like this; None: from an index."""
    found = directory / "recpoint-0.1.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: recpoint\nVersion: 0.1.0\n")
    if origin is not None:
        text = origin if isinstance(origin, str) else json.dumps(origin)
        (found / "direct_url.json").write_text(text)
    return metadata.Distribution.at(found)


@pytest.mark.parametrize("editable", [True, False])
def test_a_clone_is_named(tmp_path: Path, editable: bool) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    info = {"editable": True} if editable else {}
    found = installed(tmp_path, {"url": clone.as_uri(), "dir_info": info})
    option = "-e " if editable else ""
    expected = f"pip install {option}'{clone}[flows]'"
    assert install_command("flows", distribution=found) == expected


def test_a_wheel_is_named_while_it_is_there(tmp_path: Path) -> None:
    wheel = tmp_path / "recpoint-0.1.0-cp311-abi3-linux_x86_64.whl"
    wheel.touch()
    found = installed(tmp_path, {"url": wheel.as_uri(), "archive_info": {}})
    assert install_command("flows", distribution=found) == f"pip install '{wheel}[flows]'"
    wheel.unlink()
    assert install_command("flows", distribution=found) == BY_NAME


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, BY_NAME),
        ("{", BY_NAME),
        ({"url": "https://me:secret@example.org/recpoint.git", "vcs_info": {}}, BY_NAME),
        (
            {
                "url": "https://example.org/recpoint.git",
                "vcs_info": {"vcs": "git", "commit_id": "0123abc"},
            },
            "pip install 'recpoint[flows] @ git+https://example.org/recpoint.git@0123abc'",
        ),
        (
            {"url": "https://example.org/recpoint-0.1.0.whl", "archive_info": {}},
            "pip install 'recpoint[flows] @ https://example.org/recpoint-0.1.0.whl'",
        ),
    ],
)
def test_what_is_not_local_is_named_by_its_url(tmp_path: Path, origin: Any, expected: str) -> None:
    assert install_command("flows", distribution=installed(tmp_path, origin)) == expected
