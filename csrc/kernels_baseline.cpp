#define PACELINE_KERNELS kBaselineKernels
#define PACELINE_NAMESPACE baseline
#define PACELINE_ISA_NAME "baseline"

namespace paceline::baseline {
constexpr int kDirectRows = 4;   // rows and panels of a tile that reads packed weights
constexpr int kDirectPanels = 1;
constexpr int kTileRows = 4;    // rows and panels of a tile that reads unpacked weights
constexpr int kTilePanels = 2;
constexpr int kUnpackFrom = 8;   // rows from which unpacking pays
constexpr int kUnpackHalvesFrom = 8;  // the same for weights whose runs are half a group
constexpr int kDenseTile = 4;    // rows x panels of a tile of float weights: its sums fill the registers
constexpr int kDensePanels = 1;   // panels of such a tile where there are many rows
constexpr int kDenseSlab = 256;   // inputs that it takes at a time then
constexpr int kTileQueries = 6;   // most queries of an attention tile that has more than one row
constexpr int kScoreVectors = 1;   // of 16 tokens each, that a query's scores take at a time
}  // namespace paceline::baseline

#include "kernels.inl"
