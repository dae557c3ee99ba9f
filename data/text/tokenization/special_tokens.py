"""Special tokens, which no text encodes to, and the names that tokenizers give them."""

from collections.abc import Callable

END_OF_TEXT = "<|endoftext|>"
#: Names of the end-of-document token in published tokenizers, most common first.
EOS_NAMES = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]", "[EOS]")
#: Use -> its names in published tokenizers. Our own tokenizers use the first name.
NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]", "<s>", "<cls>"),
    "sep": ("[SEP]", "</s>", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}
# Sentinel i stands for the i-th span removed from a text. The names of mT5 begin with a space.
_SENTINELS = ("<extra_id_{}>", "▁<extra_id_{}>")
_NUM_SENTINELS = 100
#: The special tokens of our own tokenizers, after the end of a document, for all objectives other
#: than causal_lm. As in T5, the ids of sentinels are in descending order.
ADDED = (
    *(names[0] for names in NAMES.values()),
    *(_SENTINELS[0].format(i) for i in reversed(range(_NUM_SENTINELS))),
)


def find_special_ids(token_to_id: Callable[[str], int | None]) -> dict[str, int]:
    """Return use -> id, for the uses in NAMES that a tokenizer has a token for.

    Args:
        token_to_id: returns the id of a token, or None if the tokenizer does not have it.
    """
    ids = {}
    for use, names in NAMES.items():
        known = [i for i in map(token_to_id, names) if i is not None]
        if known:
            ids[use] = known[0]
    return ids


def find_sentinel_ids(token_to_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """Return the ids of sentinels 0, 1, ..., up to the first one that a tokenizer lacks.

    Args:
        token_to_id: returns the id of a token, or None if the tokenizer does not have it.
    """
    for name in _SENTINELS:
        ids = []
        while (token_id := token_to_id(name.format(len(ids)))) is not None:
            ids.append(token_id)
        if ids:
            return tuple(ids)
    return ()
