"""Reading the pickled parts of Megatron's checkpoint format without running anything that they carry.

A pickle names the classes and functions that it is made with. Here each name is looked up in a table that the caller
gives, and never imported: what comes back are inert records, tuples and strings of this module, made anew for every
file, so that a damaged or malicious file can neither call nor alter anything. A name outside of the table is refused.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_megatron.errors import CheckpointError

Names = Mapping[tuple[str, str], Any]
"""(module, name) as a pickle spells it -> what stands for it; :data:`RECORD` for an inert record."""

RECORD = object()


class Record:
    """Stands for an instance of a class of the file: its attributes, and no behaviour."""

    def __init__(self, *values: Any):
        self.values = values

    def __setstate__(self, state: Any) -> None:
        """Takes a dictionary as attributes, anything else as `state`."""
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class RefusedClass(Exception):
    """A pickle names something outside of its table."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedIOBase, names: Names, persistent: Callable[[Any], Any] | None):
        super().__init__(file)
        self._names, self._persistent = names, persistent
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name; nothing is imported."""
        key = (module, name)
        if key not in self._names:
            raise RefusedClass(f"{module}.{name}")
        stand_in = self._names[key]
        if stand_in is RECORD:
            # One class for each name and file: nothing that a file does to it outlives the reading.
            stand_in = self._made.setdefault(key, type(name, (Record,), {}))
        return stand_in

    def persistent_load(self, pid: Any) -> Any:
        """Hands a storage's description to the caller."""
        if self._persistent is None:
            raise RefusedClass("a persistent id")
        return self._persistent(pid)


def dumps(value: Any) -> bytes:
    """The pickle of a value that is made here: Megatron's format wants one."""
    return pickle.dumps(value)


def load(content: bytes, names: Names, where: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Unpickles with stand-ins only.

    Args:
        content: The pickle.
        names: Everything that it may name.
        where: The file, for errors.
        persistent: Makes something of a persistent id (torch's way to name a storage).

    Raises:
        CheckpointError: The pickle names something else, or is damaged.
    """
    try:
        return _Unpickler(io.BytesIO(content), names, persistent).load()
    except RefusedClass as error:
        raise CheckpointError(
            f"{where}: its pickled part names {error}, which this format does not need. Nothing was executed. Use a "
            "checkpoint from a source you trust, or save it again."
        ) from error
    except Exception as error:
        # A damaged pickle raises anything: UnpicklingError, EOFError, ValueError, KeyError, MemoryError, ...
        raise CheckpointError(
            f"{where}: not a readable pickle ({type(error).__name__}: {error}). The file is damaged; take another copy "
            "of the checkpoint."
        ) from error
