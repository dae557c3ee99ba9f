"""Continues prompts with a language model, on the mesh that its parameters are on.

prompts ──by length──> batches ──> prefill ──> decode, many tokens in one compiled loop ──> tokens

A loop's pass finds one token per row, or several with drafts (generate/drafts.py).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from generate.batches import batches_of, check_batch_size, pad_rows
from generate.beam_search import Beams, BeamSearch
from generate.decoder import Caches, decoder_of, unchanged
from generate.drafts import Drafts, drafter_of
from generate.prompts import TextCodec, as_prompt
from generate.rows import NONE, Rows
from generate.sampling import Sampling
from sharding.logical import Rules, axis_rules
from sharding.rules import rules_on

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
    """A batch of rows between two passes."""

    caches: Caches  # all tokens of each row but the newest
    rows: Rows
    memory: Tree  # state of the drafter; see `Drafter`
    passes_B: jax.Array  # int32, number of decoding passes that the row took part in


class Generator:
    """Continues prompts.

    Args:
        model: language model, as from `convert.from_hf.load`. Use the generator on the
            mesh that it was loaded on. If the model is abstract, call `set_params` first.
        stop: ids of tokens that end a text.
        start: id of the token that the decoder of a sequence-to-sequence model begins with; not
            part of a continuation.
        batch_size: most rows that are continued at the same time; a multiple of the number of
            replicas of the mesh.
        drafts: where drafts of the next tokens come from; None: there are none. They change the
            speed of `generate` and `stream`, but not their tokens.
        codec: turns texts into tokens, and back; only `generate_texts` needs it.
        rules: sharding rules of activations; by default the mesh's.

    Attributes:
        follows_prompt: whether a continuation follows its prompt, and is not an answer to it.
        num_passes: number of passes that `generate` and `stream` took so far, summed over rows;
            without those over prompts.

    Raises:
        ValueError: the model cannot generate text, has no start token but needs one, the draft
            model does not fit, or `batch_size` does not divide.
    """

    def __init__(
        self,
        model: Any,
        *,
        stop: Sequence[int] = (),
        start: int | None = None,
        batch_size: int = 32,
        drafts: Drafts | None = None,
        codec: TextCodec | None = None,
        rules: Rules | None = None,
    ):
        mesh = jax.sharding.get_mesh()
        self._mesh = mesh
        self._num_replicas = check_batch_size(mesh, batch_size)
        self._config = model.config
        self._decoder = decoder_of(model, start)
        self.follows_prompt = self._decoder.follows_prompt
        self._stop = tuple(dict.fromkeys(stop))
        self._batch_size = batch_size
        self._codec = codec
        self._drafter = drafter_of(drafts, model, self._decoder, start)
        params = nnx.to_pure_dict(nnx.split(model)[1])
        is_abstract = isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct)
        self._params: tuple[Tree, Tree] = None, self._drafter.params
        if not is_abstract:
            self.set_params(params)
        self.num_passes = 0
        # Within these functions, activations follow the rules of the mesh.
        on_mesh = axis_rules(rules_on(mesh) if rules is None else rules)
        self._begin = jax.jit(on_mesh(self._first), static_argnums=(0, 1))
        self._advance = jax.jit(on_mesh(self._further), static_argnums=0, donate_argnames="state")
        search = BeamSearch(self._decoder, self._stop)
        self._first_beams = jax.jit(on_mesh(search.first), static_argnums=(0, 1))
        self._other_beams = jax.jit(on_mesh(search.rest), static_argnums=0, donate_argnames="state")

    def set_params(self, params: Tree, prepare: Callable[[Tree], Tree] = unchanged) -> None:
        """Copy the parameters of the model, which the next continuations are made with.

        Args:
            params: parameters of the model, or others that `prepare` makes them from.
            prepare: applied to them while they are copied; the same function each time.
        """
        self._params = self._decoder.separated(params, prepare), self._params[1]

    def clear_params(self) -> None:
        """Free the memory of the parameters."""
        self._params = None, self._params[1]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        num_samples: int = 1,
        on_batch: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """Return the continuation of each prompt, `num_samples` in a row for each.

        A continuation ends with a stop token, or has `max_new_tokens` tokens.

        Args:
            prompts: token ids, at least one per prompt.
            sampling: how tokens are chosen; as likely as the model says by default.
            on_batch: called with the number of rows of each batch that is complete.

        Raises:
            ValueError: a prompt is empty, has an unknown token, or is too long for the model.
        """
        sampling = sampling or Sampling()
        self.check(prompts, max_new_tokens)
        sampling.check_vocab(self._config.vocab_size)
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} must be at least 1")
        rows = [prompt for prompt in prompts for _ in range(num_samples)]
        continuations: list[list[int]] = [[] for _ in rows]
        for numbers in batches_of(rows, self._batch_size):
            batch = {number: rows[number] for number in numbers}
            state = self._started(batch, max_new_tokens, sampling)
            state = self._advance(sampling, self._params, max_new_tokens, state=state)
            self.num_passes += int(np.sum(self._fetched(state.passes_B)))
            for number, new_M in zip(numbers, self._fetched(state.rows.new_BM), strict=False):
                continuations[number] = new_M[new_M != NONE].tolist()
            if on_batch is not None:
                on_batch(len(numbers))
        return continuations

    def generate_texts(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        num_samples: int = 1,
    ) -> list[str]:
        """Return the continuation of each text, without special tokens.

        Takes the arguments of `generate`, with texts as prompts, and raises the same errors.

        Raises:
            ValueError: also if the generator has no codec.
        """
        codec = self._codec
        if codec is None:
            raise ValueError(
                "the generator has no tokenizer; load it with load_generator from a directory with "
                "a tokenizer.json, or pass codec=TextCodec(tokenizer)"
            )
        prompt_tokens = [as_prompt(text, codec).tokens for text in prompts]
        continuations = self.generate(
            prompt_tokens, max_new_tokens=max_new_tokens, sampling=sampling, num_samples=num_samples
        )
        before = prompt_tokens if self.follows_prompt else [[]] * len(prompt_tokens)
        rows = [prompt for prompt in before for _ in range(num_samples)]
        return [codec.decode_after(*row) for row in zip(rows, continuations, strict=True)]

    def beam_search(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        beams: Beams,
        on_batch: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """Return the best continuation of each prompt that a beam search finds.

        Args:
            prompts: token ids, at least one per prompt.
            on_batch: called with the number of prompts of each batch that is complete.

        Raises:
            ValueError: see `generate`.
        """
        self.check(prompts, max_new_tokens)
        continuations: list[list[int]] = [[] for _ in prompts]
        for numbers in batches_of(prompts, self._batch_size):
            tokens_BT, lengths_B = self._padded([prompts[number] for number in numbers])
            is_prompt_B = np.arange(len(lengths_B)) < len(numbers)
            state = self._first_beams(
                max_new_tokens, beams, self._params[0], tokens_BT, lengths_B, is_prompt_B
            )
            state = self._other_beams(beams, self._params[0], state=state)
            for number, tokens in zip(numbers, np.asarray(state.ended_BKM)[:, 0], strict=False):
                ends = np.flatnonzero(np.isin(tokens, [*self._stop, NONE]))
                stop = len(tokens) if not len(ends) else ends[0] + (tokens[ends[0]] != NONE)
                continuations[number] = tokens[:stop].tolist()
            if on_batch is not None:
                on_batch(len(numbers))
        return continuations

    def stream(
        self, prompt: Sequence[int], *, max_new_tokens: int, sampling: Sampling | None = None
    ) -> Iterator[int]:
        """Yield the tokens of one continuation, each as soon as it is known.

        Takes the same arguments as `generate`, raises the same errors, and yields the same tokens.
        """
        sampling = sampling or Sampling()
        self.check([prompt], max_new_tokens)
        sampling.check_vocab(self._config.vocab_size)
        state = self._started({0: prompt}, max_new_tokens, sampling)
        count = 0
        while True:
            state = self._advance(sampling, self._params, count + 1, state=state)
            new_M = np.asarray(state.rows.new_BM)[0]
            tokens = [int(token) for token in new_M[count:] if token != NONE]
            yield from tokens
            count += len(tokens)
            if state.rows.is_done_B[0]:
                self.num_passes += int(state.passes_B[0])
                return

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Check prompts; see `generate`.

        Raises:
            ValueError: a prompt is empty, has an unknown token, or is too long for the model.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
        limits = {"model": self._decoder, "draft model": self._drafter}
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {i} is empty; give each at least one token")
            for token in (min(prompt), max(prompt)):
                if not 0 <= token < self._config.vocab_size:
                    raise ValueError(
                        f"prompt {i} has the token id {token}, but the model's ids are 0 to "
                        f"{self._config.vocab_size - 1}; use the tokenizer of the model"
                    )
            for owner, limit in limits.items():
                max_positions = limit.max_positions
                if max_positions is not None and len(prompt) + max_new_tokens > max_positions:
                    raise ValueError(
                        f"prompt {i} has {len(prompt)} tokens; with max_new_tokens="
                        f"{max_new_tokens}, they are more than the {owner}'s {max_positions} "
                        "positions; shorten one of them"
                    )

    def _fetched(self, array: jax.Array) -> np.ndarray:
        """Return an array on this host; its parts may be on the devices of several processes."""
        if not array.is_fully_addressable:
            array = jax.device_put(array, NamedSharding(self._mesh, PartitionSpec()))
        return np.asarray(array)

    def _started(
        self, rows: Mapping[int, Sequence[int]], max_new_tokens: int, sampling: Sampling
    ) -> _State:
        """Return a batch with the first new token of each row."""
        tokens_BT, lengths_B = self._padded([*rows.values()])
        numbers_B = np.full(len(lengths_B), NONE, np.int32)
        numbers_B[: len(rows)] = [*rows]
        return self._begin(max_new_tokens, sampling, self._params, tokens_BT, lengths_B, numbers_B)

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        limits = self._decoder.max_positions, self._drafter.max_positions
        max_positions = min((limit for limit in limits if limit is not None), default=None)
        return pad_rows(rows, self._num_replicas, self._batch_size, max_positions)

    def _first(
        self,
        max_new_tokens: int,
        sampling: Sampling,
        params: tuple[Tree, Tree],
        tokens_BT: jax.Array,
        lengths_B: jax.Array,
        numbers_B: jax.Array,
    ) -> _State:
        """Run the prompts, and choose the first token of each row."""
        drafter = self._drafter
        logits_BV, caches = self._decoder.prefill(
            params[0], tokens_BT, lengths_B, max_new_tokens, drafter.num_tokens
        )
        has_penalty = sampling.repetition_penalty != 1
        rows = Rows.of_prompts(
            *self._decoder.given(tokens_BT, lengths_B),
            numbers_B,
            max_new_tokens=max_new_tokens,
            seen_size=logits_BV.shape[1] if has_penalty else None,
        )
        return _State(
            caches=caches,
            rows=rows.with_next(sampling, self._stop, logits_BV),
            memory=drafter.begin(params[1], tokens_BT, lengths_B, max_new_tokens),
            passes_B=jnp.zeros_like(lengths_B),
        )

    def _further(
        self,
        sampling: Sampling,
        params: tuple[Tree, Tree],
        target_count: jax.Array | int,
        *,
        state: _State,
    ) -> _State:
        """Choose tokens until each row has `target_count`, or is done."""

        def goes_on(state: _State) -> jax.Array:
            return jnp.any(~state.rows.is_done_B & (state.rows.counts_B < target_count))

        def step(state: _State) -> _State:
            rows = state.rows
            drafts_BD, memory = self._drafter.propose(params[1], state.memory, rows, sampling)
            tokens_BT = jnp.concatenate([rows.newest_B[:, None], drafts_BD], axis=1)
            logits_BTV, caches = self._decoder.decode(
                params[0], tokens_BT, rows.positions_B, state.caches
            )
            return _State(
                caches=caches,
                rows=rows.with_checked(sampling, self._stop, drafts_BD, logits_BTV),
                memory=memory,
                passes_B=state.passes_B + ~rows.is_done_B,
            )

        return jax.lax.while_loop(goes_on, step, state)
