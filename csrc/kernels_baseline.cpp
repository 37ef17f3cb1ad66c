#define PACELINE_KERNELS kBaselineKernels
#define PACELINE_NAMESPACE baseline
#define PACELINE_ISA_NAME "baseline"

namespace paceline::baseline {
constexpr int kDirectRows = 4;    // rows of a tile that reads packed records
constexpr int kUnpackedRows = 4;  // rows of a tile that reads unpacked panels
constexpr int kUnpackFrom = 8;    // rows from which unpacking pays
constexpr int kDenseTile = 4;    // rows x panels of a tile of float weights: its sums fill the registers
constexpr int kDensePanels = 1;   // panels of such a tile where there are many rows
constexpr int kDenseSlab = 256;   // inputs that it takes at a time then
}  // namespace paceline::baseline

#include "kernels.inl"
