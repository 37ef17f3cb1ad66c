#define PACELINE_KERNELS kAvx2Kernels
#define PACELINE_NAMESPACE avx2
#define PACELINE_ISA_NAME "avx2"

namespace paceline::avx2 {
constexpr int kDirectRows = 4;    // rows of a tile that reads packed records
constexpr int kUnpackedRows = 2;  // rows of a tile that reads unpacked panels
constexpr int kUnpackFrom = 8;    // rows from which unpacking pays
constexpr int kDenseTile = 6;    // rows x panels of a tile of float weights: its sums fill the registers
constexpr int kDensePanels = 1;   // panels of such a tile where there are many rows
constexpr int kDenseSlab = 256;   // inputs that it takes at a time then
}  // namespace paceline::avx2

#include "kernels.inl"
