"""Read a pickle as data, without importing anything that it names.

A pickle is a program for a small machine with a stack. It can name any function and call it. Here,
every name stands for a `Record`, which only stores its arguments and its state. Nothing can be
called but the constructors of records and of empty dicts:

    torch.distributed.checkpoint.metadata.Metadata(state={...})

Before that, the program is checked: it may have only the operations that plain data needs, because
a few others allocate as much memory as they say, whatever the size of the file.
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

from untrusted.messages import shortened

_OPERATIONS = frozenset(
    """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 INT
    LONG BINFLOAT FLOAT UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING
    STRING BINBYTES SHORT_BINBYTES EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2
    TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET
    GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD
    """.split()
)
#: Operations whose argument is the number of a slot, for which memory is allocated.
_SLOTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


class _Dict(dict):
    """A dict that is made empty, because copying another one may take more memory than the file."""

    def __init__(self):
        super().__init__()


class Record:
    """An object of a pickle.

    Attributes:
        name: module and name of its type or function.
        args: arguments that it was made with.
        state: its attributes, in most cases as a dict; None if it has none.
    """

    name = ""

    def __new__(cls, *args: Any):
        """Keep the arguments; `pickle` may call this without `__init__`."""
        record = object.__new__(cls)
        record.args = args
        record.state = None
        return record

    def __init__(self, *args: Any):
        self.args: tuple[Any, ...]
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        """Return an attribute of the object; None if it has none of this name."""
        return self.state.get(field) if isinstance(self.state, dict) else None


def read_pickle(content: bytes, where: object, is_known: Callable[[str], bool]) -> Any:
    """Return the data of a pickle, with a `Record` in place of each object.

    Args:
        where: file, for messages.
        is_known: whether a pickle of this kind may name a type, such as `torch.float32`.

    Raises:
        ValueError: The pickle is damaged, names another type, or has operations that plain data
            does not need.
    """
    _check_operations(content, where)
    try:
        return _Reader(content, is_known).load()
    except _RefusedError as error:
        raise ValueError(f"{where} {error}") from None
    except Exception as error:
        raise ValueError(
            f"{where} is not a pickle of plain data ({shortened(error)}); it is damaged or has "
            "another format"
        ) from None


class _RefusedError(pickle.UnpicklingError):
    """A name that is refused, as the rest of a sentence about the file."""


class _Reader(pickle.Unpickler):
    """An unpickler that imports nothing."""

    def __init__(self, content: bytes, is_known: Callable[[str], bool]):
        super().__init__(io.BytesIO(content))
        self._is_known = is_known
        self._types: dict[str, type] = {"collections.OrderedDict": _Dict}

    def find_class(self, module: str, name: str) -> Any:
        """Return the type of the records that stand for this name."""
        full = f"{module}.{name}"
        if full not in self._types:
            if not self._is_known(full):
                raise _RefusedError(
                    f"has an object of the type {shortened(full)}, which is refused, because such "
                    "a file does not need it"
                )
            self._types[full] = type("Record", (Record,), {"name": full})
        return self._types[full]


def _check_operations(content: bytes, where: object) -> None:
    num_operations = 0
    try:
        for operation, argument, _ in pickletools.genops(content):
            num_operations += 1
            is_far = operation.name in _SLOTS and int(argument or 0) > num_operations
            if operation.name not in _OPERATIONS or is_far:
                raise ValueError(f"the operation {operation.name} is not needed for data")
    except Exception as error:
        raise ValueError(
            f"{where} is not a pickle of plain data ({shortened(error)}); it is damaged or has "
            "another format"
        ) from None
