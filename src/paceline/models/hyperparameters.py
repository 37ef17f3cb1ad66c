"""Hyperparameters of a GGUF file, checked as they are read."""

from math import inf

import numpy as np

from paceline.errors import ModelFileError
from paceline.models.gguf import GGUFFile, MetadataValue
from paceline.models.quants import dequantize


class Hyperparameters:
    """The metadata under ``<architecture>.`` and the file's tensors, which remembers what nobody asked for.

    Its methods raise ModelFileError for a value that is missing, of the wrong type or out of range. Where GGUF writes 0
    for "switched off", they return None.
    """

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.path = file.path
        self.architecture = architecture
        self.model_name = str(file.metadata.get("general.name", file.path.stem))
        self.tensors = dict(file.tensors)
        """All but those that were read as hyperparameters."""
        self._prefix = f"{architecture}."
        self._unread = {key: value for key, value in file.metadata.items() if key.startswith(self._prefix)}

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer of 31 bits."""
        value = self._take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.fault(f"{self._prefix}{name} is {_shown(value)}; a positive integer below 2^31 is needed")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._take(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
            raise self.fault(f"{self._prefix}{name} is {_shown(value)}; a positive number is needed")
        return float(value)

    def number_or_off(self, name: str, default: float = 0.0) -> float | None:
        """A positive, finite number."""
        return None if self._is_off(name, default) else self.number(name, default)

    def word(self, name: str, *known: str) -> str:
        """One of some words, the first by default."""
        value = self._take(name, known[0])
        if not isinstance(value, str) or value not in known:
            raise self.fault(f"{self._prefix}{name} = {_shown(value)} is not supported; known: {', '.join(known)}")
        return value

    def neutral(self, name: str, *allowed: MetadataValue) -> None:
        """A feature we do not have may be described, as long as it is switched off."""
        value = self._unread.pop(self._prefix + name, allowed[0])
        if not isinstance(value, type(allowed[0])) or value not in allowed:
            raise self.fault(f"{self._prefix}{name} = {_shown(value)} is not supported; only {allowed[0]!r} is")

    def ignore(self, *names: str) -> None:
        """Keys that some files have, but that say nothing about how their model is computed."""
        for name in names:
            self._unread.pop(self._prefix + name, None)

    def layer_count(self) -> int:
        """``block_count``, bounded by the tensors there are: it becomes the length of a tuple."""
        count = self.integer("block_count")
        if count > len(self.tensors):
            raise self.fault(f"{self._prefix}block_count is {count}, but the file has only {len(self.tensors)} tensors")
        return count

    def window(self, default: int = 0) -> int | None:
        """``attention.sliding_window``: how many tokens a query sees in a layer with a window."""
        name = "attention.sliding_window"
        return None if self._is_off(name, default) else self.integer(name, default)

    def windowed_layers(self, num_layers: int, period: int) -> tuple[bool, ...]:
        """Which layers have a window: by default all but every ``period``-th, otherwise as the file says.

        llama.cpp reads ``attention.sliding_window_pattern`` as the period or as one boolean per layer
        (``llama_model_base::load_swa_pattern``).
        """
        name = "attention.sliding_window_pattern"
        pattern = self._unread.get(self._prefix + name)
        if not isinstance(pattern, np.ndarray):
            period = self.integer(name, period)
            return tuple(layer % period < period - 1 for layer in range(num_layers))
        if len(pattern) != num_layers or not np.isin(pattern, (0, 1)).all():
            raise self.fault(f"{self._prefix}{name} is {_shown(pattern)}; {num_layers} booleans are needed")
        del self._unread[self._prefix + name]
        return tuple(bool(windowed) for windowed in pattern)

    def tensor_values(self, name: str, length: int) -> tuple[float, ...]:
        """The values of a tensor that holds hyperparameters; none if the file does not have it."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            return ()
        values = dequantize(tensor)
        if values.shape != (length,) or not np.all((values > 0) & (values < inf)):
            raise self.fault(f"the tensor {name} has shape {values.shape}; {length} positive numbers are needed")
        return tuple(values.tolist())

    def refuse_unread(self) -> None:
        """Raises ModelFileError: the file says something about the model that nobody asked for."""
        for key, value in self._unread.items():
            raise self.fault(f"{key} = {_shown(value)} is not supported")

    def fault(self, what: str) -> ModelFileError:
        """An error about this file."""
        return ModelFileError(f"{self.path}: {what}")

    def _is_off(self, name: str, default: float) -> bool:
        key = self._prefix + name
        value = self._unread.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != 0:
            return False
        self._unread.pop(key, None)
        return True

    def _take(self, name: str, default: MetadataValue | None) -> MetadataValue:
        value = self._unread.pop(self._prefix + name, default)
        if value is None:
            raise self.fault(f"the metadata has no {self._prefix}{name}")
        return value


def _shown(value: MetadataValue) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
