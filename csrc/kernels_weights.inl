// Reading packed weights (form.hpp): codes and scales of a group, whole rows. Included by kernels.inl.

// Once per index, so that it is a constant in each step.
template <int kCount, int kAt = 0, typename Step>
inline void each(Step step) {
  if constexpr (kAt < kCount) {
    step.template operator()<kAt>();
    each<kCount, kAt + 1>(step);
  }
}

// Calls tile.operator()<size>() for 1 <= size <= kMost.
template <int kMost, typename Tile>
inline void with_size(int size, Tile tile) {
  if constexpr (kMost > 1) {
    if (size < kMost) return with_size<kMost - 1>(size, tile);
  }
  tile.template operator()<kMost>();
}

// Quads kPair and kPair + 4 of a group.
template <Form kForm, int kPair>
inline void load_pair(const uint8_t* codes, Codes& first, Codes& second) {
  if constexpr (kForm.bits == 8) {
    first = load_codes(codes + 64 * kPair);
    second = load_codes(codes + 64 * (kPair + 4));
  } else {
    split_nibbles(codes + 64 * kPair, first, second);
  }
  if constexpr (kForm.bits == 5 || kForm.bits == 6) {
    const auto add_plane = [&]<int kQuad>(Codes& u) {
      const Codes plane = load_codes(codes + 64 * (4 + plane_of(kForm, kQuad)));
      u = add_high_bits<plane_bit(kForm, kQuad)>(u, plane, kForm.bits == 5 ? 0x10 : 0x30);
    };
    add_plane.template operator()<kPair>(first);
    add_plane.template operator()<kPair + 4>(second);
  }
  if constexpr (kForm.table) {
    first = look_up(kTableCodes, first);
    second = look_up(kTableCodes, second);
  }
}
template <Form kForm>
inline void load_group(const uint8_t* codes, Codes (&u)[8]) {
  each<4>([&]<int kPair>() { load_pair<kForm, kPair>(codes, u[kPair], u[kPair + 4]); });
}

struct Scales {
  F32 d, m;
};
template <Form kForm>
inline Scales block_scales(const uint8_t* block) {
  const uint16_t* base = reinterpret_cast<const uint16_t*>(block);
  return {load_half(base), kForm.affine ? load_half(base + kPanel) : zero()};
}
template <Form kForm>
inline Scales run_scales(Scales base, const uint8_t* block, int run) {
  if constexpr (kForm.groups == 1) return base;
  const int8_t* factors = reinterpret_cast<const int8_t*>(block + base_bytes(kForm) + run * factor_bytes(kForm));
  return {mul(base.d, load_int8(factors)), kForm.affine ? mul(base.m, load_int8(factors + kPanel)) : zero()};
}

// Input i of a float panel.
template <StoredType kType>
inline F32 load_column(const uint8_t* panel, int i) {
  const size_t at = static_cast<size_t>(i) * kPanel;
  if constexpr (kType == StoredType::kF16) return load_half(reinterpret_cast<const uint16_t*>(panel) + at);
  else if constexpr (kType == StoredType::kBF16) return load_bfloat(reinterpret_cast<const uint16_t*>(panel) + at);
  else return load(reinterpret_cast<const float*>(panel) + at);
}

// Calls visit with the type as a template argument.
template <typename Visit>
inline void with_type(StoredType type, Visit visit) {
  switch (type) {
    case StoredType::kF32: return visit.template operator()<StoredType::kF32>();
    case StoredType::kF16: return visit.template operator()<StoredType::kF16>();
    case StoredType::kBF16: return visit.template operator()<StoredType::kBF16>();
    case StoredType::kQ4_0: return visit.template operator()<StoredType::kQ4_0>();
    case StoredType::kQ4_1: return visit.template operator()<StoredType::kQ4_1>();
    case StoredType::kQ5_0: return visit.template operator()<StoredType::kQ5_0>();
    case StoredType::kQ5_1: return visit.template operator()<StoredType::kQ5_1>();
    case StoredType::kQ8_0: return visit.template operator()<StoredType::kQ8_0>();
    case StoredType::kQ2_K: return visit.template operator()<StoredType::kQ2_K>();
    case StoredType::kQ3_K: return visit.template operator()<StoredType::kQ3_K>();
    case StoredType::kQ4_K: return visit.template operator()<StoredType::kQ4_K>();
    case StoredType::kQ5_K: return visit.template operator()<StoredType::kQ5_K>();
    case StoredType::kQ6_K: return visit.template operator()<StoredType::kQ6_K>();
    case StoredType::kIQ4_NL: return visit.template operator()<StoredType::kIQ4_NL>();
  }
}

// One lane of a panel. All of them are unpacked for it: the cache lines are the same.
template <Form kForm>
void unpack_quantized(const Matrix& w, const uint8_t* block, int lane, float* out) {
  for (int first = 0; first < w.k; first += kForm.groups * kGroup, block += block_bytes(kForm)) {
    const Scales base = block_scales<kForm>(block);
    for (int g = 0; g < kForm.groups; ++g) {
      alignas(64) uint8_t codes[8 * 64];
      Codes u[8];
      load_group<kForm>(block + header_bytes(kForm) + g * code_bytes(kForm), u);
      for (int j = 0; j < 8; ++j) store_codes(codes + 64 * j, u[j]);
      for (int run = 0; run < runs_per_group(kForm); ++run) {
        float d[kPanel], m[kPanel];
        const Scales s = run_scales<kForm>(base, block, g * runs_per_group(kForm) + run);
        store(d, s.d);
        store(m, s.m);
        for (int i = run * kForm.run; i < (run + 1) * kForm.run; ++i) {
          const int code = codes[64 * (i / 4) + lane * 4 + i % 4];
          out[first + g * kGroup + i] = static_cast<float>(code - kForm.zero) * d[lane] + m[lane];
        }
      }
    }
  }
}

void unpack_row(const Matrix& w, int n, float* out) {
  const uint8_t* panel = w.data + static_cast<size_t>(n / kPanel) * w.panel_bytes;
  const int lane = n % kPanel;
  with_type(w.type, [&]<StoredType kType>() {
    if constexpr (is_quantized(form_of(kType))) {
      unpack_quantized<form_of(kType)>(w, panel, lane, out);
    } else {
      for (int i = 0; i < w.k; ++i) {
        float column[kPanel];
        store(column, load_column<kType>(panel, i));
        out[i] = column[lane];
      }
    }
  });
}
