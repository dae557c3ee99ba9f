"""Compiles for absent GPUs without machine code, for programs whose times are only predicted.

XLA writes kernels in PTX and has NVIDIA's assembler translate them: some hundred in a step of a
Transformer, which takes a third of the time to compile it. Times and memory are known before that.
So XLA gets a folder like CUDA's whose assembler `ptxas` writes empty files.
"""

import functools
import importlib.util
import shlex
import tempfile
import threading
from pathlib import Path

#: Packages that contain CUDA's compiler, as jax[cuda12] and jax[cuda13] install it.
_PACKAGES = ("nvidia.cuda_nvcc", "nvidia.cu13")
_lock = threading.Lock()
_ASSEMBLER = """#!/bin/sh
case " $* " in *" --version "*) exec {assembler} "$@" ;; esac
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then : > "$2"; fi
  shift
done
"""


def options_without_machine_code() -> dict[str, str]:
    """Return the options of XLA's compiler that leave out machine code.

    The program can be analyzed, but not run. {} if jax has not installed CUDA's compiler itself.
    """
    # Without the lock, two threads could each make a folder, and one of the folders would be
    # deleted while a thread still compiles with it.
    with _lock:
        folder = _folder()
    if folder is None:
        return {}
    # From jax 0.11 on, XLA calls a library instead, unless it may not.
    mode = "LIB_NV_JIT_LINK_MODE_DISABLED"
    return {
        "xla_gpu_cuda_data_dir": folder.name,
        "xla_gpu_libnvjitlink_mode": mode,
        "xla_backend_optimization_level": "0",  # XLA still generates each kernel's code
    }


@functools.cache
def _folder() -> tempfile.TemporaryDirectory | None:
    for package in _PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # the package that it is in is missing
            spec = None
        for location in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(location) / "bin" / "ptxas").exists():
                return _without_assembler(Path(location))
    return None


def _without_assembler(cuda: Path) -> tempfile.TemporaryDirectory:
    """Return a folder like CUDA's, with an assembler that writes empty files."""
    folder = tempfile.TemporaryDirectory(prefix="taibai_cuda_")
    path = Path(folder.name)
    (path / "bin").mkdir()
    for entry in cuda.iterdir():
        if entry.name != "bin":
            (path / entry.name).symlink_to(entry)
    for entry in (cuda / "bin").iterdir():
        if entry.name != "ptxas":
            (path / "bin" / entry.name).symlink_to(entry)
    real = shlex.quote(str(cuda / "bin" / "ptxas"))
    assembler = path / "bin" / "ptxas"
    assembler.write_text(_ASSEMBLER.format(assembler=real), encoding="utf-8")
    assembler.chmod(0o755)
    return folder
