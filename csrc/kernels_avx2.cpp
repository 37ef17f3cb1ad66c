#define PACELINE_KERNELS kAvx2Kernels
#define PACELINE_NAMESPACE avx2
#define PACELINE_ISA_NAME "avx2"

namespace paceline::avx2 {
constexpr int kDirectRows = 3;   // rows and panels of a tile that reads packed weights
constexpr int kDirectPanels = 1;
constexpr int kStreams = 4;      // panels that one row reads side by side: memory has more to do at a time
constexpr int kUnroll = 16;      // of loops over rows or queries, so that their sums are registers
constexpr int kTileRows = 6;    // rows and panels of a tile that reads unpacked weights
constexpr int kTilePanels = 1;
constexpr int kUnpackFrom = 24;   // rows from which unpacking pays
constexpr int kUnpackHalvesFrom = 8;  // the same for weights whose runs are half a group
constexpr int kDenseTile = 6;    // rows x panels of a tile of float weights: its sums fill the registers
constexpr int kDensePanels = 1;   // panels of such a tile where there are many rows
constexpr int kDenseSlab = 256;   // inputs that it takes at a time then
constexpr int kTileQueries = 6;   // most queries of an attention tile that has more than one row
constexpr int kScoreVectors = 1;   // of 16 tokens each, that a query's scores take at a time
}  // namespace paceline::avx2

#include "kernels.inl"
