// The C++ tests: native_tests [PART OF A NAME]
#include <cstdio>
#include <cstring>

#include "cpu.hpp"
#include "testing.hpp"

namespace paceline::testing {

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

namespace {

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
  for (const char* name : {"avx512", "avx2", "baseline"}) {
    try {
      found.push_back(&choose_kernels(name));
    } catch (const std::invalid_argument&) {  // not on this machine
    }
  }
  return found;
}

bool passes(const Test& test, const Kernels* kernels) {
  try {
    kernels ? test.run_with(*kernels) : test.run();
    return true;
  } catch (const std::exception& error) {
    std::printf("FAILED %s (%s): %s\n", test.name.c_str(), kernels ? kernels->name : "any", error.what());
    return false;
  }
}

int run_all(const char* part) {
  int ran = 0, failed = 0;
  const auto count = [&](bool passed) { ++ran, failed += !passed; };
  for (const Test& test : tests()) {
    if (!std::strstr(test.name.c_str(), part)) continue;
    if (test.run) count(passes(test, nullptr));
    else for (const Kernels* kernels : available()) count(passes(test, kernels));
  }
  std::printf("%d passed, %d failed; the kernels of", ran - failed, failed);
  for (const Kernels* kernels : available()) std::printf(" %s", kernels->name);
  std::printf("\n");
  return failed > 0 || ran == 0;
}

}  // namespace

}  // namespace paceline::testing

int main(int argc, char** argv) { return paceline::testing::run_all(argc > 1 ? argv[1] : ""); }
