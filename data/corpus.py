"""Every corpus behind one door: texts and images as rows of batches."""

from data.config import DataConfig
from data.examples import Corpus
from data.image_config import ImageConfig, check_images


def load_corpus(config: DataConfig, images: ImageConfig | None = None) -> Corpus:
    """Returns the corpus that `data.name` names, prepared on first use.

    Args:
        config: What is read, and what is learnt of it.
        images: How images are cropped, changed and chosen; None: as the defaults have it.

    Raises:
        ValueError: The corpus, or the tokenizer of a text, is unknown, broken, unfit for the
            objective or too small, or the sections do not fit each other.
        FileNotFoundError: A glob, a folder, a token file or the tokenizer file is not there.
    """
    images = images or ImageConfig()
    check_images(config, images)
    # Texts need no Pillow, and images no tokenizers.
    if config.reads_images:
        from data.images.image_corpus import load_images

        return load_images(config, images)
    from data.text.text_corpus import load_text

    return load_text(config)
