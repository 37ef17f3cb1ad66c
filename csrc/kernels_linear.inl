// Linear layers: rows of activations times panels of 16 outputs. Included by kernels.inl.
//
// A row's result is one chain per lane over the runs of inputs that share a scale, in ascending order,
//   acc = fma(float(integer dot) * scale, d, acc);  affine: acc = fma(sum, m, acc)
// in every variant below, so the tile shape never shows in the bits.

static constexpr int kAheadBytes = 2048;  // from the weights that are read to those that memory is asked for

// What remains of a form once its codes are bytes and its scales floats.
struct Arithmetic {
  bool affine;
  int bits;         // of a code
  int runs, quads;  // runs in a group, quads in a run
};
static constexpr Arithmetic arithmetic(Form f) { return {f.affine, f.table ? 8 : f.bits, runs_per_group(f), f.run / 4}; }

template <Arithmetic kA>
inline int32_t code_sum(const Rows& x, size_t group, int run) {
  if constexpr (kA.runs == 1) return x.code_sum[group];
  return run == 0 ? x.low_sum[group] : x.code_sum[group] - x.low_sum[group];
}
// Symmetric weights start the integer sum at -zero * (sum of activation codes): exact, and no second product.
template <Arithmetic kA>
inline int32_t dot_start(const Rows& x, size_t group, int run, int zero_point) {
  return kA.affine ? 0 : -zero_point * code_sum<kA>(x, group, run);
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

// Where the results of a tile's rows go.
struct Destination {
  float* out;
  ptrdiff_t stride;
  bool accumulate;
};
template <int kRows, int kPanels>
inline void put(const F32 (&acc)[kRows][kPanels], const Destination& to) {
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      float* out = to.out + r * to.stride + p * kPanel;
      store(out, to.accumulate ? add(load(out), acc[r][p]) : acc[r][p]);
    }
  }
}

// Few rows: groups are unpacked in registers and met by all rows at once. With `fetch`, memory is asked for the lines of
// a few groups ahead, at a panel's end for those of the next panels.
template <Form kForm, int kPanels, int kRows>
void direct_tile(const Matrix& w, const Rows& x, int row, int panel, bool fetch, const Destination& to) {
  constexpr int kRuns = runs_per_group(kForm);
  constexpr Arithmetic kA = arithmetic(kForm);
  const int groups = w.k / kGroup;
  const uint8_t* panels = w.data + static_cast<size_t>(panel) * w.panel_bytes;
  F32 acc[kRows][kPanels];
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kPanels; ++p) acc[r][p] = zero();
  for (int first = 0; first < groups; first += kForm.groups) {
    const size_t at = static_cast<size_t>(first / kForm.groups) * block_bytes(kForm);
    const uint8_t* block = panels + at;
    Scales base[kPanels];
    for (int p = 0; p < kPanels; ++p) base[p] = block_scales<kForm>(block + p * w.panel_bytes);
    for (int g = 0; g < kForm.groups; ++g) {
      const uint8_t* codes = block + header_bytes(kForm) + g * code_bytes(kForm);
      if (fetch) {
        constexpr int kHeader = kForm.groups == 1 ? header_bytes(kForm) : 0;
        const uint8_t* ahead = codes + kAheadBytes + (at + kAheadBytes < w.panel_bytes ? 0 : (kPanels - 1) * w.panel_bytes);
        for (int p = 0; p < kPanels; ++p, ahead += w.panel_bytes)
          for (int line = -kHeader; line < code_bytes(kForm); line += 64) __builtin_prefetch(ahead + line);
      }
      const size_t group = static_cast<size_t>(row) * groups + first + g;  // of the first row
      Dots<kA.bits> sum[kRuns][kRows][kPanels];
      for (int run = 0; run < kRuns; ++run)
#pragma GCC unroll kUnroll  // here and below, or GCC keeps the sums in memory
        for (int r = 0; r < kRows; ++r)
          for (int p = 0; p < kPanels; ++p)
            sum[run][r][p] = Dots<kA.bits>(dot_start<kA>(x, group + r * groups, run, kForm.zero));
      each<4>([&]<int kPair>() {
        Codes low[kPanels], high[kPanels];
        for (int p = 0; p < kPanels; ++p) load_pair<kForm, kPair>(codes + p * w.panel_bytes, low[p], high[p]);
#pragma GCC unroll kUnroll
        for (int r = 0; r < kRows; ++r) {
          const int8_t* q = x.q + (group + r * groups) * kGroup + 4 * kPair;
          const Quad near = load_quad(q), far = load_quad(q + 16);
          for (int p = 0; p < kPanels; ++p) {
            sum[0][r][p].add(low[p], near);
            sum[kRuns - 1][r][p].add(high[p], far);
          }
        }
      });
      each<kRuns>([&]<int kRun>() {
        for (int p = 0; p < kPanels; ++p) {
          const Scales s = run_scales<kForm>(base[p], block + p * w.panel_bytes, g * kRuns + kRun);
#pragma GCC unroll kUnroll
          for (int r = 0; r < kRows; ++r) {
            const I32 total = sum[kRun][r][p].total(dot_start<kA>(x, group + r * groups, kRun, kForm.zero));
            acc[r][p] = add_run<kA>(acc[r][p], total, x, group + r * groups, kRun, s);
          }
        }
      });
    }
  }
  put(acc, to);
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

template <Arithmetic kA, int kPanels, int kRows>
void unpacked_tile(const Unpacked& w, int zero_point, const Rows& x, int row, int first_group, int groups,
                   const float* start, const Destination& to) {
  const int row_groups = x.k / kGroup;
  const uint8_t* codes = w.codes;
  const float *d = w.d, *m = w.m;
  F32 acc[kRows][kPanels];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      acc[r][p] = start ? load(start + (r * kPanels + p) * kPanel) : zero();
      __builtin_prefetch(to.out + r * to.stride + p * kPanel, 1);  // rows of a result lie far apart
    }
  }
  for (int g = 0; g < groups; ++g) {
    size_t group[kRows];
    for (int r = 0; r < kRows; ++r) group[r] = static_cast<size_t>(row + r) * row_groups + first_group + g;
    each<kA.runs>([&]<int kRun>() {
      Dots<kA.bits> sum[kRows][kPanels];
      for (int r = 0; r < kRows; ++r)
        for (int p = 0; p < kPanels; ++p) sum[r][p] = Dots<kA.bits>(dot_start<kA>(x, group[r], kRun, zero_point));
      for (int j = kRun * kA.quads; j < (kRun + 1) * kA.quads; ++j) {
        Codes u[kPanels];
        for (int p = 0; p < kPanels; ++p, codes += 64) u[p] = load_codes_once(codes);
        for (int r = 0; r < kRows; ++r) {
          const Quad quad = load_quad(x.q + group[r] * kGroup + 4 * j);
          for (int p = 0; p < kPanels; ++p) sum[r][p].add(u[p], quad);
        }
      }
      for (int p = 0; p < kPanels; ++p, d += kPanel, m += kPanel) {
        const Scales s{load(d), kA.affine ? load(m) : zero()};
        for (int r = 0; r < kRows; ++r) {
          const I32 total = sum[r][p].total(dot_start<kA>(x, group[r], kRun, zero_point));
          acc[r][p] = add_run<kA>(acc[r][p], total, x, group[r], kRun, s);
        }
      }
    });
  }
  put(acc, to);
}

// Cuts rows, or panels, into tiles of at most kMost, as even as can be: tile.operator()<size>(where it begins).
template <int kMost, typename Tile>
inline void in_tiles(int count, Tile tile) {
  const int tiles = (count + kMost - 1) / kMost;
  for (int t = 0; t < tiles; ++t) {
    const int begin = count * t / tiles;
    with_size<kMost>(count * (t + 1) / tiles - begin, [&]<int kSize>() { tile.template operator()<kSize>(begin); });
  }
}

// The first rows bring the panels to L1, for those that follow.
template <Form kForm, int kPanels>
void linear_direct(const Matrix& w, const Rows& x, int first_row, int num_rows, int panel, float* out,
                   ptrdiff_t out_stride, bool accumulate) {
  constexpr int kMostRows = kDirectRows > 1 ? kDirectRows / runs_per_group(kForm) : 1;  // each run has its sums
  in_tiles<kMostRows>(num_rows, [&]<int kRows>(int r) {
    direct_tile<kForm, kPanels, kRows>(w, x, first_row + r, panel, r == 0, {out + r * out_stride, out_stride, accumulate});
  });
}

template <Form kForm, int kPanels>
void linear_unpacked(const Matrix& w, const Rows& x, int first_row, int num_rows, int panel, float* out,
                     ptrdiff_t out_stride, bool accumulate, uint8_t* scratch) {
  constexpr int kFloats = kUnpackGroups * runs_per_group(kForm) * kPanels * kPanel;
  float* scales = reinterpret_cast<float*>(scratch + kUnpackGroups * kPanels * 512);
  const Unpacked unpacked{scratch, scales, scales + kFloats};
  float* partial = reinterpret_cast<float*>(scratch + kUnpackBytes);  // [row, panel, 16] between pieces
  constexpr int kPartial = kPanels * kPanel, kMostBlocks = kUnpackGroups / kForm.groups;
  const int blocks = w.k / (kGroup * kForm.groups), pieces = (blocks + kMostBlocks - 1) / kMostBlocks;
  for (int piece = 0; piece < pieces; ++piece) {
    const int begin = static_cast<int>(static_cast<int64_t>(blocks) * piece / pieces);
    const int end = static_cast<int>(static_cast<int64_t>(blocks) * (piece + 1) / pieces);
    for (int p = 0; p < kPanels; ++p)
      unpack_panel<kForm, kPanels>(w.data + (panel + p) * w.panel_bytes + static_cast<size_t>(begin) * block_bytes(kForm),
                                   end - begin, p, unpacked);
    in_tiles<kTileRows>(num_rows, [&]<int kRows>(int r) {
      float* between = partial + r * kPartial;
      const Destination to = piece < pieces - 1 ? Destination{between, kPartial, false}
                                                : Destination{out + r * out_stride, out_stride, accumulate};
      unpacked_tile<arithmetic(kForm), kPanels, kRows>(unpacked, kForm.zero, x, first_row + r, begin * kForm.groups,
                                                       (end - begin) * kForm.groups, piece > 0 ? between : nullptr, to);
    });
  }
}

template <Form kForm>
void linear_quantized(const Matrix& w, const Rows& x, int first_row, int num_rows, int first_panel, int last_panel,
                      float* out, ptrdiff_t out_stride, bool accumulate, uint8_t* scratch) {
  const int panels = last_panel - first_panel;
  if (num_rows == 1) {
    in_tiles<kStreams>(panels, [&]<int kPanels>(int p) {
      direct_tile<kForm, kPanels, 1>(w, x, first_row, first_panel + p, true, {out + p * kPanel, out_stride, accumulate});
    });
  } else if (num_rows < (runs_per_group(kForm) == 1 ? kUnpackFrom : kUnpackHalvesFrom)) {
    in_tiles<kDirectPanels>(panels, [&]<int kPanels>(int p) {
      linear_direct<kForm, kPanels>(w, x, first_row, num_rows, first_panel + p, out + p * kPanel, out_stride, accumulate);
    });
  } else {
    in_tiles<kTilePanels>(panels, [&]<int kPanels>(int p) {
      linear_unpacked<kForm, kPanels>(w, x, first_row, num_rows, first_panel + p, out + p * kPanel, out_stride,
                                      accumulate, scratch);
    });
  }
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
