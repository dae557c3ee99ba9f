"""Images with captions: folders of images with a metadata.jsonl, as `datasets` reads them too.

    my_images/metadata.jsonl        {"file_name": "a/1.jpg", "text": "a cat on a chair"}
    my_images/a/1.jpg               ...

`data.paths` names such folders as for images without captions: one, one with train/ and val/
folders, or two. An image may have several lines.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.cache import make_cache
from data.config import DataConfig
from data.examples import Example, NoExamples
from data.image_config import ImageConfig
from data.images.folder import FolderImages, split_folders, validation_root
from data.images.image_corpus import Images, open_splits
from data.images.readability import leave_out, sound_files
from data.images.sources import ImageDataset, ImageSource, Split, hold_out
from data.images.unpack import CAPTIONS, IMAGE_FIELD, unpack
from data.text.objectives.rows import special_id
from data.text.text_corpus import TextCorpus, load_fixed_tokenizer, train_bpe
from data.text.tokenization.tokenizer import Tokenizer
from data.validation import naming_validation_paths, validation_sources
from untrusted.documents import parse_json
from untrusted.files import MAX_BYTES, digest_of, open_regular


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """The usable lines of a folder's metadata.jsonl.

    Attributes:
        files: paths of the images relative to the folder.
        captions: caption of each of them.
    """

    root: Path
    files: Sequence[str]
    captions: Sequence[str]

    @property
    def paths(self) -> list[str]:
        """The full paths of the images."""
        return [os.path.join(self.root, file) for file in self.files]

    def chosen(self, is_chosen: np.ndarray) -> "_Pairs":
        """Keep some of the pairs: bool[number of pairs]."""
        numbers = np.flatnonzero(is_chosen).tolist()
        return _Pairs(
            root=self.root,
            files=[self.files[i] for i in numbers],
            captions=[self.captions[i] for i in numbers],
        )


class CaptionedImages(Images):
    """The rows of a split of images with captions.

    A caption is truncated, and followed by the end-of-text token and padding. A tokenizer that has
    a token for the beginning of a text puts it first, unless it is the same as the one for its end.

    Args:
        source: images; the number of an image's class is the number of its caption.
        captions: all captions.
    """

    def __init__(
        self,
        source: ImageSource,
        data: DataConfig,
        images: ImageConfig,
        captions: Sequence[str],
        tokenizer: Tokenizer,
    ):
        super().__init__(source, data, images)
        self._captions = captions
        self._tokenizer = tokenizer
        self._pad = special_id(tokenizer, "pad", data)
        bos = getattr(tokenizer, "bos_id", None)
        self._first = [] if bos in (None, tokenizer.eos_id) else [bos]

    def _targets(self, label: int) -> Example:
        length = self._data.sequence_length
        (ids,) = self._tokenizer.encode_batch([self._captions[label]])
        kept = [*self._first, *ids[: length - 1 - len(self._first)], self._tokenizer.eos_id]
        tokens = np.full(length, self._pad, np.int32)
        tokens[: len(kept)] = kept
        return {"tokens": tokens}


def load_captioned_images(config: DataConfig, images: ImageConfig) -> TextCorpus:
    """Find and check images with captions, and load the tokenizer of the captions.

    Raises:
        ValueError: A line of metadata.jsonl is not a JSON object with an image and a caption, the
            tokenizer is broken, or there are too few pairs for one batch; or `images.on_broken` is
            'refuse', and captions are empty, or images are missing or broken.
        FileNotFoundError: A folder, its metadata.jsonl or the tokenizer file does not exist.
    """
    make_cache(config)
    tokenizer = load_fixed_tokenizer(config)
    roots = split_folders(unpack(config))
    if config.validation_paths:
        roots = roots[:1]
    named = _validation_pairs(config, images)
    parts = [_read_pairs(root, config, images) for root in roots]
    parts, captions, splits = _usable([*parts, *named.values()], config, images)
    own = parts[: len(roots)]
    found = ImageDataset(
        train=splits[0],
        validation=splits[1] if len(roots) > 1 else None,
        classes=(),
        key=_key(own),
        contents=_key(own, is_full=True) if config.verify == "full" else "",
        named_validation=dict(zip(named, splits[len(roots) :], strict=True)),
    )
    dataset = hold_out(found, config, images)
    texts = parts[0].captions
    tokenizer = tokenizer or train_bpe(config, f"captions {found.key}", lambda: texts)
    train, sets = open_splits(
        dataset,
        config,
        images,
        lambda source: CaptionedImages(source, config, images, captions, tokenizer),
    )
    keyed = f"{dataset.key} {tokenizer.fingerprint}"
    corpus = TextCorpus(
        tokenizer=tokenizer,
        train=train,
        validation=NoExamples(),
        fingerprint=hashlib.sha256(keyed.encode()).hexdigest(),
        contents=dataset.contents,
    )
    return corpus.with_validation(sets)


def load_validation_captions(config: DataConfig, images: ImageConfig) -> TextCorpus:
    """Load the captioned images of `data.validation_paths` alone, without training data.

    Raises:
        ValueError: A line or the tokenizer is broken, or a folder has no usable lines.
        FileNotFoundError: A folder, its metadata.jsonl or the tokenizer file does not exist.
    """
    make_cache(config)
    tokenizer = load_fixed_tokenizer(config)
    assert tokenizer is not None, config.tokenizer
    named = _validation_pairs(config, images)
    _, captions, splits = _usable([*named.values()], config, images)
    corpus = TextCorpus(
        tokenizer=tokenizer, train=NoExamples(), validation=NoExamples(), fingerprint=""
    )
    return corpus.with_validation(
        {
            name: CaptionedImages(split.source, config, images, captions, tokenizer)
            for name, split in zip(named, splits, strict=True)
        }
    )


def _validation_pairs(config: DataConfig, images: ImageConfig) -> dict[str, "_Pairs"]:
    """Read the lines of each set of `data.validation_paths`, by its name."""
    with naming_validation_paths():
        return {
            name: _read_pairs(validation_root(source), config, images)
            for name, source in validation_sources(config).items()
        }


def _usable(
    parts: Sequence["_Pairs"], config: DataConfig, images: ImageConfig
) -> tuple[list["_Pairs"], list[str], list[Split]]:
    """Drop pairs whose image is broken; return the others, their captions, and their splits."""
    is_sound = sound_files([path for part in parts for path in part.paths], config, images)
    bounds = np.cumsum([len(part.files) for part in parts])[:-1]
    kept = np.split(is_sound, bounds)
    parts = [part.chosen(is_kept) for part, is_kept in zip(parts, kept, strict=True)]
    captions = [caption for part in parts for caption in part.captions]
    starts = [0, *np.cumsum([len(part.files) for part in parts])]
    splits = [_split(part, int(start)) for part, start in zip(parts, starts, strict=False)]
    return parts, captions, splits


def _read_pairs(root: Path, config: DataConfig, images: ImageConfig) -> _Pairs:
    """Read the lines of a folder, without those that have an empty caption or no image file."""
    files = []
    captions = []
    problems = []
    for place, file, caption in _lines(root, config.text_field):
        if not caption.strip():
            problems.append(f"{place} (its caption is empty)")
        elif not (root / file).is_file():
            problems.append(f"{place} (there is no image {file!r} in {root})")
        else:
            files.append(file)
            captions.append(caption)
    what = f"line(s) of {root / CAPTIONS} cannot be used"
    leave_out(problems, what, "add the captions and images, or remove the lines", images)
    if not files:
        raise ValueError(
            f"data.paths: {root / CAPTIONS} has no usable lines; add lines such as "
            f'{{"{IMAGE_FIELD}": "1.jpg", "{config.text_field}": "a caption"}}'
        )
    return _Pairs(root=root, files=files, captions=captions)


def _lines(root: Path, text_field: str) -> Iterator[tuple[str, str, str]]:
    """Yield (place, file name of the image, caption) of each line that is not blank."""
    path = root / CAPTIONS
    if not path.exists():
        raise FileNotFoundError(
            f"data.paths: {root} has no {CAPTIONS}, from which data.objective='image_text' reads "
            f'the captions; write one with lines such as {{"{IMAGE_FIELD}": "1.jpg", '
            f'"{text_field}": "a caption"}}'
        )
    with open_regular(path) as file:
        number = 0
        while line := file.readline(MAX_BYTES):
            number += 1
            if not line.strip():
                continue
            place = f"line {number} of {path}"
            record = parse_json(line, place)
            for name, key in ((IMAGE_FIELD, ""), (text_field, "data.text_field=")):
                if not isinstance(record.get(name), str):
                    raise ValueError(
                        f"data.paths: {place} has the fields {sorted(record)}, but no string in "
                        f"{key}{name!r}; every line needs the file name of an image in "
                        f"{IMAGE_FIELD!r} and a caption in data.text_field"
                    )
            name = record[IMAGE_FIELD]
            if os.path.isabs(name) or ".." in Path(name).parts or "\0" in name:
                raise ValueError(
                    f"data.paths: {place} has {IMAGE_FIELD}={name!r}, which must be a path within "
                    f"{root}; move the image there"
                )
            yield place, name, record[text_field]


def _split(pairs: _Pairs, first: int) -> Split:
    """Return the split of a folder; its captions are numbered from `first`."""
    files = np.array([os.fsencode(file) for file in pairs.files], np.bytes_)
    numbers = first + np.arange(len(files), dtype=np.int32)
    # All pairs count as one class. The names are those of the images, so that all captions of an
    # image are next to each other when some are held out.
    return Split(
        source=FolderImages(pairs.root, files, numbers),
        names=files,
        labels=np.zeros(len(files), np.int32),
    )


def _key(parts: Sequence[_Pairs], *, is_full: bool = False) -> str:
    """Hash captions, and relative paths and sizes or contents of images."""
    digest = hashlib.sha256(b"captions")
    for part in parts:
        digest.update(f"{len(part.files)}\0".encode())
        for file, path, caption in zip(part.files, part.paths, part.captions, strict=True):
            version = digest_of(Path(path)) if is_full else os.stat(path).st_size
            digest.update(
                os.fsencode(file) + f"\0{version}\0{caption}\0".encode("utf-8", "replace")
            )
    return digest.hexdigest()
