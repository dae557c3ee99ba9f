"""The values of a DeepSpeed JSON, with the types and under the names that DeepSpeed has for them.

{"bfloat16": {"enabled": "true"}, "zero_optimization": {"stage": "auto"}}
-> {"bf16.enabled": True}, and zero_optimization.stage is without a value
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from fields.numbers import number_problem, shown
from train.config.deepspeed_keys import NULLABLE, ONLY, PARSED_BY_PYDANTIC, TYPES, Kind
from untrusted.schema import is_of

_AUTO = "auto"
#: Strings that pydantic parses as a bool.
_BOOLS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The batch sizes of a file, which complete each other once the number of replicas is known.

    whole = micro × count × replicas

    Attributes:
        whole: `train_batch_size`, or None.
        micro: `train_micro_batch_size_per_gpu`, or None.
        count: `gradient_accumulation_steps`, or None.
    """

    whole: int | None
    micro: int | None
    count: int | None

    def completed(self, num_replicas: int, default_count: int) -> dict[str, int]:
        """Return the values of `data.global_batch_size` and `train.num_microbatches`, if known.

        Args:
            num_replicas: `mesh.data` × `mesh.fsdp`.
            default_count: count if the file has only `micro`.

        Raises:
            ValueError: the file has all sizes, and they contradict each other.
        """
        whole = self.whole
        count = self.count
        if self.micro is not None and whole is not None:
            fitting, rest = divmod(whole, self.micro * num_replicas)
            if rest or count not in (None, fitting):
                raise ValueError(
                    f"train_batch_size={whole} must equal train_micro_batch_size_per_gpu="
                    f"{self.micro} × gradient_accumulation_steps={count or '...'} × "
                    f"{num_replicas} replicas (mesh.data × mesh.fsdp)"
                )
            count = fitting
        elif self.micro is not None:
            count = count or default_count
            whole = self.micro * num_replicas * count
        sizes = {"data.global_batch_size": whole, "train.num_microbatches": count}
        return {key: size for key, size in sizes.items() if size is not None}


def flat_values(tree: dict) -> tuple[dict[str, Any], set[str]]:
    """Return the values of a file by dotted key, and the keys without a value.

    The latter are those with "auto", and those with null if DeepSpeed allows it there.
    """
    values = dict(_flat(tree))
    without_value = {
        key
        for key, value in values.items()
        if value == _AUTO or (value is None and key in NULLABLE)
    }
    return {key: value for key, value in values.items() if key not in without_value}, without_value


def _flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value of a nested dict."""
    for name, value in tree.items():
        if "." in name:  # It must not be taken for a key of a section.
            yield prefix + repr(name), value
        elif isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def rename_old_keys(values: dict[str, Any], problems: list[str]) -> None:
    """Replace deprecated keys by those that have their meaning now.

    Args:
        values: values by dotted key, which are changed in place.
        problems: list that a problem is added to.
    """
    old = [key for key in values if key.startswith("bfloat16.")]
    if old and any(key.startswith("bf16.") for key in values):
        problems.append("bf16 and bfloat16 are names of the same section; remove one of the two")
    for key in old:
        values[f"bf16.{key.removeprefix('bfloat16.')}"] = values.pop(key)
    if isinstance(values.get("zero_optimization"), bool):
        values["zero_optimization.stage"] = int(values.pop("zero_optimization"))


def parse_values(values: dict[str, Any], problems: list[str]) -> None:
    """Convert the values of known keys to their types, and check their ranges.

    Args:
        values: values by dotted key, which are changed in place; invalid ones are removed.
        problems: list that problems are added to.
    """
    for key, value in list(values.items()):
        is_lax = key.startswith(PARSED_BY_PYDANTIC)
        kind = TYPES.get(key)
        if kind is None and is_lax and key in ONLY:
            kind = Kind(type(ONLY[key]))
        parsed = value
        problem = number_problem(value, is_float=True)
        if problem is None and kind is not None:
            parsed = _parsed(value, kind, is_lax=is_lax)
            problem = f"must be {kind.description}" if parsed is None else None
        if problem is None:
            values[key] = parsed
        else:
            problems.append(f"{key}={shown(value)} {problem}")
            del values[key]


def _parsed(value: Any, kind: Kind, *, is_lax: bool) -> Any:
    """Return a value with the type of a key, or None if it has another type or is out of range.

    Args:
        value: value in the file. A float without a fraction, such as 1e9, is also an integer.
        kind: type of the key.
        is_lax: whether to convert strings to numbers and bools, and 0 and 1 to bools, as pydantic
            does.
    """
    if kind.type is bool:
        if is_lax and type(value) in (int, float) and value in (0, 1):
            return bool(value)
        if is_lax and isinstance(value, str):
            return _BOOLS.get(value.lower())
        return value if type(value) is bool else None
    if kind.type not in (int, float):
        return value if is_of(value, kind.type) else None
    if is_lax and isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if type(value) is float and kind.type is int and value.is_integer():
        value = int(value)
    if not is_of(value, kind.type) or not math.isfinite(value):
        return None
    return value if kind.least <= value <= kind.most else None
