"""moto's S3 server with objects that survive its end: `python -m tests.s3_server PORT DIRECTORY`.

moto keeps objects in memory. On SIGTERM this server answers no new requests, finishes those that it
works on, and writes all objects to the directory; it reads them before it listens again. So every
write that a client has seen succeed survives.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"

_backend: Any = s3_backends["123456789012"]["aws"]


class RequestCounter:
    """Counts the requests that an application works on, and refuses new ones after `stop`."""

    def __init__(self, application: Any):
        self._application = application
        self._changed = threading.Condition()
        self._num_running = 0
        self._is_stopping = False

    def __call__(self, environ: Any, start_response: Any) -> Any:
        with self._changed:
            if self._is_stopping:
                raise ConnectionError("the server is stopping")  # closes the connection
            self._num_running += 1
        try:
            return self._application(environ, start_response)
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def stop(self) -> None:
        """Wait until no request is running."""
        with self._changed:
            self._is_stopping = True
            self._changed.wait_for(lambda: self._num_running == 0)


class SilentHandler(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Log nothing."""


def main(port: int, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    _backend.create_bucket(BUCKET, "us-east-1")
    for file in directory.iterdir():
        _backend.put_object(BUCKET, unquote(file.name), file.read_bytes())
        file.unlink()
    counter = RequestCounter(DomainDispatcherApplication(create_backend_app))

    def end(*_: Any) -> None:
        # In a thread, because a request that is running may hold a lock of this thread.
        threading.Thread(target=write_objects).start()

    def write_objects() -> None:
        counter.stop()
        for name, key in _backend.buckets[BUCKET].keys.items():
            (directory / quote(name, safe="")).write_bytes(key.value)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    server = make_server("127.0.0.1", port, counter, threaded=True, request_handler=SilentHandler)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
