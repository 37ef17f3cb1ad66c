// Reading GGML's stored blocks: formats as in ggml-common.h (block_q4_0 and its siblings), bit order as in
// dequantize_row_* of ggml-quants.c.
#pragma once

#include <cstdint>

#include "form.hpp"

namespace paceline {

// One block of one row in the terms of Form. The types with blocks of 32 use the first 32 codes and no factors.
struct Block {
  uint16_t d = 0;              // fp16
  uint16_t m = 0;              // fp16, added: the minimum that K-quants subtract comes negated
  int8_t d_factor[16] = {};    // per run
  int8_t m_factor[16] = {};
  uint8_t codes[kBlock];       // unsigned, `bits` wide
};

// Stored bytes of one block of a quantized type.
int stored_block_bytes(StoredType type);

Block read_block(StoredType type, const uint8_t* stored);

}  // namespace paceline
