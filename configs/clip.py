r"""CLIP or SigLIP: an image encoder and a text encoder learn from images with captions.

Hardware: any for the default size. `my_images` has images and a metadata.jsonl with a line
`{"file_name": "1.jpg", "text": "a cat on a chair"}` for each:

    python -m train.main --config=configs/clip.py --config.data.paths=my_images

`--config=configs/clip.py:SIZE` selects a published size, for accelerators: clip_base32,
clip_base16, clip_large14, siglip_base16 or siglip_large16 (Radford et al. 2021, table 20; Zhai et
al. 2023). The loss compares all pairs of a batch, so a batch must be one microbatch. If it does not
fit on a device, split it over mesh.data or mesh.fsdp.
"""

from ml_collections import ConfigDict

from configs import sizes

#: name -> (encoder of images: layers, heads, embed dim, MLP dim, patch size; of texts: layers,
#: heads, embed dim, MLP dim; dim of the embeddings).
SIZES = {
    "clip_base32": ((12, 12, 768, 3072, 32), (12, 8, 512, 2048), 512),
    "clip_base16": ((12, 12, 768, 3072, 16), (12, 8, 512, 2048), 512),
    "clip_large14": ((24, 16, 1024, 4096, 14), (12, 12, 768, 3072), 768),
    "siglip_base16": ((12, 12, 768, 3072, 16), (12, 12, 768, 3072), 768),
    "siglip_large16": ((24, 16, 1024, 4096, 16), (24, 16, 1024, 4096), 1024),
}
_TINY = ((2, 4, 64, 256, 8), (2, 4, 64, 256), 64)


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("clip", size, ("tiny", *SIZES))
    config = sizes.of_images("clip", "image_text")
    images, texts, projection_dim = SIZES.get(size, _TINY)
    is_siglip = size.startswith("siglip")
    config.data.name = "image_folder"
    config.data.paths = ("my_images",)
    config.data.tokenizer = "bytes"  # or the tokenizer.json of a published model
    config.images.channels = 3
    sizes.encoder(config, *images)
    layers, heads, embed_dim, mlp_dim = texts
    config.model.text_num_layers = layers
    config.model.text_num_heads = heads
    config.model.text_embed_dim = embed_dim
    config.model.text_mlp_dim = mlp_dim
    config.model.projection_dim = projection_dim
    if not is_siglip:
        config.model.eos_id = 256  # of data.tokenizer
    else:
        config.model.pool = "attention"
        config.model.text_pool = "last"
        config.model.contrast = "sigmoid"
        config.model.initial_logit_scale = 2.302585  # log 10
        config.model.activation = "gelu_tanh"
        config.model.layer_norm_epsilon = 1e-6
    config.images.crop_scale = (0.9, 1.0)
    if size == "tiny":
        config.data.sequence_length = 32
        config.images.size = 32
        return config

    config.data.sequence_length = 64 if is_siglip else 77
    config.data.global_batch_size = 32_768
    config.images.size = 256 if size == "siglip_large16" else 224
    config.images.num_workers = 8
    config.optimizer.learning_rate = 1e-3 if is_siglip else 5e-4
    config.optimizer.beta2 = 0.95 if is_siglip else 0.98
    config.optimizer.weight_decay = 1e-4 if is_siglip else 0.2
    config.optimizer.warmup_steps = 2000
    config.train.num_steps = 390_000  # 12.8 billion pairs
    config.train.remat = "stage,full"
    config.precision.compute = "bfloat16"
    return config
