// IEEE half precision without instructions for it: plain integer and float operations, so that loops over them become
// vectors on any machine.
#pragma once

#include <cstdint>
#include <cstring>

namespace paceline {

static inline float half_to_float(uint16_t bits) {
  // Exponent and fraction moved to their place in a float32 are too small by 2^112, subnormals included; infinity and
  // NaN keep their meaning only if the exponent is set by hand.
  uint32_t wide = static_cast<uint32_t>(bits & 0x7fff) << 13;
  float x;
  std::memcpy(&x, &wide, 4);
  x *= 0x1p112f;
  std::memcpy(&wide, &x, 4);
  const uint32_t special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  wide |= special | static_cast<uint32_t>(bits & 0x8000) << 16;
  std::memcpy(&x, &wide, 4);
  return x;
}

// Rounds to nearest, ties to even, as the instructions do.
static inline uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (bits >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 2^16 and above
  if (bits < 0x38800000u) {
    // Subnormal: adding 2^-1 leaves the value in units of 2^-24 in the low bits, rounded by the addition itself.
    float small;
    std::memcpy(&small, &bits, 4);
    small += 0.5f;
    std::memcpy(&bits, &small, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  // Rounding may carry into the exponent, up to infinity, which is right.
  bits += 0x0fffu + (bits >> 13 & 1u);
  return static_cast<uint16_t>(sign | (bits - (112u << 23)) >> 13);
}

}  // namespace paceline
