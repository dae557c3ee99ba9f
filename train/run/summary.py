"""The summary that a run prints at its start."""

from fractions import Fraction

import jax

from data.batches import epoch_elements
from data.examples import Corpus
from models.functions import can_share_vocab
from sharding.mesh import describe as describe_mesh
from train.run.run import Run


def describe(run: Run, corpus: Corpus) -> str:
    """Format the summary of a run: parameters, mesh, attention kernels, stages and data."""
    frozen = f" ({run.num_frozen:,} frozen)" if run.num_frozen else ""
    per_block = run.functions.layers_per_block
    num_layers = sum(per_block[name] * count for name, count in run.functions.num_layers.items())
    lines = [
        f"model   {type(run.model).__name__}, {run.num_params:,} parameters{frozen}, "
        f"{num_layers} layers, {_describe_flops(run)}",
        f"mesh    {describe_mesh(run.mesh)} on {run.mesh.size} "
        f"{run.hardware.device_kind} device(s), {jax.process_count()} process(es)",
        *([f"context {run.sequence}"] if run.sequence.num_devices > 1 else []),
        *(f"attention {kernel}" for kernel in run.attention_kernels),
        *([f"stages  {_describe_stages(run)}"] if run.mesh.shape["pipeline"] > 1 else []),
        f"data    {_describe_training(run, corpus)}{_describe_validation(corpus)} "
        f"{_describe_rows(run, corpus)}",
        *_describe_rampup(run),
        *_describe_epochs(run, corpus),
    ]
    return "\n".join(lines)


def _describe_training(run: Run, corpus: Corpus) -> str:
    """Describe the training data, up to the validation data."""
    name = run.config.data.name
    if corpus.stream is not None:
        return f"{name}: training sequences {corpus.stream.description} and "
    if not len(corpus.train) and run.config.data.validation_paths:  # an evaluation reads no other
        return "data.validation_paths: "
    return f"{name}: {len(corpus.train):,} training and "


def _describe_epochs(run: Run, corpus: Corpus) -> list[str]:
    """Describe the length of the run and of an epoch."""
    num_steps = run.config.train.num_steps
    if corpus.stream is not None:
        return [f"epochs  unknown, because the data is streamed; the run has {num_steps:,} steps"]
    if not len(corpus.train):
        return []
    data = run.config.data
    per_epoch = epoch_elements(corpus, data, run.config.images)
    num_epochs = data.batch_sizes.first_element(num_steps) / per_epoch
    full = " of the full batch size" if data.rampup_batch_size else ""
    return [
        f"epochs  {_rounded(num_epochs)} in {num_steps:,} steps; an epoch has "
        f"{_rounded(per_epoch / data.global_batch_size)} steps{full}"
    ]


def _describe_rampup(run: Run) -> list[str]:
    """Describe how the batch size grows, if it does."""
    phases = run.config.data.batch_sizes.phases
    if len(phases) == 1:
        return []
    count = run.config.with_batch_size(phases[0].size).train.num_microbatches
    return [
        f"batches of {phases[0].size} in {count} microbatch(es) at first, and of "
        f"{phases[-1].size} in {run.config.train.num_microbatches} from step "
        f"{phases[-1].first_step + 1:,} on; {len(phases)} sizes, each with a compiled step"
    ]


def _rounded(number: Fraction) -> str:
    """Return a number with about three digits."""
    return f"{float(number):.3g}" if number < 10 else f"{float(number):,.1f}".removesuffix(".0")


def _describe_validation(corpus: Corpus) -> str:
    """Count the rows of the validation sets, such as "20 validation (12 wiki, 8 code)"."""
    sizes = {name: len(rows) for name, rows in corpus.validation_sets.items()}
    names = ", ".join(f"{size:,} {name or 'without a name'}" for name, size in sizes.items())
    return f"{sum(sizes.values()):,} validation" + (f" ({names})" if {*sizes} - {""} else "")


def _describe_stages(run: Run) -> str:
    """Describe how even the work of the stages is, and settings that would make it more even."""
    counts = [0] * len(run.schedule.placement)
    for layout in run.layouts.values():
        for v, stage in enumerate(run.schedule.placement):
            counts[v] += layout.chunks[stage][run.schedule.chunk_of(v)][1]
    work = run.traces.work
    shares = run.config.pipeline.share_vocab

    def unevenness(counts, shares_vocab):
        flops = work.per_virtual_stage(counts, shares_vocab=shares_vocab)
        return max(flops) * len(flops) / sum(flops)

    now = unevenness(counts, shares)
    auto = work.balanced(len(counts), shares_vocab=shares)
    alternatives = {"pipeline.layers_per_stage=auto": unevenness(auto, shares)}
    if can_share_vocab(run.model) and not shares:
        even = work.balanced(len(counts), shares_vocab=True)
        alternatives["pipeline.share_vocab=True"] = unevenness(even, True)
    better = [
        f"{alternative} would make it {value:.2f}"
        for alternative, value in alternatives.items()
        if value < now - 0.1
    ]
    layers = ", ".join(map(str, counts))
    return "; ".join([f"{layers} layers; the busiest computes {now:.2f} × the mean", *better])


def _describe_flops(run: Run) -> str:
    return f"{run.flops_per_unit:,} FLOPs {'an image' if run.unit == 'image' else 'a token'}"


def _describe_rows(run: Run, corpus: Corpus) -> str:
    images = run.config.images
    if run.config.data.reads_images:
        classes = f", {len(corpus.labels):,} classes" if corpus.labels else ""
        return f"images of {images.size} × {images.size} × {images.channels}{classes}"
    fill_rate = corpus.train.fill_rate
    filled = "" if fill_rate is None else f" ({100 * fill_rate:.1f} % filled)"
    return (
        f"sequences of {run.config.data.sequence_length} tokens{filled}, vocabulary "
        f"{corpus.vocab_size:,}"
    )
