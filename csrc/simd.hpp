// Sixteen float lanes, and sixteen int32 lanes that sum products of unsigned weight codes with signed activations, on
// whichever instruction set this file is compiled for. Included inside a namespace of that instruction set's own.
//
// Every operation is lane by lane with the same rounding whatever surrounds it, and reductions are fixed trees, so that
// kernels built on it give the same bits for any tile shape (DESIGN: determinism rules c to e).

inline float from_bits(int32_t bits) { return __builtin_bit_cast(float, bits); }
inline int32_t to_bits(float x) { return __builtin_bit_cast(int32_t, x); }

// Reductions fold the upper half onto the lower one, 16 to 8 to 4 to 2 to 1 lanes, on every instruction set.
#if defined(__AVX2__)
inline float fold_add(__m256 x) {
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline int32_t fold_max(__m256i x) {
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
#endif

#if defined(__AVX512VNNI__)

struct F32 { __m512 v; };
struct I32 { __m512i v; };
struct Codes { __m512i v; };  // 16 lanes x 4 unsigned codes

inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
inline F32 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F32 zero() { return {_mm512_setzero_ps()}; }
inline F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline float reduce_add(F32 a) {
  return fold_add(_mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)));
}
// The largest |value| of both, compared as bit patterns: infinity and NaN are larger than any number, and win.
inline float largest_magnitude(F32 a, F32 b) {
  const __m512i bits = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(a.v)), _mm512_castps_si512(_mm512_abs_ps(b.v)));
  return from_bits(fold_max(_mm256_max_epi32(_mm512_castsi512_si256(bits), _mm512_extracti32x8_epi32(bits, 1))));
}
// a where x >= y, else b
inline F32 select_ge(F32 x, F32 y, F32 a, F32 b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_GE_OQ), b.v, a.v)};
}
// lanes < n from a, the rest from b
inline F32 select_first(int n, F32 a, F32 b) {
  const int count = n < 0 ? 0 : n > 16 ? 16 : n;
  return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << count) - 1), b.v, a.v)};
}
inline F32 load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F32 load_bfloat(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline F32 load_int8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline void store_half(uint16_t* p, F32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
// a * 2^n for integral n in [-126, 127]
inline F32 scale_by_power(F32 a, F32 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I32 splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Codes load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_codes(uint8_t* p, Codes c) { _mm512_store_si512(p, c.v); }
// Codes that are to stay in a register: GCC would rather load them again for each use.
inline Codes load_codes_once(const uint8_t* p) {
  Codes c = load_codes(p);
  asm("" : "+v"(c.v));
  return c;
}
inline void split_nibbles(const uint8_t* p, Codes& low, Codes& high) {
  const __m512i mask = _mm512_set1_epi8(15), v = _mm512_loadu_si512(p);
  low.v = _mm512_and_si512(v, mask);
  high.v = _mm512_and_si512(_mm512_srli_epi16(v, 4), mask);
}
// code | (plane's bits from kBit on, as the code's bits from 4 on) & mask
template <int kBit>
inline Codes add_high_bits(Codes code, Codes plane, int8_t mask) {
  __m512i at_four;
  if constexpr (kBit < 4) at_four = _mm512_slli_epi16(plane.v, 4 - kBit);
  else at_four = _mm512_srli_epi16(plane.v, kBit - 4);
  return {_mm512_or_si512(code.v, _mm512_and_si512(at_four, _mm512_set1_epi8(mask)))};
}
// table[code] for codes below 16
inline Codes look_up(const uint8_t* table, Codes code) {
  const __m512i values = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm512_shuffle_epi8(values, code.v)};
}
struct Quad { __m512i v; };  // one activation quad in every lane
inline Quad load_quad(const int8_t* x) { return {_mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x))}; }
// Sums of products of codes of kBits with a run of 16 or 32 activations, from `start` on.
template <int kBits>
struct Dots {
  I32 sum;

  Dots() = default;
  explicit Dots(int32_t start) : sum(splat_int(start)) {}
  void add(Codes u, Quad x) { sum.v = _mm512_dpbusd_epi32(sum.v, u.v, x.v); }
  I32 total(int32_t) const { return sum; }
};
inline void store_int8(int8_t* p, F32 integral) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(integral.v)));
}

#elif defined(__AVX2__)

struct F32 { __m256 a, b; };
struct I32 { __m256i a, b; };
struct Codes { __m256i a, b; };

inline F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline F32 splat(float x) { const __m256 v = _mm256_set1_ps(x); return {v, v}; }
inline F32 zero() { return splat(0.0f); }
inline F32 add(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F32 sub(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F32 mul(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F32 div(F32 x, F32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F32 fma(F32 x, F32 y, F32 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F32 max(F32 x, F32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F32 min(F32 x, F32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline float reduce_add(F32 x) { return fold_add(_mm256_add_ps(x.a, x.b)); }
inline float largest_magnitude(F32 x, F32 y) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const auto bits = [&](__m256 v) { return _mm256_and_si256(_mm256_castps_si256(v), magnitude); };
  return from_bits(fold_max(
      _mm256_max_epi32(_mm256_max_epi32(bits(x.a), bits(x.b)), _mm256_max_epi32(bits(y.a), bits(y.b)))));
}
inline F32 select_ge(F32 x, F32 y, F32 p, F32 q) {
  return {_mm256_blendv_ps(q.a, p.a, _mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)),
          _mm256_blendv_ps(q.b, p.b, _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ))};
}
inline F32 select_first(int n, F32 p, F32 q) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes));
  const __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lanes));
  return {_mm256_blendv_ps(q.a, p.a, low), _mm256_blendv_ps(q.b, p.b, high)};
}
inline F32 load_half(const uint16_t* p) {
  const __m128i* h = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
inline F32 load_bfloat(const uint16_t* p) {
  const auto half = [](const uint16_t* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  };
  return {half(p), half(p + 8)};
}
inline F32 load_int8(const int8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
}
inline void store_half(uint16_t* p, F32 x) {
  __m128i* h = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(h, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(h + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline __m256 scale_by_power(__m256 x, __m256 n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
inline F32 scale_by_power(F32 x, F32 n) { return {scale_by_power(x.a, n.a), scale_by_power(x.b, n.b)}; }
inline F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I32 splat_int(int32_t x) { const __m256i v = _mm256_set1_epi32(x); return {v, v}; }
inline Codes load_codes(const uint8_t* p) {
  const __m256i* v = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
inline void store_codes(uint8_t* p, Codes c) {
  __m256i* v = reinterpret_cast<__m256i*>(p);
  _mm256_store_si256(v, c.a);
  _mm256_store_si256(v + 1, c.b);
}
inline Codes load_codes_once(const uint8_t* p) { return load_codes(p); }
inline void split_nibbles(const uint8_t* p, Codes& low, Codes& high) {
  const __m256i mask = _mm256_set1_epi8(15);
  const Codes v = load_codes(p);
  low = {_mm256_and_si256(v.a, mask), _mm256_and_si256(v.b, mask)};
  high = {_mm256_and_si256(_mm256_srli_epi16(v.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(v.b, 4), mask)};
}
template <int kBit>
inline Codes add_high_bits(Codes code, Codes plane, int8_t mask) {
  const auto half = [&](__m256i c, __m256i p) {
    __m256i at_four;
    if constexpr (kBit < 4) at_four = _mm256_slli_epi16(p, 4 - kBit);
    else at_four = _mm256_srli_epi16(p, kBit - 4);
    return _mm256_or_si256(c, _mm256_and_si256(at_four, _mm256_set1_epi8(mask)));
  };
  return {half(code.a, plane.a), half(code.b, plane.b)};
}
inline Codes look_up(const uint8_t* table, Codes code) {
  const __m256i values = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(values, code.a), _mm256_shuffle_epi8(values, code.b)};
}
struct Quad { __m256i v; };
inline Quad load_quad(const int8_t* x) { return {_mm256_set1_epi32(*reinterpret_cast<const int32_t*>(x))}; }
inline __m256i dot_pairs(__m256i u, __m256i x) { return _mm256_maddubs_epi16(u, x); }
inline __m256i add_pairs(__m256i acc, __m256i pairs) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// vpmaddubsw saturates at 16 bits, which two products of codes above 128 can reach: 8-bit codes go through as nibbles,
// 16 * (high . x) + low . x, each far below the limit.
template <int kBits>
struct Dots {
  I32 sum;

  Dots() = default;
  explicit Dots(int32_t start) : sum(splat_int(start)) {}
  void add(Codes u, Quad x) {
    sum.a = add_dot(sum.a, u.a, x.v);
    sum.b = add_dot(sum.b, u.b, x.v);
  }
  I32 total(int32_t) const { return sum; }

 private:
  static __m256i add_dot(__m256i acc, __m256i u, __m256i x) {
    if constexpr (kBits < 8) return add_pairs(acc, dot_pairs(u, x));
    const __m256i mask = _mm256_set1_epi8(15);
    const __m256i high = add_pairs(_mm256_setzero_si256(), dot_pairs(_mm256_and_si256(_mm256_srli_epi16(u, 4), mask), x));
    return add_pairs(_mm256_add_epi32(acc, _mm256_slli_epi32(high, 4)), dot_pairs(_mm256_and_si256(u, mask), x));
  }
};
// The eight quads of a run stay in 16 bits: 8 * 2 * 15 * 127 is 30480.
template <>
struct Dots<4> {
  __m256i a, b;

  Dots() = default;
  explicit Dots(int32_t) : a(_mm256_setzero_si256()), b(_mm256_setzero_si256()) {}
  void add(Codes u, Quad x) {
    a = _mm256_add_epi16(a, dot_pairs(u.a, x.v));
    b = _mm256_add_epi16(b, dot_pairs(u.b, x.v));
  }
  I32 total(int32_t start) const {
    const __m256i from = _mm256_set1_epi32(start);
    return {add_pairs(from, a), add_pairs(from, b)};
  }
};
inline void store_int8(int8_t* p, F32 integral) {
  const __m256i words = _mm256_permute4x64_epi64(
      _mm256_packs_epi32(_mm256_cvtps_epi32(integral.a), _mm256_cvtps_epi32(integral.b)), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

#else  // portable: plain loops that any compiler turns into whatever vectors there are

struct F32 { float v[16]; };
struct I32 { int32_t v[16]; };
struct Codes { uint8_t v[64]; };

#define PACELINE_LANES(result, expression) \
  result r;                                \
  for (int i = 0; i < 16; ++i) r.v[i] = (expression); \
  return r

inline F32 load(const float* p) { PACELINE_LANES(F32, p[i]); }
inline void store(float* p, F32 a) { for (int i = 0; i < 16; ++i) p[i] = a.v[i]; }
inline F32 splat(float x) { PACELINE_LANES(F32, x); }
inline F32 zero() { return splat(0.0f); }
inline F32 add(F32 a, F32 b) { PACELINE_LANES(F32, a.v[i] + b.v[i]); }
inline F32 sub(F32 a, F32 b) { PACELINE_LANES(F32, a.v[i] - b.v[i]); }
inline F32 mul(F32 a, F32 b) { PACELINE_LANES(F32, a.v[i] * b.v[i]); }
inline F32 div(F32 a, F32 b) { PACELINE_LANES(F32, a.v[i] / b.v[i]); }
inline F32 fma(F32 a, F32 b, F32 c) { PACELINE_LANES(F32, a.v[i] * b.v[i] + c.v[i]); }
inline F32 max(F32 a, F32 b) { PACELINE_LANES(F32, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F32 min(F32 a, F32 b) { PACELINE_LANES(F32, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline float reduce_add(F32 a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] + a.v[i + width];
  return a.v[0];
}
inline float largest_magnitude(F32 a, F32 b) {
  int32_t largest = 0;
  for (int i = 0; i < 16; ++i) {
    const int32_t x = to_bits(a.v[i]) & 0x7fffffff, y = to_bits(b.v[i]) & 0x7fffffff;
    largest = x > largest ? x : largest;
    largest = y > largest ? y : largest;
  }
  return from_bits(largest);
}
inline F32 select_ge(F32 x, F32 y, F32 a, F32 b) { PACELINE_LANES(F32, x.v[i] >= y.v[i] ? a.v[i] : b.v[i]); }
inline F32 select_first(int n, F32 a, F32 b) { PACELINE_LANES(F32, i < n ? a.v[i] : b.v[i]); }
inline F32 load_half(const uint16_t* p) { PACELINE_LANES(F32, half_to_float(p[i])); }
inline F32 load_bfloat(const uint16_t* p) { PACELINE_LANES(F32, from_bits(static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16))); }
inline F32 load_int8(const int8_t* p) { PACELINE_LANES(F32, static_cast<float>(p[i])); }
inline void store_half(uint16_t* p, F32 a) { for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.v[i]); }
// Adding 1.5 * 2^23 leaves n in the low bits; a conversion would be undefined for NaN.
inline F32 scale_by_power(F32 a, F32 n) {
  PACELINE_LANES(F32, a.v[i] * from_bits(static_cast<int32_t>((static_cast<uint32_t>(to_bits(n.v[i] + 12582912.0f)) + 127u) << 23)));
}
inline F32 to_float(I32 a) { PACELINE_LANES(F32, static_cast<float>(a.v[i])); }
inline I32 splat_int(int32_t x) { PACELINE_LANES(I32, x); }
inline Codes load_codes(const uint8_t* p) { Codes c; __builtin_memcpy(c.v, p, 64); return c; }
inline void store_codes(uint8_t* p, Codes c) { __builtin_memcpy(p, c.v, 64); }
inline Codes load_codes_once(const uint8_t* p) { return load_codes(p); }
inline void split_nibbles(const uint8_t* p, Codes& low, Codes& high) {
  for (int i = 0; i < 64; ++i) {
    low.v[i] = p[i] & 15;
    high.v[i] = p[i] >> 4;
  }
}
template <int kBit>
inline Codes add_high_bits(Codes code, Codes plane, int8_t mask) {
  for (int i = 0; i < 64; ++i) code.v[i] |= static_cast<uint8_t>((plane.v[i] << 4 >> kBit) & mask);
  return code;
}
inline Codes look_up(const uint8_t* table, Codes code) {
  for (int i = 0; i < 64; ++i) code.v[i] = table[code.v[i]];
  return code;
}
struct Quad { int16_t v[4]; };
inline Quad load_quad(const int8_t* x) { return {{x[0], x[1], x[2], x[3]}}; }
template <int kBits>
struct Dots {
  I32 sum;

  Dots() = default;
  explicit Dots(int32_t start) : sum(splat_int(start)) {}
  void add(Codes u, Quad x) {
    for (int i = 0; i < 16; ++i)
      sum.v[i] += u.v[4 * i] * x.v[0] + u.v[4 * i + 1] * x.v[1] + u.v[4 * i + 2] * x.v[2] + u.v[4 * i + 3] * x.v[3];
  }
  I32 total(int32_t) const { return sum; }
};
inline void store_int8(int8_t* p, F32 integral) { for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(integral.v[i]); }
#undef PACELINE_LANES

#endif

inline float reduce_max(F32 a) {
  float v[16];
  store(v, a);
  float m = v[0];
  for (int i = 1; i < 16; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// Nearest integer, ties to even, for |a| < 2^22.
inline F32 round_even(F32 a) {
  const F32 magic = splat(12582912.0f);  // 1.5 * 2^23: the sum has no bits left for a fraction
  return sub(add(a, magic), magic);
}

// e^a, relative error below 2e-7 (Cephes expf); exactly 0 up to -87, exactly 1 at 0. For a <= 88. NaN stays: max gives
// its second operand where one is NaN.
inline F32 exp(F32 a) {
  const F32 floor = splat(-87.0f);
  const F32 x = max(floor, a);
  const F32 n = round_even(mul(x, splat(1.44269504088896341f)));
  F32 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F32 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), splat(1.0f));
  return select_ge(floor, a, zero(), scale_by_power(p, n));
}

// tanh(a) = 1 - 2 / (e^2a + 1), absolute error below 2e-7. Clamped where float32 cannot tell it from 1; NaN stays, as in
// exp.
inline F32 tanh(F32 a) {
  const F32 clamped = min(splat(20.0f), max(splat(-20.0f), a));
  const F32 one = splat(1.0f);
  return sub(one, div(splat(2.0f), add(exp(add(clamped, clamped)), one)));
}
