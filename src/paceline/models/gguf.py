"""Reader of GGUF model files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3.

Nothing in the file is believed: every count and length is held against the bytes that are left before it is used, so
that a damaged or hostile file costs no more memory than its own size accounts for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ModelFileError
from paceline.models.gguf_bytes import GGUFBytes
from paceline.models.part_name import PartName
from paceline.models.quants import UNREADABLE_TYPES, QuantType, Tensor

MetadataValue = bool | int | float | str | list[str] | NDArray[Any]
"""An array of numbers or booleans is a numpy array of the stored type; an array of strings is a list."""

_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4  # GGML_MAX_DIMS
_READABLE_TYPES = frozenset(QuantType)
_SMALLEST_ENTRY = 8 + 4 + 1  # key length, value type, one byte
_SMALLEST_TENSOR_INFO = 8 + 4 + 8 + 4 + 8  # name length, dimension count, one dimension, type, offset

_SPLIT_NUMBER, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
"""GGUF value types (``enum gguf_type``) that are numbers, as numpy types."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open model file, or all parts of a split one; a context manager that closes itself."""

    paths: tuple[Path, ...]
    """In the order of the parts."""
    metadata: Mapping[str, MetadataValue]
    """The first part's; the others have none but of their own place."""
    tensors: dict[str, Tensor]

    @property
    def path(self) -> Path:
        return self.paths[0]

    def close(self) -> None:
        """Forget the tensors. The mappings of the files go when nobody holds one of their arrays any more."""
        self.tensors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_gguf(path: Path | str) -> GGUFFile:
    """Map a GGUF file and read its metadata and tensor table; the tensors' data stays on disk until it is touched.

    ``path`` may be any part of a split model, ``…-00001-of-00003.gguf``; all parts are read.

    Raises:
        ModelFileError: a file cannot be opened, is no GGUF of version 2 or 3, or contradicts itself or the other parts;
            the message names the file and the offset of the fault in bytes.
    """
    path = Path(path)
    file = _read_file(path)
    count = _integer(file, _SPLIT_COUNT, 1)
    # a merged model keeps the key, with 0
    return file if count in (0, 1) else _join([_read_part(each, count) for each in _parts(path, count)])


def _read_file(path: Path) -> GGUFFile:
    source = GGUFBytes(path)
    num_tensors, num_entries = _read_header(source)
    metadata = _read_metadata(source, num_entries)
    alignment = _alignment(source, metadata)
    infos = [_read_tensor_info(source) for _ in range(num_tensors)]
    return GGUFFile((path,), metadata, _place_tensors(source, infos, alignment))


def _integer(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int):
        raise ModelFileError(f"{file.path}: {key} is {value!r}; an integer is needed")
    return value


def _parts(path: Path, count: int) -> list[Path]:
    name = PartName.parse(path.name)
    if name is None or name.count != count:
        raise ModelFileError(
            f"{path}: one of {count} parts of a split model, whose name must end in "
            f"-00001-of-{count:05}.gguf or the like, so that the other parts can be found; give them such names"
        )
    return [path.with_name(part) for part in name.all_parts()]


def _read_part(path: Path, count: int) -> GGUFFile:
    if not path.exists():
        raise ModelFileError(f"{path}: this part of a model that is split in {count} is missing")
    part, name = _read_file(path), PartName.parse(path.name)
    place = _integer(part, _SPLIT_NUMBER, 0), _integer(part, _SPLIT_COUNT, 1)
    assert name is not None
    if place != (name.number - 1, count):
        raise ModelFileError(
            f"{path}: {_SPLIT_NUMBER} and {_SPLIT_COUNT} are {place[0]} and {place[1]}, but by its name and the other "
            f"parts they must be {name.number - 1} and {count}"
        )
    return part


def _join(parts: list[GGUFFile]) -> GGUFFile:
    tensors: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelFileError(f"{part.path}: tensor {name!r} is in an earlier part of the model, too")
            tensors[name] = tensor
    expected = _integer(parts[0], _SPLIT_TENSORS, len(tensors))
    if expected != len(tensors):
        raise ModelFileError(
            f"{parts[0].path}: {_SPLIT_TENSORS} is {expected}, but the {len(parts)} parts have {len(tensors)} tensors"
        )
    return GGUFFile(tuple(part.path for part in parts), parts[0].metadata, tensors)


def _read_header(source: GGUFBytes) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata entries."""
    magic = bytes(source.data[:4])
    if magic != b"GGUF":
        raise source.fault(f"not a GGUF file: it starts with {magic!r}, not b'GGUF'", 0)
    source.offset = 4
    version = source.u32("the version")
    if version and version & 0xFFFF == 0:  # as llama.cpp tells: byte order is not marked in any other way
        raise source.fault("a big-endian GGUF file; only little-endian files can be read", 4)
    if version not in (2, 3):
        raise source.fault(f"GGUF version {version}; versions 2 and 3 can be read", 4)
    num_tensors = source.count("the number of tensors", _SMALLEST_TENSOR_INFO)
    return num_tensors, source.count("the number of metadata entries", _SMALLEST_ENTRY)


def _read_metadata(source: GGUFBytes, num_entries: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_entries):
        start = source.offset
        key = source.string("a metadata key")
        if key in metadata:
            raise source.fault(f"metadata key {key!r} appears twice", start)
        metadata[key] = _read_value(source, f"metadata value {key!r}")
    return metadata


def _read_value(source: GGUFBytes, what: str) -> MetadataValue:
    kind = source.u32(f"the type of {what}")
    if kind == _ARRAY:
        return _read_array(source, what)
    if kind == _STRING:
        return source.string(what)
    if kind == _BOOL:
        return bool(source.booleans(1, what)[0])
    if kind in _NUMBERS:
        value: int | float = source.numbers(_NUMBERS[kind], 1, what)[0].item()
        return value
    raise source.fault(f"{what} has the unknown type {kind}", source.offset - 4)


def _read_array(source: GGUFBytes, what: str) -> MetadataValue:
    kind = source.u32(f"the element type of {what}")
    if kind == _STRING:
        return source.strings(source.count(f"the length of {what}", 8), what)
    if kind == _BOOL:
        return source.booleans(source.count(f"the length of {what}", 1), what)
    if kind in _NUMBERS:
        number = source.count(f"the length of {what}", np.dtype(_NUMBERS[kind]).itemsize)
        return source.numbers(_NUMBERS[kind], number, what)
    problem = "is an array of arrays, which no known model uses" if kind == _ARRAY else f"has unknown elements {kind}"
    raise source.fault(f"{what} {problem}", source.offset - 4)


def _alignment(source: GGUFBytes, metadata: Mapping[str, MetadataValue]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or value < 8 or value & (value - 1):
        raise source.fault(f"general.alignment is {value!r}; it must be a power of two of at least 8")
    return value


class _TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type: QuantType
    offset: int
    """From the start of the data section."""
    num_bytes: int
    entry: int
    """Where the file describes the tensor, for messages."""


def _read_tensor_info(source: GGUFBytes) -> _TensorInfo:
    entry = source.offset
    name = source.string("a tensor's name")
    num_dims = source.u32(f"the number of dimensions of tensor {name!r}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise source.fault(f"tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are allowed", entry)
    dims = [source.u64(f"a dimension of tensor {name!r}") for _ in range(num_dims)]
    kind = source.u32(f"the type of tensor {name!r}")
    offset = source.u64(f"the offset of tensor {name!r}")
    if kind not in _READABLE_TYPES:
        known = ", ".join(known.name for known in QuantType)
        kind_name = UNREADABLE_TYPES.get(kind, "unknown")
        raise source.fault(f"tensor {name!r} has type {kind} ({kind_name}); the types that can be read: {known}", entry)
    quant = QuantType(kind)
    if 0 in dims or dims[0] % quant.block.elements:
        raise source.fault(f"tensor {name!r} of type {quant.name} has impossible dimensions {dims}", entry)
    num_bytes = prod(dims) // quant.block.elements * quant.block.bytes
    return _TensorInfo(name, tuple(reversed(dims)), quant, offset, num_bytes, entry)


def _place_tensors(source: GGUFBytes, infos: list[_TensorInfo], alignment: int) -> dict[str, Tensor]:
    """Views of the data section, in the order of the tensor table."""
    section = -(-source.offset // alignment) * alignment
    _check_layout(source, infos, alignment, section)
    file_bytes = np.frombuffer(source.data, np.uint8)
    tensors: dict[str, Tensor] = {}
    for info in infos:
        if info.name in tensors:
            raise source.fault(f"tensor {info.name!r} appears twice", info.entry)
        start = section + info.offset
        tensors[info.name] = Tensor(info.name, info.shape, info.type, file_bytes[start : start + info.num_bytes])
    return tensors


def _check_layout(source: GGUFBytes, infos: list[_TensorInfo], alignment: int, section: int) -> None:
    previous_name, previous_end = "", 0
    for info in sorted(infos, key=lambda info: info.offset):
        end = info.offset + info.num_bytes
        if info.offset % alignment:
            raise source.fault(
                f"tensor {info.name!r} starts at {info.offset}, no multiple of the alignment {alignment}", info.entry
            )
        if section + end > source.size:
            raise source.fault(
                f"tensor {info.name!r} ends at byte {section + end}, but the file has only {source.size}; "
                "it may be truncated: download it again",
                info.entry,
            )
        if info.offset < previous_end:
            raise source.fault(f"tensors {previous_name!r} and {info.name!r} overlap", info.entry)
        previous_name, previous_end = info.name, end
