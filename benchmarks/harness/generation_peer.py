"""Times greedy generation in turns with transformers: same weights, same prompts, same tokens."""

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness import report
from benchmarks.harness.timing import interleave, ratios
from convert.from_hf import load
from generate.generator import Generator
from generate.sampling import Sampling

_GREEDY = Sampling(temperature=0.0)
_PROMPT = 32


def compare(
    sizes: dict[str, int], batches: Sequence[int], *, num_tokens: int, num_rounds: int
) -> dict[str, Any]:
    """Return how fast both continue random prompts of 32 tokens, in float32.

    Args:
        sizes: fields of a GPT-2 config of transformers that differ from GPT-2 small.
        batches: numbers of prompts at the same time.
        num_tokens: number of new tokens of each prompt.
        num_rounds: how many times both take turns.

    Returns:
        Versions, sizes, and for each number of prompts the tokens per second of both, and ours
        divided by theirs.

    Raises:
        ValueError: both found different tokens.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(**{"bos_token_id": None, "eos_token_id": None, **sizes})
    model: Any = transformers.GPT2LMHeadModel(config).eval()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        generator = Generator(load(directory))
    batch_results = []
    for batch in batches:
        rng = np.random.default_rng(batch)
        prompts_BT = rng.integers(0, config.vocab_size, (batch, _PROMPT))
        batch_results.append(_of_batch(generator, model, prompts_BT, num_tokens, num_rounds))
    return {
        "versions": report.versions(with_torch=True),
        "cpu": report.cpu_name(),
        "num_cores": report.num_cores(),
        "model": {"class": type(model).__name__, "num_params": model.num_parameters(), **sizes},
        "num_prompt_tokens": _PROMPT,
        "num_new_tokens": num_tokens,
        "batches": batch_results,
    }


def _of_batch(
    generator: Generator, model: Any, prompts_BT: np.ndarray, num_tokens: int, num_rounds: int
) -> dict[str, Any]:
    import torch

    prompts = prompts_BT.tolist()
    tensor_BT = torch.tensor(prompts)

    def ours() -> list[list[int]]:
        return generator.generate(prompts, max_new_tokens=num_tokens, sampling=_GREEDY)

    def theirs() -> list[list[int]]:
        with torch.no_grad():
            tokens_BT = model.generate(
                tensor_BT,
                attention_mask=torch.ones_like(tensor_BT),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return tokens_BT[:, prompts_BT.shape[1] :].tolist()

    if ours() != theirs():  # this also compiles ours
        raise ValueError("Taibai and transformers continue the prompts with different tokens")

    times = interleave({"ours": ours, "transformers": theirs}, num_rounds=num_rounds, num_steps=1)
    count = len(prompts) * num_tokens
    return {
        "batch_size": len(prompts),
        "tokens_per_s": {name: count / each.median_s for name, each in times.items()},
        "speed_ratio": ratios(times["ours"], times["transformers"]),
    }


def rows_of(figures: dict[str, Any]) -> list[list[str]]:
    """Return the table of docs/generate.md."""
    table = [["batch", "tokens/s", "tokens/s of transformers", "ours ÷ theirs", "in the rounds"]]
    for each in figures["batches"]:
        rates, ratio = each["tokens_per_s"], each["speed_ratio"]
        table.append(
            [
                str(each["batch_size"]),
                f"{rates['ours']:,.1f}",
                f"{rates['transformers']:,.1f}",
                f"{ratio['median']:.2f}",
                f"{ratio['min']:.2f} to {ratio['max']:.2f}",
            ]
        )
    return table
