"""Write the tokenizer of a run that was trained from scratch, as transformers expects it.

    hf/tokenizer.json of the run -> tokenizer.json          with the tokens around a text: [CLS] …
                                    tokenizer_config.json   special tokens by use, maximum length
                                    generation_config.json  if the model generates text
                                    config.json             the ids of special tokens

The classes in `transformers`, such as BertTokenizer, imply special tokens that Taibai's tokenizers
do not have. The files therefore name the generic class, which uses the tokens in the files.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers

from convert.architecture import Architecture
from convert.model_on_disk import Source
from data.text.tokenization.file_tokenizer import FileTokenizer, load_tokenizer_file
from data.text.tokenization.settings import CONFIG_FILE
from data.text.tokenization.tokenizer import Tokenizer
from untrusted.documents import read_json
from untrusted.files import write_text

GENERATION_CONFIG = "generation_config.json"


def write_tokenizer(source: Source, architecture: Architecture, directory: Path) -> dict[str, int]:
    """Write the files of a tokenizer, if the run has one that does not come from Hugging Face.

    Returns:
        The keys of config.json with the ids of special tokens; empty if nothing was written.

    Raises:
        ValueError: The run's tokenizer.json is damaged.
    """
    if source.hf_config is not None or source.tokenizer is None:
        return {}
    tokenizer = load_tokenizer_file(str(source.tokenizer))
    ids = _special_ids(tokenizer, architecture)
    write_text(directory / "tokenizer.json", _with_template(tokenizer, architecture, ids))
    _write_json(directory / CONFIG_FILE, _config(tokenizer, source, architecture, ids))
    keys = {f"{use}_token_id": ids[use] for use in ("bos", "eos", "pad")}
    if architecture.is_generative:
        if _has_decoder(source):
            keys["decoder_start_token_id"] = ids["pad"]
        file = directory / GENERATION_CONFIG  # exists if the run learned conversations
        generation_config = read_json(file, within=directory) if file.exists() else {}
        _write_json(file, keys | generation_config)
    return keys


def keep_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer that a run trains with, and the names of its special tokens."""
    write_text(directory / "tokenizer.json", tokenizer.content)
    _write_json(directory / CONFIG_FILE, dict(tokenizer.token_names))


def add_stop_token(directory: Path, token: int, end_of_text: int) -> None:
    """Add a token to those with which generation stops, in generation_config.json.

    Args:
        directory: directory of the tokenizer files, and of config.json if it has one.
        end_of_text: id of the token that stops generation if neither file names one.

    Raises:
        ValueError: A file is damaged.
    """
    files = [directory / name for name in (GENERATION_CONFIG, "config.json")]
    configs = [read_json(file, within=directory) if file.exists() else {} for file in files]
    known = [config["eos_token_id"] for config in configs if config.get("eos_token_id") is not None]
    eos_setting = known[0] if known else end_of_text
    stops = eos_setting if isinstance(eos_setting, list) else [eos_setting]
    if token not in stops:
        _write_json(files[0], configs[0] | {"eos_token_id": [*stops, token]})


def _special_ids(tokenizer: FileTokenizer, architecture: Architecture) -> dict[str, int]:
    """Return use -> id of the special tokens that the architecture uses."""
    end = tokenizer.eos_id
    first = end if tokenizer.bos_id is None else tokenizer.bos_id
    ids = {"bos": first, "eos": end, "pad": end, **tokenizer.special_ids}
    if "{cls}" not in architecture.template:
        return {use: i for use, i in ids.items() if use in ("bos", "eos", "pad")}
    return {**ids, "bos": ids.get("cls", end), "eos": ids.get("sep", end)}


def _with_template(
    tokenizer: FileTokenizer, architecture: Architecture, ids: dict[str, int]
) -> str:
    """Return a tokenizer.json that puts the special tokens of the objective around texts.

    A tokenizer that has such a template already keeps it.
    """
    content = tokenizers.Tokenizer.from_str(tokenizer.content)
    if content.post_processor is not None or "{" not in architecture.template:
        return tokenizer.content
    names = {use: tokenizer.decode([i]) for use, i in ids.items()}
    content.post_processor = tokenizers.processors.TemplateProcessing(
        single=architecture.template.format(**names),
        pair=architecture.pair_template.format(**names),
        special_tokens=[(names[use], i) for use, i in ids.items()],
    )
    return content.to_str()


def _config(
    tokenizer: FileTokenizer, source: Source, architecture: Architecture, ids: dict[str, int]
) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    has_types = getattr(source.config, "num_token_types", 1) > 1
    inputs = ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": inputs,
        **{f"{use}_token": tokenizer.decode([i]) for use, i in ids.items()},
    }
    if tokenizer.unknown_token is not None:
        config["unk_token"] = tokenizer.unknown_token
    if _has_decoder(source):
        sentinels = [tokenizer.decode([i]) for i in tokenizer.sentinel_ids]
        config["additional_special_tokens"] = sentinels
    elif architecture.is_generative:
        config["padding_side"] = "left"  # A decoder continues the end of each row.
    length = getattr(source.config, "max_positions", None)
    return config if length is None else {**config, "model_max_length": length}


def _has_decoder(source: Source) -> bool:
    """Return whether the model has an encoder and a decoder."""
    return hasattr(source.config, "num_decoder_layers")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    write_text(file, json.dumps(content, indent=2) + "\n")
