"""Runs that start from Hugging Face text models, through the command line."""

import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from flax import nnx

from convert.from_hf import convert as from_hf
from convert.from_hf import load as load_model
from convert.source import read_source
from convert.to_hf import convert as to_hf
from data.batches import validation_batches
from data.text.text_corpus import load_text
from sharding.mesh import make_mesh
from tests.convert import hf_files
from tests.hugging_face import OPT, save_model
from tests.runs import ROOT, write_corpus
from tests.train.meshes.models_on_meshes import write_labelled
from tests.train.test_main import error_line, run_main
from train.config.config_files import load
from train.config.inherit_config import inherit_config
from train.config.overrides import Overrides
from train.config.schema import validate_config
from train.reporting.metrics import read_metrics
from train.run.assemble import assemble_run
from train.run.init_from import start_params

pytestmark = [pytest.mark.usefixtures("shared_steps"), pytest.mark.drawn(4, among="thorough")]

BERT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
SHORT = (
    "data.sequence_length=16",
    "data.global_batch_size=8",
    "train.num_steps=3",
    "log.every_steps=1",
    "precision.compute=float32",
)
FINETUNE, CLASSIFY = (str(ROOT / "configs" / f"{n}.py") for n in ("opt_finetune", "bert_classify"))


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    """(directory, model) of a Hugging Face OPT."""
    directory = tmp_path_factory.mktemp("opt")
    return directory, save_model(directory, "OPTForCausalLM", **OPT)


@pytest.mark.thorough
def test_run_can_start_from_a_converted_model_but_not_resume_it(opt, text, tmp_path, capsys):
    from_hf(opt[0], tmp_path / "converted")
    overrides = (*text[1], *SHORT, f"init_from={tmp_path / 'converted'}")
    assert run_main(tmp_path / "converted", overrides, config=FINETUNE) == 2
    assert "is a converted model, not a run; start from it" in error_line(capsys)
    assert run_main(tmp_path / "ours", overrides, config=FINETUNE) == 0
    assert run_main(tmp_path / "theirs", (*overrides, f"init_from={opt[0]}"), config=FINETUNE) == 0
    assert losses_of(tmp_path / "ours") == losses_of(tmp_path / "theirs")


@pytest.mark.thorough
def test_run_starts_from_a_model_with_other_keys_and_files(opt, text, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(opt[0], other)
    hf_files.edit_config(other, new_feature="on", other=3)
    (other / "model.safetensors").unlink()
    torch.save(opt[1].state_dict(), other / "pytorch_model.bin")
    overrides = (*text[1], *SHORT, f"init_from={other}")
    options: tuple[str, ...] = ()
    for harmless in ("new_feature", "new_feature,other"):
        assert run_main(tmp_path / "run", (*overrides, *options), config=FINETUNE) == 2
        assert f"does not, set --config.train.init_harmless={harmless}" in error_line(capsys)
        options = (f"train.init_harmless={harmless}",)
    overrides = (*overrides, *options)
    assert run_main(tmp_path / "run", overrides, config=FINETUNE) == 2
    assert "if you trust it, add --allow_pickle_weights" in error_line(capsys)
    options = ("--allow_pickle_weights",)
    assert run_main(tmp_path / "run", overrides, *options, config=FINETUNE) == 0
    plain = (*text[1], *SHORT, f"init_from={opt[0]}")
    assert run_main(tmp_path / "plain", plain, config=FINETUNE) == 0
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "plain")


@pytest.mark.thorough
def test_run_starts_from_a_model_with_vocab_and_merges_like_from_one_with_a_tokenizer(
    opt, text, tmp_path
):
    older = tmp_path / "older"
    shutil.copytree(opt[0], older)
    (older / "tokenizer.json").unlink()
    tokenizer = json.loads((opt[0] / "tokenizer.json").read_text())
    (older / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    (older / "merges.txt").write_text("#version: 0.2\n")  # the tokenizer merges nothing
    (older / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    for name, directory in {"old": older, "new": opt[0]}.items():
        overrides = (*text[1], *SHORT, f"init_from={directory}")
        assert run_main(tmp_path / name, overrides, config=FINETUNE) == 0
    assert losses_of(tmp_path / "old") == losses_of(tmp_path / "new")
    assert {"vocab.json", "merges.txt"} <= {path.name for path in (tmp_path / "old/hf").iterdir()}


@pytest.mark.thorough
def test_run_whose_model_has_no_tokenizer_is_evaluated_with_that_of_its_config(opt, text, tmp_path):
    without = tmp_path / "without"
    shutil.copytree(opt[0], without)
    tokenizer = (without / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    overrides = (*text[1], *SHORT, f"init_from={without}")
    workdir = tmp_path / "run"
    options = (f"data.tokenizer={tokenizer}",)
    assert run_main(workdir, (*overrides, *options), config=FINETUNE) == 0
    config = str(workdir / "config.yaml")
    assert run_main(workdir, (), "--mode=eval", config=config) == 0


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """The directory of a Hugging Face BERT with a masked-LM head."""
    directory = tmp_path_factory.mktemp("bert")
    save_model(directory, "BertForMaskedLM", **BERT)
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    overrides = write_corpus(directory)
    write_labelled(directory)
    return directory, (*overrides, "data.name=text")


def losses_of(workdir):
    return [entry["loss"] for entry in read_metrics(workdir / "metrics.jsonl") if "loss" in entry]


@pytest.mark.thorough
def test_evaluation_of_a_checkpoint_equals_transformers(opt, text, tmp_path, capsys):
    directory, model = opt
    overrides = (*text[1], *SHORT, f"init_from={directory}", "data.validation_fraction=0.3")
    assert run_main(tmp_path, overrides, "--mode=eval", config=FINETUNE) == 0
    printed = capsys.readouterr().out.split()
    found = float(printed[printed.index("eval_loss") + 1])

    config = load(FINETUNE, overrides)
    inherit_config(config, read_source(directory), Overrides.of(overrides))
    validated = validate_config(config)
    total = weight = 0.0
    corpus = load_text(validated.data)
    for batch in validation_batches(corpus, validated.data, range(8)):
        with torch.no_grad():
            logits = model(torch.tensor(batch["tokens"])).logits
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.tensor(batch["targets"]).long().flatten(), reduction="none"
        )
        total += float((losses.numpy() * batch["weights"].reshape(-1)).sum())
        weight += float(batch["weights"].sum())
    # Both sum in float32, and the output has 6 digits.
    assert found == pytest.approx(total / weight, rel=1e-5)


@pytest.mark.thorough
def test_finetuning_is_equal_on_any_mesh_and_resumes(opt, text, tmp_path):
    overrides = (*text[1], *SHORT, f"init_from={opt[0]}", "train.num_microbatches=2")
    mesh = ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2")
    assert run_main(tmp_path / "one", overrides, config=FINETUNE) == 0
    assert run_main(tmp_path / "many", (*overrides, *mesh), config=FINETUNE) == 0
    one = losses_of(tmp_path / "one")
    many = losses_of(tmp_path / "many")
    np.testing.assert_allclose(one, many, rtol=1e-5)
    assert (tmp_path / "one" / "hf" / "config.json").exists()
    longer = (*overrides, "train.num_steps=5")
    assert run_main(tmp_path / "one", longer, config=FINETUNE) == 0
    assert len(losses_of(tmp_path / "one")) == 5


@pytest.mark.thorough
def test_classifier_starts_from_the_encoder_and_its_head_is_new(bert, text):
    overrides = (f"data.paths={text[0]}/labelled.jsonl", *SHORT, f"init_from={bert}")
    config = load(CLASSIFY, (*overrides, "mesh.fsdp=2"))
    source = read_source(bert)
    inherit_config(config, source, Overrides.of(overrides))
    validated = validate_config(config)
    vocab_size = validated.model_fields["vocab_size"]
    run = assemble_run(
        validated, make_mesh(validated.mesh, jax.devices()), vocab_size=vocab_size, num_labels=2
    )
    params = start_params(run, source)
    plain = nnx.to_pure_dict(nnx.split(load_model(bert))[1])
    assert params.keys() - plain.keys() == {"pooler", "classifier"}
    assert plain.keys() - params.keys() == {"masked_lm"}
    for name in params.keys() & plain.keys():
        jax.tree.map(np.testing.assert_array_equal, params[name], plain[name])
    fresh = run.state_layout.initial().params["classifier"]
    jax.tree.map(np.testing.assert_array_equal, params["classifier"], fresh)


@pytest.mark.thorough
def test_classifier_keeps_the_dense_layer_of_modernbert_before_the_logits(text, tmp_path):
    sizes = {**BERT, "num_hidden_layers": 4, "pad_token_id": 1}
    save_model(tmp_path, "ModernBertForMaskedLM", **sizes)
    run, source = run_from(tmp_path, text, 2, "model.name=modernbert", "model.pool=mean")
    params = start_params(run, source)
    plain = nnx.to_pure_dict(nnx.split(load_model(tmp_path))[1])
    assert params.keys() - plain.keys() == {"classifier"}
    assert plain.keys() - params.keys() == {"vocab_bias"}
    jax.tree.map(np.testing.assert_array_equal, params["dense_head"], plain["dense_head"])


def run_from(directory, text, labels, *overrides):
    """Return (run, source) for a classifier with these labels."""
    where = (f"data.paths={text[0]}/labelled.jsonl", f"init_from={directory}")
    overrides = (*where, *SHORT, *overrides)
    config = load(CLASSIFY, overrides)
    source = read_source(directory)
    inherit_config(config, source, Overrides.of(overrides))
    validated = validate_config(config)
    sizes = {"vocab_size": validated.model_fields["vocab_size"], "num_labels": labels}
    return assemble_run(validated, make_mesh(validated.mesh, jax.devices()), **sizes), source


@pytest.mark.thorough
def test_classifier_is_new_if_the_checkpoint_has_another_task(text, tmp_path):
    save_model(tmp_path, "BertForPreTraining", **BERT)
    for num_labels in (2, 3):
        run, source = run_from(tmp_path, text, num_labels)
        assert run.model_config.num_labels == num_labels
        params = start_params(run, source)
        fresh = run.state_layout.initial().params["classifier"]
        jax.tree.map(np.testing.assert_array_equal, params["classifier"], fresh)
        theirs = nnx.to_pure_dict(nnx.split(load_model(tmp_path))[1])
        jax.tree.map(np.testing.assert_array_equal, params["pooler"], theirs["pooler"])


@pytest.mark.thorough
def test_labels_of_a_published_classifier_keep_their_meaning(text, tmp_path):
    names = {"id2label": {0: "none", 1: "colon"}, "label2id": {"none": 0, "colon": 1}}
    save_model(tmp_path, "BertForSequenceClassification", **BERT, **names)
    run, source = run_from(tmp_path, text, 2)
    theirs = nnx.to_pure_dict(nnx.split(load_model(tmp_path))[1])["classifier"]
    ours = start_params(run, source, ("colon", "none"))["classifier"]
    for name in ("kernel", "bias"):
        np.testing.assert_array_equal(ours[name], theirs[name][..., ::-1])
    with pytest.raises(
        ValueError, match="labels none, colon, but the data has a, b; rename .*=new"
    ):
        start_params(run, source, ("a", "b"))
    run, source = run_from(tmp_path, text, 2, "train.init_labels=by_position")
    ours = start_params(run, source, ("a", "b"))["classifier"]
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.thorough
def test_classifier_of_another_task_is_reinitialized_on_request(text, tmp_path):
    save_model(tmp_path, "BertForSequenceClassification", **BERT)
    theirs = nnx.to_pure_dict(nnx.split(load_model(tmp_path))[1])
    for num_labels in (2, 3):
        run, source = run_from(tmp_path, text, num_labels, "train.init_labels=new")
        params = start_params(run, source, "abc"[:num_labels])
        assert run.model_config.num_labels == num_labels
        fresh = run.state_layout.initial().params["classifier"]
        jax.tree.map(np.testing.assert_array_equal, params.pop("classifier"), fresh)
        assert params.keys() == theirs.keys() - {"classifier"}
        for name in params:
            jax.tree.map(np.testing.assert_array_equal, params[name], theirs[name])
    for labels in ("by_name", "by_position"):
        run, source = run_from(tmp_path, text, 3, f"train.init_labels={labels}")
        with pytest.raises(
            ValueError, match="has a classifier for 2 labels, but the run has 3; .*labels=new"
        ):
            start_params(run, source, "abc")


def test_init_labels_without_a_classifier_is_rejected(bert, opt, text):
    run, source = run_from(bert, text, 2, "train.init_labels=by_position")
    with pytest.raises(ValueError, match="has no classifier for model.head='sequence'; do not set"):
        start_params(run, source, ("colon", "none"))
    overrides = (*text[1], *SHORT, f"init_from={opt[0]}", "train.init_labels=new")
    config = load(FINETUNE, overrides)
    source = read_source(opt[0])
    inherit_config(config, source, Overrides.of(overrides))
    validated = validate_config(config)
    run = assemble_run(validated, make_mesh(validated.mesh, jax.devices()), vocab_size=None)
    with pytest.raises(ValueError, match="train.init_labels='new' is for a classifier, but .*opt"):
        start_params(run, source)


@pytest.mark.thorough
def test_classifier_trains_from_published_weights(bert, text, tmp_path):
    where = (f"data.paths={text[0]}/labelled.jsonl", f"data.cache_dir={text[0]}/cache")
    overrides = (*where, *SHORT, f"init_from={bert}", "mesh.fsdp=2", "mesh.model=2")
    assert run_main(tmp_path, overrides, config=CLASSIFY) == 0
    assert len(losses_of(tmp_path)) >= 1
    evaluations = [e for e in read_metrics(tmp_path / "metrics.jsonl") if "eval_loss" in e]
    assert 0 <= evaluations[-1]["eval_accuracy"] <= 1
    to_hf(tmp_path, tmp_path / "hugging_face")
    theirs = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "hugging_face")
    assert theirs.config.id2label == {0: "colon", 1: "none"}
    tokens = np.random.default_rng(0).integers(105, 361, (2, 12))
    with torch.no_grad():
        logits = theirs.eval()(torch.tensor(tokens)).logits
    # Float32 in another order.
    np.testing.assert_allclose(load_model(tmp_path)(jax.numpy.asarray(tokens)), logits, atol=1e-5)


@pytest.mark.thorough
def test_run_from_scratch_is_exported_with_its_tokenizer(text, tmp_path, caplog):
    sizes = ("model.num_layers=2", "model.embed_dim=16", "model.num_heads=2")
    overrides = (*text[1], *SHORT, *sizes, "data.vocab_size=300", "mesh.pipeline=2")
    config = str(ROOT / "configs" / "gpt2.py")
    assert run_main(tmp_path, overrides, config=config) == 0
    to_hf(tmp_path, tmp_path / "hugging_face")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hugging_face").eval()
    assert theirs.config.eos_token_id == 0 and not caplog.records
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "hugging_face" / "tokenizer.json"))
    ids = tokenizer.encode("def f(x):").ids
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits
    np.testing.assert_allclose(load_model(tmp_path)(jax.numpy.asarray([ids])), logits, atol=1e-5)
    # Another run can start from this one.
    again = (*overrides, f"init_from={tmp_path}")
    assert run_main(tmp_path / "again", again, config=config) == 0


@pytest.mark.thorough
def test_every_config_of_the_model_takes_its_sizes_from_the_checkpoint(opt, text, tmp_path, capsys):
    config = str(ROOT / "configs" / "opt.py")
    overrides = (*text[1], *SHORT, f"init_from={opt[0]}")
    assert run_main(tmp_path / "run", overrides, "--fast_dev_run", config=config) == 0
    overridden = (*overrides, "model.embed_dim=8")
    assert run_main(tmp_path / "run", overridden, config=config) == 2
    assert "--config.model.embed_dim=8, but the checkpoint init_from=" in error_line(capsys)


def test_configs_that_need_a_checkpoint_report_it(text, tmp_path, capsys):
    for config in (FINETUNE, CLASSIFY):
        assert run_main(tmp_path / "run", (*text[1], *SHORT), config=config) == 2
        assert "config.init_from" in error_line(capsys)


def test_padding_of_another_tokenizer_is_refused(text, tmp_path, capsys):
    config = str(ROOT / "configs" / "roberta.py")
    overrides = (*text[1], *SHORT, "data.tokenizer=bytes")
    assert run_main(tmp_path / "run", overrides, config=config) == 2
    assert "model.pad_id=1, but padding is token 257 of data.tokenizer='bytes'" in error_line(
        capsys
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ("model.name=gpt2", "config.model.name='gpt2', but init_from="),
        ("init_from=nowhere", "nowhere does not exist; correct the path"),
        ("data.sequence_length=64", "model.max_positions=32 is less than data.sequence_length=64"),
        ("data.objective=masked_lm", "data.objective='masked_lm' does not match"),
    ],
)
def test_incompatible_checkpoint_is_rejected_in_one_sentence(
    change, message, opt, text, tmp_path, capsys
):
    overrides = (*text[1], *SHORT, f"init_from={opt[0]}", change)
    assert run_main(tmp_path / "run", overrides, config=FINETUNE) == 2
    assert message in error_line(capsys)
    assert not (tmp_path / "run").exists()
