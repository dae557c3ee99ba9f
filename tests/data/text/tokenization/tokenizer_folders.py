"""Small tokenizer folders with the files of published models, one per kind.

gpt2       vocab.json, merges.txt
opt        the same, with `add_bos_token` and tokens that only special_tokens_map.json names
phi        the same, with runs of spaces in added_tokens.json
roberta    the same, with `<s> … </s>` around texts and a mask token that takes the space before
qwen2      the same, with other rules for splitting, and `added_tokens_decoder`
bert       vocab.txt
llama      a SentencePiece BPE as tokenizer.json, which begins texts with `<s>`
deepseek   a byte-level BPE as tokenizer.json, with an end of text of its own
t5         a SentencePiece Unigram as tokenizer.json, with sentinels
xlm_roberta  the same, with `<s> … </s>` around texts, and files that do not name its special tokens
camembert    the same, with other ids of its special tokens
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

CORPUS = ["the cat sat on the mat", "naïve café — 数学 " * 3, "1234 5678 the the"] * 5
END = "<|endoftext|>"
#: Properties of an added token in tokenizer_config.json.
_PLAIN = {"lstrip": False, "rstrip": False, "single_word": False}
_SPECIAL = {**_PLAIN, "normalized": False, "special": True}


def save_bpe(directory: Path, special: list[str], **files: Any) -> None:
    """Write the vocab.json and the merges.txt of a byte-level BPE, and further JSON files."""
    trainer = tokenizers.ByteLevelBPETokenizer()
    trainer.train_from_iterator(CORPUS, vocab_size=340, special_tokens=special, show_progress=False)
    directory.mkdir(exist_ok=True)
    trainer.save_model(str(directory))
    save_json(directory, **files)


def save_json(directory: Path, **files: Any) -> None:
    """Write JSON files, given by their names without the suffix."""
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def vocab_size(directory: Path) -> int:
    """Return the number of tokens in vocab.json."""
    return len(json.loads((directory / "vocab.json").read_text(encoding="utf-8")))


def gpt2(directory: Path) -> None:
    """Write a folder like GPT-2's."""
    save_bpe(directory, [END], config={"model_type": "gpt2", "eos_token_id": 0})


def opt(directory: Path) -> None:
    """Write a folder like OPT's, whose texts begin with the token that also ends them."""
    token = {"__type": "AddedToken", "content": "</s>", **_PLAIN, "normalized": True}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False}
    named = {"bos_token": token, "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    save_bpe(
        directory,
        ["<s>", "<pad>", "</s>", "<unk>"],
        tokenizer_config=config,
        special_tokens_map={name: _without_type(value) for name, value in named.items()},
        config={"model_type": "opt", "eos_token_id": 2},
    )


def phi(directory: Path) -> None:
    """Write a folder like Phi-2's, with more tokens than its vocab.json."""
    config = {"tokenizer_class": "CodeGenTokenizer", "bos_token": END, "eos_token": END}
    config |= {"additional_special_tokens": ["<|user|>"]}
    save_bpe(directory, [END], tokenizer_config=config, config={"model_type": "phi"})
    added = ["  " * 3, "  ", "\t\t", "<|user|>"]
    first = vocab_size(directory)
    numbered = {token: first + i for i, token in enumerate(added)}
    save_json(directory, added_tokens=numbered, special_tokens_map={"unk_token": END})


def roberta(directory: Path) -> None:
    """Write a folder like RoBERTa's."""
    mask = {"content": "<mask>", **_PLAIN, "lstrip": True, "normalized": True}
    save_bpe(
        directory,
        ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        special_tokens_map={"mask_token": mask, "cls_token": "<s>", "sep_token": "</s>"},
        config={"model_type": "roberta", "bos_token_id": 0, "eos_token_id": 2},
    )


def qwen2(directory: Path) -> None:
    """Write a folder like a Qwen chat model's, which have no beginning of text."""
    save_bpe(directory, [], config={"model_type": "qwen2", "eos_token_id": 341})
    first = vocab_size(directory)
    names = [END, "<|im_start|>", "<|im_end|>"]
    added: dict[str, Any] = {
        str(first + i): {"content": name, **_SPECIAL} for i, name in enumerate(names)
    }
    other = {"content": "<tool_call>", **_PLAIN, "normalized": False, "special": False}
    alone = {"content": "cats", **_PLAIN, "single_word": True, "normalized": True, "special": False}
    added |= {str(first + 3): other, str(first + 4): alone}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": END,
    }
    ends = [first + 2, first]
    save_json(directory, tokenizer_config=config, generation_config={"eos_token_id": ends})


def bert(directory: Path) -> None:
    """Write a folder like BERT's."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = tokenizers.BertWordPieceTokenizer(lowercase=True)
    trainer.train_from_iterator(CORPUS, vocab_size=120, special_tokens=special, show_progress=False)
    directory.mkdir(exist_ok=True)
    trainer.save_model(str(directory))
    config = {"do_lower_case": True, "tokenizer_class": "BertTokenizer"}
    save_json(directory, tokenizer_config=config, config={"model_type": "bert"})


def llama(directory: Path) -> None:
    """Write a folder like LLaMA's."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trained = tokenizers.SentencePieceBPETokenizer()
    trained.train_from_iterator(CORPUS, vocab_size=120, show_progress=False)
    learned = json.loads(trained.to_str())["model"]
    ordered = sorted(learned["vocab"], key=learned["vocab"].get)
    tokens += [token for token in ordered if token not in tokens]
    merges = [tuple(pair) for pair in learned["merges"]]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": None,
        "legacy": False,
    }
    _save(made, directory, tokenizer_config=config, config={"model_type": "llama"})


def deepseek(directory: Path) -> None:
    """Write a folder like a distilled DeepSeek model's."""
    first, last = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    save_bpe(directory, [])
    content = {
        name: (directory / name).read_text(encoding="utf-8")
        for name in ("vocab.json", "merges.txt")
    }
    pairs = [line.split(" ") for line in content["merges.txt"].split("\n")[1:] if line]
    model = models.BPE(
        vocab=json.loads(content["vocab.json"]), merges=[(left, right) for left, right in pairs]
    )
    for name in content:
        (directory / name).unlink()
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([last, first])
    made.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    size = made.get_vocab_size()
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A",
        pair=f"{first} $A {first} $B",
        special_tokens=[(first, size - 2)],
    )
    tokens = {
        name: {"__type": "AddedToken", "content": token, **_PLAIN, "normalized": True}
        for name, token in (("bos_token", first), ("eos_token", last), ("pad_token", last))
    }
    config = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, **tokens}
    _save(made, directory, tokenizer_config=config, config={"model_type": "llama"})


def t5(directory: Path) -> None:
    """Write a folder like T5's."""
    sentinels = [f"<extra_id_{i}>" for i in range(100)]
    trained = tokenizers.SentencePieceUnigramTokenizer()
    trained.train_from_iterator(
        CORPUS, vocab_size=80, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"
    )
    pieces = [tuple(piece) for piece in json.loads(trained.to_str())["model"]["vocab"]]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    made.add_special_tokens(["<pad>", "</s>", "<unk>", *reversed(sentinels)])
    config = {
        "tokenizer_class": "T5Tokenizer",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "extra_ids": 100,
        "additional_special_tokens": sentinels,
    }
    _save(made, directory, tokenizer_config=config, config={"model_type": "t5"})


def xlm_roberta(directory: Path) -> None:
    """Write a folder like XLM-R's."""
    _save_like_xlm_roberta(directory, ["<s>", "<pad>", "</s>", "<unk>"], "xlm-roberta")


def camembert(directory: Path) -> None:
    """Write a folder like CamemBERT's, which does not use the first of its tokens."""
    unused = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"]
    _save_like_xlm_roberta(directory, [*unused, "<s>", "</s>"], "camembert")


def _save_like_xlm_roberta(directory: Path, special: list[str], model_type: str) -> None:
    trained = tokenizers.SentencePieceUnigramTokenizer()
    trained.train_from_iterator(
        CORPUS, vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    pieces = [tuple(piece) for piece in json.loads(trained.to_str())["model"]["vocab"]]
    made = tokenizers.Tokenizer(models.Unigram([*pieces, ("<mask>", 0.0)], unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    first, last = "<s>", "</s>"
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {last} $B {last}",
        special_tokens=[(token, special.index(token)) for token in (first, last)],
    )
    mask = tokenizers.AddedToken("<mask>", lstrip=True, special=True, normalized=False)
    made.add_special_tokens([*special, mask])
    files = {"tokenizer_config": {"model_max_length": 512}, "config": {"model_type": model_type}}
    _save(made, directory, **files)


KINDS: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        gpt2,
        opt,
        phi,
        roberta,
        qwen2,
        bert,
        llama,
        deepseek,
        t5,
        xlm_roberta,
        camembert,
    )
}


def _save(made: tokenizers.Tokenizer, directory: Path, **files: Any) -> None:
    directory.mkdir(exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    save_json(directory, **files)


def _without_type(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "__type"} if isinstance(value, dict) else value
