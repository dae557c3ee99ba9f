"""Requests that pages of other sites make a browser send."""

import socket

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from generate.serve.browsers import RefuseOtherSites


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "rebound.example"}, 403),
        ({"Host": "rebound.example:8000"}, 403),
        ({"Host": "127.0.0.1.example"}, 403),
        ({"Host": "localhost@rebound.example"}, 403),
        ({"Origin": "https://other.example"}, 403),
        ({"Origin": "http://localhost.example"}, 403),
        ({"Origin": "http://203.0.113.9"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "203.0.113.9"}, 200),
        ({"Host": "203.0.113.9:80", "Origin": "http://203.0.113.9:80"}, 200),
        ({"Host": socket.gethostname()}, 200),
        ({"Host": "model.example", "Origin": "https://model.example"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "http://[::1]:3000"}, 200),
        ({"Origin": "https://page.example"}, 200),
    ],
)
def test_requests_of_other_sites_are_refused(headers, status):
    async def answer(request: Request) -> Response:
        del request
        return Response("answer")

    routes = [Route("/", answer)]
    allowed = ("model.example", "page.example")
    app = Starlette(routes=routes, middleware=[Middleware(RefuseOtherSites, allowed=allowed)])
    found = TestClient(app, base_url="http://127.0.0.1:8000").get("/", headers=headers)
    assert found.status_code == status
    if status == 403:
        assert "--allowed_hosts" in found.json()["error"]["message"]
