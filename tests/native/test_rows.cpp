// The kernels that work on one row, against the formulas in double.
#include <limits>

#include "testing.hpp"

namespace paceline::testing {

namespace {

std::vector<double> doubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

void test_norms(const Kernels& kernels) {
  Random random(1);
  for (const int n : {16, 64, 576, 1536}) {
    const std::vector<float> x = normals(random, n, 3), weight = normals(random, n), bias = normals(random, n);
    for (const bool layer_norm : {false, true}) {
      double mean = 0, squares = 0;
      for (const float value : x) mean += layer_norm ? value / static_cast<double>(n) : 0;
      for (const float value : x) squares += (value - mean) * (value - mean) / n;
      std::vector<double> expected;
      for (int i = 0; i < n; ++i)
        expected.push_back((x[i] - mean) / std::sqrt(squares + 1e-5) * weight[i] + (layer_norm ? bias[i] : 0));
      std::vector<float> in_place = x;
      kernels.norm(in_place.data(), weight.data(), layer_norm ? bias.data() : nullptr, 1e-5f, n, in_place.data());
      require_close(in_place, expected, 1e-6, layer_norm ? "LayerNorm" : "RMSNorm");
    }
  }
}
const Listed norms("norms", test_norms);

void test_quantization(const Kernels& kernels) {
  constexpr int kWidth = 96, kColumn = 32;
  Random random(2);
  std::vector<float> values = normals(random, 2 * kGroup);
  values[5] = -4;                                            // the largest, which gets the code -127
  std::fill(values.begin() + kGroup, values.end(), 0.0f);    // a group of zeros has no scale
  std::vector<int8_t> q(2 * kWidth, 99);
  std::vector<float> scale(6, 99), sum(6, 99), f(2 * kWidth, 99);
  std::vector<int32_t> code_sum(6, 99), low_sum(6, 99);
  const Rows rows{kWidth, q.data(), scale.data(), sum.data(), code_sum.data(), low_sum.data(), f.data()};
  kernels.store_row(values.data(), 2 * kGroup, rows, 1, kColumn);
  const int at = kWidth + kColumn, group = at / kGroup;
  const float expected_scale = 4.0f / 127.0f;
  require(scale[group] == expected_scale && scale[group + 1] == 0, "scales");
  int low = 0, all = 0;
  for (int i = 0; i < kGroup; ++i) {
    const double exact = values[i] / static_cast<double>(expected_scale);
    require(std::fabs(q[at + i] - exact) <= 0.5 + 1e-4, "code " + std::to_string(i) + " is not the nearest");
    all += q[at + i];
    low += i < kGroup / 2 ? q[at + i] : 0;
    require(q[at + kGroup + i] == 0, "a group of zeros has codes");
  }
  require(q[at + 5] == -127, "the largest value's code");
  require(code_sum[group] == all && low_sum[group] == low && sum[group] == expected_scale * static_cast<float>(all), "sums");
  require(q[at - 1] == 99 && f[at - 1] == 99 && q[at - kWidth] == 99, "written beside the columns");
  require(std::equal(values.begin(), values.end(), f.begin() + at), "float columns");

  for (const float poison : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    values[7] = poison;
    kernels.store_row(values.data(), kGroup, rows, 0, 0);
    require(!std::isfinite(scale[0]), "what is not finite vanishes in the rounding");
  }
}
const Listed quantization("rows are quantized to the nearest codes", test_quantization);

void test_activations(const Kernels& kernels) {
  std::vector<float> gate, up;
  for (int i = -512; i < 512; ++i) {
    gate.push_back(static_cast<float>(i) * 0.25f);
    up.push_back(1.0f + static_cast<float>(i % 7));
  }
  for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
    std::vector<double> active, gated;
    for (size_t i = 0; i < gate.size(); ++i) {
      const double x = gate[i];
      active.push_back(activation == Activation::kSilu
                           ? x / (1 + std::exp(-x))
                           : 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))));
      gated.push_back(active.back() * up[i]);
    }
    std::vector<float> out(gate.size());
    const int n = static_cast<int>(gate.size());
    kernels.activate(activation, gate.data(), nullptr, n, out.data());
    require_close(out, active, 1e-6, "activation");
    kernels.activate(activation, gate.data(), up.data(), n, out.data());
    require_close(out, gated, 1e-6, "gated activation");
  }
}
const Listed activations("activation functions", test_activations);

void test_sums_and_caps(const Kernels& kernels) {
  Random random(3);
  const std::vector<float> x = normals(random, 64, 20), y = normals(random, 64);
  std::vector<double> sums, capped;
  for (int i = 0; i < 64; ++i) {
    sums.push_back(x[i] + 0.4 * y[i]);
    capped.push_back(30 * std::tanh(x[i] / 30.0));
  }
  std::vector<float> out = x;
  kernels.add_scaled(y.data(), 0.4f, 64, out.data());
  require_close(out, sums, 1e-6, "x + factor * y");
  out = x;
  kernels.softcap(30, 64, out.data());
  require_close(out, capped, 1e-6, "soft cap");
}
const Listed sums_and_caps("scaled sums and soft caps", test_sums_and_caps);

void test_rope(const Kernels& kernels) {
  Random random(4);
  constexpr int kHeads = 3;
  for (const auto& [head_dim, dim] : {std::pair{64, 64}, {96, 96}, {80, 32}, {48, 20}}) {
    const int half = dim / 2;
    std::vector<float> x = normals(random, kHeads * head_dim), cos, sin;
    for (int i = 0; i < half; ++i) {
      cos.push_back(static_cast<float>(std::cos(0.3 * i)));
      sin.push_back(static_cast<float>(std::sin(0.3 * i)));
    }
    std::vector<double> expected = doubles(x);
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < half; ++i) {
        const double a = x[h * head_dim + i], b = x[h * head_dim + half + i];
        expected[h * head_dim + i] = a * cos[i] - b * sin[i];
        expected[h * head_dim + half + i] = b * cos[i] + a * sin[i];
      }
    }
    kernels.rope(x.data(), kHeads, head_dim, dim, cos.data(), sin.data());
    require_close(x, expected, 1e-6, "rotation of " + std::to_string(dim) + " dimensions of " + std::to_string(head_dim));
  }
}
const Listed rope("rotary embedding", test_rope);

void test_argmax(const Kernels& kernels) {
  Random random(5);
  std::vector<float> x = normals(random, 1003);
  int index = -1;
  for (const int at : {0, 15, 16, 500, 1000, 1002}) {
    std::vector<float> peaked = x;
    peaked[at] = 9;
    require(kernels.argmax(peaked.data(), 1003, &index) && index == at, "a peak at " + std::to_string(at));
    peaked[at] = std::numeric_limits<float>::quiet_NaN();
    require(!kernels.argmax(peaked.data(), 1003, &index), "NaN at " + std::to_string(at) + " goes unseen");
    peaked[at] = -std::numeric_limits<float>::infinity();
    require(!kernels.argmax(peaked.data(), 1003, &index), "-infinity at " + std::to_string(at) + " goes unseen");
  }
  x[40] = x[900] = 9;
  require(kernels.argmax(x.data(), 1003, &index) && index == 40, "a tie goes to the lowest index");
}
const Listed argmax("argmax", test_argmax);

void test_exponentials(const Kernels& kernels) {
  std::vector<float> x;
  for (int i = 0; i < 160; ++i) x.push_back(-0.7f * static_cast<float>(i));
  std::vector<double> expected;
  for (const float value : x) expected.push_back(std::exp(value * 0.8));
  std::vector<float> out(x.size());
  kernels.exp_scaled(x.data(), static_cast<int>(x.size()), 0.0f, 0.8f, out.data());
  for (size_t i = 0; i < x.size(); ++i) {
    const bool vanishes = expected[i] < 1e-37;
    require(vanishes ? out[i] < 1e-37f : std::fabs(out[i] / expected[i] - 1) < 5e-6, "e^" + std::to_string(x[i] * 0.8));
  }
  require(out[0] == 1, "the likeliest token's weight is exactly 1");
}
const Listed exponentials("exponentials", test_exponentials);

}  // namespace

}  // namespace paceline::testing
