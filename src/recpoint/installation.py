"""Says how to add an extra to recpoint as it is installed here: from a clone, a wheel or git.

pip records where a package came from in `direct_url.json` (PEP 610). A name alone would ask a
package index, which may not have the project.
"""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["install_command"]


def install_command(extra: str, *, distribution: metadata.Distribution | None = None) -> str:
    """Return the command that installs an extra of recpoint.

    Args:
        extra: name of the extra, such as `dashboard`.
        distribution: recpoint as it is installed; None: as this process finds it.

    Returns:
        A `pip install` command. It names the place that recpoint was installed from; if that is not
        recorded, or is a local file that is gone, it names the project.
    """
    by_name = f"pip install 'recpoint[{extra}]'"
    try:
        installed = metadata.distribution("recpoint") if distribution is None else distribution
        origin = json.loads(installed.read_text("direct_url.json") or "null")
        return _from_origin(origin, extra) or by_name
    except (metadata.PackageNotFoundError, OSError, ValueError, KeyError, TypeError):
        return by_name


def _from_origin(origin: dict[str, Any] | None, extra: str) -> str | None:
    if origin is None:
        return None
    text = origin["url"]
    url = urlsplit(text)
    if url.username is not None or url.password is not None:
        return None  # a credential belongs in no message
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        source = f"{vcs['vcs']}+{text}@{vcs['commit_id']}"
        return f"pip install {shlex.quote(f'recpoint[{extra}] @ {source}')}"
    if url.scheme != "file":
        return f"pip install {shlex.quote(f'recpoint[{extra}] @ {text}')}"
    path = Path(unquote(url.path))
    if not path.exists():
        return None
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{path}[{extra}]')}"
