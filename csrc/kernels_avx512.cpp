#define PACELINE_KERNELS kAvx512Kernels
#define PACELINE_NAMESPACE avx512
#define PACELINE_ISA_NAME "avx512"

namespace paceline::avx512 {
constexpr int kDirectRows = 8;    // rows of a tile that reads packed records
constexpr int kUnpackedRows = 6;  // rows of a tile that reads unpacked panels
constexpr int kUnpackFrom = 12;    // rows from which unpacking pays
}  // namespace paceline::avx512

#include "kernels.inl"
