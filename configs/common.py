"""The sections that every config shares, with a comment per field.

A config file starts from `get_config()` and sets what it wants otherwise. Any field can be set on
the command line: `--config.section.key=value`. The section `model` is the config file's own; every
model with attention also takes `model.attention`: "auto" (the devices' best kernel) or "plain".
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """Returns the shared sections; the section `model` is the config file's own."""
    config = ConfigDict()

    # A Hugging Face model, or a run's directory, that the parameters start from; "": from nothing.
    config.init_from = ""

    # Devices along each mesh axis, outermost first; one axis may be -1: the devices left over.
    config.mesh = ConfigDict()
    config.mesh.pipeline = 1  # stages: each holds a part of the layers
    config.mesh.data = 1  # replicas, each with a part of the batch
    config.mesh.fsdp = 1  # as data, but parameters and optimizer state are split too
    config.mesh.context = 1  # parts of the sequence
    config.mesh.expert = 1  # parts of the experts
    config.mesh.model = 1  # tensor parallelism: parts of heads, mlp and vocab

    # Extra or changed rows of the table in sharding/rules.py: logical axis -> mesh axis or axes.
    config.rules = ConfigDict()

    config.pipeline = ConfigDict()
    config.pipeline.schedule = (
        "1f1b"  # gpipe | 1f1b | interleaved_1f1b | zero_bubble | zbv | path of a table.csv
    )
    config.pipeline.chunks = 1  # runs of layers per stage: 2 for zbv, any for interleaved_1f1b
    config.pipeline.remat = "full"  # kept of a microbatch: full: its input | none: as train.remat
    config.pipeline.layers_per_stage = ()  # of each chunk: 5,7,7,5 | auto: by FLOPs | (): even
    config.pipeline.share_vocab = False  # all stages share embedding and head, split by vocab

    config.memory = ConfigDict()
    config.memory.zero_stage = 0  # shared out among replicas: 1 optimizer, 2 gradients, 3 layers
    config.memory.shard_parameters_fraction = 1.0  # of the layers' bytes, with zero_stage=3
    config.memory.placement = (
        "device"  # host: optimizer state and master weights lie there | auto: as fits the budget
    )
    config.memory.offload_optimizer_fraction = 1.0  # of all parameters' bytes, with placement=host
    config.memory.offload_parameters_fraction = 0.0  # of the layers' bytes: read from there, too
    config.memory.offload_activations = ()  # kept in host memory: names as for train.remat
    config.memory.device_budget = placeholder(float)  # GiB of each; None: 0.9 of what it has
    config.memory.host_budget = placeholder(float)  # GiB of each; None: 0.9 of what it has

    config.data = ConfigDict()
    config.data.name = (
        "python_stdlib"  # python_stdlib | text | megatron | mixture | a TFDS name | module:function
    )
    config.data.paths = ()  # globs of .txt and .jsonl files, token files, or folders of images
    config.data.mixture = ()  # for name='mixture': 0.7 wiki40b/en,0.3 my_texts/*.txt
    config.data.text_field = "text"  # field of a .jsonl line, or feature of a TFDS set
    # Of texts causal_lm | masked_lm | masked_lm_pairs | span_corruption | seq2seq | classification;
    # of images image_classification | image_reconstruction | image_contrast.
    config.data.objective = "causal_lm"  # what is learnt
    config.data.isolate_documents = False  # tokens see their own document only
    config.data.mask_fraction = 0.15  # of the tokens, for masked_lm* and span_corruption
    config.data.whole_words = False  # masked_lm* hides all tokens of a word or none
    config.data.mean_span_length = 3.0  # tokens, for span_corruption
    config.data.target_length = placeholder(int)  # of the decoder; None: what spans need, or T
    config.data.target_field = "target"  # field of a .jsonl line, for seq2seq
    config.data.pair_field = placeholder(str)  # of a second text, for classification; None: none
    config.data.label_field = "label"  # for classification
    config.data.tokenizer = "bpe"  # bpe (trained on the corpus) | bytes | path of a tokenizer.json
    config.data.vocab_size = 8192  # tokens of the bpe tokenizer
    config.data.sequence_length = 128  # T, tokens; of the encoder, if there is a decoder
    config.data.global_batch_size = 16  # sequences or images a step, over all devices
    config.data.validation_fraction = 0.05  # where the corpus has no validation split of its own
    config.data.cache_dir = ""  # "" is ~/.cache/taibai
    config.data.num_threads = 2  # of each process, reading ahead

    config.images = ConfigDict()  # for data.objective='image_...'; see docs/data.md
    config.images.size = 8  # pixels of a side, of what the model gets
    config.images.channels = 1  # 3: colour | 1: grey; images of another kind are converted
    config.images.crop_scale = (1.0, 1.0)  # least and most area of a random crop; 1,1: no crop
    config.images.crop_ratio = (3 / 4, 4 / 3)  # least and most width ÷ height of it
    config.images.flip = False  # mirror half of the images
    config.images.randaugment_num = 0  # RandAugment's changes of an image; 0: none
    config.images.randaugment_magnitude = 9.0  # their strength, 0 to 10
    config.images.jitter = (0.0, 0.0, 0.0, 0.0)  # of brightness, contrast, saturation, hue; 0: none
    config.images.jitter_probability = 0.8  # part of the images that is jittered
    config.images.grayscale = 0.0  # part of the images that loses its colour
    config.images.blur = (0.0, 0.0)  # part blurred of first and second views, for image_contrast
    config.images.solarize = (0.0, 0.0)  # likewise, part with bright pixels inverted
    config.images.erasing = 0.0  # part of the images that gets a rectangle of noise
    config.images.mixup = 0.0  # alpha of Mixup, for image_classification; 0: none
    config.images.cutmix = 0.0  # alpha of CutMix, likewise
    config.images.mixing_probability = 1.0  # part of the pairs of images that is mixed
    config.images.cutmix_share = 0.5  # part of them that gets CutMix, if both are on
    config.images.repeats = 1  # times an image is in a batch, changed anew each time
    config.images.eval_crop = 1.0  # evaluations: side of the central crop ÷ the shorter side
    config.images.train_fraction = 1.0  # part of the training images that is used
    config.images.on_broken = "refuse"  # images, labels, classes that are bad: refuse | skip them
    config.images.num_workers = 0  # processes that read images, for each process; 0: num_threads

    config.optimizer = ConfigDict()
    config.optimizer.name = "adamw"  # adamw | lamb | lars | sgd | package.module:function
    config.optimizer.learning_rate = 1e-3  # peak
    config.optimizer.warmup_steps = 20  # linear rise
    config.optimizer.schedule = "cosine"  # after warm-up: cosine | linear | constant
    config.optimizer.final_learning_rate_fraction = 0.1  # of the peak
    config.optimizer.weight_decay = 0.1  # none on biases, norms and what a model names
    config.optimizer.clip_norm = 1.0  # of the global gradient; 0: no clipping
    config.optimizer.beta1 = 0.9  # decay of Adam's mean of gradients
    config.optimizer.beta2 = 0.95  # decay of Adam's mean of squared gradients
    config.optimizer.epsilon = 1e-8  # added to the root of the latter
    config.optimizer.momentum = 0.9  # of lars and sgd; 0: none is kept
    config.optimizer.layer_decay = 1.0  # of updates, per layer nearer to the embedding; 1: none
    config.optimizer.frozen = ()  # names of parameters that stay: token_embedding,encoder.*

    config.train = ConfigDict()
    config.train.num_steps = 100  # updates, each of one global batch
    config.train.num_microbatches = 1  # pipeline and gradient accumulation; divides the batch
    config.train.seed = 0  # of initial parameters, dropout and shuffling
    config.train.start_timeout_s = 60.0  # to wait for the other processes at the start
    config.train.failure_timeout_s = 600.0  # a step or sign of life that takes longer failed
    config.train.init_labels = "by_name"  # a checkpoint's classifier: by_name | by_position | new
    config.train.compilation_cache = True  # a restart reads compiled steps from data.cache_dir
    config.train.max_nonfinite_steps = 10  # in a row, each skipped; then on_nonfinite. 0: go on
    config.train.on_nonfinite = "stop"  # stop | rollback: to the last checkpoint before them
    config.train.skip_spikes = placeholder(float)  # also grad_norm > so many × mean; None: keep
    config.train.ema_decay = placeholder(float)  # of an average of the parameters; None: none
    config.train.ema_schedule = "constant"  # constant | cosine: rises to 1 at the last step
    config.train.remat = (
        "none"  # recomputed in a block's backward: none | full | dots (all but) | all but qkv,mlp
    )

    config.eval = ConfigDict()
    config.eval.every_steps = 50  # 0: only at the end
    config.eval.num_batches = placeholder(int)  # None: the whole validation split

    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 50  # 0: only at the end
    config.checkpoint.every_minutes = placeholder(float)  # also after so long; None: steps only
    config.checkpoint.max_to_keep = 3  # the newest
    config.checkpoint.keep_best = 0  # beside them, the so many best of those evaluated
    config.checkpoint.best_metric = "eval_loss"  # what the evaluation logs: eval_loss | eval_...
    config.checkpoint.best_is_max = False  # True: large values of it are good
    config.checkpoint.timeout_s = 1200.0  # what takes longer to save hangs

    config.precision = ConfigDict()
    config.precision.compute = "float32"  # bfloat16 | float16 | float32 | float64
    config.precision.params = "float32"  # master weights: bfloat16 | float32 | float64
    config.precision.reduce = placeholder(str)  # sums of gradients over devices; None: float32
    config.precision.loss_scale = 65536.0  # of float16, at the start
    config.precision.loss_scale_window = 2000  # finite steps until it doubles; 0: it is fixed
    config.precision.loss_scale_hysteresis = 1  # steps that are not finite until it is halved
    config.precision.loss_scale_min = 1.0  # not halved below this

    config.log = ConfigDict()
    config.log.every_steps = 5  # and at the first and the last step
    return config
