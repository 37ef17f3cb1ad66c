#include "blocks.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

namespace paceline {

namespace {

uint16_t read_half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}

uint16_t negated(uint16_t half) { return half ^ 0x8000; }

// Fields of `bits` bits: a stretch of bytes holds elements that follow one another in its lowest fields, those after
// them in the next higher fields, and so on. ORs n fields, shifted up by `up`, into the codes.
void read_fields(const uint8_t* p, int n, int stretch, int bits, int up, uint8_t* codes) {
  const int fields = 8 / bits, mask = (1 << bits) - 1;
  for (int i = 0; i < n; i += stretch) {
    const uint8_t* from = p + i / (stretch * fields) * stretch;
    const int shift = i / stretch % fields * bits;
    for (int b = 0; b < stretch; ++b) codes[i + b] |= static_cast<uint8_t>((from[b] >> shift & mask) << up);
  }
}

// The fifth bits of a block of 32: bit i belongs to element i.
void read_fifth_bits(const uint8_t* p, uint8_t* codes) {
  for (int i = 0; i < kGroup; i += 4) {
    // Copies 7 bits apart have bit j of the four where byte j begins.
    const uint32_t spread = (p[i / 8] >> i % 8 & 15) * 0x00204081u & 0x01010101u;
    uint32_t word;
    std::memcpy(&word, codes + i, 4);
    word |= spread << 4;
    std::memcpy(codes + i, &word, 4);
  }
}

// Eight scales and eight minima of 6 bits in 12 bytes (ggml-quants.c, get_scale_min_k4).
void read_scales_and_minima(const uint8_t* p, Block& block) {
  for (int i = 0; i < 4; ++i) {
    block.d_factor[i] = static_cast<int8_t>(p[i] & 63);
    block.m_factor[i] = static_cast<int8_t>(p[i + 4] & 63);
    block.d_factor[i + 4] = static_cast<int8_t>((p[i + 8] & 15) | p[i] >> 6 << 4);
    block.m_factor[i + 4] = static_cast<int8_t>(p[i + 8] >> 4 | p[i + 4] >> 6 << 4);
  }
}

void read_q2_k(const uint8_t* p, Block& block) {  // scales[16], qs[64], d, dmin
  for (int i = 0; i < 16; ++i) {
    block.d_factor[i] = static_cast<int8_t>(p[i] & 15);
    block.m_factor[i] = static_cast<int8_t>(p[i] >> 4);
  }
  read_fields(p + 16, kBlock, 32, 2, 0, block.codes);
  block.d = read_half(p + 80);
  block.m = negated(read_half(p + 82));
}

void read_q3_k(const uint8_t* p, Block& block) {  // hmask[32], qs[64], scales[12], d
  read_fields(p + 32, kBlock, 32, 2, 0, block.codes);
  read_fields(p, kBlock, 32, 1, 2, block.codes);
  uint8_t factors[16] = {};
  read_fields(p + 96, 16, 8, 4, 0, factors);
  read_fields(p + 104, 16, 4, 2, 4, factors);
  for (int i = 0; i < 16; ++i) block.d_factor[i] = static_cast<int8_t>(factors[i] - 32);
  block.d = read_half(p + 108);
}

void read_q4_k(const uint8_t* p, Block& block) {  // d, dmin, scales[12], qs[128]
  block.d = read_half(p);
  block.m = negated(read_half(p + 2));
  read_scales_and_minima(p + 4, block);
  read_fields(p + 16, kBlock, 32, 4, 0, block.codes);
}

void read_q5_k(const uint8_t* p, Block& block) {  // d, dmin, scales[12], qh[32], qs[128]
  block.d = read_half(p);
  block.m = negated(read_half(p + 2));
  read_scales_and_minima(p + 4, block);
  read_fields(p + 48, kBlock, 32, 4, 0, block.codes);
  read_fields(p + 16, kBlock, 32, 1, 4, block.codes);
}

void read_q6_k(const uint8_t* p, Block& block) {  // ql[128], qh[64], scales[16], d
  read_fields(p, kBlock, 64, 4, 0, block.codes);
  read_fields(p + 128, kBlock, 32, 2, 4, block.codes);
  std::memcpy(block.d_factor, p + 192, 16);
  block.d = read_half(p + 208);
}

void read_q8_0(const uint8_t* p, Block& block) {  // d, qs[32]
  block.d = read_half(p);
  for (int i = 0; i < kGroup; ++i) block.codes[i] = static_cast<uint8_t>(p[2 + i] ^ 0x80);
}

// d, where affine m, where `fifth` 32 bits, qs[16].
void read_nibbles(const uint8_t* p, bool affine, bool fifth, Block& block) {
  block.d = read_half(p);
  p += 2;
  if (affine) {
    block.m = read_half(p);
    p += 2;
  }
  const uint8_t* fifth_bits = p;
  if (fifth) p += 4;
  for (int i = 0; i < kGroup / 2; ++i) {
    block.codes[i] = p[i] & 15;
    block.codes[kGroup / 2 + i] = p[i] >> 4;
  }
  if (fifth) read_fifth_bits(fifth_bits, block.codes);
}

[[noreturn]] void unknown(StoredType type) {
  throw std::invalid_argument("no quantized tensor type has the number " + std::to_string(static_cast<int>(type)));
}

}  // namespace

int stored_block_bytes(StoredType type) {
  switch (type) {
    case StoredType::kQ4_0:
    case StoredType::kIQ4_NL: return 18;
    case StoredType::kQ4_1: return 20;
    case StoredType::kQ5_0: return 22;
    case StoredType::kQ5_1: return 24;
    case StoredType::kQ8_0: return 34;
    case StoredType::kQ2_K: return 84;
    case StoredType::kQ3_K: return 110;
    case StoredType::kQ4_K: return 144;
    case StoredType::kQ5_K: return 176;
    case StoredType::kQ6_K: return 210;
    default: unknown(type);
  }
}

Block read_block(StoredType type, const uint8_t* p) {
  Block block;
  std::memset(block.codes, 0, static_cast<size_t>(kGroup) * form_of(type).groups);
  switch (type) {
    case StoredType::kQ4_0:
    case StoredType::kIQ4_NL: read_nibbles(p, false, false, block); break;
    case StoredType::kQ4_1: read_nibbles(p, true, false, block); break;
    case StoredType::kQ5_0: read_nibbles(p, false, true, block); break;
    case StoredType::kQ5_1: read_nibbles(p, true, true, block); break;
    case StoredType::kQ8_0: read_q8_0(p, block); break;
    case StoredType::kQ2_K: read_q2_k(p, block); break;
    case StoredType::kQ3_K: read_q3_k(p, block); break;
    case StoredType::kQ4_K: read_q4_k(p, block); break;
    case StoredType::kQ5_K: read_q5_k(p, block); break;
    case StoredType::kQ6_K: read_q6_k(p, block); break;
    default: unknown(type);
  }
  return block;
}

}  // namespace paceline
