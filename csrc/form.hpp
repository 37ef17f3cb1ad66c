// How a stored type lies in a panel. As in matrix.hpp: no std templates, and functions are static constexpr.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

constexpr int kPanel = 16;  // output channels per weight panel, one per vector lane
constexpr int kGroup = 32;  // inputs that share a scale in activations; the unit in which weights are unpacked
constexpr int kBlock = 256;  // inputs of a K-quant's block, which shares d and m

// Numbers of the GGUF format (ggml.h, enum ggml_type).
enum class StoredType : int {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kBF16 = 30,
};

// Weights from unsigned codes u. A run is the inputs that share a scale:
//   symmetric: w = (u - zero) * d        affine: w = u * d + m
// With eight groups to a block, each run has int8 factors: its d is the block's d * factor, its m likewise; float32
// holds the products exactly.
struct Form {
  int bits;    // of a stored code; 16 or 32: the weights are floats, and the rest means nothing
  int zero;    // of symmetric forms
  bool affine;
  bool table;  // stored codes index kTableCodes
  int run;     // 32, or 16: half a group
  int groups;  // of 32 inputs in a block: 1, or 8 with factors
};

static constexpr Form form_of(StoredType type) {
  switch (type) {
    case StoredType::kF32: return {32, 0, false, false, 32, 1};
    case StoredType::kF16:
    case StoredType::kBF16: return {16, 0, false, false, 32, 1};
    case StoredType::kQ4_0: return {4, 8, false, false, 32, 1};
    case StoredType::kQ4_1: return {4, 0, true, false, 32, 1};
    case StoredType::kQ5_0: return {5, 16, false, false, 32, 1};
    case StoredType::kQ5_1: return {5, 0, true, false, 32, 1};
    case StoredType::kQ8_0: return {8, 128, false, false, 32, 1};
    case StoredType::kQ2_K: return {4, 0, true, false, 16, 8};
    case StoredType::kQ3_K: return {4, 4, false, false, 16, 8};
    case StoredType::kQ4_K: return {4, 0, true, false, 32, 8};
    case StoredType::kQ5_K: return {5, 0, true, false, 32, 8};
    case StoredType::kQ6_K: return {6, 32, false, false, 16, 8};
    case StoredType::kIQ4_NL: return {4, 128, false, true, 32, 1};
  }
  return {};  // bits 0: no such type
}

// IQ4_NL's values (ggml-common.h, kvalues_iq4nl) + 128.
alignas(16) static constexpr uint8_t kTableCodes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                        129, 141, 153, 166, 181, 197, 217, 241};

static constexpr bool is_quantized(Form f) { return f.bits <= 8; }
static constexpr int runs_per_group(Form f) { return kGroup / f.run; }

// A block of a quantized panel, for 16 lanes:
//   d: 16 x fp16;  m: 16 x fp16 (affine only);
//   per run, with eight groups to a block: 16 int8 factors of d, 16 int8 factors of m (affine only);
//   per group: codes. A quad j is inputs 4j .. 4j+3 of the group: 16 lanes x 4 codes, 64 bytes.
//     8 bits: 8 vectors of 64 bytes, vector j is quad j;
//     fewer: 4 vectors, vector i holds quad i in the low and quad i + 4 in the high nibbles;
//       5 bits: then a plane of 64 bytes, whose bit j belongs to quad j;
//       6 bits: then two planes of 64 bytes; bits 2i and 2i + 1 of plane p belong to quad 4p + i.
static constexpr int code_bytes(Form f) { return kPanel * kGroup * f.bits / 8; }  // of one group
static constexpr int base_bytes(Form f) { return kPanel * 2 * (f.affine ? 2 : 1); }
static constexpr int factor_bytes(Form f) { return f.groups == 1 ? 0 : kPanel * (f.affine ? 2 : 1); }  // of one run
static constexpr int header_bytes(Form f) { return base_bytes(f) + f.groups * runs_per_group(f) * factor_bytes(f); }
static constexpr int block_bytes(Form f) { return header_bytes(f) + f.groups * code_bytes(f); }

// Bits above the fourth of a code: which plane quad j's are in, and from which bit of it.
static constexpr int plane_of(Form f, int quad) { return quad / (8 / (f.bits - 4)); }
static constexpr int plane_bit(Form f, int quad) { return quad % (8 / (f.bits - 4)) * (f.bits - 4); }

// A float panel is for each input 16 numbers of the stored type.
static constexpr size_t panel_bytes(Form f, int k) {
  return is_quantized(f) ? static_cast<size_t>(k / (kGroup * f.groups)) * block_bytes(f)
                         : static_cast<size_t>(k) * kPanel * f.bits / 8;
}

}  // namespace paceline
