"""Requests that pages of other sites make a browser send."""

import socket
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from generate.serve.__main__ import _parser, allowed_hosts
from generate.serve.browsers import RefuseOtherSites


def request_with(headers: dict[str, str], allowed: tuple[str, ...]) -> Any:
    """Send a request to an application with allowed hosts."""

    async def answer(request: Request) -> Response:
        del request
        return Response("answer")

    middleware = [Middleware(RefuseOtherSites, allowed=allowed)]
    app = Starlette(routes=[Route("/", answer)], middleware=middleware)
    return TestClient(app, base_url="http://127.0.0.1:8000").get("/", headers=headers)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("option", [[], ["--allowed_hosts=a.example, b.example,"], ["--host="]])
@pytest.mark.parametrize(
    "headers", [{"Origin": "null"}, {"Origin": "file://"}, {"Host": ":8000"}, {"Host": ""}]
)
def test_requests_without_a_name_are_refused_with_any_options(option, headers):
    args = _parser().parse_args(["--model=x", *option])
    assert request_with(headers, allowed_hosts(args)).status_code == 403
    if "b.example" in args.allowed_hosts:
        assert request_with({"Host": "b.example"}, allowed_hosts(args)).status_code == 200


@pytest.mark.drawn(6)
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
    response = request_with(headers, ("model.example", "page.example"))
    assert response.status_code == status
    if status == 403:
        assert "--allowed_hosts" in response.json()["error"]["message"]
