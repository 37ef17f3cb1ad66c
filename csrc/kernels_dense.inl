// Linear layers whose weights are floats. Included by kernels.inl.
//
// An output is one chain of fma per lane over the inputs in ascending order, whatever the tile: what a chain has so far
// may rest in memory between two slabs of inputs, which changes no bit.

// Rows of a tile of so many panels.
static constexpr int dense_rows(int panels) { return kDenseTile / panels < 12 ? kDenseTile / panels : 12; }
static_assert(kDenseSlab * kDensePanels * kPanel * sizeof(float) <= kDenseSlabBytes && kDensePanels <= kMostDensePanels);

static constexpr int dense_column_bytes(StoredType type) { return kPanel * form_of(type).bits / 8; }

// Weights of some inputs of neighbouring panels.
struct DenseWeights {
  const uint8_t* data;   // the first panel's
  size_t panel_stride;   // bytes
  const uint8_t* ahead;  // of kAhead panels, what to ask memory for meanwhile
  size_t ahead_stride;
  int ahead_step;        // bytes for each input
};
// Where a tile's chains come from and go to.
struct DenseChains {
  const float* start;  // [row, kDensePanels * 16]; null: they start at zero
  float* end;
  ptrdiff_t end_stride;
  bool accumulate;
};

// Loops over rows and panels must be unrolled, or GCC keeps the chains in memory.
template <StoredType kType, int kPanels, int kRows, int kAhead>
void dense_tile(const DenseWeights& w, const float* in, ptrdiff_t in_stride, int inputs, const DenseChains& chains) {
  F32 acc[kRows][kPanels];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p)
      acc[r][p] = chains.start ? load(chains.start + (r * kDensePanels + p) * kPanel) : zero();
  for (int i = 0; i < inputs; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < kAhead; ++p)
      __builtin_prefetch(w.ahead + p * w.ahead_stride + static_cast<ptrdiff_t>(i) * w.ahead_step, 0, 2);
    F32 column[kPanels];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) column[p] = load_column<kType>(w.data + p * w.panel_stride, i);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const F32 x = splat(in[r * in_stride + i]);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) acc[r][p] = fma(x, column[p], acc[r][p]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      float* end = chains.end + r * chains.end_stride + p * kPanel;
      store(end, chains.accumulate ? add(load(end), acc[r][p]) : acc[r][p]);
    }
}

// All rows in one tile, so that each weight is read and widened once.
template <StoredType kType, int kPanels>
void dense_few(const Matrix& w, const float* in, int rows, int panel, float* out, ptrdiff_t out_stride,
               bool accumulate) {
  const uint8_t* data = w.data + static_cast<size_t>(panel) * w.panel_bytes;
  const DenseWeights weights{data, w.panel_bytes, data + 2048, w.panel_bytes, dense_column_bytes(kType)};
  with_size<dense_rows(kPanels)>(rows, [&]<int kRows>() {
    dense_tile<kType, kPanels, kRows, kPanels>(weights, in, w.k, w.k, {nullptr, out, out_stride, accumulate});
  });
}

// Several tiles of rows: the weights of a slab of inputs are brought to L1 as float32 once for all of them.
template <StoredType kType, int kPanels>
void dense_many(const Matrix& w, const float* in, int rows, int panel, float* out, ptrdiff_t out_stride,
                bool accumulate, uint8_t* scratch) {
  constexpr int kColumn = dense_column_bytes(kType);
  constexpr size_t kWide = kDenseSlab * kPanel * sizeof(float);
  constexpr ptrdiff_t kBetween = kDensePanels * kPanel;
  float* between = reinterpret_cast<float*>(scratch + kDenseSlabBytes);  // [row, kBetween]: chains between two slabs
  const uint8_t* panels = w.data + static_cast<size_t>(panel) * w.panel_bytes;
  const int most = dense_rows(kPanels), tiles = (rows + most - 1) / most;
  for (int begin = 0; begin < w.k; begin += kDenseSlab) {
    const int inputs = w.k - begin < kDenseSlab ? w.k - begin : kDenseSlab;
    const bool last = begin + inputs == w.k;
    const uint8_t* slab = panels + static_cast<size_t>(begin) * kColumn;
    for (int p = 0; p < kPanels; ++p)
      for (int i = 0; i < inputs; ++i)
        store(reinterpret_cast<float*>(scratch + p * kWide) + i * kPanel,
              load_column<kType>(slab + p * w.panel_bytes, i));
    const uint8_t* ahead = last ? panels + kPanels * w.panel_bytes : slab + inputs * kColumn;
    for (int t = 0; t < tiles; ++t) {
      const DenseWeights weights{scratch, kWide, ahead + t % kPanels * w.panel_bytes, 0, kColumn};
      const int row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
      float* mine = between + row * kBetween;
      const DenseChains chains{begin ? mine : nullptr, last ? out + row * out_stride : mine,
                               last ? out_stride : kBetween, last && accumulate};
      with_size<dense_rows(kPanels)>(count, [&]<int kRows>() {
        dense_tile<StoredType::kF32, kPanels, kRows, 1>(weights, in + static_cast<size_t>(row) * w.k + begin, w.k,
                                                        inputs, chains);
      });
    }
  }
}

// The fewer rows, the more panels at once: a chain by itself would wait for its own fma.
template <StoredType kType, int kPanels = 4>
void linear_float(const Matrix& w, const Rows& x, int first_row, int num_rows, int panel, int last_panel, float* out,
                  ptrdiff_t out_stride, bool accumulate, uint8_t* scratch) {
  const float* in = x.f + static_cast<size_t>(first_row) * w.k;
  const bool few = num_rows <= dense_rows(kPanels);
  const bool many = num_rows > dense_rows(1) && kPanels <= kDensePanels;
  for (; (few || many) && panel + kPanels <= last_panel; panel += kPanels, out += kPanels * kPanel) {
    if (few) dense_few<kType, kPanels>(w, in, num_rows, panel, out, out_stride, accumulate);
    else if constexpr (kPanels <= kDensePanels)
      dense_many<kType, kPanels>(w, in, num_rows, panel, out, out_stride, accumulate, scratch);
  }
  if constexpr (kPanels > 1)
    linear_float<kType, kPanels / 2>(w, x, first_row, num_rows, panel, last_panel, out, out_stride, accumulate,
                                     scratch);
}
