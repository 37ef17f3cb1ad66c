#include "quantize.hpp"

#include <algorithm>
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

// Returns the scale as it is stored: rounded.
float write_scale(float d, uint8_t* block) {
  const uint16_t half = float_to_half(d);
  std::memcpy(block, &half, sizeof half);
  return half_to_float(half);
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

// The IQ4_NL value nearest to v, at index 2 v + kZeroStep rounded down: the middle of two values is a multiple of 1/2.
constexpr int kZeroStep = 256, kSteps = 2 * kZeroStep;
struct Nearest {
  uint8_t code[kSteps];
  float value[kSteps];
};

constexpr Nearest nearest_values() {
  Nearest nearest{};
  for (int step = 0, code = 0; step < kSteps; ++step) {
    // kTableCodes are the values + 128.
    while (code < 15 && kTableCodes[code] + kTableCodes[code + 1] - 256 <= step - kZeroStep) ++code;
    nearest.code[step] = static_cast<uint8_t>(code);
    nearest.value[step] = static_cast<float>(kTableCodes[code] - 128);
  }
  return nearest;
}

constexpr Nearest kNearest = nearest_values();

void steps_of(const float* x, float inverse, int* steps) {
  for (int i = 0; i < kGroup; ++i) {
    const float step = x[i] * (2 * inverse) + kZeroStep;
    steps[i] = static_cast<int>(std::min(std::max(step, 0.0f), kSteps - 1.0f));
  }
}

struct Fit {
  float qx = 0, qq = 0;  // sums of w q x and w q^2, with weights w = x^2
};

Fit fit(const float* x, float inverse) {
  constexpr int kLanes = 8;  // sums that do not wait for each other
  int steps[kGroup];
  steps_of(x, inverse, steps);
  float q[kGroup], qx[kLanes] = {}, qq[kLanes] = {};
  for (int i = 0; i < kGroup; ++i) q[i] = kNearest.value[steps[i]];
  for (int i = 0; i < kGroup; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float v = x[i + lane], weighted = v * v * q[i + lane];
      qx[lane] += weighted * v;
      qq[lane] += weighted * q[i + lane];
    }
  Fit sum;
  for (int lane = 0; lane < kLanes; ++lane) sum.qx += qx[lane], sum.qq += qq[lane];
  return sum;
}

// Tries what the value farthest from zero may become, around either end of the codes, each time with the scale that
// then makes the error sum w (x - d q)^2 least: d = sum w q x / sum w q^2 leaves sum w x^2 - (sum w q x)^2 / sum w q^2.
// Large values count more, w = x^2, as in ggml-quants.c (quantize_row_iq4_nl_impl, which tries one end).
void quantize_iq4_nl(const float* x, float most, uint8_t* block) {
  constexpr int kEnds[] = {-127, 113}, kReach = 16, kBetween = 8;
  float relative[kGroup];  // to the farthest, so that no power of a weight leaves float32
  for (int i = 0; i < kGroup; ++i) relative[i] = x[i] / most;
  Fit best;
  for (const int end : kEnds)
    for (int level = end - kReach; level <= end + kReach; level += kBetween) {
      const Fit found = fit(relative, static_cast<float>(level));
      if (found.qx * found.qx * best.qq >= best.qx * best.qx * found.qq) best = found;
    }
  const float d = write_scale(most * best.qx / best.qq, block);
  if (d == 0) return;
  int steps[kGroup];
  steps_of(x, 1 / d, steps);
  for (int i = 0; i < kGroup / 2; ++i)
    block[2 + i] = static_cast<uint8_t>(kNearest.code[steps[i]] | kNearest.code[steps[i + kGroup / 2]] << 4);
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
