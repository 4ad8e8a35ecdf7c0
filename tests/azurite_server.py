"""Runs Azurite, Microsoft's emulator of Azure Blob Storage, which `make azure` installs."""

from __future__ import annotations

import base64
import http.client
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from recpoint.testing.seaweed import free_ports
from tests.polling import until

__all__ = ["AzuriteServer"]

_HOST: Final = "127.0.0.1"
_INSTALLED: Final = Path(__file__).resolve().parents[1] / "build/azurite/node_modules/azurite"


class AzuriteServer:
    """Runs one server, which can be killed and started again on the same data.

    Args:
        directory: holds data and log; is created.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_ports(1)
        self._account = "account" + secrets.token_hex(4)
        self._account_key = base64.b64encode(secrets.token_bytes(64)).decode()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> AzuriteServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def environment(self, *, port: int | None = None) -> dict[str, str]:
        """Return environment variables with which `open_store("az://…")` finds it.

        Args:
            port: of a proxy before the server; None: the server's own.
        """
        settings = {
            "DefaultEndpointsProtocol": "http",
            "AccountName": self._account,
            "AccountKey": self._account_key,
            "BlobEndpoint": f"http://{_HOST}:{port or self.port}/{self._account}",
        }
        joined = ";".join(f"{name}={value}" for name, value in settings.items())
        return {"AZURE_STORAGE_CONNECTION_STRING": joined}

    def start(self) -> None:
        """Start the server and wait until it answers, unless it runs."""
        if self._process is not None:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "azurite.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    Path(sys.executable).with_name("node"),
                    _INSTALLED / "dist/src/blob/main.js",
                    "--silent",
                    "--disableTelemetry",
                    # The SDK asks for a later version of the protocol than the emulator knows.
                    "--skipApiVersionCheck",
                    "--location",
                    self.directory,
                    "--blobHost",
                    _HOST,
                    "--blobPort",
                    str(self.port),
                ],
                env={**os.environ, "AZURITE_ACCOUNTS": f"{self._account}:{self._account_key}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self._answers)

    def kill(self) -> None:
        """End the server with SIGKILL."""
        if self._process is not None:
            # `node` of the wheel is a script that starts the server: both are of this group.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/")
            connection.getresponse().read()
        except OSError:
            return False
        finally:
            connection.close()
        return True
