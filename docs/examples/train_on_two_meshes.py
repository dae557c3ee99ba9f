"""Trains one config on two meshes in one process, as a notebook may."""

import jax

jax.config.update("jax_num_cpu_devices", 8)  # of a CPU; before anything else uses jax

from train import build_run, train  # noqa: E402

overrides = {
    "data.name": "docs.examples.own_parts:poems",
    "data.tokenizer": "bytes",
    "data.sequence_length": 64,
    "train.num_steps": 20,
}
meshes = {
    "one": {},
    "cube": {"mesh.pipeline": 2, "mesh.data": 2, "mesh.model": 2},
}
losses = {}
for name, mesh in meshes.items():
    built = build_run("configs/gpt2.py", {**overrides, **mesh}, workdir=f"runs/{name}")
    result = train(built)
    losses[name] = result.values("loss")

for step, loss in losses["one"].items():
    print(f"step {step:2}: loss {loss:.4f} on 1 device, {losses['cube'][step]:.4f} on 8")
