"""Answers lm-eval's requests for log-probabilities and texts, as its Hugging Face backend does."""

import bisect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from data.text.tokenization.file_tokenizer import FileTokenizer
from generate.beam_search import Beams
from generate.evaluation.scoring import Scorer
from generate.evaluation.task_options import TaskOptions, task_options
from generate.generator import Generator
from generate.prompts import TextCodec
from untrusted.messages import shortened

#: The texts of a context and a continuation, and their tokens.
_Request = tuple[tuple[str, str], list[int], list[int]]


class TaskModel(TemplateLM):
    """A model as lm-eval asks it, with the tokens and rules of lm-eval's Hugging Face backend.

    Args:
        model: causal language model, as from `convert.from_hf.load`.
        stop: ids of tokens that end a continuation.
        batch_size: most texts at a time; a multiple of the number of replicas of the mesh.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: FileTokenizer,
        *,
        stop: Sequence[int],
        batch_size: int,
        generation: Mapping[str, Any],
    ):
        super().__init__()
        self._codec = TextCodec(tokenizer)
        self._end_token = tokenizer.eos_id
        self._first_token = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        self._first_text = self._text_of(self._first_token)
        self._bos_text = None if tokenizer.bos_id is None else self._first_text
        self._scorer = Scorer(model, batch_size=batch_size)
        self._most = model.config.max_positions
        self._generator = Generator(model, stop=[*stop, self._end_token], batch_size=batch_size)
        self._generation = generation

    def _text_of(self, token: int) -> str:
        return self._codec.decode([token], has_special_tokens=True)

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-text token."""
        return self._end_token

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that an empty context consists of."""
        return self._first_token

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the tokens of a text.

        By default, they include the special ones that the tokenizer adds, unless the text begins
        with the first token already.
        """
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._first_text)
        return self._codec.encode(string, has_special_tokens=add_special_tokens)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the likeliest.

        Raises:
            ValueError: a context or a continuation has no tokens, or a continuation too many.
        """
        asked: list[Any] = [request.args for request in requests]
        for context, continuation in asked:
            if not context and not self.tok_encode(continuation, add_special_tokens=False):
                raise _no_tokens("context and the continuation", continuation)
        return super().loglikelihood(requests, disable_tqdm)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text; long texts are divided into windows."""
        windows: list[_Request] = []
        owners = []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._most,
                context_len=1,
            ):
                windows.append((("", text), *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (log_prob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += log_prob
        return totals

    def _loglikelihood_tokens(
        self, requests: list[_Request], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the likeliest.

        A context that is too long loses its first tokens. The log-probability of an empty text is
        0. Other continuations without a token, as well as contexts without one, are errors, and so
        are continuations with more tokens than the model has positions; lm-eval's own backend fails
        for all of these, too.
        """
        for (_, text), context, continuation in requests:
            if not context:
                raise _no_tokens("context", text)
            if text and not continuation:
                raise _no_tokens("continuation", text)
            if len(continuation) > self._most:
                raise ValueError(
                    f"the continuation {shortened(text)!r} has {len(continuation)} tokens, but the "
                    f"model has {self._most} positions, so it cannot be scored; leave the question "
                    "out of the task, or measure perplexity, which divides long texts"
                )
        scored = [i for i, (_, _, continuation) in enumerate(requests) if continuation]
        texts = [[*requests[i][1], *requests[i][2]][-(self._most + 1) :] for i in scored]
        results = [(0.0, True)] * len(requests)
        for i, score in zip(scored, self._scorer.score(texts), strict=True):
            length = len(requests[i][2])
            log_prob = float(score.log_probs[-length:].sum())
            results[i] = log_prob, bool(score.is_likeliest[-length:].all())
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, up to the first of the task's stop texts."""
        asked: list[Any] = [request.args for request in requests]  # (context, generation_kwargs)
        groups: dict[str, list[int]] = {}
        for number, (_, options) in enumerate(asked):
            groups.setdefault(json.dumps(options, sort_keys=True), []).append(number)
        continuations = [""] * len(requests)
        for numbers in groups.values():
            options = task_options(asked[numbers[0]][1], self._generation)
            texts = self._continuations([asked[number][0] for number in numbers], options)
            for number, text in zip(numbers, texts, strict=True):
                continuations[number] = text
        return continuations

    def _continuations(self, contexts: Sequence[str], options: TaskOptions) -> list[str]:
        """Return a continuation of each context."""
        room = self._most - options.num_reserved
        if room < 1:
            raise ValueError(
                f"the task asks for {options.num_reserved} new tokens, but the model has "
                f"{self._most} positions"
            )
        prompts = [self._prompt(context)[-room:] or [self._first_token] for context in contexts]
        max_new_tokens = options.max_new_tokens
        if isinstance(options.search, Beams):
            continuations = self._generator.beam_search(
                prompts, max_new_tokens=max_new_tokens, beams=options.search
            )
        else:
            continuations = self._generator.generate(
                prompts, max_new_tokens=max_new_tokens, sampling=options.search
            )
        until = handle_stop_sequences([*options.until], eos=self._text_of(self._end_token))
        texts = [self._codec.decode(self._stopped(tokens, until)) for tokens in continuations]
        return [postprocess_generated_text(text, until, None) for text in texts]

    def _prompt(self, context: str) -> list[int]:
        """Return the tokens of a context, with special ones unless it begins with `bos_token`."""
        has_first = self._bos_text is not None and context.startswith(self._bos_text)
        return self._codec.encode(context, has_special_tokens=not has_first)

    def _stopped(self, tokens: list[int], until: Sequence[str]) -> list[int]:
        """Return the tokens up to those with which their text first contains a stop text.

        A stop text may have special tokens, which the text of a continuation does not show.
        """

        def is_stopped(length: int) -> bool:
            text = self._codec.decode(tokens[:length], has_special_tokens=True)
            return any(stop in text for stop in until if stop)

        return tokens[: bisect.bisect_left(range(len(tokens)), True, key=is_stopped)]


def _no_tokens(part: str, text: str) -> ValueError:
    return ValueError(
        f"the {part} of the continuation {shortened(text)!r} has no tokens, so its log-probability "
        "is not defined; change the task's doc_to_text, doc_to_choice or target_delimiter"
    )
