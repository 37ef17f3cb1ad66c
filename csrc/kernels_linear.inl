// Linear layers: rows of activations times panels of 16 outputs. Included by kernels.inl.
//
// A row's result is one chain per lane over the runs of inputs that share a scale, in ascending order,
//   acc = fma(float(integer dot) * scale, d, acc);  affine: acc = fma(sum, m, acc)
// in every variant below, so the tile shape never shows in the bits.

// What remains of a form once its codes are bytes and its scales floats.
struct Arithmetic {
  bool affine, wide;
  int runs, quads;  // runs in a group, quads in a run
};
static constexpr Arithmetic arithmetic(Form f) {
  return {f.affine, f.bits == 8 || f.table, runs_per_group(f), f.run / 4};
}

template <Arithmetic kA>
inline int32_t code_sum(const Rows& x, size_t group, int run) {
  if constexpr (kA.runs == 1) return x.code_sum[group];
  return run == 0 ? x.low_sum[group] : x.code_sum[group] - x.low_sum[group];
}
// Symmetric weights start the integer sum at -zero * (sum of activation codes): exact, and no second product.
template <Arithmetic kA>
inline I32 dot_start(const Rows& x, size_t group, int run, int zero_point) {
  return splat_int(kA.affine ? 0 : -zero_point * code_sum<kA>(x, group, run));
}
template <Arithmetic kA>
inline F32 add_run(F32 acc, I32 sum, const Rows& x, size_t group, int run, Scales s) {
  acc = fma(mul(to_float(sum), splat(x.scale[group])), s.d, acc);
  if constexpr (kA.affine) {
    const float input_sum =
        kA.runs == 1 ? x.sum[group] : x.scale[group] * static_cast<float>(code_sum<kA>(x, group, run));
    acc = fma(splat(input_sum), s.m, acc);
  }
  return acc;
}

inline void put(float* out, F32 value, bool accumulate) {
  store(out, accumulate ? add(load(out), value) : value);
}

// Few rows: each group is unpacked into registers and met by all rows at once.
template <Form kForm, int kRows>
void direct_tile(const Matrix& w, const Rows& x, int row, int panel, float* out, ptrdiff_t out_stride,
                 bool accumulate) {
  constexpr int kRuns = runs_per_group(kForm), kQuads = kForm.run / 4;
  const int groups = w.k / kGroup;
  const uint8_t* block = w.data + static_cast<size_t>(panel) * w.panel_bytes;
  F32 acc[kRows];
  for (int r = 0; r < kRows; ++r) acc[r] = zero();
  for (int first = 0; first < groups; first += kForm.groups, block += block_bytes(kForm)) {
    const Scales base = block_scales<kForm>(block);
    for (int g = 0; g < kForm.groups; ++g) {
      const uint8_t* codes = block + header_bytes(kForm) + g * code_bytes(kForm);
      if constexpr (kRows == 1) {  // one row is bound by memory: ask for the lines of a few groups ahead
        constexpr int kHeader = kForm.groups == 1 ? header_bytes(kForm) : 0;
        for (int line = -kHeader; line < code_bytes(kForm); line += 64) __builtin_prefetch(codes + 2048 + line);
      }
      Codes u[8];
      load_group<kForm>(codes, u);
      each<kRuns>([&]<int kRun>() {
        const Scales s = run_scales<kForm>(base, block, g * kRuns + kRun);
#pragma GCC unroll 8  // or GCC keeps the sums in memory
        for (int r = 0; r < kRows; ++r) {
          const size_t group = static_cast<size_t>(row + r) * groups + first + g;
          const int8_t* q = x.q + group * kGroup;
          I32 sum = dot_start<arithmetic(kForm)>(x, group, kRun, kForm.zero);
          for (int j = kRun * kQuads; j < (kRun + 1) * kQuads; ++j)
            sum = dot<arithmetic(kForm).wide>(sum, u[j], q + 4 * j);
          acc[r] = add_run<arithmetic(kForm)>(acc[r], sum, x, group, kRun, s);
        }
      });
    }
  }
  for (int r = 0; r < kRows; ++r) put(out + r * out_stride, acc[r], accumulate);
}

// Many rows: a piece of up to kTilePanels panels, kUnpackGroups groups long, is unpacked to bytes and floats once, then
// every row passes over it.
struct Unpacked {
  uint8_t* codes;  // [group, quad, panel, 64]
  float* d;        // [group, run, panel, 16]
  float* m;
};

// `blocks` blocks of a panel, as panel `slot` of kPanels.
template <Form kForm, int kPanels>
void unpack_panel(const uint8_t* block, int blocks, int slot, const Unpacked& to) {
  constexpr int kRuns = runs_per_group(kForm);
  uint8_t* codes = to.codes + slot * 64;
  float *d = to.d + slot * kPanel, *m = to.m + slot * kPanel;
  for (int b = 0; b < blocks; ++b, block += block_bytes(kForm)) {
    const Scales base = block_scales<kForm>(block);
    for (int g = 0; g < kForm.groups; ++g) {
      Codes u[8];
      load_group<kForm>(block + header_bytes(kForm) + g * code_bytes(kForm), u);
      for (int j = 0; j < 8; ++j, codes += kPanels * 64) store_codes(codes, u[j]);
      for (int run = 0; run < kRuns; ++run, d += kPanels * kPanel, m += kPanels * kPanel) {
        const Scales s = run_scales<kForm>(base, block, g * kRuns + run);
        store(d, s.d);
        if constexpr (kForm.affine) store(m, s.m);
      }
    }
  }
}

// Where a tile's chains come from and go to. Between pieces they rest in memory.
struct Chains {
  const float* start;  // null: they start at zero
  ptrdiff_t start_stride;
  float* end;
  ptrdiff_t end_stride;
  bool accumulate;
};

template <Arithmetic kA, int kPanels, int kRows>
void unpacked_tile(const Unpacked& w, int zero_point, const Rows& x, int row, int first_group, int groups,
                   const Chains& chains) {
  const int row_groups = x.k / kGroup;
  const uint8_t* codes = w.codes;
  const float *d = w.d, *m = w.m;
  F32 acc[kRows][kPanels];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      acc[r][p] = chains.start ? load(chains.start + r * chains.start_stride + p * kPanel) : zero();
      __builtin_prefetch(chains.end + r * chains.end_stride + p * kPanel, 1);  // rows of a result lie far apart
    }
  }
  for (int g = 0; g < groups; ++g) {
    size_t group[kRows];
    for (int r = 0; r < kRows; ++r) group[r] = static_cast<size_t>(row + r) * row_groups + first_group + g;
    each<kA.runs>([&]<int kRun>() {
      I32 sum[kRows][kPanels];
      for (int r = 0; r < kRows; ++r)
        for (int p = 0; p < kPanels; ++p) sum[r][p] = dot_start<kA>(x, group[r], kRun, zero_point);
      for (int j = kRun * kA.quads; j < (kRun + 1) * kA.quads; ++j) {
        Codes u[kPanels];
        for (int p = 0; p < kPanels; ++p, codes += 64) u[p] = load_codes_once(codes);
        for (int r = 0; r < kRows; ++r) {
          const Quad quad = load_quad(x.q + group[r] * kGroup + 4 * j);
          for (int p = 0; p < kPanels; ++p) sum[r][p] = dot<kA.wide>(sum[r][p], u[p], quad);
        }
      }
      for (int p = 0; p < kPanels; ++p, d += kPanel, m += kPanel) {
        const Scales s{load(d), kA.affine ? load(m) : zero()};
        for (int r = 0; r < kRows; ++r) acc[r][p] = add_run<kA>(acc[r][p], sum[r][p], x, group[r], kRun, s);
      }
    });
  }
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kPanels; ++p)
      put(chains.end + r * chains.end_stride + p * kPanel, acc[r][p], chains.accumulate);
}

// Cuts at .. n into pieces: as many of kSize as fit, then smaller ones. piece.operator()<size>(where it begins).
template <int kSize, typename Piece>
inline void cover(int n, int at, Piece piece) {
  for (; n - at >= kSize; at += kSize) piece.template operator()<kSize>(at);
  if constexpr (kSize > 1) cover<(kSize > 4 ? 4 : (kSize + 1) / 2)>(n, at, piece);
}

template <Form kForm>
void linear_few(const Matrix& w, const Rows& x, int first_row, int num_rows, int first_panel, int last_panel,
                float* out, ptrdiff_t out_stride, bool accumulate) {
  constexpr int kStep = 4;  // panels whose groups stay in L1 from one tile of rows to the next
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
  constexpr int kFloats = kUnpackGroups * runs_per_group(kForm) * kPanels * kPanel;
  float* scales = reinterpret_cast<float*>(scratch + kUnpackGroups * kPanels * 512);
  const Unpacked to{scratch, scales, scales + kFloats};
  float* partial = reinterpret_cast<float*>(scratch + kUnpackBytes);  // [row, panel, 16] between pieces
  constexpr int kPartial = kPanels * kPanel, kMostBlocks = kUnpackGroups / kForm.groups;
  const int blocks = w.k / (kGroup * kForm.groups), pieces = (blocks + kMostBlocks - 1) / kMostBlocks;
  for (int piece = 0; piece < pieces; ++piece) {
    const int begin = static_cast<int>(static_cast<int64_t>(blocks) * piece / pieces);
    const int end = static_cast<int>(static_cast<int64_t>(blocks) * (piece + 1) / pieces);
    for (int p = 0; p < kPanels; ++p)
      unpack_panel<kForm, kPanels>(w.data + (panel + p) * w.panel_bytes + static_cast<size_t>(begin) * block_bytes(kForm),
                                   end - begin, p, to);
    cover<kTileRows>(num_rows, 0, [&]<int kRows>(int r) {
      Chains chains{nullptr, kPartial, partial + static_cast<ptrdiff_t>(r) * kPartial, kPartial, false};
      if (piece > 0) chains.start = chains.end;
      if (piece == pieces - 1) {
        chains.end = out + r * out_stride;
        chains.end_stride = out_stride;
        chains.accumulate = accumulate;
      }
      unpacked_tile<arithmetic(kForm), kPanels, kRows>(to, kForm.zero, x, first_row + r, begin * kForm.groups,
                                                       (end - begin) * kForm.groups, chains);
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
  cover<kTilePanels>(last_panel, first_panel, [&]<int kPanels>(int panel) {
    linear_unpacked<kForm, kPanels>(w, x, first_row, num_rows, panel, out + (panel - first_panel) * kPanel, out_stride,
                                    accumulate, scratch);
  });
}

void linear(const Matrix& w, const Rows& x, int first_row, int num_rows, int first_panel, int last_panel, float* out,
            ptrdiff_t out_stride, bool accumulate, uint8_t* scratch) {
  with_type(w.type, [&]<StoredType kType>() {
    if constexpr (is_quantized(form_of(kType)))
      linear_quantized<form_of(kType)>(w, x, first_row, num_rows, first_panel, last_panel, out, out_stride, accumulate,
                                       scratch);
    else
      linear_float<kType>(w, x, first_row, num_rows, first_panel, last_panel, out, out_stride, accumulate, scratch);
  });
}
