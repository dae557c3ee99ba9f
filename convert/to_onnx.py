"""Exports a model to ONNX: `python -m convert.to_onnx SRC DST`.

    run or Hugging Face model ──> Hugging Face model ──> transformers ──> torch.onnx ──> model.onnx
                │                                                                            │
                └──────────────> logits of Taibai <── compared ──> logits of onnxruntime <───┘

PyTorch's exporter is maintained by the authors of ONNX's operators in PyTorch, so the model is
exported through `transformers`. The file is then run, and must give the same logits as Taibai.

docs/convert.md explains the options.
"""

import contextlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint.run_copies import run_path
from convert import to_hf
from convert.adapters.peft_format import CONFIG_FILE as ADAPTER_CONFIG_FILE
from convert.command import run
from convert.files import preprocessor
from convert.from_hf import KEPT_FILES, copy_hf_files, load_model
from convert.options import DEFAULTS, ReadOptions, add_read_options, read_options
from convert.registry import architectures
from convert.source import read_source
from fields.paths import local_path
from untrusted.commands import command_parser, refuse_missing_package, run_command
from untrusted.documents import read_json
from untrusted.files import new_directory
from untrusted.messages import shortened

try:
    import onnxruntime
    import onnxscript  # noqa: F401  torch.onnx needs it
    import torch
    import transformers
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    refuse_missing_package(
        error, "exports to ONNX need: pip install torch transformers onnxscript onnxruntime"
    )

MODEL_FILE = "model.onnx"
#: Files that are copied from the Hugging Face model, if it has them.
_FILES = (*KEPT_FILES, "config.json", preprocessor.FILE, "README.md")
#: Ends of the names of Hugging Face classes whose only output is logits.
_WITH_LOGITS = (
    "LMHeadModel",
    "ForCausalLM",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForImageClassification",
)
#: The largest difference of logits that is accepted, divided by the largest logit.
_TOLERANCE = 1e-3
#: Rows and tokens of the example that is traced, and of the one that is compared.
_TRACED = 2, 8
_COMPARED = 3, 12

_log = logging.getLogger("convert")  # Not __name__, which is "__main__" if the module is run.


def convert(src: Path, dst: Path, options: ReadOptions = DEFAULTS) -> float:
    """Write a model as `model.onnx`, with its config and the files of its tokenizer.

    The inputs of a text model are int64[B, T]: `input_ids`, `attention_mask`, and
    `token_type_ids` if it has several types of tokens. The input of an image model is
    `pixel_values`, float32[B, C, H, W], normalized. The output is `logits`, in float32. B and T may
    have any size.

    Returns:
        The largest difference between the logits of the ONNX file and of Taibai, divided by the
        largest logit.

    Raises:
        ValueError: No class of `transformers` returns the logits of this model, PyTorch cannot
            export it, or the file computes other logits.
    """
    with new_directory(dst) as directory:
        with _hugging_face(src, options) as folder:
            (name,) = read_json(folder / "config.json", within=folder).get("architectures") or [""]
            if name not in architectures() or not name.endswith(_WITH_LOGITS):
                raise ValueError(
                    f"{src} is a {name}, but exports to ONNX know only models of text or images "
                    f"whose output is logits: *{', *'.join(_WITH_LOGITS)}"
                )
            copy_hf_files(folder, directory, _FILES)
            source = read_source(folder, options)
            inputs = _write_program(name, folder, directory / MODEL_FILE, options)
            difference = _difference(inputs, load_model(source), directory / MODEL_FILE)
        if not difference <= _TOLERANCE:
            raise ValueError(
                f"the logits of the ONNX file differ by {difference:.1e} of the largest one from "
                f"those of {src}; please report this model"
            )
    _log.info("%s: %s, whose logits differ by %.1e of the largest", dst, name, difference)
    return difference


@contextlib.contextmanager
def _hugging_face(src: Path, options: ReadOptions) -> Iterator[Path]:
    """Yield the directory of a Hugging Face model; for a run, a temporary one is written."""
    if (src / "config.json").is_file():
        yield src
        return
    if (src / ADAPTER_CONFIG_FILE).is_file():
        raise ValueError(
            f"{src} is an adapter; merge it first: python -m convert.from_hf {src} RUN, and then "
            "python -m convert.to_hf RUN MODEL --merge"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        to_hf.convert(src, folder, dtype="float32", merge=True, options=options)
        yield folder


class _Logits(torch.nn.Module):
    """A model of transformers whose only output is its logits."""

    def __init__(self, model: Any, names: Sequence[str]):
        super().__init__()
        self.model = model
        self.names = (*names,)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, inputs, strict=True))).logits


def _write_program(
    name: str, folder: Path, file: Path, options: ReadOptions
) -> dict[str, np.ndarray]:
    """Write the ONNX file; return other inputs than those that were traced."""
    # convert/families knows the class, so no code comes from the folder.
    model: Any = getattr(transformers, name).from_pretrained(
        folder,
        dtype=torch.float32,
        use_safetensors=None if options.allow_pickle_weights else True,
        attn_implementation="eager",
    )
    model.config.use_cache = False
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic":
        raise ValueError(
            f"PyTorch cannot export {name} to ONNX with rope_type='dynamic', whose frequencies "
            "depend on the length of the text; if no text is longer than max_position_embeddings, "
            "set rope_type='default' in config.json"
        )
    traced = _inputs(model.config, *_TRACED)
    dynamic = tuple(
        {i: torch.export.Dim.DYNAMIC for i in range(2 if array.ndim == 2 else 1)}
        for array in traced.values()
    )
    try:
        with _silence():
            program: Any = torch.onnx.export(
                _Logits(model, [*traced]).eval(),
                tuple(map(torch.from_numpy, traced.values())),
                dynamic_shapes={"inputs": dynamic},
                input_names=[*traced],
                output_names=["logits"],
                dynamo=True,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        reason = shortened(error.__cause__ or error)
        raise ValueError(f"PyTorch cannot export {name} to ONNX: {reason}") from error
    program.save(str(file))
    return _inputs(model.config, *_COMPARED)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress the output of the exporter: its own deprecations, and the graph after a failure."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        logging.disable(disabled)


def _inputs(config: Any, size: int, length: int) -> dict[str, np.ndarray]:
    """Return random inputs of a model of transformers; some rows of text have padding."""
    rng = np.random.default_rng(size)
    if hasattr(config, "image_size"):
        shape = size, config.num_channels, config.image_size, config.image_size
        return {"pixel_values": rng.normal(size=shape).astype(np.float32)}
    length = min(length, config.max_position_embeddings - 2)  # RoBERTa's positions begin at 2
    mask = np.ones((size, length), np.int64)
    mask[1:, length - length // 3 :] = 0
    tokens = rng.integers(0, config.vocab_size, mask.shape)
    inputs = {"input_ids": np.where(mask == 1, tokens, config.pad_token_id or 0)}
    inputs["attention_mask"] = mask
    if getattr(config, "type_vocab_size", 1) > 1:
        inputs["token_type_ids"] = rng.integers(0, config.type_vocab_size, mask.shape)
    return inputs


def _difference(inputs: dict[str, np.ndarray], model: Any, file: Path) -> float:
    """Return the largest difference between both models' logits, divided by the largest logit."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, inputs)
    logits = np.asarray(output)
    if "pixel_values" in inputs:
        expected = np.asarray(model(inputs["pixel_values"].transpose(0, 2, 3, 1)))
    else:
        names = {"input_ids": "tokens", "token_type_ids": "token_types"}
        ours = {names.get(key, key): array.astype(np.int32) for key, array in inputs.items()}
        expected = np.asarray(model(**ours))
    if logits.ndim == 3:  # logits of each token; ignore padding
        is_token = inputs["attention_mask"] == 1
        logits, expected = logits[is_token], expected[is_token]
    return float(np.max(np.abs(logits - expected)) / np.max(np.abs(expected)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("convert.to_onnx")
    parser.add_argument("src", type=run_path, help="a run, a checkpoint, or a Hugging Face model")
    parser.add_argument("dst", type=local_path, help="directory to write")
    add_read_options(parser)
    args = parser.parse_args(argv)
    # The exporter warns that torchvision, which no model here needs, is not installed.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    os.environ["HF_HUB_OFFLINE"] = "1"  # all files are in the folder
    return run(lambda: convert(args.src, args.dst, read_options(args)))


if __name__ == "__main__":
    run_command(main)
