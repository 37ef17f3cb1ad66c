"""From the tensors of a file to exactly those that a ModelSpec has."""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path

from paceline.errors import ModelFileError
from paceline.models.quants import Tensor
from paceline.models.spec import ModelSpec, tensor_shapes


def normalised(path: Path, tensors: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """The tensors of ``tensor_shapes(spec)``, as views of what the file at ``path`` has.

    Raises:
        ModelFileError: a tensor is missing, has another shape, or is not one of the model's.
    """
    apart = _split_fused(path, tensors, spec)
    _check(path, apart, spec)
    return apart


def _split_fused(path: Path, tensors: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """``attn_qkv`` holds the rows of ``attn_q``, ``attn_k`` and ``attn_v`` one after another."""
    sizes = {"attn_q": spec.query_size, "attn_k": spec.kv_size, "attn_v": spec.kv_size}
    apart = dict(tensors)
    for layer in range(spec.num_layers):
        for part in ("weight", "bias"):
            fused = apart.pop(f"blk.{layer}.attn_qkv.{part}", None)
            if fused is None:
                continue
            if fused.shape[0] != sum(sizes.values()):
                raise ModelFileError(
                    f"{path}: the tensor {fused.name} has {fused.shape[0]} rows; {sum(sizes.values())} are needed, "
                    f"for queries, keys and values of {spec.query_size}, {spec.kv_size} and {spec.kv_size}"
                )
            bounds = pairwise(accumulate(sizes.values(), initial=0))
            for name, (start, end) in zip(sizes, bounds, strict=True):
                rows = _rows(fused, f"blk.{layer}.{name}.{part}", start, end)
                if rows.name in apart:
                    raise ModelFileError(f"{path}: the file has both {fused.name} and {rows.name}; one is needed")
                apart[rows.name] = rows
    return apart


def _rows(tensor: Tensor, name: str, start: int, end: int) -> Tensor:
    """Some rows of a tensor in any stored type: blocks never cross a row, so a row is a run of bytes."""
    stored = tensor.data.reshape(tensor.shape[0], -1)[start:end].reshape(-1)
    return Tensor(name, (end - start, *tensor.shape[1:]), tensor.type, stored)


def _check(path: Path, tensors: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """It stops at the first tensor that is missing, so a layer count of billions ends as soon as any other."""
    unused = dict(tensors)
    for name, shape in tensor_shapes(spec):
        tensor = unused.pop(name, None)
        if tensor is None:
            raise ModelFileError(f"{path}: the tensor {name} is missing")
        if tensor.shape != shape:
            raise ModelFileError(f"{path}: the tensor {name} has shape {tensor.shape}; {shape} is needed")
    for name in unused:
        raise ModelFileError(
            f"{path}: the tensor {name} is not supported: the model uses a feature this version does not have"
        )
