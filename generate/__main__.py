"""Continues prompts with a trained model: `python -m generate --model=DIR --prompt=TEXT`.

    python -m generate --model=runs/gpt2_3d --prompt="def main(" --max_new_tokens=64
    python -m generate --model=gpt2 --prompts=prompts.jsonl --out=continued.jsonl --mesh=model=2

The model is the directory of a run, one of its checkpoints, or a Hugging Face model: its directory,
or its name on the hub. docs/generate.md explains the options.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

from convert.from_hf import load_model
from data.text.tokenization.file_tokenizer import FileTokenizer
from fields.paths import local_path
from generate.beam_search import Beams
from generate.command import (
    add_model_options,
    add_sampling_options,
    read_model,
    run,
    sampling_of,
    start_mesh,
)
from generate.drafts import Drafts
from generate.generator import Generator
from generate.loading import generator_of
from generate.prompts import (
    Prompt,
    TextCodec,
    as_line,
    as_prompt,
    have_same_tokens,
    read_prompts,
    tokenizer_of,
)
from generate.sampling import Sampling
from generate.text_stream import TextStream
from sharding.mesh import use_mesh
from untrusted.commands import command_parser, run_command
from untrusted.files import write_text
from untrusted.outputs import check_file

_EARLY_STOPPING: dict[str, Any] = {"false": False, "true": True, "never": "never"}


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    return run(_continue, _parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("generate")
    add_model_options(parser, batch_size=32)
    parser.add_argument("--prompt", action="append", default=[], help="a text; may be repeated")
    parser.add_argument(
        "--prompts", type=local_path, help='a file with {"prompt": …} or {"tokens": […]} per line'
    )
    parser.add_argument("--out", type=local_path, help="write a line of JSON for each continuation")
    parser.add_argument(
        "--max_new_tokens", type=int, default=64, metavar="N", help="most tokens of a continuation"
    )
    parser.add_argument(
        "--num_samples", type=int, default=1, metavar="N", help="continuations of each prompt"
    )
    add_sampling_options(parser)
    parser.add_argument(
        "--repetition_penalty",
        type=float,
        default=1.0,
        help="above 1 makes tokens less likely that the text already has",
    )
    parser.add_argument("--banned", default="", metavar="A,B", help="ids that are never chosen")
    parser.add_argument(
        "--num_drafts", type=int, metavar="N", help="tokens that are drafted and checked in a pass"
    )
    parser.add_argument(
        "--draft_model",
        type=local_path,
        metavar="MODEL",
        help="a smaller model that drafts; by default, drafts are copied from the text",
    )
    parser.add_argument("--num_beams", type=int, metavar="N", help="search with N beams")
    parser.add_argument(
        "--length_penalty",
        type=float,
        default=1.0,
        help="exponent of the length by which a beam's score is divided",
    )
    parser.add_argument(
        "--early_stopping", choices=_EARLY_STOPPING, default="false", help="when beams end"
    )
    return parser


def _continue(args: argparse.Namespace) -> None:
    """Load the model, and continue the prompts."""
    if bool(args.prompt) == (args.prompts is not None):
        raise ValueError("give either --prompt or --prompts=FILE")
    check_file("--out", args.out)
    sampling = sampling_of(
        args,
        repetition_penalty=args.repetition_penalty,
        banned=tuple(_numbers("banned", args.banned)),
    )
    beams = _beams_of(args, sampling)
    mesh = start_mesh(args)
    source = read_model(args.model, args)
    tokenizer = tokenizer_of(source)
    codec = None if tokenizer is None else TextCodec(tokenizer)
    if args.prompts is None:
        prompts = [as_prompt(text, codec) for text in args.prompt]
    else:
        prompts = read_prompts(args.prompts, codec)
    with use_mesh(mesh):
        drafts = _drafts_of(args, tokenizer)
        generator = generator_of(
            source, tokenizer, dtype=args.dtype, batch_size=args.batch_size, drafts=drafts
        )
        began = time.perf_counter()
        is_one = len(prompts) == args.num_samples == 1 and beams is None
        if is_one and args.out is None and codec is not None:
            tokens = generator.stream(
                prompts[0].tokens, max_new_tokens=args.max_new_tokens, sampling=sampling
            )
            count = _print_stream(prompts[0], tokens, codec, generator.follows_prompt)
        else:
            count = _write_all(
                args, prompts, codec, generator, sampling if beams is None else beams
            )
        seconds = time.perf_counter() - began
    rate = f"{count / seconds:,.1f} tokens/s"
    if args.num_drafts is not None and generator.num_passes:
        # The first token of each row comes from the pass over its prompt.
        tokens_per_pass = (count - len(prompts) * args.num_samples) / generator.num_passes
        rate += f", {tokens_per_pass:.2f} tokens of a row per pass"
    print(f"{count:,} tokens in {seconds:.1f} s with compilation: {rate}", file=sys.stderr)


def _write_all(
    args: argparse.Namespace,
    prompts: list[Prompt],
    codec: TextCodec | None,
    generator: Generator,
    how: Sampling | Beams,
) -> int:
    """Continue all prompts, write the continuations, and return the number of new tokens."""
    num_rows = len(prompts) * args.num_samples
    done = 0

    def show(size: int) -> None:
        nonlocal done
        done += size
        print(f"\r{done:,} of {num_rows:,} continuations", end="", file=sys.stderr, flush=True)

    tokens = [prompt.tokens for prompt in prompts]
    max_new_tokens = args.max_new_tokens
    if isinstance(how, Beams):
        continuations = generator.beam_search(
            tokens, max_new_tokens=max_new_tokens, beams=how, on_batch=show
        )
    else:
        continuations = generator.generate(
            tokens,
            max_new_tokens=max_new_tokens,
            sampling=how,
            num_samples=args.num_samples,
            on_batch=show,
        )
    print(file=sys.stderr)
    rows = [prompt for prompt in prompts for _ in range(args.num_samples)]
    lines = [
        as_line(*row, codec, follows_prompt=generator.follows_prompt)
        for row in zip(rows, continuations, strict=True)
    ]
    if args.out is None:
        print("\n".join(lines))
    else:
        write_text(args.out, "\n".join(lines) + "\n")
    return sum(map(len, continuations))


def _print_stream(
    prompt: Prompt, tokens: Iterator[int], codec: TextCodec, follows_prompt: bool
) -> int:
    """Print a continuation while it grows; return the number of its tokens."""
    first = next(tokens)  # now it is certain that the model takes the prompt
    if follows_prompt:
        print(codec.decode(prompt.tokens) if prompt.text is None else prompt.text, end="")
    stream = TextStream(codec, prompt.tokens if follows_prompt else ())
    count = 0
    for token in itertools.chain([first], tokens):
        print(stream.add([token]), end="", flush=True)
        count += 1
    print(stream.add([], is_last=True))
    return count


def _beams_of(args: argparse.Namespace, sampling: Sampling) -> Beams | None:
    """Return how beams are searched; None without `--num_beams`."""
    if args.num_beams is None:
        if args.length_penalty != 1.0 or args.early_stopping != "false":
            raise ValueError(
                "--length_penalty and --early_stopping are about beams; add --num_beams, such as "
                "--num_beams=4, or leave them out"
            )
        return None
    plain = dataclasses.replace(sampling, temperature=1.0, seed=0)
    if plain != Sampling() or args.num_samples != 1:
        raise ValueError(
            f"--num_beams={args.num_beams} searches for the most likely continuation; leave out "
            "top_k, top_p, min_p, repetition_penalty, banned and num_samples"
        )
    return Beams(
        num_beams=args.num_beams,
        length_penalty=args.length_penalty,
        early_stopping=_EARLY_STOPPING[args.early_stopping],
    )


def _drafts_of(args: argparse.Namespace, tokenizer: FileTokenizer | None) -> Drafts | None:
    """Return where drafts come from; None without `--num_drafts`."""
    if args.num_drafts is not None and args.num_drafts < 1:
        raise ValueError(f"--num_drafts={args.num_drafts} must be at least 1, or left out")
    if args.num_drafts is None:
        if args.draft_model is not None:
            raise ValueError(
                f"--draft_model={args.draft_model} also needs --num_drafts, such as --num_drafts=4"
            )
        return None
    if args.num_beams is not None:
        raise ValueError(
            f"--num_drafts={args.num_drafts}: a beam search has no drafts; leave out one of "
            "--num_drafts and --num_beams"
        )
    if args.draft_model is None:
        return Drafts(num_tokens=args.num_drafts)
    source = read_model(args.draft_model, args)
    its_tokenizer = tokenizer_of(source)
    if tokenizer and its_tokenizer and not have_same_tokens(tokenizer, its_tokenizer):
        raise ValueError(
            f"--draft_model={args.draft_model} has another tokenizer than --model={args.model}; "
            "take one with the same tokens"
        )
    return Drafts(num_tokens=args.num_drafts, model=load_model(source, dtype=args.dtype))


def _numbers(name: str, text: str) -> list[int]:
    parts = [part for part in text.split(",") if part]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--{name}={text} must be ids separated by commas, such as 11,13")
    return [int(part) for part in parts]


if __name__ == "__main__":
    run_command(main)
