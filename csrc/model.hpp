// A decoder-only transformer (RMSNorm, rotary embedding, grouped-query attention, SwiGLU) over a paged KV cache.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <vector>

#include "batch.hpp"
#include "matrix.hpp"
#include "memory.hpp"
#include "pack.hpp"
#include "sampler.hpp"
#include "thread_pool.hpp"

namespace paceline {

struct ModelConfig {
  int vocab_size, hidden, layers, heads, kv_heads, head_dim, intermediate;
  int max_positions;
  int rope_dim;
  double rope_theta;
  float norm_eps;
  bool tied_embeddings;
  int num_blocks;
  bool half_kv;
  int max_tokens;  // per step
  int threads;
};

enum class MatrixRole { kEmbedding, kHead, kQuery, kKey, kValue, kAttentionOutput, kGate, kUp, kDown };
enum class NormRole { kAttention, kFeedForward, kFinal };

class Model {
 public:
  Model(const ModelConfig& config, const Kernels& kernels);

  // `layer` is ignored for the embedding, the head and the final norm. Both copy; std::invalid_argument when the shape
  // is not the one the config asks for.
  void set_matrix(MatrixRole role, int layer, StoredType type, int n, int k, const uint8_t* stored, size_t bytes);
  void set_norm(NormRole role, int layer, const float* weight, size_t n);
  // Called once all weights are set, before the first step.
  void finish_loading();

  // Calls from several threads take turns.
  StepResult step(const Batch& batch);
  // The raw logits of the batch's rows, [rows, vocab_size], instead of tokens.
  std::vector<float> logits(const Batch& batch);

  const Kernels& kernels() const { return kernels_; }
  size_t weight_bytes() const { return arena_.allocated(); }
  size_t bytes_per_block() const;

 private:
  struct Layer {
    Matrix query, key, value, attention_output, gate, up, down;
    std::vector<float> attention_norm, feed_forward_norm;
    KVLayer kv;
  };
  // What one member of the pool works in.
  struct Scratch {
    uint8_t* linear;
    float *gate, *up;  // [row block, 32]
    float* attention;  // one tile
  };
  // A stretch of query rows of one sequence, small enough for one AttentionTile.
  struct Tile {
    int sequence, first_token, rows;
  };

  void check(const Batch& batch) const;
  Matrix& slot(MatrixRole role, int layer);
  Rows allocate_rows(int rows, int k, std::initializer_list<const Matrix*> readers);
  float* allocate_floats(size_t n);
  const Matrix& head() const { return config_.tied_embeddings ? embedding_ : head_; }

  std::vector<Tile> attention_tiles(const Batch& batch) const;
  ptrdiff_t qkv_width() const { return static_cast<ptrdiff_t>(config_.heads + 2 * config_.kv_heads) * config_.head_dim; }
  int panels_per_unit(const Matrix& w) const;

  // The forward pass: `consume` gets each row's logits, from whichever member of the pool is free. Below, what all
  // members call together.
  void run(const Batch& batch, const std::function<void(int member, int row, float* logits)>& consume);
  void copy_blocks(const Batch& batch);
  void embed(const Batch& batch);
  void normalize(const std::vector<float>& weight, int tokens);
  void project(const Matrix& w, const Rows& in, int rows, float* out, ptrdiff_t stride, bool accumulate, int member);
  void project_qkv(const Layer& layer, int tokens, int member);
  void rotate_and_store(const Batch& batch, const Layer& layer, const std::vector<Tile>& tiles);
  void attend(const Batch& batch, const Layer& layer, const std::vector<Tile>& tiles, int member);
  void feed_forward(const Layer& layer, int tokens, int member);
  void linear_unit(const Matrix& w, const Rows& in, int rows, int unit, float* out, ptrdiff_t stride, bool accumulate,
                   int member);

  std::mutex turn_;
  bool ready_ = false;
  const ModelConfig config_;
  const Kernels& kernels_;
  ThreadPool pool_;
  Arena arena_;      // weights
  Arena buffers_;    // activations
  Mapping kv_memory_;
  Matrix embedding_, head_;
  std::vector<float> final_norm_;
  std::vector<Layer> layers_;
  std::vector<float> rope_cos_, rope_sin_;  // [max_positions, rope_dim / 2]

  // Activations, [max_tokens, ...]
  float* x_ = nullptr;      // residual stream
  float* qkv_ = nullptr;    // queries, keys, values side by side
  Rows normed_, attended_, activated_, head_in_;
  float* logits_ = nullptr;  // [kLogitsChunk, padded vocabulary]
  std::vector<Scratch> scratch_;  // one per pool member
  std::vector<std::unique_ptr<Sampler>> samplers_;
};

}  // namespace paceline
