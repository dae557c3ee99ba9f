"""Images in tars in the format of WebDataset.

Files whose names are equal up to the first dot of the last part are one sample, and are next to
each other:

    train/000017.jpg       an image
    train/000017.cls       its label, a number or a name
    train/000017.txt       its caption
    train/000017.json      an object that may have the label and the caption instead
"""

import itertools
import tarfile
from collections.abc import Iterator
from pathlib import Path

from data.images.listing import ENDINGS
from data.images.readability import MAX_IMAGE_BYTES
from data.images.sources import Fields, Sample
from untrusted.documents import parse_json
from untrusted.files import MAX_BYTES, open_regular
from untrusted.messages import shortened

TAR = ".tar"


def samples_of_tar(file: Path, fields: Fields) -> Iterator[Sample]:
    """Yield each image of a tar, in order, with its label or caption.

    Files of other kinds are left out. Nothing of a name is used as a path.

    Raises:
        ValueError: The file is damaged or has no images, or an image has no label or caption.
        OSError: The file cannot be read.
    """
    num_images = 0
    for key, parts in itertools.groupby(_members(file), key=lambda member: member[0]):
        contents = {suffix: content for _, suffix, content in parts}
        images = [suffix for suffix in contents if f".{suffix}" in ENDINGS]
        if not images:
            continue
        place = f"sample {shortened(key)!r} of {file}"
        if len(images) > 1:
            raise ValueError(
                f"data.paths: {place} has the images {', '.join(sorted(images))}, but must have "
                "one; leave out the others"
            )
        num_images += 1
        yield Sample(
            image=contents[images[0]],
            label=None if fields.label is None else _label(contents, fields.label, place),
            caption=None if fields.caption is None else _caption(contents, fields.caption, place),
            place=place,
        )
    if not num_images:
        raise ValueError(
            f"data.paths: {file} has no images ({', '.join(ENDINGS)}); correct the path"
        )


def _members(file: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield (name up to the first dot, the rest in lower case, content) of each file of a tar."""
    try:
        with open_regular(file) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                first, _, suffix = name.partition(".")
                suffix = suffix.lower()
                is_image = f".{suffix}" in ENDINGS
                is_read = is_image or suffix in ("cls", "txt", "json")
                # A sparse file can claim any size.
                if not member.isreg() or member.issparse() or not first or not is_read:
                    continue
                limit = MAX_IMAGE_BYTES if is_image else MAX_BYTES
                if member.size > limit:
                    raise ValueError(
                        f"data.paths: {shortened(member.name)!r} of {file} has {member.size:,} "
                        f"bytes, more than {limit:,}; leave it out"
                    )
                content = tar.extractfile(member)
                assert content is not None, member
                yield f"{folder}/{first}", suffix, content.read()
    except (tarfile.TarError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.paths: {file} is not a whole tar without compression ({shortened(error)}); "
            "write it again"
        ) from error


def _label(contents: dict[str, bytes], field: str, place: str) -> object:
    if "cls" in contents:
        text = _text(contents["cls"], place).strip()
        return int(text) if text.isascii() and text.isdigit() else text
    return _field(contents, field, "cls", "data.label_field", place)


def _caption(contents: dict[str, bytes], field: str, place: str) -> str:
    if "txt" in contents:
        return _text(contents["txt"], place).strip()
    caption = _field(contents, field, "txt", "data.text_field", place)
    if not isinstance(caption, str):
        raise ValueError(
            f"data.paths: {place} has the caption {shortened(repr(caption))} in its .json, which "
            "must be a text; leave it out"
        )
    return caption


def _field(contents: dict[str, bytes], field: str, suffix: str, key: str, place: str) -> object:
    record = parse_json(contents["json"], f"the .json of {place}") if "json" in contents else {}
    if isinstance(record, dict) and field in record:
        return record[field]
    raise ValueError(
        f"data.paths: {place} has neither a .{suffix} nor a .json with {key}={field!r}; add one, "
        "or set the key to the field's name"
    )


def _text(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.paths: a text of {place} is not UTF-8 ({error})") from error
