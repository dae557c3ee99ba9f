"""The shapes and dtypes of examples, derived from the config alone before any data is read.

The arrays themselves are made by the `Examples` of each objective, in data/text/objectives/ and
data/images/image_corpus.py: a change of a shape belongs in both places.
"""

import numpy as np

from data.config import DataConfig
from data.image_config import ImageConfig
from data.text.objectives.preference import max_pairs
from data.text.objectives.span_corruption import target_length

Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]


def example_shapes(config: DataConfig, images: ImageConfig) -> Shapes:
    """Return (shape of one example, dtype) for every key of a batch except `index`.

    Args:
        images: config section `images`; read only if the objective is one of images.

    Raises:
        ValueError: `data.target_length` is too short for the spans.
    """
    return _image_shapes(config, images) if config.reads_images else _text_shapes(config)


def token_arrays(config: DataConfig) -> frozenset[str]:
    """Return the names of the arrays of an example whose first dim counts the tokens of a row."""
    if config.reads_images:
        return frozenset()
    of_rows = {"weights", "reference_log_probs"} if config.objective == "preference" else set()
    shapes = _text_shapes(config)
    return frozenset(name for name, (shape, _) in shapes.items() if shape and name not in of_rows)


def _array(dtype: type, *shape: int) -> tuple[tuple[int, ...], np.dtype]:
    return shape, np.dtype(dtype)


def _image_shapes(config: DataConfig, images: ImageConfig) -> Shapes:
    num_views = (2,) if config.objective == "image_contrast" else ()
    shapes = {
        "images": _array(np.uint8, *num_views, images.size, images.size, images.channels),
        "weights": _array(np.float32),
    }
    if config.objective == "image_text":
        shapes["tokens"] = _array(np.int32, config.sequence_length)
    if config.objective == "image_reconstruction":
        shapes["mask_seeds"] = _array(np.uint32)
    if config.objective == "image_classification":
        shapes["targets"] = _array(np.int32)
        if images.mixes:
            shapes |= {"other_targets": _array(np.int32), "target_shares": _array(np.float32)}
    return shapes


def _text_shapes(config: DataConfig) -> Shapes:
    length = config.sequence_length
    ids = _array(np.int32, length)
    if config.objective in ("span_corruption", "seq2seq"):
        is_spans = config.objective == "span_corruption"
        decoder_length = target_length(config) if is_spans else config.target_length or length
        return {
            "tokens": ids,
            "segment_ids": ids,
            "decoder_tokens": _array(np.int32, decoder_length),
            "decoder_segment_ids": _array(np.int32, decoder_length),
            "targets": _array(np.int32, decoder_length),
            "weights": _array(np.float32, decoder_length),
        }
    if config.objective == "classification":
        types = {"token_types": ids} if config.pair_field else {}
        label = {"targets": _array(np.int32), "weights": _array(np.float32)}
        return {"tokens": ids, "segment_ids": ids, **types, **label}
    if config.objective == "preference":
        names = ("tokens", "targets", "segment_ids", "positions", "answers")
        num_pairs = max_pairs(length)
        return dict.fromkeys(names, ids) | {
            "weights": _array(np.float32, num_pairs),
            "reference_log_probs": _array(np.float32, num_pairs, 2),
        }
    shapes = {"tokens": ids, "targets": ids, "weights": _array(np.float32, length)}
    if config.objective == "masked_lm_pairs":
        shapes |= {"segment_ids": ids, "token_types": ids}
        shapes |= {"labels": _array(np.int32), "label_weights": _array(np.float32)}
    if config.isolate_documents or config.objective == "chat":
        shapes |= {"segment_ids": ids, "positions": ids}
    return shapes
