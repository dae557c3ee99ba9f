"""A local S3 server for tests: moto's, in a process of its own, whose objects survive restarts."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

BUCKET = "bucket"
_START_S = 60.0


class S3Server:
    """A server with an empty bucket, at an address that does not change.

    moto keeps objects in memory only, so `stop` reads them from the server, and `start` writes them
    again. Clients see a server that is gone for a while and then has its objects back.
    """

    def __init__(self):
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.variables = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
            config=Config(retries={"max_attempts": 1}),
        )
        self._process: subprocess.Popen | None = None
        self._stored: dict[str, bytes] = {}

    def start(self) -> None:
        """Start the server with the objects that it had when it was stopped."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        silent = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=silent, stderr=silent)
        deadline_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                break
            assert time.monotonic() < deadline_s and self._process.poll() is None
            time.sleep(0.05)
        self._client.create_bucket(Bucket=BUCKET)
        for key, content in self._stored.items():
            self.put(key, content)

    def stop(self) -> None:
        """Stop the server; nothing answers at its address."""
        assert self._process is not None
        self._stored = {key: self.get(key) for key in self.keys()}
        self.kill()

    def kill(self) -> None:
        """End the server and forget its objects."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of the objects, sorted."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", []))

    def get(self, key: str) -> bytes:
        return self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key: str, content: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=key)

    def delete_all(self) -> None:
        for key in self.keys():
            self.delete(key)

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """Return the lines of a run's metrics."""
        return [json.loads(line) for line in self.get(f"{run}/metrics.jsonl").splitlines()]


@contextlib.contextmanager
def running_server() -> Iterator[S3Server]:
    server = S3Server()
    try:
        server.start()
        yield server
    finally:
        server.kill()


def use_server(monkeypatch: pytest.MonkeyPatch, server: S3Server, cache: Path) -> None:
    """Let this process use a server, with a cache of its own."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
