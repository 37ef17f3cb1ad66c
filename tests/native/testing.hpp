// What the tests share: how they are listed, what they check with, and where their numbers come from.
#pragma once

#include <cmath>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "matrix.hpp"

namespace paceline::testing {

// A test of the kernels runs once per instruction set of this machine, the others once.
struct Test {
  std::string name;
  void (*run_with)(const Kernels&) = nullptr;
  void (*run)() = nullptr;
};

// In the order of the files; each file adds its own with a global `const Listed`.
std::vector<Test>& tests();
struct Listed {
  Listed(const char* name, void (*run_with)(const Kernels&)) { tests().push_back({name, run_with, nullptr}); }
  Listed(const char* name, void (*run)()) { tests().push_back({name, nullptr, run}); }
};

inline void require(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

// Largest difference, as a share of the largest value.
inline void require_close(const std::vector<float>& got, const std::vector<double>& expected, double tolerance,
                          const std::string& what) {
  require(got.size() == expected.size(), what + ": another number of values");
  double largest = 0, difference = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    require(std::isfinite(got[i]), what + ": value " + std::to_string(i) + " is not finite");
    largest = std::fmax(largest, std::fabs(expected[i]));
    difference = std::fmax(difference, std::fabs(got[i] - expected[i]));
  }
  require(difference <= tolerance * largest,
          what + ": off by " + std::to_string(difference) + " where the largest value is " + std::to_string(largest));
}

using Random = std::mt19937;

// The standard library's distributions differ between systems; this is the same everywhere. Of mean 0, within +-3.
inline float normal(Random& random) {
  double sum = 0;
  for (int i = 0; i < 12; ++i) sum += random() / 4294967296.0;
  return static_cast<float>((sum - 6) / 2);
}
inline std::vector<float> normals(Random& random, size_t n, float scale = 1) {
  std::vector<float> values(n);
  for (float& value : values) value = normal(random) * scale;
  return values;
}

}  // namespace paceline::testing
