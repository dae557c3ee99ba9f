"""Continuations of `eval.prompts`, which show after each evaluation how a language model writes.

They are made by the generator of `python -m generate`, on the mesh of the run. It gets a copy of
the parameters in the compute dtype, and only until the last prompt is continued.
"""

import functools
import logging
import time
from pathlib import Path
from typing import Any

import jax

from data.examples import Corpus
from distributed.messages import Exchange
from sharding.memory import HOST_KIND, in_device_memory
from sharding.mesh import num_replicas, use_mesh
from train.lifecycle.phases import Phases
from train.run.run import Run
from train.state.train_state import TrainState
from untrusted.appender import JsonLines

SAMPLES_FILE = "samples.jsonl"

_log = logging.getLogger(__name__)


class _Sampler:
    """Continues the prompts of a run greedily.

    Raises:
        ValueError: the model cannot generate text, or a prompt has no tokens or too many.
    """

    def __init__(self, run: Run, corpus: Corpus):
        # Most runs have no prompts, and then need none of this.
        from generate.generator import Generator
        from generate.prompts import TextCodec, as_prompt
        from generate.sampling import Sampling

        tokenizer: Any = getattr(corpus, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(f"data.objective={run.config.data.objective!r} reads no texts")
        self._run = run
        self._texts = run.config.eval.prompts
        self._greedy = Sampling(temperature=0.0)
        end = getattr(corpus, "end_of_answers", None)
        codec = TextCodec(tokenizer)
        replicas = num_replicas(run.mesh)
        with use_mesh(run.mesh):
            self._generator = Generator(
                run.model,
                stop=[tokenizer.eos_id, *([] if end is None else [end])],
                start=tokenizer.special_ids.get("pad", tokenizer.eos_id),
                batch_size=-(-len(self._texts) // replicas) * replicas,
                codec=codec,
                rules=run.rules,
            )
        prompts = [as_prompt(text, codec).tokens for text in self._texts]
        self._generator.check(prompts, run.config.eval.max_new_tokens)

    def continuations(self, state: TrainState) -> list[str]:
        """Return the continuation of each prompt by the parameters that are evaluated."""
        params = jax.tree.map(self._on_device, self._run.params_to_evaluate(state)[0])
        with use_mesh(self._run.mesh):
            try:
                self._generator.set_params(params, self._layers_of)
                return self._generator.generate_texts(
                    self._texts,
                    max_new_tokens=self._run.config.eval.max_new_tokens,
                    sampling=self._greedy,
                )
            finally:
                self._generator.clear_params()

    def _on_device(self, leaf: jax.Array) -> jax.Array:
        if leaf.sharding.memory_kind != HOST_KIND:
            return leaf
        return jax.device_put(leaf, in_device_memory(leaf.sharding)).astype(self._dtype)

    @functools.cached_property
    def _dtype(self) -> Any:
        return self._run.config.precision.compute_dtype

    @functools.cached_property
    def _layers_of(self) -> Any:
        """Turns parameters as the step has them into parameters as the model has them."""

        def layers_of(params: Any) -> Any:
            layers = self._run.state_layout.layers_of(params)
            return jax.tree.map(lambda leaf: leaf.astype(self._dtype), layers)

        return layers_of


def check_prompts(run: Run, corpus: Corpus) -> None:
    """Check that a run can continue its `eval.prompts`, if it has any.

    Raises:
        ValueError: it cannot, or it has nothing to evaluate.
    """
    prompts = run.config.eval.prompts
    if not prompts:
        return
    if not corpus.validation_sets:
        raise ValueError(
            f"eval.prompts are continued after evaluations, but data.name={run.config.data.name!r} "
            "has no validation data; set data.validation_paths, or remove eval.prompts"
        )
    try:
        _Sampler(run, corpus)
    except ValueError as error:
        raise ValueError(
            f"eval.prompts={prompts!r} with eval.max_new_tokens={run.config.eval.max_new_tokens}: "
            f"{error}; or remove eval.prompts"
        ) from error


class Samples:
    """Appends the continuations to samples.jsonl, on the first process.

    An error, or samples that take very long, are logged and end the samples of this start; the run
    continues.

    Args:
        phases: enters the phase "compile" for the first samples, and "eval" for the others.
    """

    def __init__(self, run: Run, corpus: Corpus, workdir: Path, phases: Phases):
        self._run = run
        self._corpus = corpus
        self._path = workdir / SAMPLES_FILE
        self._phases = phases
        self._sampler: _Sampler | None = None
        self._is_active = bool(run.config.eval.prompts)

    def write(self, step: int, state: TrainState) -> None:
        """Continue the prompts with the parameters that are evaluated, and write a line for each.

        All processes call this, since the parameters are on the devices of all.
        """
        if not self._is_active:
            return
        try:
            is_first = self._sampler is None
            with self._phases("compile" if is_first else "eval"):  # the former may take any time
                start_s = time.monotonic()
                self._sampler = self._sampler or _Sampler(self._run, self._corpus)
                texts = self._sampler.continuations(state)
                took_s = time.monotonic() - start_s
                # All processes go on or stop together.
                is_slow = Exchange().on_first(lambda: self._append(step, texts, took_s))
            if is_slow:
                self._stop()
        except Exception:
            self._stop()
            _log.warning(
                "eval.prompts could not be continued at step %d; the run continues without samples",
                step,
                exc_info=True,
            )

    def _stop(self) -> None:
        self._is_active = False
        self._sampler = None

    def _append(self, step: int, texts: list[str], took_s: float) -> bool:
        """Write the lines of a step, and return whether the watchdog might end the next samples."""
        file = JsonLines(self._path, is_patient=True)
        for prompt, text in zip(self._run.config.eval.prompts, texts, strict=True):
            file.append({"step": step, "prompt": prompt, "text": text})
        file.close()
        is_slow = took_s > self._run.config.train.failure_timeout_s / 2
        if is_slow:
            _log.warning(
                "eval.prompts took %.0f s, more than half of train.failure_timeout_s; the run "
                "continues without samples",
                took_s,
            )
        return is_slow
