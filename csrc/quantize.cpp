#include "quantize.hpp"

#include <cmath>
#include <cstring>
#include <limits>

#include "half.hpp"

namespace paceline {

namespace {

constexpr int kMostCode = 127;

void read_group(StoredType from, const uint8_t* stored, float* x) {
  if (from == StoredType::kF32) {
    std::memcpy(x, stored, kGroup * sizeof(float));
    return;
  }
  uint16_t narrow[kGroup];
  std::memcpy(narrow, stored, sizeof narrow);
  for (int i = 0; i < kGroup; ++i) {
    const uint32_t wide = static_cast<uint32_t>(narrow[i]) << 16;
    if (from == StoredType::kF16) x[i] = half_to_float(narrow[i]);
    else std::memcpy(&x[i], &wide, sizeof wide);
  }
}

// The value farthest from zero; NaN where one is no number or too large for a float16 scale.
float farthest(const float* x) {
  float most = 0;
  for (int i = 0; i < kGroup; ++i) {
    if (!(std::fabs(x[i]) <= kMostCode * 65504.0f)) return std::numeric_limits<float>::quiet_NaN();
    if (std::fabs(x[i]) > std::fabs(most)) most = x[i];
  }
  return most;
}

void write_scale(float d, uint8_t* block) {
  const uint16_t half = float_to_half(d);
  std::memcpy(block, &half, sizeof half);
}

// As quantize_row_q8_0_ref of ggml-quants.c: rounds halves away from zero.
void quantize_q8_0(const float* x, float most, uint8_t* block) {
  const float d = std::fabs(most) / kMostCode, inverse = 1 / d;
  write_scale(d, block);
  for (int i = 0; i < kGroup; ++i) {
    const float size = std::fabs(x[i] * inverse);
    const int whole = static_cast<int>(size), code = whole + (size - static_cast<float>(whole) >= 0.5f);
    block[2 + i] = static_cast<uint8_t>(x[i] < 0 ? -code : code);
  }
}

// IQ4_NL's value nearest to v, for v in half steps from -128 on: what lies in the middle of two values is a multiple of
// one half.
struct Nearest {
  uint8_t code[512];
  float value[512];
};

constexpr Nearest nearest_values() {
  Nearest nearest{};
  for (int step = 0, code = 0; step < 512; ++step) {
    // Of the values, whose codes in form.hpp are 128 larger, twice: the middle of two is at their sum.
    while (code < 15 && kTableCodes[code] + kTableCodes[code + 1] <= step) ++code;
    nearest.code[step] = static_cast<uint8_t>(code);
    nearest.value[step] = static_cast<float>(kTableCodes[code] - 128);
  }
  return nearest;
}

constexpr Nearest kNearest = nearest_values();

int step_of(float scaled) {
  const float step = scaled * 2 + 256;
  return static_cast<int>(step < 0 ? 0 : step > 511 ? 511 : step);
}

// Tries what the value farthest from zero may become, at either end of the codes, each time with the scale that then
// makes the squared error least: error = sum x^2 - (sum q x)^2 / sum q^2 for d = sum q x / sum q^2.
void quantize_iq4_nl(const float* x, float most, uint8_t* block) {
  constexpr int kReach = 8;  // around an end; ggml-quants.c (quantize_row_iq4_nl_impl) tries 7
  float best = 0, d = 0;
  constexpr int kEnds[] = {-127, 113};
  for (const int end : kEnds)
    for (int level = end - kReach; level <= end + kReach; ++level) {
      const float inverse = static_cast<float>(level) / most;
      float qx = 0, qq = 0;
      for (int i = 0; i < kGroup; ++i) {
        const float q = kNearest.value[step_of(x[i] * inverse)];
        qx += q * x[i];
        qq += q * q;
      }
      if (qx * qx > best * qq) best = qx * qx / qq, d = qx / qq;
    }
  write_scale(d, block);
  const float inverse = 1 / d;
  for (int i = 0; i < kGroup / 2; ++i)
    block[2 + i] = static_cast<uint8_t>(kNearest.code[step_of(x[i] * inverse)] |
                                        kNearest.code[step_of(x[i + kGroup / 2] * inverse)] << 4);
}

}  // namespace

bool can_quantize(StoredType from, StoredType to) {
  return !is_quantized(form_of(from)) && form_of(from).bits && (to == StoredType::kQ8_0 || to == StoredType::kIQ4_NL);
}

void quantize_group(StoredType from, const uint8_t* stored, StoredType to, uint8_t* block) {
  float x[kGroup];
  read_group(from, stored, x);
  const float most = farthest(x);
  std::memset(block, 0, kMostQuantizedBytes);
  if (std::fabs(most) / kMostCode < 0x1p-25f) return;  // the scale is zero as a float16, and so are all values
  if (std::isnan(most)) write_scale(most, block);
  else if (to == StoredType::kQ8_0) quantize_q8_0(x, most, block);
  else quantize_iq4_nl(x, most, block);
}

}  // namespace paceline
