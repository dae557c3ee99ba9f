"""A local S3 server for tests: moto's, in a process of its own; see tests/s3_server.py."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT

BUCKET = "bucket"
_START_S = 60.0


class S3Server:
    """A server with a bucket, at an address that does not change, and a client of it.

    Attributes:
        url: address.
        variables: environment of programs that use the server.
    """

    def __init__(self, directory: Path):
        import boto3
        from botocore.config import Config

        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            self._port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.variables = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self._directory = directory
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
            config=Config(retries={"max_attempts": 1}),
        )
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the server, with the objects that it had when it was stopped."""
        command = [sys.executable, "-m", "tests.s3_server", str(self._port), str(self._directory)]
        silent = subprocess.DEVNULL
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=silent, stderr=silent)
        deadline_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return
            assert time.monotonic() < deadline_s and self._process.poll() is None
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server, which writes its objects to its directory."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(_START_S)
            self._process = None

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of the objects, sorted."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", []))

    def get(self, key: str) -> bytes:
        return self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key: str, content: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def delete(self, prefix: str) -> None:
        for key in self.keys(prefix):
            self._client.delete_object(Bucket=BUCKET, Key=key)

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """Return the lines of a run's metrics."""
        return [json.loads(line) for line in self.get(f"{run}/metrics.jsonl").splitlines()]

    def steps(self, run: str) -> list[int]:
        """Return the steps of the complete checkpoints of a run."""
        keys = [key.split("/") for key in self.keys(f"{run}/checkpoints/")]
        return sorted(int(parts[-2]) for parts in keys if parts[-1] == "checksums.sha256")


@contextlib.contextmanager
def running_server() -> Iterator[S3Server]:
    with tempfile.TemporaryDirectory() as directory:
        server = S3Server(Path(directory))
        try:
            server.start()
            yield server
        finally:
            server.stop()


def use_server(monkeypatch: pytest.MonkeyPatch, server: S3Server, cache: Path) -> None:
    """Let this process use a server, with a cache of its own."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
