"""Serves a language model: `python -m generate.serve --model=DIR`.

    python -m generate.serve --model=runs/chat --port=8000

    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    client.completions.create(model="chat", prompt="def main(")

docs/generate.md explains the options, and when to use vLLM instead.
"""

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from flax import nnx

from convert.from_hf import load_model
from generate.command import add_model_options, read_model, run, start_mesh
from generate.loading import default_length, template_of
from generate.prompts import TextCodec, stop_tokens_of, tokenizer_of
from generate.serve.engine import Engine
from generate.serve.readers import template_processes
from generate.serve.requests import Limits
from generate.serve.slots import Slots
from sharding.mesh import use_mesh
from untrusted.commands import code_of, command_parser, refuse_missing_package
from untrusted.streams import protect_output

try:
    from generate.serve.app import Served, make_app
    from generate.serve.connections import ConnectionLimits, listen, make_server, max_connections
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    refuse_missing_package(error, "the server needs: pip install starlette uvicorn")

_TOKENS_PER_CALL = 4
_MIB = 2**20
_HEAD_S = 10.0
_BODY_S = 30.0
#: Seconds for the answer that says that an answer took too long.
_MARGIN_S = 5.0
_log = logging.getLogger(__package__)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    return run(_serve, _parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("generate.serve")
    add_model_options(parser, batch_size=8)
    parser.add_argument("--host", default="127.0.0.1", help="address; 0.0.0.0 for all of them")
    parser.add_argument("--port", type=int, default=8000, help="port that the server listens on")
    parser.add_argument(
        "--allowed_hosts", default="", metavar="NAME,…", help="other names of this server"
    )
    parser.add_argument("--name", help="name of the model; default: the name of its directory")
    parser.add_argument(
        "--max_length",
        type=int,
        metavar="N",
        help="most tokens of a prompt and its continuation; default: the model's, at most 4096",
    )
    parser.add_argument(
        "--max_waiting", type=int, default=256, metavar="N", help="most rows that wait"
    )
    parser.add_argument(
        "--max_choices", type=int, default=64, metavar="N", help="most choices of a request"
    )
    parser.add_argument(
        "--max_body_mib", type=float, default=1.0, help="largest body of a request in MiB"
    )
    parser.add_argument("--timeout_s", type=float, default=600.0, help="longest time of an answer")
    return parser


def _serve(args: argparse.Namespace) -> None:
    """Load the model, and answer requests until the process is stopped."""
    # Listen first: loading takes a while, after which a port in use would be a late surprise.
    with listen(args.host, args.port) as listening, open_model(args) as (served, engine):
        logging.getLogger(__package__).setLevel(logging.INFO)
        for each in listening:
            address, port = each.getsockname()[:2]
            host = f"[{address}]" if ":" in address else address
            _log.info("%s is served on http://%s:%d", served.name, host, port)
        limits = ConnectionLimits(
            head_s=_HEAD_S,
            request_s=served.body_s + served.timeout_s + _MARGIN_S,
            max_connections=max_connections(),
        )
        make_server(make_app(served, engine), limits).run(sockets=listening)


def allowed_hosts(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the host names that request headers may have in addition to this machine's names."""
    return (args.host, *args.allowed_hosts.split(","))


@contextlib.contextmanager
def open_model(args: argparse.Namespace) -> Iterator[tuple[Served, Engine]]:
    """Load the model, and yield the served model and its engine; close the engine at the end.

    Raises:
        ValueError: the model cannot be served, or an option does not fit.
        OSError: it cannot be read.
    """
    mesh = start_mesh(args)
    source = read_model(args.model, args)
    tokenizer = tokenizer_of(source)
    if tokenizer is None:
        raise ValueError("the model has no tokenizer.json, which requests need; put it beside it")
    for name in ("max_waiting", "max_choices", "max_body_mib", "timeout_s"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name}={getattr(args, name)} must be positive")
    max_length = args.max_length or default_length(source)

    @contextlib.contextmanager
    def open_slots() -> Iterator[Slots]:
        nnx.use_eager_sharding(False)  # as in models/layers/basic.py: Flax has a value per thread
        with use_mesh(mesh):
            slots = Slots(
                load_model(source, dtype=args.dtype),
                num_slots=args.batch_size,
                max_length=max_length,
                tokens_per_call=_TOKENS_PER_CALL,
            )
            slots.warm_up()
            yield slots

    engine = Engine(
        open_slots,
        num_slots=args.batch_size,
        stop=stop_tokens_of(source, tokenizer),
        max_waiting=args.max_waiting,
    )
    try:
        engine.wait_until_ready()
        yield (
            Served(
                name=args.name or Path(args.model).resolve().name,
                codec=TextCodec(tokenizer),
                template=template_of(source, tokenizer, template_processes()),
                vocab_size=source.config.vocab_size,
                limits=Limits(max_length=max_length, max_choices=args.max_choices),
                max_body_bytes=int(args.max_body_mib * _MIB),
                body_s=_BODY_S,
                allowed_hosts=allowed_hosts(args),
                timeout_s=args.timeout_s,
            ),
            engine,
        )
    finally:
        engine.close()


if __name__ == "__main__":
    protect_output()
    sys.exit(code_of(main))
