"""Loads a generator: a model, its tokenizer and chat template, and the ends of its texts."""

from pathlib import Path
from typing import Any

from convert.from_hf import load_model
from convert.model_on_disk import Source
from convert.options import ReadOptions
from convert.source import read_source
from data.text.chat.template import ChatTemplate, find_template
from data.text.tokenization.file_tokenizer import FileTokenizer
from generate.drafts import Drafts
from generate.generator import Generator
from generate.prompts import TextCodec, start_token_of, stop_tokens_of, tokenizer_of
from untrusted.limited import LimitedProcesses


def load_generator(
    path: str | Path,
    *,
    dtype: str = "float32",
    batch_size: int = 32,
    drafts: Drafts | None = None,
    **options: Any,
) -> Generator:
    """Load a language model from disk onto the current mesh, ready to continue texts.

    The mesh is the one set by `jax.set_mesh`; use the generator on it. If no mesh is set, the model
    is placed on the first device.

    Args:
        path: directory of a run, one of its checkpoints, or a Hugging Face model.
        dtype: dtype of the parameters and the computation: float32, bfloat16 or float64.
        batch_size: most rows that are continued at the same time; a multiple of the number of
            replicas of the mesh.
        drafts: where drafts of the next tokens come from; None: there are none.
        **options: fields of `convert.options.ReadOptions`, such as `harmless`.

    Raises:
        ValueError: the model cannot be read, cannot be sharded over the mesh, or cannot generate
            text.
        OSError: a file cannot be read.
    """
    source = read_source(path, ReadOptions(**options))
    return generator_of(
        source, tokenizer_of(source), dtype=dtype, batch_size=batch_size, drafts=drafts
    )


def generator_of(
    source: Source,
    tokenizer: FileTokenizer | None,
    *,
    dtype: str,
    batch_size: int,
    drafts: Drafts | None,
) -> Generator:
    """Load a model that has been opened; see `load_generator`."""
    # The generator has copies of the parameters, so nothing else may keep them.
    return Generator(
        load_model(source, dtype=dtype),
        stop=stop_tokens_of(source, tokenizer),
        start=start_token_of(source, tokenizer),
        batch_size=batch_size,
        drafts=drafts,
        codec=None if tokenizer is None else TextCodec(tokenizer),
    )


def default_length(source: Source) -> int:
    """Return the most tokens of a prompt and its continuation, where rows have caches of one size.

    Raises:
        ValueError: the model does not continue its prompt.
    """
    positions = getattr(source.config, "max_positions", None)
    if positions is None:
        raise ValueError(
            f"a {source.model} cannot be served or chat: only models that continue their prompt "
            "can, such as GPT-2 or LLaMA; use python -m generate"
        )
    return min(positions, 4096)


def template_of(
    source: Source, tokenizer: FileTokenizer, processes: LimitedProcesses
) -> ChatTemplate | None:
    """Return the chat template of a model, or of its adapter; None if neither has one.

    Args:
        processes: processes that run the template.
    """
    end = tokenizer.decode([tokenizer.eos_id])
    directories = [source.adapter_files, source.hf_files]
    templates = (
        find_template("", each, end, is_repeatable=False, processes=processes)
        for each in directories
        if each
    )
    return next((template for template in templates if template is not None), None)
