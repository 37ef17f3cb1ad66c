// From GGML's stored blocks to the panels of matrix.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.hpp"
#include "memory.hpp"
#include "thread_pool.hpp"

namespace paceline {

// Numbers of the GGUF format (ggml.h, enum ggml_type).
enum class StoredType : int { kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kBF16 = 30 };

// Bytes of n x k stored weights. Throws std::invalid_argument for an unknown type or a k that blocks do not divide.
size_t stored_bytes(StoredType type, int n, int k);

// Repacks n x k row-major stored weights into `arena`. k must be a multiple of 32.
Matrix pack(StoredType type, int n, int k, const uint8_t* stored, Arena& arena, ThreadPool& pool);

}  // namespace paceline
