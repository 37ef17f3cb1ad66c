#define PACELINE_KERNELS kAvx512Kernels
#define PACELINE_NAMESPACE avx512
#define PACELINE_ISA_NAME "avx512"

namespace paceline::avx512 {
constexpr int kDirectRows = 8;    // rows of a tile that reads packed records
constexpr int kUnpackedRows = 6;  // rows of a tile that reads unpacked panels
constexpr int kUnpackFrom = 12;    // rows from which unpacking pays
constexpr int kDenseTile = 24;    // rows x panels of a tile of float weights: its sums fill the registers
constexpr int kDensePanels = 4;   // panels of such a tile where there are many rows
constexpr int kDenseSlab = 128;   // inputs that it takes at a time then
}  // namespace paceline::avx512

#include "kernels.inl"
