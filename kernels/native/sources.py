"""Digests the C++ sources, to check that the compiled kernels were built from them."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["digest"]


def digest(kernels: Path) -> str | None:
    """Digest of all C++ files below the folder of the kernels; None if there are none.

    The build of recpoint loads this file by its path, so the file imports nothing of recpoint.
    """
    files = sorted(path for kind in ("*.cpp", "*.h") for path in kernels.glob(f"*/{kind}"))
    if not files:
        return None
    sha256 = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        sha256.update(f"{file.parent.name}/{file.name} {len(content)}\n".encode() + content)
    return sha256.hexdigest()
