#define PACELINE_KERNELS kBaselineKernels
#define PACELINE_NAMESPACE baseline
#define PACELINE_ISA_NAME "baseline"

namespace paceline::baseline {
constexpr int kDirectRows = 4;    // rows of a tile that reads packed records
constexpr int kUnpackedRows = 4;  // rows of a tile that reads unpacked panels
constexpr int kUnpackFrom = 8;    // rows from which unpacking pays
}  // namespace paceline::baseline

#include "kernels.inl"
