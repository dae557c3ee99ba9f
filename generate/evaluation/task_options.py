"""How the texts that a task asks for are generated, as in lm-eval's own backend.

    task's generation_kwargs  >  generation_config.json  >  defaults of `transformers.generate`

lm-eval always says whether to sample, and with which temperature; it takes the rest of the settings
from the model's generation_config.json if a task leaves them out.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from generate.beam_search import Beams
from generate.sampling import Sampling
from untrusted.messages import shortened
from untrusted.schema import check

#: New tokens of a task that does not limit them.
_MAX_NEW_TOKENS = 256
#: Settings that are supported -> their types, and their defaults in `transformers.generate`.
_SETTINGS: dict[str, tuple[Any, Any]] = {
    "do_sample": (bool, False),
    "temperature": (float, 1.0),
    "top_k": (int, 50),
    "top_p": (float, 1.0),
    "min_p": (float | None, None),
    "repetition_penalty": (float, 1.0),
    "suppress_tokens": (list[int] | None, None),
    "num_beams": (int, 1),
    "length_penalty": (float, 1.0),
    "early_stopping": (bool | str, False),
    "max_new_tokens": (int | None, None),
}
_FOR_BEAMS = ("num_beams", "length_penalty", "early_stopping")
#: Settings for sampling, which nothing reads otherwise.
_FOR_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p")
#: Settings that are not supported -> values with which they change nothing, in addition to null.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "constraints": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": (),
    "stop_strings": (),
    "watermarking_config": (),
}
#: The same for settings that nothing reads without sampling.
_UNSUPPORTED_IN_SAMPLING: dict[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "typical_p": (1,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """How the texts that a task asks for are generated."""

    until: Sequence[str]  # texts that end a generated text
    num_reserved: int  # tokens that a context leaves free
    max_new_tokens: int  # most tokens of a generated text
    search: Sampling | Beams  # how tokens are chosen


def applied_settings(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of generation_config.json that change texts of tasks without options."""
    return {
        name: generation[name]
        for name, (_, default) in _SETTINGS.items()
        if name not in _FOR_SAMPLING and generation.get(name) not in (None, default)
    }


def task_options(given: Mapping[str, Any], generation: Mapping[str, Any]) -> TaskOptions:
    """Return how the texts of a task are generated.

    Args:
        given: task's `generation_kwargs`.

    Raises:
        ValueError: an option is not known or not supported.
    """
    options: dict[str, Any] = {**normalize_gen_kwargs({**given}, _MAX_NEW_TOKENS)}
    until = options.pop("until")
    num_reserved = options.pop("max_gen_toks")
    unknown = [name for name in options if name not in _SETTINGS]
    if unknown:
        raise ValueError(
            f"the task's generation_kwargs have {shortened(unknown)}, which is not supported; "
            f"known are until, max_gen_toks, {', '.join(_SETTINGS)}"
        )
    if options["do_sample"] and not options.get("temperature"):
        raise ValueError(
            "the task's generation_kwargs have do_sample without a temperature, which lm-eval then "
            "sets to 0; add a temperature above 0, or leave out do_sample"
        )
    named = {name: value for name, value in generation.items() if value is not None}
    merged = {name: named.get(name, default) for name, (_, default) in _SETTINGS.items()} | options
    _check_unsupported(named, samples=merged["do_sample"])
    for name, (type_, _) in _SETTINGS.items():
        where = "generation_kwargs" if name in options else "generation_config.json"
        check(merged[name], type_, f"{where}: {name}")
    return TaskOptions(
        until=until,
        num_reserved=num_reserved,
        max_new_tokens=merged["max_new_tokens"] or num_reserved,
        search=_search(merged),
    )


def _check_unsupported(generation: Mapping[str, Any], *, samples: bool) -> None:
    """Refuse a generation_config.json with settings that would change texts but cannot be used."""
    unsupported = _UNSUPPORTED | (_UNSUPPORTED_IN_SAMPLING if samples else {})
    hinders = [
        name
        for name, harmless in unsupported.items()
        if name in generation and generation[name] not in harmless
    ]
    if hinders:
        raise ValueError(
            f"generation_config.json has {shortened(hinders)}, which would change the texts that "
            "the task asks for, but is not supported; remove it there, and compare only with "
            "models evaluated without it"
        )


def _search(merged: Mapping[str, Any]) -> Sampling | Beams:
    """Return how tokens are chosen."""
    banned = tuple(merged["suppress_tokens"] or ())
    if merged["num_beams"] > 1:
        if merged["do_sample"] or merged["repetition_penalty"] != 1 or banned:
            raise ValueError(
                f"generation_kwargs and generation_config.json have num_beams="
                f"{merged['num_beams']} with do_sample, repetition_penalty or suppress_tokens, "
                "which is not supported; leave out one of them"
            )
        return Beams(**{name: merged[name] for name in _FOR_BEAMS})
    if not merged["do_sample"]:
        return Sampling(
            temperature=0.0, repetition_penalty=merged["repetition_penalty"], banned=banned
        )
    return Sampling(
        temperature=merged["temperature"],
        top_k=merged["top_k"] or None,
        top_p=merged["top_p"],
        min_p=merged["min_p"] or 0.0,
        repetition_penalty=merged["repetition_penalty"],
        banned=banned,
    )
