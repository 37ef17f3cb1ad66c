#include "pack.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "half.hpp"

namespace paceline {

namespace {

struct Layout {
  Form form;
  int zero;
  int block_bytes;  // one stored block of 32 weights
};

Layout layout(StoredType type) {
  switch (type) {
    case StoredType::kF32: return {Form::kFloat, 0, 128};
    case StoredType::kF16:
    case StoredType::kBF16: return {Form::kFloat, 0, 64};
    case StoredType::kQ4_0: return {Form::kSymmetric4, 8, 18};
    case StoredType::kQ4_1: return {Form::kAffine4, 0, 20};
    case StoredType::kQ5_0: return {Form::kSymmetric8, 16, 22};
    case StoredType::kQ5_1: return {Form::kAffine8, 0, 24};
    case StoredType::kQ8_0: return {Form::kSymmetric8, 128, 34};
  }
  throw std::invalid_argument("no kernel for tensor type " + std::to_string(static_cast<int>(type)));
}

// Block formats: ggml-common.h (block_q4_0 and its siblings).
struct Block {
  uint16_t d;
  uint16_t m;
  uint8_t codes[kGroup];
};

Block read_block(StoredType type, const uint8_t* p) {
  Block block{};
  std::memcpy(&block.d, p, 2);
  p += 2;
  if (type == StoredType::kQ4_1 || type == StoredType::kQ5_1) {
    std::memcpy(&block.m, p, 2);
    p += 2;
  }
  if (type == StoredType::kQ8_0) {
    for (int i = 0; i < kGroup; ++i) block.codes[i] = static_cast<uint8_t>(static_cast<int8_t>(p[i]) + 128);
    return block;
  }
  uint32_t fifth_bits = 0;
  if (type == StoredType::kQ5_0 || type == StoredType::kQ5_1) {
    std::memcpy(&fifth_bits, p, 4);
    p += 4;
  }
  for (int i = 0; i < kGroup / 2; ++i) {
    block.codes[i] = static_cast<uint8_t>((p[i] & 15) | (fifth_bits >> i & 1) << 4);
    block.codes[i + 16] = static_cast<uint8_t>((p[i] >> 4) | (fifth_bits >> (i + 16) & 1) << 4);
  }
  return block;
}

// Stores a block as lane `lane` of a record.
void write_block(const Block& block, Form form, int lane, uint8_t* record) {
  for (int i = 0; i < kGroup; ++i) {
    const int quad = i / 4, byte = lane * 4 + i % 4;
    if (is_eight_bit(form)) {
      record[64 * quad + byte] = block.codes[i];
    } else {
      record[64 * (quad % 4) + byte] |= static_cast<uint8_t>(quad < 4 ? block.codes[i] : block.codes[i] << 4);
    }
  }
  uint16_t* half = reinterpret_cast<uint16_t*>(record + code_bytes(form));
  half[lane] = block.d;
  if (is_affine(form)) half[kPanel + lane] = block.m;
}

float read_float(StoredType type, const uint8_t* p, int i) {
  if (type == StoredType::kF32) {
    float x;
    std::memcpy(&x, p + 4 * static_cast<size_t>(i), 4);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, p + 2 * static_cast<size_t>(i), 2);
  if (type == StoredType::kF16) return half_to_float(bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

void pack_panel(StoredType type, const Matrix& w, int panel, const uint8_t* stored, size_t row_bytes, int block_bytes) {
  uint8_t* to = w.data + static_cast<size_t>(panel) * w.panel_bytes;
  for (int lane = 0; lane < kPanel && panel * kPanel + lane < w.n; ++lane) {
    const uint8_t* row = stored + static_cast<size_t>(panel * kPanel + lane) * row_bytes;
    if (w.form == Form::kFloat) {
      float* columns = reinterpret_cast<float*>(to);
      for (int i = 0; i < w.k; ++i) columns[static_cast<size_t>(i) * kPanel + lane] = read_float(type, row, i);
    } else {
      for (int g = 0; g < w.k / kGroup; ++g)
        write_block(read_block(type, row + static_cast<size_t>(g) * block_bytes), w.form, lane, to + g * w.record_bytes);
    }
  }
}

}  // namespace

size_t stored_bytes(StoredType type, int n, int k) {
  const Layout form = layout(type);
  if (n <= 0 || k <= 0 || k % kGroup)
    throw std::invalid_argument("a matrix of " + std::to_string(n) + " x " + std::to_string(k) +
                                " cannot be packed: the inputs must be a multiple of 32");
  return static_cast<size_t>(n) * (k / kGroup) * form.block_bytes;
}

Matrix pack(StoredType type, int n, int k, const uint8_t* stored, Arena& arena, ThreadPool& pool) {
  const Layout form = layout(type);
  Matrix w;
  w.form = form.form;
  w.zero = form.zero;
  w.n = n;
  w.k = k;
  w.record_bytes = code_bytes(w.form) + kPanel * sizeof(uint16_t) * (is_affine(w.form) ? 2 : 1);
  w.panel_bytes = w.quantized() ? (k / kGroup) * w.record_bytes : static_cast<size_t>(k) * kPanel * sizeof(float);
  w.data = arena.allocate(w.panels() * w.panel_bytes);
  const size_t row_bytes = static_cast<size_t>(k / kGroup) * form.block_bytes;
  pool.run([&](int) {
    pool.for_each(w.panels(), [&](int panel) { pack_panel(type, w, panel, stored, row_bytes, form.block_bytes); });
  });
  return w;
}

}  // namespace paceline
