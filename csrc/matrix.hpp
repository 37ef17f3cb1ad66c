// Weights and activations in the layouts the kernels read, and the table of kernels an instruction set provides.
// Nothing here may use std templates: the kernel files include it and are compiled for instructions that the running
// machine may lack, and the linker would be free to keep their copy of a shared template. For the same reason functions
// here are constexpr and trivial.
#pragma once

#include <cstddef>
#include <cstdint>

#include "form.hpp"

namespace paceline {

constexpr int kBlockTokens = 32;     // tokens per KV block (executors/base.py: BLOCK_SIZE)
constexpr int kPartition = 256;      // tokens per attention partition, aligned to absolute positions
constexpr int kMaxHeadDim = 256;
constexpr int kMaxHeadGroup = 8;     // query heads per KV head

// A weight matrix of n outputs x k inputs, cut into panels of 16 outputs (the last one padded with zeros): form.hpp.
struct Matrix {
  StoredType type = StoredType::kF32;
  int n = 0;
  int k = 0;
  size_t panel_bytes = 0;
  uint8_t* data = nullptr;  // owned by an Arena

  int panels() const { return (n + kPanel - 1) / kPanel; }
  bool quantized() const { return is_quantized(form_of(type)); }
};

// Activation rows, as int8 with a scale per group of 32, as float32, or both, as their readers want them.
struct Rows {
  int k = 0;
  int8_t* q = nullptr;       // [rows, k]
  float* scale = nullptr;    // [rows, k / 32]
  float* sum = nullptr;      // [rows, k / 32], scale * (sum of the group's codes)
  int32_t* code_sum = nullptr;  // [rows, k / 32]
  int32_t* low_sum = nullptr;   // [rows, k / 32], the sum of the group's first 16 codes, for readers with runs of 16
  float* f = nullptr;        // [rows, k]
};

// Numbers of KVDType in executors/native.py.
enum class KVType : uint8_t { kF32, kF16, kInt8 };

static constexpr size_t kv_element_bytes(KVType type) {
  return type == KVType::kF32 ? sizeof(float) : type == KVType::kF16 ? sizeof(uint16_t) : 1;
}
constexpr int kKVGroup = 32;  // dimensions of a head that share a scale in an int8 cache

// The KV cache of one layer. K is stored dimension-major so that one vector holds 16 tokens, V token-major so that one
// vector holds 16 dimensions:  K [kv_head, head_dim, 32]   V [kv_head, 32, head_dim]
// and for int8 an fp16 scale per token and 32 dimensions:  [kv_head, ceil(head_dim / 32), 32], for K and V alike.
// A block has these of all layers one after another, so that a block that was never used takes no memory.
struct KVLayer {
  uint8_t* k = nullptr;  // of block 0
  uint8_t* v = nullptr;
  uint8_t* k_scale = nullptr;  // int8 only
  uint8_t* v_scale = nullptr;
  size_t block_bytes = 0;  // from block to block
  KVType type = KVType::kF16;
  int kv_heads = 0;
  int head_dim = 0;

  constexpr int groups() const { return (head_dim + kKVGroup - 1) / kKVGroup; }
};

// Consecutive query rows of one sequence that attend through one KV head.
struct AttentionTile {
  const float* q;        // first row's first query head of this KV head
  ptrdiff_t q_stride;    // floats from row to row
  int rows;
  int heads;             // query heads of the KV head
  int position;          // of the first row; row i sees positions up to position + i
  int window;            // and of these the last so many
  const int32_t* block_table;
  int kv_head;
  float scale;
  float softcap;         // 0 is none
  const AttentionTile* next;  // of another sequence, to be fetched from memory meanwhile; or null
};

constexpr int kMostTileQueries = 12;  // rows x heads of an AttentionTile

enum class Activation : uint8_t { kSilu, kGeluTanh };

struct Kernels {
  const char* name;
  int tile_queries;  // as many rows x heads are best for an AttentionTile; it has one row at least

  // out[r, c] (+)= rows[first_row + r] . panels[first_panel .. last_panel), for r < num_rows and c counted from the
  // first panel's first output. `scratch` has linear_scratch_bytes(num_rows), aligned to 64.
  void (*linear)(const Matrix& w, const Rows& x, int first_row, int num_rows, int first_panel, int last_panel,
                 float* out, ptrdiff_t out_stride, bool accumulate, uint8_t* scratch);

  // RMSNorm of n values (a multiple of 16), or with a bias LayerNorm. `out` may be x.
  void (*norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* out);

  // values[0 .. n) (n a multiple of 32) into columns column .. column + n of row `row`.
  void (*store_row)(const float* values, int n, const Rows& out, int row, int column);

  // out = activation(gate) * up, or activation(gate) where up is null; n a multiple of 16.
  void (*activate)(Activation activation, const float* gate, const float* up, int n, float* out);

  // x += factor * y, n a multiple of 16.
  void (*add_scaled)(const float* y, float factor, int n, float* x);

  // x = cap * tanh(x / cap), n a multiple of 16.
  void (*softcap)(float cap, int n, float* x);

  // Rotates `heads` vectors of head_dim floats in place: pairs (i, i + dim/2), cos and sin of dim/2 floats.
  void (*rope)(float* x, int heads, int head_dim, int dim, const float* cos, const float* sin);

  // Writes one token's K and V of one head into slot `slot` of block `block`.
  void (*store_kv)(const KVLayer& kv, int block, int kv_head, int slot, const float* k, const float* v);

  // Attention of a tile; out[row, head * head_dim] with out_stride floats from row to row.
  void (*attention)(const KVLayer& kv, const AttentionTile& tile, float* out, ptrdiff_t out_stride);

  // Lowest index of the largest value; false when a value is NaN or infinite.
  bool (*argmax)(const float* x, int n, int* index);

  // out[i] = exp((x[i] - highest) * inverse_temperature) for the n values and the rest of their last vector.
  void (*exp_scaled)(const float* x, int n, float highest, float inverse_temperature, float* out);

  // Row n of the matrix as k floats.
  void (*unpack_row)(const Matrix& w, int n, float* out);
};

// Bytes of scratch that `linear` needs for num_rows rows.
constexpr int kMostTilePanels = 4;  // panels that are unpacked together
constexpr int kUnpackGroups = 12;   // groups of 32 inputs unpacked at a time: their codes stay in L1
constexpr size_t kUnpackBytes = kMostTilePanels * kUnpackGroups * (512 + 4 * kPanel * sizeof(float));  // d, m of two runs
constexpr int kMostDensePanels = 4;
constexpr size_t kDenseSlabBytes = 32768;  // float32 weights that kernels_dense.inl has in L1
inline size_t linear_scratch_bytes(int num_rows) {
  const size_t row = kPanel * sizeof(float);
  const size_t unpacked = kUnpackBytes + num_rows * kMostTilePanels * row, dense = kDenseSlabBytes + num_rows * kMostDensePanels * row;
  return unpacked > dense ? unpacked : dense;
}

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace paceline
