"""The bytes of a GGUF file, and a position in them."""

import mmap
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ModelFileError

_U32 = Struct("<I")
_U64 = Struct("<Q")


class GGUFBytes:
    """A position in the mapped file, and the only code that moves it."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ModelFileError: the file cannot be mapped, or is empty.
        """
        self.path = path
        self.data = _map(path)
        self.size = len(self.data)
        self.offset = 0

    def fault(self, what: str, offset: int | None = None) -> ModelFileError:
        return ModelFileError(f"{self.path}: {what} (offset {self.offset if offset is None else offset})")

    def advance(self, length: int, what: str) -> int:
        """Step over ``length`` bytes and return where they start."""
        start = self.offset
        if length > self.size - start:
            raise self.fault(f"{what} needs {length} bytes, but the file ends after {self.size - start}")
        self.offset = start + length
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.advance(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.advance(8, what))[0])

    def count(self, what: str, smallest: int) -> int:
        """A number of things that follow, each of at least ``smallest`` bytes."""
        number = self.u64(what)
        if number * smallest > self.size - self.offset:
            raise self.fault(
                f"{what} is {number}, which needs at least {number * smallest} bytes, but the file ends after "
                f"{self.size - self.offset}",
                self.offset - 8,
            )
        return number

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, number: int, what: str) -> list[str]:
        """``number`` length-prefixed strings. One loop without calls of ours: a vocabulary has a hundred thousand."""
        data, size, offset, length_at = self.data, self.size, self.offset, _U64.unpack_from
        found = []
        try:
            for _ in range(number):
                start = offset + 8
                end = start + length_at(data, offset)[0] if start <= size else start
                if end > size:
                    self.offset = offset
                    raise self.fault(f"{what} needs {end - offset} bytes, but the file ends after {size - offset}")
                found.append(str(data[start:end], "utf-8"))
                offset = end
        except UnicodeDecodeError as error:
            raise self.fault(f"{what} is not valid UTF-8", offset) from error
        self.offset = offset
        return found

    def numbers(self, dtype: str, number: int, what: str) -> NDArray[Any]:
        start = self.advance(number * np.dtype(dtype).itemsize, what)
        return np.frombuffer(self.data, dtype, number, start).copy()

    def booleans(self, number: int, what: str) -> NDArray[np.bool_]:
        start = self.offset
        values = self.numbers("<u1", number, what)
        wrong = np.flatnonzero(values > 1)
        if wrong.size:
            raise self.fault(f"{what} is {values[wrong[0]]}, a boolean is 0 or 1", start + int(wrong[0]))
        return values.astype(np.bool_)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # mmap refuses length 0
        raise ModelFileError(f"{path}: not a GGUF file: it is empty (offset 0)") from error
