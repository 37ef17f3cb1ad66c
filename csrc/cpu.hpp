#pragma once

#include <string>

#include "matrix.hpp"

namespace paceline {

// The kernels for the best instruction set of this machine, or those named in PACELINE_ISA (avx512, avx2, baseline).
// Throws std::invalid_argument when the one named is unknown or the machine lacks it.
const Kernels& choose_kernels(const std::string& wanted);

}  // namespace paceline
