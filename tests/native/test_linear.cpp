// Linear layers of every stored type against sums in double of what is stored.
#include <cstring>

#include "blocks.hpp"
#include "half.hpp"
#include "pack.hpp"
#include "testing.hpp"

namespace paceline::testing {

namespace {

// Where a stored block has its fp16 scale and minimum, and (of K-quants) its factors, with bytes that make each factor 1
// and each minimum 0.
struct Layout {
  StoredType type;
  int scale_at;
  int minimum_at = -1;
  float centre = 0;  // minimum that puts the middle of random weights near 0 where the scale is 1
  int factors_at = 0;
  std::vector<uint8_t> unit_factors = {};
};

std::vector<uint8_t> bytes(std::initializer_list<std::pair<int, uint8_t>> runs) {
  std::vector<uint8_t> all;
  for (const auto& [count, value] : runs) all.insert(all.end(), count, value);
  return all;
}

const std::vector<Layout>& quantized() {
  static const std::vector<Layout> all = {
      {StoredType::kQ4_0, 0},
      {StoredType::kQ4_1, 0, 2, -7.5f},
      {StoredType::kQ5_0, 0},
      {StoredType::kQ5_1, 0, 2, -15.5f},
      {StoredType::kQ8_0, 0},
      {StoredType::kIQ4_NL, 0},
      {StoredType::kQ2_K, 80, 82, 1.5f, 0, bytes({{16, 0x01}})},
      {StoredType::kQ3_K, 108, -1, 0, 96, bytes({{8, 0x11}, {4, 0xaa}})},  // 33 - 32
      {StoredType::kQ4_K, 0, 2, 7.5f, 4, bytes({{4, 1}, {4, 0}, {4, 1}})},
      {StoredType::kQ5_K, 0, 2, 15.5f, 4, bytes({{4, 1}, {4, 0}, {4, 1}})},
      {StoredType::kQ6_K, 208, -1, 0, 192, bytes({{16, 1}})},
  };
  return all;
}

std::string label(StoredType type, int rows) {
  return "type " + std::to_string(static_cast<int>(type)) + ", " + std::to_string(rows) + " rows";
}

void set_half(uint8_t* at, float value) {
  const uint16_t half = float_to_half(value);
  std::memcpy(at, &half, 2);
}

// A matrix as stored and as doubles.
struct Stored {
  StoredType type;
  int n, k;
  std::vector<uint8_t> bytes;
  std::vector<double> weights;  // [n, k]
};

std::vector<double> weights_of(StoredType type, int n, int k, const std::vector<uint8_t>& stored) {
  const Form form = form_of(type);
  const int size = kGroup * form.groups;
  std::vector<double> weights;
  for (const uint8_t* at = stored.data(); at < stored.data() + stored.size(); at += stored_block_bytes(type)) {
    const Block block = read_block(type, at);
    for (int i = 0; i < size; ++i) {
      const int run = i / form.run;
      const double d = half_to_float(block.d) * (form.groups > 1 ? block.d_factor[run] : 1);
      const double m = form.affine ? half_to_float(block.m) * (form.groups > 1 ? block.m_factor[run] : 1) : 0;
      const int code = form.table ? kTableCodes[block.codes[i]] : block.codes[i];
      weights.push_back((code - form.zero) * d + m);
    }
  }
  require(weights.size() == static_cast<size_t>(n) * k, "another number of weights");
  return weights;
}

Stored random_quantized(const Layout& layout, int n, int k, Random& random) {
  std::vector<uint8_t> stored(stored_bytes(layout.type, n, k));
  for (uint8_t& byte : stored) byte = static_cast<uint8_t>(random() >> 13);
  for (size_t at = 0; at < stored.size(); at += stored_block_bytes(layout.type)) {
    const float scale = 0.01f * (1.0f + random() / 4294967296.0f);
    set_half(&stored[at + layout.scale_at], scale);
    if (layout.minimum_at >= 0) set_half(&stored[at + layout.minimum_at], scale * layout.centre);
  }
  return {layout.type, n, k, stored, weights_of(layout.type, n, k, stored)};
}

// Every code at one of its ends.
Stored extreme_quantized(const Layout& layout, int n, int k, Random& random) {
  std::vector<uint8_t> stored(stored_bytes(layout.type, n, k));
  const bool two_sided = layout.type == StoredType::kQ8_0;  // the one type whose codes are signed as stored
  for (uint8_t& byte : stored) byte = random() >> 31 ? (two_sided ? 0x7f : 0xff) : (two_sided ? 0x80 : 0x00);
  for (size_t at = 0; at < stored.size(); at += stored_block_bytes(layout.type)) {
    set_half(&stored[at + layout.scale_at], 1);
    if (layout.minimum_at >= 0) set_half(&stored[at + layout.minimum_at], 0);
    std::copy(layout.unit_factors.begin(), layout.unit_factors.end(), &stored[at + layout.factors_at]);
  }
  return {layout.type, n, k, stored, weights_of(layout.type, n, k, stored)};
}

Stored random_floats(StoredType type, int n, int k, Random& random) {
  Stored matrix{type, n, k, {}, {}};
  for (const float value : normals(random, static_cast<size_t>(n) * k, 0.1f)) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (type == StoredType::kF32) {
      matrix.weights.push_back(value);
    } else if (type == StoredType::kF16) {
      bits = float_to_half(value);
      matrix.weights.push_back(half_to_float(static_cast<uint16_t>(bits)));
    } else {
      bits >>= 16;
      const uint32_t wide = bits << 16;
      float kept;
      std::memcpy(&kept, &wide, 4);
      matrix.weights.push_back(kept);
    }
    const size_t width = type == StoredType::kF32 ? 4 : 2, at = matrix.bytes.size();
    matrix.bytes.resize(at + width);
    std::memcpy(&matrix.bytes[at], &bits, width);
  }
  return matrix;
}

// `count` rows of activations in both forms; freed with their storage.
struct Activations {
  Activations(const Kernels& kernels, const std::vector<float>& values, int k)
      : k(k), q(values.size()), scale(values.size() / kGroup), sum(scale), code_sum(scale.size()), low_sum(code_sum),
        f(values.size()) {
    rows = {k, q.data(), scale.data(), sum.data(), code_sum.data(), low_sum.data(), f.data()};
    for (size_t row = 0; row < values.size() / k; ++row)
      kernels.store_row(&values[row * k], k, rows, static_cast<int>(row), 0);
  }
  double value(size_t row, int i, bool as_codes) const {
    const size_t at = row * k + i;
    return as_codes ? static_cast<double>(q[at]) * scale[at / kGroup] : f[at];
  }

  int k;
  std::vector<int8_t> q;
  std::vector<float> scale, sum;
  std::vector<int32_t> code_sum, low_sum;
  std::vector<float> f;
  Rows rows;
};

std::vector<double> product(const Stored& matrix, const Activations& in, int count) {
  std::vector<double> out;
  for (int row = 0; row < count; ++row) {
    for (int n = 0; n < matrix.n; ++n) {
      double sum = 0;
      for (int i = 0; i < matrix.k; ++i)
        sum += matrix.weights[static_cast<size_t>(n) * matrix.k + i] * in.value(row, i, is_quantized(form_of(matrix.type)));
      out.push_back(sum);
    }
  }
  return out;
}

std::vector<float> linear(const Kernels& kernels, const Matrix& w, const Activations& in, int count, bool accumulate) {
  const int width = w.panels() * kPanel;
  std::vector<float> wide(static_cast<size_t>(count) * width, accumulate ? 1.0f : 0.0f), out;
  Mapping scratch(linear_scratch_bytes(count));
  kernels.linear(w, in.rows, 0, count, 0, w.panels(), wide.data(), width, accumulate, scratch.data());
  for (int row = 0; row < count; ++row) out.insert(out.end(), &wide[row * width], &wide[row * width] + w.n);
  return out;
}

constexpr int kMostRows = 33;
constexpr int kRowCounts[] = {1, 3, 8, kMostRows};

// An odd last panel, padded; with 768 inputs there is more than one piece to unpack.
constexpr int kOutputs = 37, kInputs = 768;

void check(const Kernels& kernels, const Stored& matrix, const std::vector<float>& values, double tolerance) {
  Arena arena;
  ThreadPool pool(1);
  const Matrix w = pack(matrix.type, matrix.n, matrix.k, matrix.bytes.data(), matrix.type, arena, pool);
  const Activations in(kernels, values, matrix.k);
  for (const int count : kRowCounts) {
    const std::string what = label(matrix.type, count);
    std::vector<double> expected = product(matrix, in, count);
    require_close(linear(kernels, w, in, count, false), expected, tolerance, what);
    for (double& value : expected) value += 1;
    require_close(linear(kernels, w, in, count, true), expected, tolerance, what + ", added to ones");
  }
}

void test_random(const Kernels& kernels) {
  Random random(1);
  const std::vector<float> values = normals(random, kMostRows * kInputs);
  for (const Layout& layout : quantized())
    check(kernels, random_quantized(layout, kOutputs, kInputs, random), values, 1e-5);
  for (const StoredType type : {StoredType::kF32, StoredType::kF16, StoredType::kBF16})
    check(kernels, random_floats(type, kOutputs, kInputs, random), values, 1e-5);
}
const Listed random_weights("linear layers are the product of what is stored", test_random);

// Integers that float32 holds: one step of saturation at 16 bits would show.
void test_extremes(const Kernels& kernels) {
  Random random(2);
  std::vector<float> values(kMostRows * kBlock);
  for (float& value : values) value = random() >> 31 ? 127.0f : -127.0f;
  std::fill_n(values.begin(), kBlock, 127.0f);
  std::fill_n(values.begin() + kBlock, kBlock, -127.0f);
  for (const Layout& layout : quantized())
    check(kernels, extreme_quantized(layout, kOutputs, kBlock, random), values, 0);
}
const Listed extreme_codes("extreme codes multiply exactly", test_extremes);

void test_unpacking(const Kernels& kernels) {
  Random random(3);
  Arena arena;
  ThreadPool pool(2);
  for (const Layout& layout : quantized()) {
    const Stored matrix = random_quantized(layout, kOutputs, kInputs, random);
    const Matrix w = pack(matrix.type, matrix.n, matrix.k, matrix.bytes.data(), matrix.type, arena, pool);
    std::vector<float> all(matrix.weights.size());
    for (int n = 0; n < kOutputs; ++n) kernels.unpack_row(w, n, &all[static_cast<size_t>(n) * kInputs]);
    require_close(all, matrix.weights, 1e-6, label(matrix.type, kOutputs));
  }
}
const Listed unpacking("unpacked rows are what is stored", test_unpacking);

}  // namespace

}  // namespace paceline::testing
