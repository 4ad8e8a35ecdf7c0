"""Serves predictions of the example's DLRM over HTTP while a trainer trains it.

python -m recpoint agent &
python examples/train_dlrm.py --run ./runs/retail &
python examples/serve.py --run ./runs/retail --port 8080
curl localhost:8080/status
curl localhost:8080/predict -d '{"sparse": [[5, 7, 9, 0, 12, 3, 88, 99]]}'
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from recpoint import Follower
from recpoint.errors import NotServing
from train_dlrm import build_model, open_reader


def arguments() -> argparse.Namespace:
    """Parse the command line; --data, --rows and --keyed must be the same as the trainer's."""
    add = (parser := argparse.ArgumentParser(description=__doc__.splitlines()[0])).add_argument
    add("--run", required=True, help="URL of the run to follow")
    add("--channel", default="newest", choices=("newest", "validated", "published"))
    add("--port", type=int, default=8080, help="0: any free port; it is printed")
    add("--poll", type=float, default=2.0, help="seconds between two reads of the run")
    add("--quantized", action="store_true", help="keep rows as codes")
    add("--threads", type=int, default=1, help="torch threads")
    add("--data", default="retail", help="same as for train_dlrm.py")
    add("--rows", type=int, default=1 << 18, help="same as for train_dlrm.py")
    add("--keyed", action="store_true", help="same as for train_dlrm.py")
    parser.set_defaults(batch=512, steps=None, seed=0)
    return parser.parse_args()


class Handler(BaseHTTPRequestHandler):
    """Answers each request from one version: all numbers in an answer belong to its step."""

    follower: Follower
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer `/status`: the version that is served, and how far it is behind."""
        status = asdict(self.follower.status)
        serving = self.follower.status.serving
        status["serving"] = None if serving is None else serving.model_dump()
        self._answer(200, status)

    def do_POST(self) -> None:
        """Answer `/predict`: logits of `sparse` [n, columns] and, if the model has it, `dense`."""
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
            sparse = torch.tensor(body["sparse"], dtype=torch.int64)
            dense = torch.tensor(body.get("dense", []), dtype=torch.float32)
            with self.follower.reading() as version:
                logits = version(dense.reshape(len(sparse), -1), sparse)
        except NotServing as error:
            self._answer(503, {"error": str(error)})
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
            self._answer(400, {"error": f"{type(error).__name__}: {error}"})
        else:
            assert isinstance(logits, torch.Tensor)
            self._answer(200, {"step": version.step, "logits": logits.tolist()})

    def _answer(self, code: int, document: dict[str, Any]) -> None:
        data = json.dumps(document, default=str).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: no log line for each request."""


def main() -> None:
    """Serve until the process is ended."""
    args = arguments()
    torch.set_num_threads(args.threads)
    reader = open_reader(args)
    follower = Follower(
        args.run,
        model=build_model(reader),
        channel=args.channel,
        quantized=args.quantized,
        poll_seconds=args.poll,
    )
    Handler.follower = follower
    with follower, ThreadingHTTPServer(("127.0.0.1", args.port), Handler) as server:
        print(json.dumps({"port": server.server_port}), flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
