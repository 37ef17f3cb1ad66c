// From GGML's stored blocks to the panels of form.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.hpp"
#include "memory.hpp"
#include "thread_pool.hpp"

namespace paceline {

// Bytes of n x k weights as stored, and repacked. Both throw std::invalid_argument for an unknown type, or a k that is
// no multiple of 256 for K-quants (their block) or of 32 for the rest (a group of activations).
size_t stored_bytes(StoredType type, int n, int k);
size_t packed_bytes(StoredType type, int n, int k);

// Repacks n x k row-major weights stored as `type` into `arena`, as `kept_as`: the same type, or where `type` is a
// float one that quantize.hpp knows. Throws std::invalid_argument as above, or where it does not.
Matrix pack(StoredType type, int n, int k, const uint8_t* stored, StoredType kept_as, Arena& arena, ThreadPool& pool);

}  // namespace paceline
