"""Training: the commands, and the only place where model, mesh, data and checkpoints meet.

from train import build_run, train

built = build_run("configs/gpt2.py", {"mesh.data": 4}, workdir="runs/gpt2")
result = train(built)
"""

from typing import TYPE_CHECKING, Any

from taibai import refuse_hidden_packages

if TYPE_CHECKING:
    from train.notebook import TrainingResult, build_run, train

__all__ = ["TrainingResult", "build_run", "train"]

refuse_hidden_packages()


def __getattr__(name: str) -> Any:
    """Return a name of __all__, and import jax only then: a launcher needs none of it."""
    if name in __all__:
        from train import notebook

        return getattr(notebook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
