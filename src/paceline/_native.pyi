"""Types of the C++ module (csrc/module.cpp)."""

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from paceline.executors.base import Batch, Float32, Int32, UInt8

class Activation(Enum):
    SILU = 0
    GELU_TANH = 1

class KVType(Enum):
    F32 = 0
    F16 = 1
    INT8 = 2

class Model:
    def __init__(
        self,
        *,
        vocab_size: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        intermediate: int,
        layers: list[tuple[int, int]],
        ropes: list[tuple[list[float], float]],
        norm_eps: float,
        attention_scale: float,
        attention_softcap: float,
        logits_softcap: float,
        logits_scale: float,
        embedding_scale: float,
        residual_scale: float,
        tied_embeddings: bool,
        parallel_residual: bool,
        activation: Activation,
        num_blocks: int,
        max_positions: int,
        max_tokens: int,
        threads: int,
        kv_type: KVType,
        isa: str = "",
    ) -> None: ...
    def set_matrices(self, matrices: list[tuple[str, int, int, int, int, NDArray[np.uint8], int]]) -> None: ...
    def set_norm(self, name: str, layer: int, values: Float32) -> None: ...
    def set_bias(self, name: str, layer: int, values: Float32) -> None: ...
    def set_positions(self, values: Float32) -> None: ...
    def finish_loading(self) -> None: ...
    def step(self, batch: Batch) -> tuple[Int32, UInt8, Float32, Int32, Float32]: ...
    def logits(self, batch: Batch) -> Float32: ...
    def touch_kv(self, begin: int, size: int) -> None: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...
    @property
    def bytes_per_block(self) -> int: ...

def isa(wanted: str = "") -> str: ...
def linear(type: int, n: int, k: int, stored: NDArray[np.uint8], rows: Float32, isa: str = "") -> Float32: ...
def unpack(
    type: int, n: int, k: int, stored: NDArray[np.uint8], isa: str = "", kept_as: int | None = None
) -> Float32: ...
def packed_bytes(type: int, n: int, k: int) -> int: ...
