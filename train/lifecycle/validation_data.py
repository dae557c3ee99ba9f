"""Loads the data that `--mode=eval` evaluates on, which the run may never have seen."""

import dataclasses
from pathlib import Path

from convert.options import ReadOptions
from convert.source import Source, read_source
from data.corpus import load_corpus, load_validation
from data.examples import Corpus, Label
from train.config.schema import RunConfig
from train.lifecycle import workdir


def load_data_to_evaluate(
    config: RunConfig, directory: Path, source: Source | None, options: ReadOptions
) -> Corpus:
    """Load the validation sets that a config names alone, or the split that the run has held out.

    Sets that are named need neither the training data nor its tokenizer: the workdir has a copy of
    the tokenizer, and the labels.

    Args:
        directory: workdir of the run.
        source: `init_from` checkpoint, or None.
        options: permissions for the checkpoint of the run.

    Raises:
        ValueError: the data, the tokenizer or the labels are missing or broken.
        OSError: a file cannot be read.
    """
    data = config.data
    if not (data.validation_paths or data.validation_splits):
        return load_corpus(data, config.images)
    labels: tuple[Label, ...] = () if source is None else source.labels
    if workdir.has_checkpoint(directory):
        labels = workdir.saved_labels(directory)
        if data.reads_text and data.tokenizer == "bpe":
            data = dataclasses.replace(data, tokenizer=_tokenizer_of(directory, options))
    if data.has_labels and not labels:
        raise ValueError(
            f"--mode=eval: neither --workdir={directory} nor config.init_from has the labels of "
            "the classifier; set config.init_from to a checkpoint with them, or leave "
            "data.validation_paths out"
        )
    return load_validation(data, config.images, labels if data.has_labels else ())


def _tokenizer_of(directory: Path, options: ReadOptions) -> str:
    tokenizer = read_source(directory, options).tokenizer
    if tokenizer is None:
        raise ValueError(
            f"--mode=eval: --workdir={directory} has no tokenizer; set data.tokenizer to the "
            "tokenizer.json that the model was trained with"
        )
    return str(tokenizer)
