"""Predicts how fast GPUs generate text: `python -m benchmarks.decode --target=h100:1x1`.

    python -m benchmarks.decode --config=configs/llama.py:3-8b --target=h100:1x1 --batch=1,32,256
    python -m benchmarks.decode --target=h100:2x4 --batch=64 --tensor_mode=2d_stationary
    python -m benchmarks.decode --peer --batch=1,8
    python -m benchmarks.decode --docs

The pass over one token per row (`Decoder.decode` in generate/decoder.py, with a greedy choice) is
compiled for GPUs, which need not be present, and its time is predicted as for a training step. The
limit is the time in which a GPU reads its parameters and all slots of its caches once.

With --peer, a GPT-2 small with random weights generates text on this machine, in turns with
transformers. With --docs, the command writes the tables of docs/generate.md from decode.json and
cpu_decode.json in benchmarks/results.
"""

import json
import logging
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from benchmarks.harness import docs_page, generation_peer, report
from fields.paths import local_path
from generate.decoder import decoder_of
from models.stack import logical_axes
from predict.machines.datasheets import machine_of
from predict.machines.targets import Target, parse_target
from predict.program.memory import memory
from predict.time.prediction import predict
from sharding import hardware
from sharding.logical import axis_rules
from sharding.mesh import MeshConfig, use_mesh
from sharding.rules import make_rules, partition_specs, rules_on
from sharding.tensor import MODES, TensorConfig
from train.compile import load_config, run_for
from train.config.overrides import Overrides
from train.config.schema import validate_config
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "decode.json"
_PEER_RESULTS = _RESULTS.with_name("cpu_decode.json")
_DOCS = _ROOT / "docs" / "generate.md"
_PROMPT = 8
#: Its run has the whole model.
_ONE_GPU = "h100:1x1"
ONE_DIM = TensorConfig()


@refuses_bad_input()
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("benchmarks.decode")
    parser.add_argument("--config", default="configs/llama.py:3-8b")
    parser.add_argument("--target", default="h100:1x1", help="GPUs; the model is split over all")
    parser.add_argument("--tensor_mode", choices=MODES, default="1d", help="how it is split")
    parser.add_argument("--batch", default="1,32,256", help="numbers of rows")
    parser.add_argument("--length", type=int, default=1024, help="slots of a row's caches")
    parser.add_argument("--out", type=local_path, help="write the figures to this JSON file")
    parser.add_argument("--peer", action="store_true", help="measure beside transformers instead")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, with --peer")
    parser.add_argument("--docs", action="store_true", help="write docs/generate.md")
    args, others = parser.parse_known_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, force=True)
    if args.docs:
        docs_page.write_tables(_DOCS, tables())
        return 0
    jax.config.update("jax_platforms", "cpu")
    command = command_line("benchmarks.decode", argv)
    sizes = [int(size) for size in args.batch.split(",")]
    if args.peer:
        comparison = generation_peer.compare({}, sizes, num_tokens=64, num_rounds=args.rounds)
        return _report({"command": command, **comparison}, args.out)
    target = parse_target(args.target)
    tensor = TensorConfig(mode=args.tensor_mode)
    tensor.factors(target.num_devices)  # an error before the model is built
    config = load_config(args.config, Overrides.parse(others))
    model = run_for(validate_config(config), parse_target(_ONE_GPU)).model
    passes = [predicted(model, target, size, args.length, tensor=tensor) for size in sizes]
    figures = {"command": command, "versions": report.versions(), "target": target.name}
    figures |= {"config": args.config, "length": args.length, "passes": passes}
    return _report(figures, args.out)


def _report(figures: dict[str, Any], out: Path | None) -> int:
    """Print figures as JSON, also into a file if there is one; return the exit code."""
    print(json.dumps(figures, indent=1, allow_nan=False))
    report.write_json(out, figures, indent=1)
    return 0


def tables() -> dict[str, str]:
    """Return the tables of docs/generate.md."""
    peer_rows = generation_peer.rows_of(report.read_json(_PEER_RESULTS))
    return {
        "decode": docs_page.markdown(rows_of(report.read_json(_RESULTS))),
        "decode beside transformers": docs_page.markdown(peer_rows),
    }


def predicted(
    model: Any, target: Target, batch_size: int, num_slots: int, *, tensor: TensorConfig = ONE_DIM
) -> dict[str, Any]:
    """Return the predicted time of a pass over one token per row, in bfloat16, and its limit.

    Args:
        model: causal language model, which may be abstract.
        target: GPUs, over which the model is split.
        batch_size: number of rows.
        num_slots: number of slots of a row's caches.
        tensor: how the model is split.

    Raises:
        ValueError: the GPUs do not divide a dim of the model, or the mode has no such number.
    """
    decoder = decoder_of(model)
    sizes = MeshConfig(model=target.num_devices).axis_sizes(tensor)
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    params = _params(model, decoder, mesh)
    tokens_BT = jax.ShapeDtypeStruct((batch_size, _PROMPT), jnp.int32)
    rows_B = _placed(jax.ShapeDtypeStruct((batch_size,), jnp.int32), PartitionSpec(), mesh)

    def prefill(params, tokens_BT, lengths_B):
        return decoder.prefill(params, tokens_BT, lengths_B, num_slots - _PROMPT)

    def step(params, tokens_B, positions_B, caches):
        logits_B1V, caches = decoder.decode(params, tokens_B[:, None], positions_B, caches)
        newest_B = jnp.argmax(logits_B1V[:, 0], axis=-1).astype(jnp.int32)
        return newest_B, positions_B + 1, caches

    def cache(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Split the heads of [B, K, S, H], if the columns of the mesh divide them."""
        splits = x.ndim == 4 and x.shape[1] % sizes["model"] == 0
        return _placed(x, PartitionSpec(None, "model") if splits else PartitionSpec(), mesh)

    on_gpus = hardware.use(hardware.hardware_of(target.devices()[0]))
    with on_gpus, use_mesh(mesh), axis_rules(rules_on(mesh)):
        caches = jax.tree.map(cache, jax.eval_shape(prefill, params, tokens_BT, rows_B)[1])
        traced = jax.jit(step, donate_argnums=(1, 2, 3)).trace(params, rows_B, rows_B, caches)
    compiled = target.compile(traced, mesh, [])
    return {"batch_size": batch_size, **_figures(model, target, compiled, mesh, params, caches)}


def _params(model: Any, decoder: Any, mesh: AbstractMesh) -> Any:
    """Return the parameters as the decoder takes them, in bfloat16, with their shardings."""
    params = nnx.to_pure_dict(nnx.split(model)[1])
    specs = partition_specs(params, logical_axes(model), make_rules(), mesh)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    separate = jax.eval_shape(decoder.separate, stacked)
    in_stacks = decoder.split(specs)

    def layer(tree: Any, stack: Any) -> Any:
        """Place a layer like the stack, without the dim of layers."""
        return jax.tree.map(lambda x, spec: _placed(x, PartitionSpec(*spec[1:]), mesh), tree, stack)

    stacks = {
        name: [layer(each, in_stacks["stacks"][name]) for each in layers]
        for name, layers in separate["stacks"].items()
    }
    non_stack = jax.tree.map(
        lambda x, spec: _placed(x, spec, mesh), separate["non_stack"], in_stacks["non_stack"]
    )
    return {"non_stack": non_stack, "stacks": stacks}


def _placed(
    x: jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: AbstractMesh
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def _figures(
    model: Any, target: Target, compiled: Any, mesh: AbstractMesh, params: Any, caches: Any
) -> dict[str, Any]:
    machine = machine_of(target)
    prediction = predict(compiled.as_text() or "", dict(mesh.shape), machine)
    used = memory(compiled)

    def device_bytes(x: jax.ShapeDtypeStruct) -> int:
        sharding: Any = x.sharding
        return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

    estimate = sum(map(device_bytes, jax.tree.leaves((params, caches))))
    num_bytes = estimate
    # A pass reads one row of the token embedding for each row of the batch.
    if not getattr(model.config, "tie_embeddings", True):
        num_bytes -= device_bytes(params["non_stack"]["token_embedding"])
    limit_s = num_bytes / machine.memory_bytes_per_s
    batch_size = jax.tree.leaves(caches)[0].shape[0]
    return {
        "predicted_s": prediction.step_s,
        "exposed_communication_s": prediction.exposed_communication_s,
        "limit_s": limit_s,
        "tokens_per_s": batch_size / prediction.step_s,
        "limit_tokens_per_s": batch_size / limit_s,
        "temp_bytes": used.temp_bytes,
        "argument_bytes": used.argument_bytes,
        "estimated_bytes": estimate,
    }


def rows_of(figures: dict[str, Any]) -> list[list[str]]:
    """Return the table of docs/generate.md."""
    table = [["batch", "time of a token", "tokens/s", "limit", "of the limit", "memory"]]
    for each in figures["passes"]:
        share = each["limit_s"] / each["predicted_s"]
        gib = (each["argument_bytes"] + each["temp_bytes"]) / 2**30
        table.append(
            [
                str(each["batch_size"]),
                f"{1e3 * each['predicted_s']:.2f} ms",
                f"{each['tokens_per_s']:,.0f}",
                f"{each['limit_tokens_per_s']:,.0f}",
                f"{share:.0%}",
                f"{gib:.1f} GiB",
            ]
        )
    return table


if __name__ == "__main__":
    run_command(main)
