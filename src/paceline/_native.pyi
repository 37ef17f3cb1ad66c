"""Types of the C++ module (csrc/module.cpp)."""

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from paceline.executors.base import Batch, Float32, Int32, UInt8

class MatrixRole(Enum):
    EMBEDDING = 0
    HEAD = 1
    QUERY = 2
    KEY = 3
    VALUE = 4
    ATTENTION_OUTPUT = 5
    GATE = 6
    UP = 7
    DOWN = 8

class NormRole(Enum):
    ATTENTION = 0
    FEED_FORWARD = 1
    FINAL = 2

class Model:
    def __init__(
        self,
        *,
        vocab_size: int,
        hidden: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        intermediate: int,
        max_positions: int,
        rope_dim: int,
        rope_theta: float,
        norm_eps: float,
        tied_embeddings: bool,
        num_blocks: int,
        half_kv: bool,
        max_tokens: int,
        threads: int,
        isa: str = "",
    ) -> None: ...
    def set_matrix(
        self, role: MatrixRole, layer: int, type: int, n: int, k: int, stored: NDArray[np.uint8]
    ) -> None: ...
    def set_norm(self, role: NormRole, layer: int, weight: Float32) -> None: ...
    def finish_loading(self) -> None: ...
    def step(self, batch: Batch) -> tuple[Int32, UInt8, Float32, Int32, Float32]: ...
    def logits(self, batch: Batch) -> Float32: ...
    @property
    def isa(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def bytes_per_block(self) -> int: ...

def isa(wanted: str = "") -> str: ...
def linear(type: int, n: int, k: int, stored: NDArray[np.uint8], rows: Float32, isa: str = "") -> Float32: ...
