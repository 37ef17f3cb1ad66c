// IEEE half precision without instructions for it.
#pragma once

#include <cstdint>
#include <cstring>

namespace paceline {

static inline float half_to_float(uint16_t bits) {
  _Float16 h;
  std::memcpy(&h, &bits, sizeof(h));
  return static_cast<float>(h);
}

static inline uint16_t float_to_half(float x) {
  const _Float16 h = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &h, sizeof(bits));
  return bits;
}

}  // namespace paceline
