"""The entry point of the data package: load any corpus, of text or of images."""

from data.config import DataConfig
from data.examples import Corpus, Label
from data.hub_files import with_local_files
from data.image_config import ImageConfig, check_images
from data.validation import with_split_folders, with_validation_folders


def load_corpus(config: DataConfig, images: ImageConfig | None = None) -> Corpus:
    """Load the corpus `data.name`, and prepare it on first use.

    Args:
        images: config section `images`: crops, augmentation and selection of images. None
            stands for the defaults.

    Raises:
        ValueError: The corpus or its tokenizer is unknown, broken, unsuitable for the objective or
            too small, or the two config sections contradict each other.
        FileNotFoundError: A glob matches nothing, or a folder, a token file or the tokenizer file
            does not exist.
    """
    images = images or ImageConfig()
    check_images(config, images)  # RunConfig checks it too, but this function takes any sections
    config = with_split_folders(config)
    config = with_local_files(config, reads_training_data=not config.streaming)
    # Imported here so that text corpora do not need Pillow, and image corpora no tokenizers.
    if config.objective == "image_text":
        from data.images.captioned import load_captioned_images

        return load_captioned_images(config, images)
    if config.reads_images:
        from data.images.image_corpus import load_images

        return load_images(config, images)
    from data.text.text_corpus import load_text

    return load_text(config)


def load_validation(config: DataConfig, images: ImageConfig, labels: tuple[Label, ...]) -> Corpus:
    """Load only the validation sets that the config names; training data need not exist.

    Args:
        config: config section `data`; its tokenizer does not need to be trained.
        labels: labels that the model has learned; empty if it has none.

    Raises:
        ValueError: A set or the tokenizer is broken or unsuitable for the objective.
        FileNotFoundError: A glob matches nothing, or a folder or the tokenizer does not exist.
    """
    # The training data need not exist if the config names other validation data.
    has_sets = bool(config.validation_paths)
    config = with_validation_folders(config) if has_sets else with_split_folders(config)
    config = with_local_files(config, reads_training_data=False)
    if config.objective == "image_text":
        from data.images.captioned import load_validation_captions

        return load_validation_captions(config, images)
    if config.reads_images:
        from data.images.image_corpus import load_validation_images

        return load_validation_images(config, images, labels)
    from data.text.text_corpus import load_validation_text

    return load_validation_text(config, labels)


def expected_vocab_size(config: DataConfig) -> int | None:
    """Return the vocabulary size of the corpus without reading the corpus.

    Returns:
        The size of the tokenizer, at most which a `bpe` tokenizer will have; None if the objective
        reads no texts.

    Raises:
        ValueError: The tokenizer file is broken.
        FileNotFoundError: The tokenizer file does not exist.
    """
    if not config.reads_text:
        return None
    from data.text.text_corpus import load_fixed_tokenizer

    tokenizer = load_fixed_tokenizer(config)
    return config.vocab_size if tokenizer is None else tokenizer.vocab_size
