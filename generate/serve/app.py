"""The HTTP side of the server: routes, limits, and answers whole or piece by piece.

    request ──> checked ──> jobs ──> engine's thread ──> events ──> text ──> answer, or a stream

A client that leaves cancels its jobs.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from data.text.chat.template import ChatTemplate
from generate.prompts import TextCodec
from generate.serve.answers import CHAT, TEXT, Format, error, new_answer, usage
from generate.serve.browsers import RefuseOtherSites
from generate.serve.engine import ERROR, STOP, Busy, Engine, Job, Unavailable
from generate.serve.readers import Readers
from generate.serve.requests import (
    BadRequest,
    CompletionRequest,
    Limits,
    read_chat,
    read_completion,
)
from generate.text_stream import TextStream
from untrusted.documents import parse_json

_log = logging.getLogger(__name__)
_POLL_S = 0.25
_CLOSED_REQUEST = 499  # nginx's status for a client that has left


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """The model that is served, and the limits on requests."""

    name: str
    codec: TextCodec
    template: ChatTemplate | None  # its chat template; None if it has none
    vocab_size: int
    limits: Limits
    max_body_bytes: int  # most bytes of a request
    body_s: float  # most seconds until a request has arrived
    allowed_hosts: tuple[str, ...]  # names of this server that it does not know itself
    timeout_s: float  # most seconds of an answer


def make_app(served: Served, engine: Engine) -> Starlette:
    """Return the application; it does not close the engine."""
    server = _Server(served, engine)
    app = Starlette(
        routes=[
            Route("/health", server.health),
            Route("/v1/models", server.models),
            Route("/v1/models/{name:path}", server.model),
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _on_http_error, Exception: _on_error},
        middleware=[Middleware(RefuseOtherSites, allowed=served.allowed_hosts)],
    )
    # A redirect from /health/ to /health would name the host that the client has written.
    app.router.redirect_slashes = False
    return app


class _Answer:
    """The continuations of a request while they grow."""

    def __init__(self, request: CompletionRequest, codec: TextCodec, engine: Engine):
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, list[int], str | None]] = asyncio.Queue()
        self._events = events
        self._engine = engine
        self._streams = []
        self.jobs: list[Job] = []
        self.num_new_tokens = 0

        def put(number: int, tokens: list[int], reason: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(events.put_nowait, (number, tokens, reason))

        for prompt, max_new_tokens in zip(request.prompts, request.max_new_tokens, strict=True):
            for _ in range(request.num_choices):
                job = Job(
                    tokens=prompt,
                    sampling=request.sampling,
                    row=len(self.jobs),
                    max_new_tokens=max_new_tokens,
                    on_tokens=partial(put, len(self.jobs)),
                )
                self.jobs.append(job)
                self._streams.append(TextStream(codec, prompt, request.stop))
        engine.submit(self.jobs)
        self._running = set(range(len(self.jobs)))

    async def pieces(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """Yield (number of the continuation, new text, reason of its end or None).

        Raises:
            BadRequest: the model has failed.
        """
        while self._running:
            number, tokens, reason = await self._events.get()
            if number not in self._running:
                continue  # a stop text has ended it
            if reason == ERROR:
                raise BadRequest("the server is closing, or the model has failed", 503)
            stream = self._streams[number]
            self.num_new_tokens += len(tokens)
            text = stream.add(tokens, is_last=reason is not None)
            if stream.is_stopped and reason is None:
                self._engine.cancel([self.jobs[number]])
            reason = STOP if stream.is_stopped else reason
            if reason is not None:
                self._running.remove(number)
            if text or reason is not None:
                yield number, text, reason

    def close(self) -> None:
        """Give up the continuations that are not complete."""
        self._engine.cancel([self.jobs[number] for number in self._running])


class _Server:
    """The handlers of the routes."""

    def __init__(self, served: Served, engine: Engine):
        self._served = served
        self._engine = engine
        self._readers = Readers()
        self._description = {
            "id": served.name,
            "object": "model",
            "created": 0,
            "owned_by": "taibai",
        }

    async def health(self, request: Request) -> Response:
        """Say whether the model works, and how much it has to do."""
        del request
        is_well = self._engine.failure is None
        state = {"status": "ok" if is_well else "failed"}
        counts = {"running": self._engine.num_running, "waiting": self._engine.num_waiting}
        return JSONResponse(state | counts, status_code=200 if is_well else 503)

    async def models(self, request: Request) -> Response:
        """List the model."""
        del request
        return JSONResponse({"object": "list", "data": [self._description]})

    async def model(self, request: Request) -> Response:
        """Describe the model."""
        if request.path_params["name"] != self._served.name:
            return JSONResponse(error(self._other_model(), 404), 404)
        return JSONResponse(self._description)

    def _other_model(self) -> str:
        return f"the model is {self._served.name!r}; set model to it"

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        served = self._served
        read = partial(
            read_completion,
            codec=served.codec,
            vocab_size=served.vocab_size,
            limits=served.limits,
        )
        return await self._answered(request, read, TEXT)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        served = self._served
        read = partial(
            read_chat, codec=served.codec, template=served.template, limits=served.limits
        )
        return await self._answered(request, read, CHAT)

    async def _answered(
        self,
        request: Request,
        read: Callable[[dict[str, Any]], CompletionRequest],
        form: Format,
    ) -> Response:
        try:
            async with asyncio.timeout(self._served.body_s):
                fields = await self._fields(request)
        except TimeoutError:
            return JSONResponse(error("the request did not arrive in time", 408), 408)
        except BadRequest as problem:
            return _refusal(problem)
        except ClientDisconnect:
            return Response(status_code=_CLOSED_REQUEST)
        deadline_s = asyncio.get_running_loop().time() + self._served.timeout_s
        try:
            wanted = await self._readers.read(
                read, fields, is_chat=form is CHAT, deadline_s=deadline_s
            )
            answer = _Answer(wanted, self._served.codec, self._engine)
        except (BadRequest, Busy, Unavailable) as problem:
            return _refusal(problem)
        except TimeoutError:
            return JSONResponse(self._too_late(), 504)
        if wanted.streams:
            events = self._events(answer, wanted, form, deadline_s)
            return StreamingResponse(events, media_type="text/event-stream")
        return await self._whole(request, answer, wanted, form, deadline_s)

    def _too_late(self) -> dict[str, Any]:
        return error(f"the answer took more than {self._served.timeout_s:g} s", 504)

    async def _fields(self, request: Request) -> dict[str, Any]:
        """Return the JSON object of a request, after checks of its size and its model."""
        max_body_bytes = self._served.max_body_bytes
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > max_body_bytes:
                raise BadRequest(
                    f"the request has more than {max_body_bytes:,} bytes; shorten it", 413
                )
        try:
            fields = parse_json(bytes(body), "the request")
        except ValueError as problem:
            raise BadRequest(str(problem)) from problem
        model = fields.get("model", self._served.name)
        if model != self._served.name:
            raise BadRequest(self._other_model(), 404)
        return fields

    async def _whole(
        self,
        request: Request,
        answer: _Answer,
        wanted: CompletionRequest,
        form: Format,
        deadline_s: float,
    ) -> Response:
        """Return an answer when it is complete, or an error at the deadline."""
        texts = [""] * len(answer.jobs)
        reasons: list[str | None] = [None] * len(answer.jobs)

        async def collect() -> None:
            async for number, text, reason in answer.pieces():
                texts[number] += text
                reasons[number] = reason or reasons[number]

        task = asyncio.ensure_future(collect())
        clock = asyncio.get_running_loop().time
        try:
            while not task.done():
                await asyncio.wait([task], timeout=min(_POLL_S, max(0.0, deadline_s - clock())))
                if not task.done() and await request.is_disconnected():
                    return Response(status_code=_CLOSED_REQUEST)
                if not task.done() and clock() >= deadline_s:
                    return JSONResponse(self._too_late(), 504)
            task.result()
        except BadRequest as problem:
            return _refusal(problem)
        finally:
            task.cancel()
            answer.close()
        choices = [
            form.choice(text) | {"index": i, "logprobs": None, "finish_reason": reason}
            for i, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        body = new_answer(form.kind, form.prefix, self._served.name)
        counts = usage(wanted.num_prompt_tokens, answer.num_new_tokens)
        return JSONResponse(body | {"choices": choices, "usage": counts})

    async def _events(
        self, answer: _Answer, wanted: CompletionRequest, form: Format, deadline_s: float
    ) -> AsyncIterator[str]:
        """Yield an answer piece by piece, as server-sent events."""
        body = new_answer(form.kind_of_piece, form.prefix, self._served.name)
        begun: set[int] = set()
        try:
            async with asyncio.timeout_at(deadline_s):
                async for number, text, reason in answer.pieces():
                    choice = form.piece(text, number not in begun)
                    begun.add(number)
                    choice |= {"index": number, "logprobs": None, "finish_reason": reason}
                    yield _event(body | {"choices": [choice]})
            if wanted.includes_usage:
                counts = usage(wanted.num_prompt_tokens, answer.num_new_tokens)
                yield _event(body | {"choices": [], "usage": counts})
            yield "data: [DONE]\n\n"
        except TimeoutError:
            yield _event(self._too_late())
        except BadRequest as problem:
            yield _event(error(str(problem), problem.status))
        finally:
            answer.close()


def _refusal(problem: BadRequest | Busy | Unavailable) -> JSONResponse:
    headers = {"Retry-After": "1"} if isinstance(problem, Busy) else None
    return JSONResponse(error(str(problem), problem.status), problem.status, headers)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _on_http_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    message = f"{request.method} {request.url.path}: {problem.detail}"
    return JSONResponse(error(message, problem.status_code), problem.status_code)


async def _on_error(request: Request, problem: Exception) -> Response:
    _log.error("%s has failed", request.url.path, exc_info=problem)
    return JSONResponse(error("the server has failed; see its log", 500), 500)
