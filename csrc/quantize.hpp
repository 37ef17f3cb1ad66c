// From float weights to GGML's quantized blocks, for models that are quantized as they are loaded.
#pragma once

#include <cstdint>

#include "form.hpp"

namespace paceline {

// Whether quantize_group makes blocks of `to` from weights stored as `from`.
bool can_quantize(StoredType from, StoredType to);

constexpr int kMostQuantizedBytes = 34;  // of a block that quantize_group writes

// kGroup weights, stored as F32, F16 or BF16, as one stored block of `to`. Where one of them is not finite, all values
// of the block are NaN.
void quantize_group(StoredType from, const uint8_t* stored, StoredType to, uint8_t* block);

}  // namespace paceline
