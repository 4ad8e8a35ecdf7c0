"""The command info: versions, and what runs here."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING

from rich.table import Table

from recpoint.catalog.staging import staged
from recpoint.cli.reporting import JsonOption, Result, command
from recpoint.dashboards import terminal
from recpoint.format.version import FORMAT_VERSION

if TYPE_CHECKING:  # kernels import torch, which takes longer than any other command's help
    from recpoint.kernels.implementation import Implementation

__all__ = ["info"]

_PACKAGES = ("torch", "triton", "numba", "numpy", "fsspec", "s3fs", "prefect", "pandas", "pyarrow")


@command
def info(json_output: JsonOption = False) -> Result:
    """Versions, which kernels run here and why, devices, staging area."""
    import torch

    from recpoint.kernels.implementation import implementations, vector_extension
    from recpoint.trainer_plugin import huge_pages

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    kernels = implementations()
    versions = {name: _version(name) for name in _PACKAGES}
    document = {
        "recpoint": _version("recpoint"),
        "format": FORMAT_VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "kernels": [kernel._asdict() for kernel in kernels],
        "cuda_devices": devices,
        "cpu_threads": torch.get_num_threads(),
        "vector_extension": vector_extension(),
        "staging": str(staged.default_staging_root()),
        "huge_pages": huge_pages.policy(),
        "huge_pages_from_bytes": huge_pages.SMALLEST_BYTES,
    }
    packages = ", ".join(f"{name} {found or '(none)'}" for name, found in versions.items())
    smallest = terminal.bytes_text(huge_pages.SMALLEST_BYTES)
    fields = [
        ("recpoint", f"{document['recpoint']}, format {FORMAT_VERSION}"),
        ("python", f"{document['python']} on {document['platform']}"),
        ("packages", packages),
        ("threads", document["cpu_threads"]),
        ("vectors", document["vector_extension"] or "not known"),
        ("CUDA devices", ", ".join(devices) or "none"),
        ("staging", document["staging"]),
        ("huge pages", f"{document['huge_pages']}; asked for tables of {smallest} and more"),
    ]
    return Result(document, terminal.fields_table(fields), _kernels_table(kernels))


def _kernels_table(kernels: list[Implementation]) -> Table:
    """One line a kernel and device of its tensors."""
    table = terminal.plain_table("Kernels")
    for heading in ("kernel", "tensors on", "runs", "why"):
        table.add_column(heading)
    for kernel in kernels:
        why = terminal.shown(kernel.why)
        table.add_row(kernel.kernel, kernel.device, kernel.name or "nothing", why)
    return table


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
