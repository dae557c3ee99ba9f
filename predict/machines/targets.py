"""Describes GPUs that are not installed, so that a step can be compiled for them.

To compile for a GPU, XLA needs a description of it, not the GPU itself. A target selects one of the
descriptions in gpu_targets/ (or a file in the same format), a number of hosts, and a number of GPUs
per host:

    target = parse_target("h100:8x8")
    mesh = make_mesh(MeshConfig(pipeline=4, data=2, model=8), target.devices())
    hardware = hardware_of(target.devices()[0])
    options = options_for(hardware, is_described=True, saves_memory=False)
    compiled = target.compile(jax.jit(step).trace(state, batch), mesh, options)

The compiler is part of jax's CUDA plugin, which does not need a driver for this.
"""

import dataclasses
import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from predict.machines.machine_code import options_without_machine_code
from sharding.compiler_options import DISABLED_PASSES, CompilerOption, as_dict
from sharding.mesh import AnyMesh
from untrusted.files import read_text

_FOLDER = Path(__file__).parent / "gpu_targets"
#: Kinds of GPUs whose descriptions come with Taibai.
TARGETS = tuple(sorted(path.stem for path in _FOLDER.glob("*.txtpb")))
#: The largest number of GPUs that this has been tested with.
MAX_DEVICES = 4096
#: XLA's pass that turns softmax and normalizations into Triton kernels.
_TRITON_PASS = "triton-softmax-rewriter"

INSTALL = "python -m pip install 'jax[cuda12]' (3 GB; no driver is needed)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Hosts with GPUs of one kind.

    Attributes:
        name: name as given by the user, such as "h100:8x8".
        description: text of a GpuTargetConfigProto.
        num_hosts: number of hosts.
        gpus_per_host: number of GPUs per host, which are connected by NVLink.
        network_gbit_per_s: bandwidth between hosts in one direction, in Gbit/s per GPU; None: as in
            the usual hosts of these GPUs.
        has_machine_code: whether programs for them contain machine code. Without it, they compile
            faster and have the same times and memory, but cannot be run.
        has_triton_kernels: whether XLA may turn softmax and normalizations into Triton kernels,
            whose tilings it searches for. Without them, a program compiles up to twice as fast, and
            its predicted time is up to 15 % longer for small models.
    """

    name: str
    description: str
    num_hosts: int
    gpus_per_host: int
    network_gbit_per_s: float | None = None
    has_machine_code: bool = True
    has_triton_kernels: bool = True

    @property
    def num_devices(self) -> int:
        """Total number of GPUs."""
        return self.num_hosts * self.gpus_per_host

    @property
    def device_kind(self) -> str:
        """Name that jax gives to one of the GPUs, such as "NVIDIA H100 80GB HBM3"."""
        match = re.search(r'\bdevice_description_str:\s*"([^"]*)"', self.description)
        return match[1] if match else self.name.rpartition(":")[0]

    @property
    def memory_bytes(self) -> int:
        """Memory of one GPU in bytes."""
        return int(self._number("device_memory_size"))

    @property
    def memory_bytes_per_s(self) -> float:
        """Bandwidth of one GPU's memory, in bytes per second."""
        return self._number("memory_bandwidth")

    def resized(self, num_devices: int, *, memory_bytes: int | None = None) -> "Target":
        """Return as few of these hosts as have `num_devices` GPUs.

        If they do not fill whole hosts, each host has fewer GPUs.

        Args:
            num_devices: number of GPUs.
            memory_bytes: replaces the memory of each GPU; None: as described.
        """
        max_gpus_per_host = min(num_devices, self.gpus_per_host)
        gpus_per_host = max(n for n in range(1, max_gpus_per_host + 1) if num_devices % n == 0)
        num_hosts = num_devices // gpus_per_host
        description = self.description
        if memory_bytes is not None:
            pattern = r"\b(device_memory_size:\s*)[\d.]+"
            description = re.sub(pattern, rf"\g<1>{memory_bytes}", description)
        kind = self.name.rpartition(":")[0]
        return dataclasses.replace(
            self,
            name=f"{kind}:{num_hosts}x{gpus_per_host}",
            description=description,
            num_hosts=num_hosts,
            gpus_per_host=gpus_per_host,
        )

    def devices(self) -> list[Any]:
        """Return device objects that stand for the GPUs, host by host; they cannot hold arrays.

        Raises:
            ValueError: if jax's CUDA plugin is not installed, or does not accept the description.
        """
        if not has_compiler():
            raise ValueError(f"--target={self.name} needs XLA's compiler for CUDA: {INSTALL}")
        try:
            topology = topologies.get_topology_desc(
                topology_name=self.name.partition(":")[0],
                platform="cuda",
                target_config=self.description,
                topology=f"1x{self.num_hosts}x{self.gpus_per_host}",
            )
        except Exception as error:  # jaxlib raises its own exception type, jax raises others
            raise ValueError(f"--target={self.name}: XLA rejects it: {error}") from error
        return list(topology.devices)

    def compile(
        self, traced: jax.stages.Traced, mesh: AnyMesh, options: list[CompilerOption]
    ) -> jax.stages.Compiled:
        """Compile a traced function for these GPUs.

        Args:
            traced: function, traced on `mesh`. Trace it on an `AbstractMesh` if memory kinds of
                arguments matter: jax keeps them there, but devices that are not installed report
                none.
            mesh: mesh that it was traced on.
            options: options for the compiler.

        Returns:
            The compiled program.
        """
        lowered = traced.lower(lowering_platforms=("cuda",))
        values = as_dict(options)
        if not self.has_machine_code:
            values |= options_without_machine_code()
        if not self.has_triton_kernels:
            without = [values.get(DISABLED_PASSES, ""), _TRITON_PASS]
            values[DISABLED_PASSES] = ",".join(filter(None, without))
        if isinstance(mesh, jax.sharding.Mesh):
            return lowered.compile(compiler_options=values)
        devices = self.devices()[: mesh.size]
        # For an abstract mesh, jax uses the compiler of the default backend, which is the CPU.
        # There is no public way to select another one.
        arguments: Any = lowered._lowering.compile_args
        arguments["backend"] = devices[0].client
        return lowered.compile(compiler_options=values, device_assignment=tuple(devices))

    def _number(self, field: str) -> float:
        match = re.search(rf"\b{field}:\s*([\d.]+)", self.description)
        if match is None:
            raise ValueError(f"--target={self.name}: its description lacks {field}; add this field")
        try:
            number = float(match[1])
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise ValueError(f"--target={self.name}: {match[0][:80]} must be a positive number")
        return number


def target_of(device_kind: str, num_devices: int, per_host: int) -> Target | None:
    """Return present GPUs as a target; None if there is no description of them.

    Args:
        device_kind: as in jax.Device.device_kind, such as "NVIDIA H200". NVIDIA's drivers have
            several names for a GPU, of which one may be the beginning of another.
        num_devices: number of GPUs.
        per_host: number of GPUs per host.
    """
    gpus_per_host = min(num_devices, per_host)
    for kind in TARGETS:
        target = parse_target(f"{kind}:{-(-num_devices // gpus_per_host)}x{gpus_per_host}")
        described = target.device_kind
        if described.startswith(device_kind) or device_kind.startswith(described):
            return target
    return None


def has_compiler() -> bool:
    """Return whether a CUDA plugin of jax is installed."""
    try:
        specs = map(importlib.util.find_spec, ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"))
        return any(spec is not None for spec in specs)
    except ModuleNotFoundError:  # there is no plugin at all
        return False


def parse_target(text: str, network_gbit_per_s: float | None = None) -> Target:
    """Parse a target `KIND:HOSTSxGPUS`, such as `h100:8x8` or `my.txtpb:1x4`.

    Args:
        text: value of `--target`.
        network_gbit_per_s: value of `--network`; None: as in the usual hosts of these GPUs.

    Raises:
        ValueError: if the text has another form, has too many GPUs, if KIND is neither a known
            kind nor a file, or if the network has no bandwidth.
    """
    kind, _, shape = text.rpartition(":")
    sizes = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", shape)
    if not kind or sizes is None:
        raise ValueError(
            f"--target={text[:200]!r} must be KIND:HOSTSxGPUS, such as h100:8x8 for 8 hosts of 8 "
            f"GPUs; KIND is {', '.join(TARGETS)}, or a file"
        )
    num_hosts = int(sizes[1])
    gpus_per_host = int(sizes[2])
    if num_hosts * gpus_per_host > MAX_DEVICES:
        raise ValueError(
            f"--target={text!r} has {num_hosts * gpus_per_host:,} GPUs; choose at most "
            f"{MAX_DEVICES:,}"
        )
    path = _FOLDER / f"{kind}.txtpb" if kind in TARGETS else Path(kind)
    if not path.is_file():
        raise ValueError(
            f"--target={text!r}: {kind!r} is none of {', '.join(TARGETS)}, and not a file with a "
            "GpuTargetConfigProto as text"
        )
    if network_gbit_per_s is not None and not 0 < network_gbit_per_s < math.inf:
        raise ValueError(
            f"--network={network_gbit_per_s} must be a positive number of Gbit/s per GPU, such as "
            "400 for one InfiniBand NDR adapter per GPU"
        )
    return Target(
        name=text,
        description=read_text(path),
        num_hosts=num_hosts,
        gpus_per_host=gpus_per_host,
        network_gbit_per_s=network_gbit_per_s,
    )
