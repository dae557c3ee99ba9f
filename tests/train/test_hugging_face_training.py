"""Compares 30 training steps with `transformers` and torch's AdamW on the same data."""

import copy
import json
from typing import Any

import jax
import numpy as np
import peft
import pytest
import torch
import transformers

from convert.source import read_source
from data.batches import train_batches
from data.text.text_corpus import load_text
from sharding.batches import place_batch
from sharding.mesh import make_mesh
from tests.hugging_face import save_model
from tests.runs import ROOT, write_corpus
from train.config.config_files import load
from train.config.inherit_config import inherit_config
from train.config.overrides import Overrides
from train.config.schema import validate_config
from train.references import add_references
from train.run.assemble import assemble_run
from train.run.init_from import start_params

pytestmark = pytest.mark.drawn(3, among="thorough")

NUM_STEPS = 30
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.1
#: float32 with another order of summation; Adam's division amplifies the differences at every step.
TOLERANCE = 1e-3

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "gpt2": (
        "GPT2LMHeadModel",
        {
            **{"n_layer": 2, "n_head": 2, "n_embd": 24, "n_positions": 32},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        },
        (),
    ),
    "bert": (
        "BertForMaskedLM",
        {
            **{"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 24},
            **{"intermediate_size": 40, "max_position_embeddings": 32, **NO_DROPOUT},
        },
        ("model.head=masked_lm", "data.objective=masked_lm"),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            **{"num_layers": 2, "num_heads": 2, "d_model": 24, "d_kv": 8, "d_ff": 40},
            **{"feed_forward_proj": "gated-gelu", "dropout_rate": 0.0},
            **{"decoder_start_token_id": 0, "pad_token_id": 0},
        },
        (),
    ),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        {
            **{"num_layers": 2, "num_heads": 2, "d_model": 24, "d_kv": 8, "d_ff": 40},
            **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4},
            **{"num_decoder_layers": 2, "expert_capacity": 5, "router_jitter_noise": 0.0},
            **{"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0},
        },
        # Otherwise, Adam makes rounding so large that a token goes to another expert.
        ("optimizer.epsilon=1e-3",),
    ),
}
_TINY = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
}
_TINY_EXPERTS = {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
#: Models with experts, each with another kind of routing.
EXPERTS = {
    "mixtral": ("MixtralForCausalLM", {**_TINY, "num_local_experts": 5}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**_TINY, **_TINY_EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 12},
    ),
    "deepseek3": (
        "DeepseekV3ForCausalLM",
        {
            **_TINY,
            **_TINY_EXPERTS,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 10,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
SHARED = (
    "data.name=text",
    "data.sequence_length=24",
    "data.global_batch_size=8",
    "data.validation_fraction=0.2",
    "train.num_microbatches=2",
    f"train.num_steps={NUM_STEPS}",
    f"optimizer.learning_rate={LEARNING_RATE}",
    f"optimizer.weight_decay={WEIGHT_DECAY}",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "optimizer.clip_norm=1.0",
)


def torch_step(model, optimizer, batch):
    """Does a step with `transformers` on one of Taibai's batches; returns the loss."""
    tensors = {name: torch.tensor(array) for name, array in batch.items() if name != "index"}
    inputs = {"input_ids": tensors["tokens"]}
    for ours, theirs in (
        ("segment_ids", "attention_mask"),
        ("decoder_tokens", "decoder_input_ids"),
        ("decoder_segment_ids", "decoder_attention_mask"),
    ):
        if ours in tensors:
            inputs[theirs] = tensors[ours]
    logits = model(**inputs).logits.flatten(0, 1)
    targets = tensors["targets"].long().flatten()
    weights = tensors["weights"].flatten()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def unpacked_torch_step(model, optimizer, batch):
    """Do the same step with each conversation of a packed batch on its own; return the loss."""
    loss_sum = torch.zeros(())
    for tokens, targets, weights, segments in zip(
        *(batch[name] for name in ("tokens", "targets", "weights", "segment_ids")), strict=True
    ):
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            logits = model(input_ids=torch.tensor(tokens[here])[None]).logits[0]
            losses = torch.nn.functional.cross_entropy(
                logits, torch.tensor(targets[here]).long(), reduction="none"
            )
            loss_sum = loss_sum + (losses * torch.tensor(weights[here])).sum()
    loss = loss_sum / batch["weights"].sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


class PreferenceStep:
    """Does a step of direct preference optimization with each conversation on its own.

    Args:
        model: model; a copy of it is the reference.
        beta: as in Rafailov et al. 2023 (arXiv:2305.18290), equation 7.
    """

    def __init__(self, model, beta):
        self._reference = copy.deepcopy(model).eval()
        self._beta = beta

    def __call__(self, model, optimizer, batch):
        losses = []
        for tokens, targets, answers, segments in zip(
            *(batch[name] for name in ("tokens", "targets", "answers", "segment_ids")), strict=True
        ):
            rewards = []
            for segment in range(1, segments.max() + 1):
                here = segments == segment
                both = []
                for each in (model, self._reference):
                    logits = each(input_ids=torch.tensor(tokens[here])[None]).logits[0]
                    chosen = torch.tensor(targets[here]).long()[:, None]
                    log_probs = torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0]
                    both.append(log_probs[answers[here] > 0].sum())
                rewards.append(self._beta * (both[0] - both[1].detach()))
            margins = torch.stack(rewards[::2]) - torch.stack(rewards[1::2])
            losses.append(-torch.nn.functional.logsigmoid(margins))
        loss = torch.cat(losses).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())


def losses_of_both(name, model, start, overrides, corpus_overrides, *, step=torch_step):
    """Return the losses of Taibai and of torch, which train on the same batches.

    Args:
        name: config in configs/.
        model: model of transformers or PEFT; it is trained.
        start: directory with the same model.
        overrides: overrides of the config.
        corpus_overrides: overrides to train on a corpus.
        step: does a step with torch.
    """
    overrides = (*SHARED, *corpus_overrides, *overrides, f"init_from={start}")
    config = load(str(ROOT / "configs" / f"{name}.py"), overrides)
    source = read_source(start)
    inherit_config(config, source, Overrides.of(overrides))
    validated = validate_config(config)
    corpus = load_text(validated.data)
    mesh = make_mesh(validated.mesh, jax.devices())
    run = assemble_run(validated, mesh, vocab_size=corpus.tokenizer.vocab_size)
    state = run.state_layout.initial(start_params(run, source))
    add_references(run, corpus, state.params, 0, start)

    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim > 1]
    rest = [p for p in trained if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}],
        lr=validated.optimizer.learning_rate,
        betas=(validated.optimizer.beta1, validated.optimizer.beta2),
        eps=validated.optimizer.epsilon,
    )
    batches = train_batches(corpus, validated.data, run.rows, seed=validated.train.seed)
    ours = []
    theirs = []
    for _ in range(NUM_STEPS):
        batch = next(batches)
        theirs.append(step(model, optimizer, batch))
        placed = place_batch(batch, run.rows, run.batch_layout, len(run.rows))
        state, metrics = run.compile_train_step()(state, placed)
        ours.append(float(jax.device_get(metrics["loss"])))
    return ours, theirs


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_losses_of_30_steps_equal_torch(name, tmp_path):
    class_name, settings, changes = MODELS[name]
    model = save_model(tmp_path / "model", class_name, **settings).train()
    config = "t5" if name == "switch" else name
    ours, theirs = losses_of_both(
        config, model, tmp_path / "model", changes, write_corpus(tmp_path)
    )
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)
    assert ours[-1] < ours[0] - 0.3


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", EXPERTS)
def test_losses_of_30_steps_with_experts_equal_torch(name, tmp_path):
    class_name, settings = EXPERTS[name]
    model = save_model(tmp_path / "model", class_name, **settings).train()
    ours, theirs = losses_of_both(
        "mixtral", model, tmp_path / "model", ("model.router_loss=0.0",), write_corpus(tmp_path)
    )
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)
    assert ours[-1] < ours[0] - 0.3


@pytest.mark.slow(only=["variant0", "variant1"])
@pytest.mark.thorough
@pytest.mark.parametrize("variant", [(), ("use_rslora",), ("use_dora",)])
def test_losses_of_30_steps_with_adapters_equal_peft(variant, tmp_path):
    class_name, settings, _ = MODELS["gpt2"]
    base = save_model(tmp_path / "model", class_name, **settings)
    # transformers changes names in a config that it has created itself.
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager"
    )
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_fc"]}
    settings |= {"fan_in_fan_out": True, "task_type": "CAUSAL_LM", **dict.fromkeys(variant, True)}
    adapters = peft.LoraConfig(**settings)
    model = peft.get_peft_model(base, adapters)
    model.save_pretrained(str(tmp_path / "adapters"))
    ours, theirs = losses_of_both(
        "gpt2",
        model.train(),
        tmp_path / "adapters",
        (
            "lora.rank=4",
            "lora.alpha=8",
            "lora.targets=attention.qkv,mlp.up",
            "optimizer.learning_rate=0.02",
            *(f"lora.{name}=true" for name in variant),
        ),
        write_corpus(tmp_path),
    )
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)
    assert ours[-1] < ours[0] - 0.3


@pytest.mark.thorough
def test_losses_of_30_steps_on_packed_answers_equal_torch_without_packing(tmp_path):
    class_name, settings, _ = MODELS["gpt2"]
    settings = settings | {"n_positions": 64}
    model = save_model(tmp_path / "model", class_name, **settings).train()
    chats = (
        [
            {"role": "user", "content": f"Say {number} and {'a' * (number % 5)}."},
            {"role": "assistant", "content": f"{number}, {'a' * (number % 5)}!"},
        ]
        for number in range(200)
    )
    lines = (json.dumps({"messages": chat}) + "\n" for chat in chats)
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    overrides = (
        "data.objective=chat",
        f"data.chat_template={tmp_path}/chat.jinja",
        "data.sequence_length=64",
    )
    ours, theirs = losses_of_both(
        "gpt2",
        model,
        tmp_path / "model",
        overrides,
        (f"data.paths={tmp_path}/chats.jsonl", f"data.cache_dir={tmp_path}/cache"),
        step=unpacked_torch_step,
    )
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)
    assert ours[-1] < ours[0] - 0.3


@pytest.mark.thorough
def test_losses_of_30_steps_on_packed_preferences_equal_torch_without_packing(tmp_path):
    class_name, settings, _ = MODELS["gpt2"]
    settings = settings | {"n_positions": 128}
    model = save_model(tmp_path / "model", class_name, **settings).train()
    lines = (
        {"prompt": f"Say {i}.", "chosen": f"{i}, {'a' * (i % 5)}!", "rejected": f"{'no' * (i % 4)}"}
        for i in range(200)
    )
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    overrides = (
        "data.objective=preference",
        f"data.chat_template={tmp_path}/chat.jinja",
        "data.sequence_length=128",
        "data.global_batch_size=4",
        "preference.beta=0.3",
    )
    ours, theirs = losses_of_both(
        "gpt2",
        model,
        tmp_path / "model",
        overrides,
        (f"data.paths={tmp_path}/pairs.jsonl", f"data.cache_dir={tmp_path}/cache"),
        step=PreferenceStep(model, 0.3),
    )
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)
    assert ours[0] == pytest.approx(np.log(2), rel=1e-5) and ours[-1] < 0.5
