"""The base class of the config's sections: a dataclass that checks its declared fields."""

import dataclasses
from typing import Any, ClassVar

from fields.field import declaration_of
from fields.types import check_value


class Section:
    """A section of the config.

    A subclass is a frozen dataclass that names its section, whose docstring introduces the section
    in docs/config.md, and whose fields are declared with `fields.field.field`:

        @dataclasses.dataclass(frozen=True, kw_only=True)
        class EvalConfig(Section, section="eval"):
            \"\"\"When to evaluate, and on how many batches.\"\"\"

            every_steps: int = field(50, "Steps between evaluations.", ge=0)

    A rule about several fields is code in the subclass's `__post_init__`, after
    `super().__post_init__()`.

    Attributes:
        section: name of the section, for messages.
    """

    section: ClassVar[str]

    def __init_subclass__(cls, *, section: str):
        super().__init_subclass__()
        cls.section = section

    def __post_init__(self) -> None:
        """Check the type and the rule of every declared field.

        An int in a float field becomes a float, and a list in a field of type `tuple[X, ...]` a
        tuple.

        Raises:
            ValueError: a value is not valid. The message names the key, the value, the rule and
                the remedy: `images.channels=4 is unknown; choose 3 (color) or 1 (gray)`.
        """
        values: Any = self  # a subclass is a dataclass
        for field in dataclasses.fields(values):
            if declaration_of(field) is not None:
                value = getattr(self, field.name)
                self._set(field.name, check_value(field, value, f"{self.section}.{field.name}"))

    def _set(self, name: str, value: Any) -> None:
        """Set a field of this frozen dataclass while it is initialized."""
        object.__setattr__(self, name, value)
