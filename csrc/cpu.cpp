#include "cpu.hpp"

#include <stdexcept>

namespace paceline {

namespace {

struct Choice {
  const Kernels* kernels;
  bool available;
};

}  // namespace

const Kernels& choose_kernels(const std::string& wanted) {
  const Choice choices[] = {
#if defined(__x86_64__)
      {&kAvx512Kernels, __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
      {&kAvx2Kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")},
#endif
      {&kBaselineKernels, true},
  };
  std::string names;
  for (const Choice& choice : choices) {
    if (wanted.empty() ? choice.available : wanted == choice.kernels->name) {
      if (!choice.available) throw std::invalid_argument("PACELINE_ISA=" + wanted + ": this processor lacks it");
      return *choice.kernels;
    }
    names += std::string(names.empty() ? "" : ", ") + choice.kernels->name;
  }
  throw std::invalid_argument("PACELINE_ISA=" + wanted + " is not one of " + names);
}

}  // namespace paceline
