"""The config sections that all runs share: the reference for every key.

A config file starts from `get_config()` and changes the keys that it needs. You can set any key on
the command line: `--config.section.key=value`. The section `model` belongs to each config file.
Every model with attention also takes `model.attention`: "auto" (the best kernel for the devices) or
"plain".
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """Return the shared sections; each config file adds the section `model`."""
    config = ConfigDict()

    # Checkpoint that the initial parameters are read from: a directory with a Hugging Face model,
    # or the directory of a run. "": initialize the parameters from train.seed.
    config.init_from = ""

    # The device mesh: number of devices along each axis, outermost first. At most one axis may be
    # -1, which stands for all remaining devices. See docs/meshes.md.
    config.mesh = ConfigDict()
    config.mesh.pipeline = 1  # pipeline stages; each stage holds a part of the layers
    config.mesh.data = 1  # data-parallel replicas; each computes a part of the batch
    config.mesh.fsdp = 1  # like data, but also shards parameters and optimizer state
    config.mesh.context = 1  # splits the sequence dimension
    config.mesh.expert = 1  # splits the experts of mixture-of-experts layers
    config.mesh.model = 1  # tensor parallelism: splits attention heads, mlp and vocab

    # Rows to add to, or change in, the table of sharding/rules.py: logical axis -> mesh axis or
    # sequence of mesh axes, or None to replicate it: --config.rules.mlp=None.
    config.rules = ConfigDict()

    # Pipeline parallelism; see docs/pipelines.md.
    config.pipeline = ConfigDict()
    # gpipe | 1f1b | interleaved_1f1b | zero_bubble | zbv | path of a schedule as a .csv file.
    config.pipeline.schedule = "1f1b"  # order of forward and backward passes
    # 2 for zbv; any number for gpipe and interleaved_1f1b; 1 for 1f1b and zero_bubble.
    config.pipeline.chunks = 1  # separate runs of layers per stage
    # Rematerialization per stage. "full": a stage keeps only its input from the forward to the
    # backward pass of a microbatch, and recomputes the rest. "none": it keeps all activations that
    # train.remat keeps.
    config.pipeline.remat = "full"  # full | none
    # Number of layers of each chunk of each stage, in the order of the layers.
    config.pipeline.layers_per_stage = ()  # 5,7,7,5 | auto (balance FLOPs) | () (all equal)
    config.pipeline.share_vocab = False  # split embedding and head over all stages, by vocab

    # Sharding and placement of the training state; see docs/memory.md.
    config.memory = ConfigDict()
    # State that is sharded over replicas instead of replicated. 0: nothing, 1: optimizer state and
    # master weights, 2: gradients too, 3: parameters too, which are gathered one layer at a time.
    config.memory.zero_stage = 0  # 0 | 1 | 2 | 3
    # With zero_stage=3: fraction of the layers' bytes that is gathered one layer at a time, the
    # largest parameters first. The rest is gathered once per step, as in stage 2.
    config.memory.shard_parameters_fraction = 1.0  # 0 to 1
    # "device": everything in device memory. "host": optimizer state and master weights in host
    # memory. "auto": choose the fastest settings that fit the memory budget.
    config.memory.placement = "device"  # device | host | auto
    # With placement=host: fraction of the bytes of all parameters whose optimizer state and master
    # weights are in host memory, the largest parameters first.
    config.memory.offload_optimizer_fraction = 1.0  # 0 to 1
    # With placement=host: fraction of the layers' bytes that forward and backward passes also read
    # from host memory, one layer at a time.
    config.memory.offload_parameters_fraction = 0.0  # 0 to 1
    # Activations that are kept in host memory between a block's forward and backward pass.
    config.memory.offload_activations = ()  # names, as for train.remat: qkv,mlp
    # Memory that a step may use.
    config.memory.device_budget = placeholder(float)  # GiB per device; None: 0.9 of its memory
    config.memory.host_budget = placeholder(float)  # GiB per host; None: 0.9 of its memory

    # What to train on; see docs/data.md.
    config.data = ConfigDict()
    # Text: python_stdlib | text (files) | megatron (token files) | mixture | a TFDS name such as
    # wiki40b/en. Images: digits | image_folder | a TFDS name such as cifar10. Your own data:
    # package.module:function.
    config.data.name = "python_stdlib"  # name of the corpus
    # Globs of .txt and .jsonl files for name=text, token files for megatron, folders of images for
    # image_folder.
    config.data.paths = ()  # my_texts/*.txt,more.jsonl
    config.data.mixture = ()  # for name=mixture: 0.7 wiki40b/en,0.3 my_texts/*.txt
    config.data.text_field = "text"  # field of a .jsonl line, or TFDS feature, with the text
    # Training objective. Text: causal_lm | masked_lm | masked_lm_pairs | span_corruption |
    # seq2seq | classification. Images: image_classification | image_reconstruction |
    # image_contrast.
    config.data.objective = "causal_lm"  # objective that makes the batches
    # True: tokens attend only within their own document, and positions restart in each.
    config.data.isolate_documents = False  # causal_lm, masked_lm
    config.data.mask_fraction = 0.15  # fraction of tokens to mask: masked_lm*, span_corruption
    config.data.whole_words = False  # masked_lm*: mask all tokens of a word or none
    config.data.mean_span_length = 3.0  # span_corruption: mean tokens per span
    # None: as many as the spans need (span_corruption), or sequence_length (seq2seq).
    config.data.target_length = placeholder(int)  # tokens per sequence of the decoder
    config.data.target_field = "target"  # seq2seq: field of a .jsonl line with the target text
    config.data.pair_field = placeholder(str)  # classification: field of a second text; None: none
    config.data.label_field = "label"  # classification: field, or TFDS feature, of the label
    # bpe: trained on the corpus | bytes | path of a tokenizer.json | init_from: the checkpoint's.
    config.data.tokenizer = "bpe"  # turns text into tokens
    config.data.vocab_size = 8192  # tokens of the bpe tokenizer, special tokens included
    config.data.sequence_length = 128  # T, tokens per sequence; the encoder's, if there is one
    config.data.global_batch_size = 16  # sequences or images per step, over all devices
    # Fraction held out for validation if the corpus has no validation split of its own.
    config.data.validation_fraction = 0.05  # in [0, 1)
    # Directory for data sets, tokenizers and compiled steps.
    config.data.cache_dir = ""  # "": $XDG_CACHE_HOME/taibai, or ~/.cache/taibai
    config.data.num_threads = 2  # threads per process that read batches ahead

    # Image preprocessing and augmentation, for data.objective=image_...; see docs/data.md.
    config.images = ConfigDict()
    config.images.size = 8  # height and width of the model's input, in pixels
    config.images.channels = 1  # 3: RGB | 1: grayscale; other images are converted
    config.images.crop_scale = (1.0, 1.0)  # range of a random crop's area fraction; 1,1: no crop
    config.images.crop_ratio = (3 / 4, 4 / 3)  # range of a random crop's width / height
    config.images.flip = False  # mirror an image horizontally with probability 0.5
    config.images.randaugment_num = 0  # RandAugment operations, each with p = 0.5; 0: none
    config.images.randaugment_magnitude = 9.0  # mean strength of these operations, 0 to 10
    # Strength of color jitter.
    config.images.jitter = (0.0, 0.0, 0.0, 0.0)  # brightness, contrast, saturation, hue; 0: none
    config.images.jitter_probability = 0.8  # fraction of images to jitter
    config.images.grayscale = 0.0  # fraction of images to convert to grayscale
    config.images.blur = (0.0, 0.0)  # image_contrast: fraction of first, second views to blur
    config.images.solarize = (0.0, 0.0)  # likewise, to solarize (invert bright pixels)
    config.images.erasing = 0.0  # fraction of images that get a rectangle of noise
    config.images.mixup = 0.0  # image_classification: alpha of Mixup; 0: none
    config.images.cutmix = 0.0  # image_classification: alpha of CutMix; 0: none
    config.images.mixing_probability = 1.0  # fraction of image pairs to mix
    config.images.cutmix_share = 0.5  # fraction of mixed pairs that use CutMix, if both are on
    config.images.repeats = 1  # copies of an image per batch, each augmented differently
    config.images.eval_crop = 1.0  # evaluation: side of the central crop / shorter side
    config.images.train_fraction = 1.0  # fraction of the training images to use
    config.images.on_broken = "refuse"  # unreadable images, bad labels: refuse to start | skip
    config.images.num_workers = 0  # image-reading processes per process; 0: use data.num_threads

    # See docs/optimizers.md.
    config.optimizer = ConfigDict()
    config.optimizer.name = "adamw"  # adamw | lamb | lars | sgd | package.module:function
    config.optimizer.learning_rate = 1e-3  # peak
    config.optimizer.warmup_steps = 20  # steps of linear warmup
    config.optimizer.schedule = "cosine"  # decay after the warmup: cosine | linear | constant
    config.optimizer.final_learning_rate_fraction = 0.1  # last rate / peak; not for constant
    # Weight decay does not apply to biases, norm scales and the parameters that the model names in
    # `not_decayed`.
    config.optimizer.weight_decay = 0.1  # multiplied by the learning rate
    config.optimizer.clip_norm = 1.0  # largest global gradient norm; 0: no clipping
    config.optimizer.beta1 = 0.9  # adamw, lamb: decay of the first moment
    config.optimizer.beta2 = 0.95  # adamw, lamb: decay of the second moment
    config.optimizer.epsilon = 1e-8  # adamw, lamb: added to the root of the second moment
    config.optimizer.momentum = 0.9  # lars, sgd; 0: no momentum
    # Layer-wise decay: the update of layer l of L is multiplied by layer_decay ** (L - l).
    config.optimizer.layer_decay = 1.0  # in (0, 1]; 1: none
    # Parameters that are not trained.
    config.optimizer.frozen = ()  # names, * matches anything: token_embedding,encoder.*

    config.train = ConfigDict()
    config.train.num_steps = 100  # optimizer updates, each on one global batch
    # num_microbatches × mesh.data × mesh.fsdp must divide data.global_batch_size.
    config.train.num_microbatches = 1  # per step, for pipelines and gradient accumulation
    config.train.seed = 0  # for initial parameters, dropout and shuffling; 0 to 2**32 - 1
    # How long to wait at the start for the other processes, and for another run's workdir lock.
    config.train.start_timeout_s = 60.0  # seconds
    # A step, or a wait for data, that takes longer counts as hung, and the process exits.
    config.train.failure_timeout_s = 600.0  # seconds
    # Classifier of an init_from checkpoint. by_name: match its labels with the data's by name |
    # by_position: keep the order of its labels | new: initialize a new classifier.
    config.train.init_labels = "by_name"  # by_name | by_position | new
    # Keep compiled steps in data.cache_dir, so that a restart does not compile them again.
    config.train.compilation_cache = True  # True | False
    # Steps with a NaN or infinity are skipped. After this many in a row, on_nonfinite applies.
    config.train.max_nonfinite_steps = 10  # 0: no limit
    # stop: end the run | rollback: continue with the parameters of a checkpoint from before them.
    config.train.on_nonfinite = "stop"  # stop | rollback
    # Skip a step whose gradient norm exceeds this multiple of the running mean.
    config.train.skip_spikes = placeholder(float)  # more than 1; None: skip none
    # Decay of an exponential moving average (EMA) of the parameters.
    config.train.ema_decay = placeholder(float)  # in (0, 1); None: keep no average
    config.train.ema_schedule = "constant"  # constant | cosine: the decay rises to 1 at the end
    # Rematerialization: activations that a block recomputes in its backward pass. none: only norms
    # and activation functions | full: everything | dots: everything except matrix products outside
    # attention | a list of names, such as qkv,mlp: everything except these activations.
    config.train.remat = "none"  # none | full | dots | names

    config.eval = ConfigDict()
    config.eval.every_steps = 50  # steps between evaluations; 0: only after the last step
    config.eval.num_batches = placeholder(int)  # batches per evaluation; None: the whole split

    # See docs/checkpoints.md.
    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 50  # steps between checkpoints; 0: only after the last step
    config.checkpoint.every_minutes = placeholder(float)  # also save at this interval; None: never
    config.checkpoint.max_to_keep = 3  # how many of the newest checkpoints to keep
    config.checkpoint.keep_best = 0  # how many of the best to keep as well
    config.checkpoint.best_metric = "eval_loss"  # metric that ranks them: eval_loss | eval_...
    config.checkpoint.best_is_max = False  # True: larger values are better
    config.checkpoint.timeout_s = 1200.0  # seconds after which a save counts as hung

    # See docs/precision.md.
    config.precision = ConfigDict()
    # dtype of activations, and of the copy of the parameters that layers compute with.
    config.precision.compute = "float32"  # bfloat16 | float16 | float32 | float64
    config.precision.params = "float32"  # dtype of the master weights: bfloat16 | float32 | float64
    # dtype in which gradients are summed over devices. None: the one in which they were
    # accumulated, float32 or wider.
    config.precision.reduce = placeholder(str)  # None | bfloat16 | float16 | float32
    # Loss scaling, for compute=float16.
    config.precision.loss_scale = 65536.0  # initial scale
    config.precision.loss_scale_window = 2000  # finite steps until it doubles; 0: never changes
    config.precision.loss_scale_hysteresis = 1  # steps with NaN or infinity until it is halved
    config.precision.loss_scale_min = 1.0  # lower bound

    config.log = ConfigDict()
    config.log.every_steps = 5  # steps between logged steps; the first and the last always are
    return config
