#define PACELINE_KERNELS kAvx512Kernels
#define PACELINE_NAMESPACE avx512
#define PACELINE_ISA_NAME "avx512"

namespace paceline::avx512 {
constexpr int kDirectRows = 6;   // rows and panels of a tile that reads packed weights
constexpr int kDirectPanels = 2;
constexpr int kStreams = 4;      // panels that one row reads side by side: memory has more to do at a time
constexpr int kUnroll = 16;      // of loops over rows or queries, so that their sums are registers
constexpr int kTileRows = 3;    // rows and panels of a tile that reads unpacked weights
constexpr int kTilePanels = 4;
constexpr int kUnpackFrom = 64;   // rows from which unpacking pays
constexpr int kUnpackHalvesFrom = 12;  // the same for weights whose runs are half a group
constexpr int kDenseTile = 24;    // rows x panels of a tile of float weights: its sums fill the registers
constexpr int kDensePanels = 4;   // panels of such a tile where there are many rows
constexpr int kDenseSlab = 128;   // inputs that it takes at a time then
constexpr int kTileQueries = 12;   // most queries of an attention tile that has more than one row
constexpr int kScoreVectors = 2;   // of 16 tokens each, that a query's scores take at a time
}  // namespace paceline::avx512

#include "kernels.inl"
