#define PACELINE_KERNELS kBaselineKernels
#define PACELINE_NAMESPACE baseline
#define PACELINE_ISA_NAME "baseline"

namespace paceline::baseline {
// Few variants: a compiler takes long over these loops.
constexpr int kDirectRows = 1;        // rows and panels of a tile that reads packed weights
constexpr int kDirectPanels = 1;
constexpr int kStreams = 1;           // panels that one row reads side by side
constexpr int kTileRows = 2;          // rows and panels of a tile that reads unpacked weights
constexpr int kTilePanels = 1;
constexpr int kUnpackFrom = 2;        // rows from which unpacking pays
constexpr int kUnpackHalvesFrom = 2;  // the same for weights whose runs are half a group
constexpr int kUnroll = 1;            // of loops over rows or queries
constexpr int kDenseTile = 4;    // rows x panels of a tile of float weights: its sums fill the registers
constexpr int kDensePanels = 1;   // panels of such a tile where there are many rows
constexpr int kDenseSlab = 256;   // inputs that it takes at a time then
constexpr int kTileQueries = 3;   // most queries of an attention tile that has more than one row
constexpr int kScoreVectors = 1;   // of 16 tokens each, that a query's scores take at a time
}  // namespace paceline::baseline

#include "kernels.inl"
