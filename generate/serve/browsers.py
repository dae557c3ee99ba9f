"""Refuses requests that a web page makes a browser send: DNS rebinding and foreign origins.

A server that listens on 127.0.0.1 can be reached by every page that its user's browser shows. Two
headers, which pages cannot forge, tell such requests apart:

    Host    the name in the URL. A page can let its own name point to 127.0.0.1 (DNS rebinding), so
            the name must be an address, or a name that this machine is known by.
    Origin  the page that sends the request; other clients send none. It must be on this machine, or
            come from this server.
"""

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from generate.serve.answers import error
from untrusted.messages import shortened

_STATUS = 403


class RefuseOtherSites:
    """Passes on requests whose Host and Origin are allowed, and answers others with status 403.

    Args:
        allowed: names of hosts that are allowed in both headers, in addition to this machine's.
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str]):
        self._app = app
        names = (name.strip().lower().strip("[]") for name in allowed)
        # An empty name would allow every origin that has no host, such as "null".
        self._allowed = frozenset(name for name in names if name)
        self._own = socket.gethostname().lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; see the ASGI specification."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            problem = self._problem(headers.getlist("host"), headers.getlist("origin"))
            if problem is not None:
                await JSONResponse(error(problem, _STATUS), _STATUS)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, hosts: list[str], origins: list[str]) -> str | None:
        """Return why a request is refused; None if it is not."""
        for host in hosts:
            name = _name_of(f"http://{host}")
            is_own = _is_local(name) or _is_address(name) or name == self._own
            if not is_own and name not in self._allowed:
                return (
                    f"the host {shortened(host)!r} is not known to be this server; if it is, start "
                    "it with --allowed_hosts=NAME"
                )
        for origin in origins:
            name = _name_of(origin)
            is_same = origin.partition("://")[2].lower() in [host.lower() for host in hosts]
            if not is_same and not _is_local(name) and name not in self._allowed:
                return (
                    f"pages of {shortened(origin)!r} may not use this server; to allow them, start "
                    "it with --allowed_hosts=NAME"
                )
        return None


def _name_of(url: str) -> str:
    """Return the host in a URL; "" if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_local(name: str) -> bool:
    if _is_address(name):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")
