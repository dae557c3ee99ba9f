"""Tokens that no text encodes to, by what objectives use them for."""

from collections.abc import Callable

END_OF_TEXT = "<|endoftext|>"
#: The names that published tokenizers give the end of a document, the commonest first.
EOS_NAMES = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]", "[EOS]")
#: Use -> the names that published tokenizers give it; the first is that of our own.
NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]", "<s>", "<cls>"),
    "sep": ("[SEP]", "</s>", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}
# A span that is left out has the sentinel of its number; mT5's names begin with a space.
_SENTINELS = ("<extra_id_{}>", "▁<extra_id_{}>")
_NUM_SENTINELS = 100
#: What our own tokenizers know besides the end of a document, unless they are for causal_lm; as
#: with T5, sentinels have descending ids.
ADDED = (
    *(names[0] for names in NAMES.values()),
    *(_SENTINELS[0].format(i) for i in reversed(range(_NUM_SENTINELS))),
)


def find_special_ids(token_to_id: Callable[[str], int | None]) -> dict[str, int]:
    """Returns the ids of the special tokens that a tokenizer has, by their use."""
    found = {}
    for use, names in NAMES.items():
        known = [i for i in map(token_to_id, names) if i is not None]
        if known:
            found[use] = known[0]
    return found


def find_sentinel_ids(token_to_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """Returns the ids of the sentinels 0, 1, ... that a tokenizer has."""
    for name in _SENTINELS:
        ids = []
        while (found := token_to_id(name.format(len(ids)))) is not None:
            ids.append(found)
        if ids:
            return tuple(ids)
    return ()
