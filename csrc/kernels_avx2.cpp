#define PACELINE_KERNELS kAvx2Kernels
#define PACELINE_NAMESPACE avx2
#define PACELINE_ISA_NAME "avx2"

namespace paceline::avx2 {
constexpr int kDirectRows = 4;    // rows of a tile that reads packed records
constexpr int kUnpackedRows = 2;  // rows of a tile that reads unpacked panels
constexpr int kUnpackFrom = 8;    // rows from which unpacking pays
}  // namespace paceline::avx2

#include "kernels.inl"
