"""The commands that run things on this host: agent, server, demo; and info."""

from __future__ import annotations

import platform
from importlib import metadata

from recpoint.catalog import staged
from recpoint.cli.reporting import JsonOption, Result, command
from recpoint.dashboards import terminal
from recpoint.format.version import FORMAT_VERSION

__all__ = ["info"]

_PACKAGES = ("torch", "triton", "numba", "numpy", "fsspec", "s3fs", "prefect", "pandas", "pyarrow")


@command
def info(json_output: JsonOption = False) -> Result:
    """Versions, and which kernels run here."""
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    document = {
        "recpoint": _version("recpoint"),
        "format": FORMAT_VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "kernels": {"cpu": "numba", "cuda": "triton" if devices else None},
        "cuda_devices": devices,
        "cpu_threads": torch.get_num_threads(),
        "staging": str(staged.default_staging_root()),
    }
    packages = (f"{name} {_version(name) or '(not installed)'}" for name in _PACKAGES)
    fields = [
        ("recpoint", f"{document['recpoint']}, format {FORMAT_VERSION}"),
        ("python", f"{document['python']} on {document['platform']}"),
        ("packages", ", ".join(packages)),
        ("kernels", f"tables on a CPU: numba; on a GPU: {'triton' if devices else 'no GPU here'}"),
        ("devices", ", ".join(devices) or "none"),
        ("staging", document["staging"]),
    ]
    return Result(document, terminal.fields_table(fields))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
