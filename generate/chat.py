"""Chats with a model on the terminal: `python -m generate.chat --model=DIR`.

    $ python -m generate.chat --model=runs/chat
    > What is the capital of Peru?
    The capital of Peru is Lima.

The chat template turns the messages so far into one prompt. Each reply is a new pass over all of
them, but the shapes of all turns are the same, so few programs are compiled.

    /reset   begins a new conversation
    /exit    ends the chat, as Ctrl-D does
    Ctrl-C   ends a reply, which stays in the conversation as far as it was printed

docs/generate.md explains the options.
"""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence

import numpy as np

from convert.from_hf import load_model
from data.text.chat.rendering import Message
from data.text.chat.template import ChatTemplate
from generate.command import (
    add_model_options,
    add_sampling_options,
    read_model,
    run,
    sampling_of,
    start_mesh,
)
from generate.loading import default_length, template_of
from generate.prompts import TextCodec, stop_tokens_of, tokenizer_of
from generate.sampling import Sampling
from generate.serve.readers import template_processes
from generate.serve.slots import Row, Slots
from generate.text_stream import TextStream
from sharding.mesh import num_replicas, use_mesh
from untrusted.commands import command_parser, print_error, run_command
from untrusted.messages import without_surrogates

RESET = "/reset"
EXIT = "/exit"


class Chat:
    """A conversation with a model.

    Args:
        slots: places for rows, of which the chat uses the first.
        num_slots: number of these places.
        max_length: most tokens of the conversation.
        stop: ids of tokens that end a reply.
        max_new_tokens: most tokens of a reply; None: as many as there is room for.
        system: message that each conversation begins with; "" for none.
    """

    def __init__(
        self,
        slots: Slots,
        codec: TextCodec,
        template: ChatTemplate,
        *,
        num_slots: int,
        max_length: int,
        stop: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int | None = None,
        system: str = "",
    ):
        self._slots = slots
        self._codec = codec
        self._template = template
        self._is_active_B = np.arange(num_slots) == 0
        self._max_length = max_length
        self._stop = frozenset(stop)
        self._sampling = sampling
        self._max_new_tokens = max_new_tokens
        self._first: list[Message] = [{"role": "system", "content": system}] if system else []
        self._num_replies = 0
        self.messages: list[Message] = [*self._first]

    def reset(self) -> None:
        """Begin a new conversation."""
        self.messages = [*self._first]

    def reply(self, text: str) -> Generator[str]:
        """Add a message of the user, and yield the pieces of the reply.

        The reply becomes part of the conversation, also if the caller closes the iterator early.

        Raises:
            ValueError: the template refuses the messages, or there is no room for a reply; the
                conversation is as before.
        """
        asked = [*self.messages, {"role": "user", "content": without_surrogates(text)}]
        rendered = self._template.render(asked, add_generation_prompt=True)
        prompt = self._codec.encode(rendered, has_special_tokens=False)
        room = self._max_length - len(prompt)
        if not prompt or room < 1:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, which leaves no room for a reply in "
                f"max_length={self._max_length}; {RESET} begins a new one"
            )
        pieces: list[str] = []
        stream = TextStream(self._codec, prompt)
        try:
            for token in self._tokens(prompt, min(room, self._max_new_tokens or room)):
                pieces.append(stream.add([token]))
                yield pieces[-1]
            pieces.append(stream.add([], is_last=True))
            yield pieces[-1]
        finally:
            self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def _tokens(self, prompt: list[int], max_new_tokens: int) -> Iterator[int]:
        """Yield the tokens of a reply, without the one that ends it."""
        # Another row for each reply, so that the same question gets other random numbers.
        row = Row(slot=0, tokens=prompt, sampling=self._sampling, number=self._num_replies)
        self._num_replies += 1
        (token,) = self._slots.begin([row])
        for count in range(1, max_new_tokens + 1):
            if token in self._stop:
                return
            yield token
            if count < max_new_tokens:
                token = int(self._slots.advance(self._is_active_B)[0, 0])


class _Interrupt:
    """Records Ctrl-C, which ends a reply, instead of interrupting a call in the middle.

    An interrupted call might have given away the caches without returning new ones. A second
    Ctrl-C ends the program.
    """

    def __init__(self):
        self.is_received = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record Ctrl-C within the block."""
        self.is_received = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _receive(self, *_: object) -> None:
        if self.is_received:
            raise KeyboardInterrupt
        self.is_received = True


def talk(chat: Chat, *, is_terminal: bool) -> None:
    """Read messages from standard input until it ends, and print the replies.

    Args:
        is_terminal: whether a person types; otherwise, nothing but replies is printed.
    """
    interrupt = _Interrupt()
    while True:
        try:
            text = input("> " if is_terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(f"\n({EXIT} or Ctrl-D ends the chat)")
            continue
        if text.strip() == EXIT:
            return
        if text.strip() == RESET:
            chat.reset()
        elif text.strip():
            with interrupt.watching():
                _print_reply(chat.reply(text), interrupt)


def _print_reply(pieces: Generator[str], interrupt: _Interrupt) -> None:
    with contextlib.closing(pieces):
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
                if interrupt.is_received:
                    break
        except ValueError as error:
            print_error(error)
            return
    print(flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("generate.chat")
    add_model_options(parser, batch_size=None)
    parser.add_argument("--system", default="", metavar="TEXT", help="message to begin with")
    parser.add_argument("--max_new_tokens", type=int, metavar="N", help="most tokens of a reply")
    parser.add_argument(
        "--max_length",
        type=int,
        metavar="N",
        help="most tokens of a conversation; default: the model's, at most 4096",
    )
    add_sampling_options(parser)
    return run(_chat, parser.parse_args(argv))


def _chat(args: argparse.Namespace) -> None:
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise ValueError(f"--max_new_tokens={args.max_new_tokens} must be at least 1")
    sampling = sampling_of(args)
    mesh = start_mesh(args)
    source = read_model(args.model, args)
    tokenizer = tokenizer_of(source)
    processes = template_processes()
    template = None if tokenizer is None else template_of(source, tokenizer, processes)
    if tokenizer is None or template is None:
        raise ValueError(
            f"--model={args.model} has no chat template; take a model that was trained on "
            "conversations, or continue texts with python -m generate"
        )
    sampling.check_vocab(source.config.vocab_size)
    max_length = args.max_length or default_length(source)
    with use_mesh(mesh):
        num_slots = num_replicas(mesh)
        model = load_model(source, dtype=args.dtype)
        chat = Chat(
            Slots(model, num_slots=num_slots, max_length=max_length, tokens_per_call=1),
            TextCodec(tokenizer),
            template,
            num_slots=num_slots,
            max_length=max_length,
            stop=stop_tokens_of(source, tokenizer),
            sampling=sampling,
            max_new_tokens=args.max_new_tokens,
            system=args.system,
        )
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # the arrow keys edit and repeat messages
            print(f"{RESET} begins again, {EXIT} or Ctrl-D ends the chat, Ctrl-C ends a reply.")
        talk(chat, is_terminal=is_terminal)


if __name__ == "__main__":
    run_command(main)
