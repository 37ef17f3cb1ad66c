#include "pack.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "blocks.hpp"
#include "quantize.hpp"

namespace paceline {

namespace {

// The form of an n x k matrix that can be packed.
Form checked(StoredType type, int n, int k) {
  const Form form = form_of(type);
  if (form.bits == 0)
    throw std::invalid_argument("no kernel for tensor type " + std::to_string(static_cast<int>(type)));
  const int block = kGroup * form.groups;
  if (n <= 0 || k <= 0 || k % block)
    throw std::invalid_argument("a matrix of " + std::to_string(n) + " x " + std::to_string(k) +
                                " cannot be packed: the inputs must be a multiple of " + std::to_string(block));
  return form;
}

// Stores a group's codes as lane `lane`. A quad is 32 bits: no field leaves its byte.
void write_codes(const uint8_t* codes, Form form, int lane, uint8_t* to) {
  uint32_t quads[8];
  std::memcpy(quads, codes, sizeof quads);
  uint32_t* vectors = reinterpret_cast<uint32_t*>(to) + lane;
  if (form.bits == 8) {
    for (int quad = 0; quad < 8; ++quad) vectors[quad * kPanel] = quads[quad];
    return;
  }
  constexpr uint32_t kNibbles = 0x0f0f0f0f;
  for (int i = 0; i < 4; ++i) vectors[i * kPanel] = (quads[i] & kNibbles) | (quads[i + 4] & kNibbles) << 4;
  if (form.bits == 4) return;
  uint32_t planes[2] = {};
  for (int quad = 0; quad < 8; ++quad)
    planes[plane_of(form, quad)] |= (quads[quad] >> 4 & kNibbles) << plane_bit(form, quad);
  for (int p = 0; p < form.bits - 4; ++p) vectors[(4 + p) * kPanel] = planes[p];
}

void write_block(const Block& block, Form form, int lane, uint8_t* to) {
  uint16_t* base = reinterpret_cast<uint16_t*>(to);
  base[lane] = block.d;
  if (form.affine) base[kPanel + lane] = block.m;
  if (form.groups > 1) {
    uint8_t* factors = to + base_bytes(form);
    for (int run = 0; run < form.groups * runs_per_group(form); ++run, factors += factor_bytes(form)) {
      factors[lane] = static_cast<uint8_t>(block.d_factor[run]);
      if (form.affine) factors[kPanel + lane] = static_cast<uint8_t>(block.m_factor[run]);
    }
  }
  for (int g = 0; g < form.groups; ++g)
    write_codes(block.codes + g * kGroup, form, lane, to + header_bytes(form) + g * code_bytes(form));
}

template <typename Bits>
void write_floats(const uint8_t* row, int k, int lane, uint8_t* to) {
  constexpr size_t kSize = sizeof(Bits);
  for (int i = 0; i < k; ++i) std::memcpy(to + (size_t{kPanel} * i + lane) * kSize, row + i * kSize, kSize);
}

Block quantized_block(StoredType type, const uint8_t* stored, StoredType kept_as) {
  uint8_t block[kMostQuantizedBytes];
  quantize_group(type, stored, kept_as, block);
  return read_block(kept_as, block);
}

void pack_panel(const Matrix& w, Form form, int panel, StoredType type, const uint8_t* stored, size_t row_bytes) {
  for (int lane = 0; lane < kPanel && panel * kPanel + lane < w.n; ++lane) {
    const uint8_t* row = stored + static_cast<size_t>(panel * kPanel + lane) * row_bytes;
    uint8_t* to = w.data + static_cast<size_t>(panel) * w.panel_bytes;
    if (!is_quantized(form)) {
      (form.bits == 16 ? write_floats<uint16_t> : write_floats<uint32_t>)(row, w.k, lane, to);
      continue;
    }
    const int blocks = w.k / (kGroup * form.groups);
    const size_t step = row_bytes / blocks;
    for (int b = 0; b < blocks; ++b, row += step, to += block_bytes(form))
      write_block(type == w.type ? read_block(type, row) : quantized_block(type, row, w.type), form, lane, to);
  }
}

}  // namespace

size_t stored_bytes(StoredType type, int n, int k) {
  const Form form = checked(type, n, k);
  const size_t row = is_quantized(form) ? static_cast<size_t>(k / (kGroup * form.groups)) * stored_block_bytes(type)
                                        : static_cast<size_t>(k) * form.bits / 8;
  return n * row;
}

size_t packed_bytes(StoredType type, int n, int k) {
  const Form form = checked(type, n, k);
  return static_cast<size_t>((n + kPanel - 1) / kPanel) * panel_bytes(form, k);
}

Matrix pack(StoredType type, int n, int k, const uint8_t* stored, StoredType kept_as, Arena& arena, ThreadPool& pool) {
  if (kept_as != type && !can_quantize(type, kept_as))
    throw std::invalid_argument("tensor type " + std::to_string(static_cast<int>(type)) + " cannot be kept as " +
                                std::to_string(static_cast<int>(kept_as)));
  const Form form = checked(kept_as, n, k);
  Matrix w;
  w.type = kept_as;
  w.n = n;
  w.k = k;
  w.panel_bytes = panel_bytes(form, k);
  w.data = arena.allocate(packed_bytes(kept_as, n, k));
  const size_t row_bytes = stored_bytes(type, 1, k);
  pool.run([&](int) {
    pool.for_each(w.panels(), [&](int panel) { pack_panel(w, form, panel, type, stored, row_bytes); });
  });
  return w;
}

}  // namespace paceline
