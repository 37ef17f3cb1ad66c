// Linear layers: rows of activations times panels of 16 outputs. Included by kernels.inl.
//
// A row's result is one chain per lane over the groups of 32 inputs in ascending order,
//   acc = fma(float(integer dot) * scale, d, acc);  affine: acc = fma(sum, m, acc)
// in every variant below, so the tile shape never shows in the bits.

template <Form kForm>
inline void load_group(const uint8_t* record, Codes (&u)[8]) {
  if constexpr (is_eight_bit(kForm)) {
    for (int j = 0; j < 8; ++j) u[j] = load_codes(record + 64 * j);
  } else {
    for (int j = 0; j < 4; ++j) split_nibbles(record + 64 * j, u[j], u[j + 4]);
  }
}
template <Form kForm>
inline const uint16_t* scales(const uint8_t* record) {
  return reinterpret_cast<const uint16_t*>(record + code_bytes(kForm));
}

// Symmetric weights start the integer sum at -zero * (sum of activation codes): exact, and no second product.
template <bool kAffine>
inline I32 dot_start(const Rows& x, size_t group, int zero_point) {
  return splat_int(kAffine ? 0 : -zero_point * x.code_sum[group]);
}
template <bool kAffine>
inline F32 add_group(F32 acc, I32 sum, const Rows& x, size_t group, F32 d, F32 m) {
  acc = fma(mul(to_float(sum), splat(x.scale[group])), d, acc);
  if constexpr (kAffine) acc = fma(splat(x.sum[group]), m, acc);
  return acc;
}

inline void put(float* out, F32 value, bool accumulate) {
  store(out, accumulate ? add(load(out), value) : value);
}

// Few rows: each record is unpacked into registers and met by all rows at once.
template <Form kForm, int kRows>
void direct_tile(const Matrix& w, const Rows& x, int row, int panel, float* out, ptrdiff_t out_stride,
                 bool accumulate) {
  constexpr bool kAffine = is_affine(kForm);
  const int groups = w.k / kGroup;
  const uint8_t* record = w.data + static_cast<size_t>(panel) * w.panel_bytes;
  F32 acc[kRows];
  for (int r = 0; r < kRows; ++r) acc[r] = zero();
  for (int g = 0; g < groups; ++g, record += w.record_bytes) {
    if constexpr (kRows == 1) {  // one row is bound by memory: ask for the lines of a few records ahead
      for (int line = 0; line < code_bytes(kForm); line += 64) __builtin_prefetch(record + 2048 + line);
    }
    Codes u[8];
    load_group<kForm>(record, u);
    const F32 d = load_half(scales<kForm>(record));
    const F32 m = kAffine ? load_half(scales<kForm>(record) + kPanel) : zero();
#pragma GCC unroll 8  // or GCC keeps the sums in memory
    for (int r = 0; r < kRows; ++r) {
      const size_t group = static_cast<size_t>(row + r) * groups + g;
      const int8_t* q = x.q + group * kGroup;
      I32 sum = dot_start<kAffine>(x, group, w.zero);
      for (int j = 0; j < 8; ++j) sum = dot<is_eight_bit(kForm)>(sum, u[j], q + 4 * j);
      acc[r] = add_group<kAffine>(acc[r], sum, x, group, d, m);
    }
  }
  for (int r = 0; r < kRows; ++r) put(out + r * out_stride, acc[r], accumulate);
}

// Many rows: up to kUnpackGroups groups of one or two panels are unpacked to bytes and floats once, then every row
// passes over them.
struct Unpacked {
  uint8_t* codes;  // [panel, group, 512]
  float* d;        // [panel, group, 16]
  float* m;
};

template <Form kForm>
void unpack_panel(const Matrix& w, int panel, int first_group, int groups, int slot, const Unpacked& to) {
  const uint8_t* record =
      w.data + static_cast<size_t>(panel) * w.panel_bytes + static_cast<size_t>(first_group) * w.record_bytes;
  for (int g = 0; g < groups; ++g, record += w.record_bytes) {
    const int at = slot * kUnpackGroups + g;
    Codes u[8];
    load_group<kForm>(record, u);
    for (int j = 0; j < 8; ++j) store_codes(to.codes + at * 512 + 64 * j, u[j]);
    store(to.d + at * kPanel, load_half(scales<kForm>(record)));
    if constexpr (is_affine(kForm)) store(to.m + at * kPanel, load_half(scales<kForm>(record) + kPanel));
  }
}

template <Form kForm, int kPanels, int kRows>
void unpacked_tile(const Unpacked& w, int zero_point, const Rows& x, int row, int first_group, int groups,
                   const float* start, float* out, ptrdiff_t out_stride, bool accumulate) {
  constexpr bool kAffine = is_affine(kForm);
  const int row_groups = x.k / kGroup;
  F32 acc[kRows][kPanels];
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kPanels; ++p)
      acc[r][p] = start ? load(start + r * 2 * kPanel + p * kPanel) : zero();
  for (int g = 0; g < groups; ++g) {
    size_t group[kRows];
    I32 sum[kRows][kPanels];
    for (int r = 0; r < kRows; ++r) {
      group[r] = static_cast<size_t>(row + r) * row_groups + first_group + g;
      for (int p = 0; p < kPanels; ++p) sum[r][p] = dot_start<kAffine>(x, group[r], zero_point);
    }
    for (int j = 0; j < 8; ++j) {
      Codes u[kPanels];
      for (int p = 0; p < kPanels; ++p) u[p] = load_codes(w.codes + (p * kUnpackGroups + g) * 512 + 64 * j);
      for (int r = 0; r < kRows; ++r) {
        const Quad quad = load_quad(x.q + group[r] * kGroup + 4 * j);
        for (int p = 0; p < kPanels; ++p) sum[r][p] = dot<is_eight_bit(kForm)>(sum[r][p], u[p], quad);
      }
    }
    for (int p = 0; p < kPanels; ++p) {
      const F32 d = load(w.d + (p * kUnpackGroups + g) * kPanel);
      const F32 m = kAffine ? load(w.m + (p * kUnpackGroups + g) * kPanel) : zero();
      for (int r = 0; r < kRows; ++r) acc[r][p] = add_group<kAffine>(acc[r][p], sum[r][p], x, group[r], d, m);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kPanels; ++p) put(out + r * out_stride + p * kPanel, acc[r][p], accumulate);
}

// Cuts rows at .. n into tiles: as many of kSize as fit, then of 4, 2 and 1. tile.operator()<size>(first row).
template <int kSize, typename Tile>
inline void cover(int n, int at, Tile tile) {
  for (; n - at >= kSize; at += kSize) tile.template operator()<kSize>(at);
  if constexpr (kSize > 1) cover<(kSize > 4 ? 4 : kSize / 2)>(n, at, tile);
}

template <Form kForm>
void linear_few(const Matrix& w, const Rows& x, int first_row, int num_rows, int first_panel, int last_panel,
                float* out, ptrdiff_t out_stride, bool accumulate) {
  constexpr int kStep = 4;  // panels whose records stay in L1 from one tile of rows to the next
  for (int begin = first_panel; begin < last_panel; begin += kStep) {
    const int end = begin + kStep < last_panel ? begin + kStep : last_panel;
    cover<kDirectRows>(num_rows, 0, [&]<int kRows>(int r) {
      for (int p = begin; p < end; ++p)
        direct_tile<kForm, kRows>(w, x, first_row + r, p, out + r * out_stride + (p - first_panel) * kPanel,
                                  out_stride, accumulate);
    });
  }
}

template <Form kForm, int kPanels>
void linear_unpacked(const Matrix& w, const Rows& x, int first_row, int num_rows, int panel, float* out,
                     ptrdiff_t out_stride, bool accumulate, uint8_t* scratch) {
  const Unpacked to{scratch, reinterpret_cast<float*>(scratch + 2 * kUnpackGroups * 512),
                    reinterpret_cast<float*>(scratch + 2 * kUnpackGroups * 512) + 2 * kUnpackGroups * kPanel};
  float* partial = reinterpret_cast<float*>(scratch + kUnpackBytes);  // [num_rows, 2 panels] between pieces of k
  const int groups = w.k / kGroup;
  const int pieces = (groups + kUnpackGroups - 1) / kUnpackGroups;
  for (int piece = 0; piece < pieces; ++piece) {
    const int begin = static_cast<int>(static_cast<int64_t>(groups) * piece / pieces);
    const int end = static_cast<int>(static_cast<int64_t>(groups) * (piece + 1) / pieces);
    for (int p = 0; p < kPanels; ++p) unpack_panel<kForm>(w, panel + p, begin, end - begin, p, to);
    const bool last = piece == pieces - 1;
    cover<kUnpackedRows>(num_rows, 0, [&]<int kRows>(int r) {
      float* row_partial = partial + static_cast<ptrdiff_t>(r) * 2 * kPanel;
      unpacked_tile<kForm, kPanels, kRows>(to, w.zero, x, first_row + r, begin, end - begin,
                                           piece ? row_partial : nullptr, last ? out + r * out_stride : row_partial,
                                           last ? out_stride : 2 * kPanel, last && accumulate);
    });
  }
}

template <Form kForm>
void linear_quantized(const Matrix& w, const Rows& x, int first_row, int num_rows, int first_panel, int last_panel,
                      float* out, ptrdiff_t out_stride, bool accumulate, uint8_t* scratch) {
  if (num_rows < kUnpackFrom) {
    linear_few<kForm>(w, x, first_row, num_rows, first_panel, last_panel, out, out_stride, accumulate);
    return;
  }
  int panel = first_panel;
  for (; panel + 2 <= last_panel; panel += 2)
    linear_unpacked<kForm, 2>(w, x, first_row, num_rows, panel, out + (panel - first_panel) * kPanel, out_stride,
                              accumulate, scratch);
  if (panel < last_panel)
    linear_unpacked<kForm, 1>(w, x, first_row, num_rows, panel, out + (panel - first_panel) * kPanel, out_stride,
                              accumulate, scratch);
}

template <int kRows>
void float_tile(const Matrix& w, const Rows& x, int row, int panel, float* out, ptrdiff_t out_stride,
                bool accumulate) {
  const float* weights = reinterpret_cast<const float*>(w.data + static_cast<size_t>(panel) * w.panel_bytes);
  const float* in = x.f + static_cast<size_t>(row) * x.k;
  F32 acc[kRows];
  for (int r = 0; r < kRows; ++r) acc[r] = zero();
  for (int i = 0; i < w.k; ++i) {
    const F32 column = load(weights + static_cast<size_t>(i) * kPanel);
    for (int r = 0; r < kRows; ++r) acc[r] = fma(splat(in[static_cast<size_t>(r) * x.k + i]), column, acc[r]);
  }
  for (int r = 0; r < kRows; ++r) put(out + r * out_stride, acc[r], accumulate);
}

void linear(const Matrix& w, const Rows& x, int first_row, int num_rows, int first_panel, int last_panel, float* out,
            ptrdiff_t out_stride, bool accumulate, uint8_t* scratch) {
  const auto quantized = [&]<Form kForm>() {
    linear_quantized<kForm>(w, x, first_row, num_rows, first_panel, last_panel, out, out_stride, accumulate, scratch);
  };
  switch (w.form) {
    case Form::kSymmetric4: return quantized.template operator()<Form::kSymmetric4>();
    case Form::kAffine4: return quantized.template operator()<Form::kAffine4>();
    case Form::kSymmetric8: return quantized.template operator()<Form::kSymmetric8>();
    case Form::kAffine8: return quantized.template operator()<Form::kAffine8>();
    case Form::kFloat:
      for (int p = first_panel; p < last_panel; ++p)
        cover<kDirectRows>(num_rows, 0, [&]<int kRows>(int r) {
          float_tile<kRows>(w, x, first_row + r, p, out + r * out_stride + (p - first_panel) * kPanel, out_stride,
                            accumulate);
        });
  }
}

void unpack_row(const Matrix& w, int n, float* out) {
  const uint8_t* panel = w.data + static_cast<size_t>(n / kPanel) * w.panel_bytes;
  const int lane = n % kPanel;
  if (w.form == Form::kFloat) {
    for (int i = 0; i < w.k; ++i) out[i] = reinterpret_cast<const float*>(panel)[static_cast<size_t>(i) * kPanel + lane];
    return;
  }
  const bool eight = is_eight_bit(w.form);
  for (int g = 0; g < w.k / kGroup; ++g) {
    const uint8_t* record = panel + static_cast<size_t>(g) * w.record_bytes;
    const uint16_t* half = reinterpret_cast<const uint16_t*>(record + code_bytes(w.form));
    const float d = half_to_float(half[lane]);
    const float m = is_affine(w.form) ? half_to_float(half[kPanel + lane]) : 0.0f;
    for (int i = 0; i < kGroup; ++i) {
      const int quad = i / 4, byte = lane * 4 + i % 4;
      const int code = eight ? record[64 * quad + byte]
                             : (record[64 * (quad % 4) + byte] >> (quad < 4 ? 0 : 4)) & 15;
      out[g * kGroup + i] = static_cast<float>(code - w.zero) * d + m;
    }
  }
}
