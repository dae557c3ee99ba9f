r"""Writes, describes and reads token files in the format of Megatron-LM and LiBai.

    python -m data.megatron write my_tokens --data.name=text --data.paths='my_texts/*.txt' \
        --data.tokenizer=my_model/tokenizer.json
    python -m data.megatron show my_tokens
    python -m data.megatron read my_tokens --data.tokenizer=my_model/tokenizer.json

docs/data.md explains the commands and how to train on the files.
"""

import argparse
from collections.abc import Iterator

import numpy as np

from data.config import DataConfig
from data.hub_files import with_local_files
from data.text.text_corpus import load_fixed_tokenizer, load_stores
from data.text.token_files import TokenFile, open_token_file, write_token_file
from data.text.token_store import TokenStore, document_ends, unknown_ids
from data.validation import with_split_folders
from fields.paths import local_name
from untrusted.commands import command_parser, refuses_bad_input, run_command


@refuses_bad_input()
def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments; None for the command line of the process.

    Returns:
        The exit code: 0, or 2 after an error, which is printed to stderr in one sentence.
    """
    args = vars(_parser().parse_args(argv))
    command = args.pop("command")
    path = args.pop("path")
    first, count, split = (args.pop(key, None) for key in ("first", "count", "split"))
    fields = {key.removeprefix("data."): v for key, v in args.items() if v is not None}
    # These commands make no rows, so the two sizes do not matter.
    config = DataConfig(sequence_length=1, global_batch_size=1, **fields)
    if command == "write":
        print(_write(path, config, split))
    elif command == "show":
        print(_show(path, open_token_file(path)))
    else:
        for line in _read(open_token_file(path), config, first, count):
            print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    def texts(value: str) -> tuple[str, ...]:
        return tuple(part for part in value.split(",") if part)

    parser = command_parser("data.megatron")
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="tokenize a corpus described by fields of the config")
    show = commands.add_parser("show", help="print the format and the sizes of a token file")
    read = commands.add_parser("read", help="print documents of a token file as text")
    for command in (write, show, read):
        command.add_argument(
            "path", type=local_name, help="path of the .bin and .idx files, without the suffix"
        )
    for key in ("name", "text_field", "tokenizer", "cache_dir"):
        write.add_argument(f"--data.{key}", help="as in a run's config")
    for key in ("paths", "mixture"):
        write.add_argument(
            f"--data.{key}", type=texts, help="as in a run's config; comma-separated list"
        )
    write.add_argument("--data.vocab_size", type=int, help="as in a run's config")
    write.add_argument("--data.validation_fraction", type=float, help="as in a run's config")
    write.add_argument(
        "--split", choices=("train", "validation"), default="train", help="documents to write"
    )
    read.add_argument(
        "--data.tokenizer", required=True, help="the tokenizer that the file was written with"
    )
    read.add_argument("--first", type=int, default=0, help="number of the first document to print")
    read.add_argument("--count", type=int, default=3, help="number of documents to print")
    return parser


def _write(path: str, config: DataConfig, split: str) -> str:
    """Write a split of the corpus, and return a description of the token file."""
    config = with_local_files(with_split_folders(config))
    tokenizer, stores = load_stores(config)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32)
    write_token_file(path, _documents(stores, split, tokenizer.eos_id), dtype)
    written = _show(path, open_token_file(path))
    return f"{written}; read them with data.tokenizer={tokenizer.source}"


def _documents(stores: list[TokenStore], split: str, eos_id: int) -> Iterator[np.ndarray]:
    """Yield the documents of all sources, each with its end-of-document token."""
    for store in stores:
        # The array begins with an end-of-document token, so each document follows one.
        ends = document_ends(store.splits[split], eos_id)
        for before, end in zip(ends[:-1], ends[1:], strict=True):
            yield store.splits[split][before + 1 : end + 1]


def _show(path: str, file: TokenFile) -> str:
    sizes = np.diff(file.bounds)
    mean = sizes.mean() if len(sizes) else 0.0
    return (
        f"{path}: {file.kind}, {file.tokens.dtype}, {len(file):,} documents in "
        f"{file.num_sequences:,} sequences, {len(file.tokens):,} tokens, {mean:,.1f} a document"
    )


def _read(file: TokenFile, config: DataConfig, first: int, count: int) -> Iterator[str]:
    tokenizer = load_fixed_tokenizer(config)
    if tokenizer is None:
        raise ValueError(
            "data.tokenizer='bpe' is trained from text; set data.tokenizer to the tokenizer.json "
            "that the token file was written with"
        )
    if not 0 <= first < len(file):
        raise ValueError(
            f"--first={first} must be the number of a document, from 0 to {len(file) - 1}"
        )
    for number in range(first, min(first + count, len(file))):
        ids = file[number]
        bad = unknown_ids(ids, tokenizer)
        if len(bad):
            raise ValueError(
                f"document {number} has the token id {bad[0]}, but data.tokenizer="
                f"{config.tokenizer!r} has the ids 0 to {tokenizer.vocab_size - 1}; use the "
                "tokenizer that the file was written with"
            )
        yield f"--- document {number}, {len(file[number])} tokens\n{tokenizer.decode(file[number])}"


if __name__ == "__main__":
    run_command(main)
