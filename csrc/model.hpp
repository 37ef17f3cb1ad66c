// A decoder-only transformer, as models/spec.py describes it, over a paged KV cache.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "batch.hpp"
#include "matrix.hpp"
#include "memory.hpp"
#include "pack.hpp"
#include "sampler.hpp"
#include "thread_pool.hpp"

namespace paceline {

// The rotation of some layers. Dimensions i and i + dim/2 rotate together, by frequency[i] radians per position.
struct RopeConfig {
  std::vector<double> frequencies;
  double magnitude = 1.0;  // factor of cos and sin
};

struct LayerConfig {
  int rope = -1;        // index into ModelConfig::ropes, -1 for none
  int window = 0;       // tokens a query sees, itself included; 0 for all
};

// models/spec.py has the meaning of each. What is not here follows from the weights that are set: biases, norms, gates.
struct ModelConfig {
  int vocab_size, hidden, heads, kv_heads, head_dim, intermediate;
  std::vector<LayerConfig> layers;
  std::vector<RopeConfig> ropes;
  double norm_eps, attention_scale, attention_softcap, logits_softcap, logits_scale, embedding_scale, residual_scale;
  bool tied_embeddings, parallel_residual;
  Activation activation;
  // How it is run.
  int num_blocks, max_positions, max_tokens, threads;  // max_tokens: per step
  KVType kv_type;

  int query_size() const { return heads * head_dim; }
  int kv_size() const { return kv_heads * head_dim; }
};

constexpr int kRowBlock = 128;    // rows a linear layer takes at a time: their activations stay in L2
constexpr int kLogitsChunk = 32;  // rows whose logits exist at a time

class Model {
 public:
  Model(const ModelConfig& config, const Kernels& kernels);

  // Weights under GGUF's names without "blk.N." and ".weight" or ".bias", such as attn_q; `layer` is -1 for those outside
  // the layers. They copy; std::invalid_argument for a name or shape that the config does not have.
  void set_matrix(const std::string& name, int layer, StoredType type, int n, int k, const uint8_t* stored,
                  size_t bytes, StoredType kept_as);  // see pack.hpp
  void set_norm(const std::string& name, int layer, const float* values, size_t n);
  void set_bias(const std::string& name, int layer, const float* values, size_t n);  // of a linear layer or a norm
  // Learned position embeddings, at least max_positions rows of hidden values.
  void set_positions(const float* values, size_t n);
  // Called once all weights are set, before the first step.
  void finish_loading();

  // Calls from several threads take turns.
  StepResult step(const Batch& batch);
  // The raw logits of the batch's rows, [rows, vocab_size], instead of tokens.
  std::vector<float> logits(const Batch& batch);

  const Kernels& kernels() const { return kernels_; }
  size_t weight_bytes() const { return arena_.allocated(); }
  size_t buffer_bytes() const { return buffers_.allocated(); }
  size_t bytes_per_block() const;
  size_t kv_bytes() const { return kv_memory_.bytes(); }
  // Takes a part of the KV cache's memory now rather than as blocks get used; may run beside step().
  void touch_kv(size_t begin, size_t size) const { kv_memory_.populate(begin, size); }

 private:
  struct Linear {
    Matrix weight;
    std::vector<float> bias;  // padded to whole panels, or empty
  };
  struct Norm {
    std::vector<float> weight, bias;  // no bias: RMSNorm; no weight: no norm
    explicit operator bool() const { return !weight.empty(); }
  };
  struct Layer {
    Linear query, key, value, attention_output, gate, up, down;
    Norm attention_norm, feed_forward_norm, query_norm, key_norm, post_attention_norm, post_feed_forward_norm;
    KVLayer kv;
    LayerConfig config;
  };
  struct Rope {
    RopeConfig config;
    float *cos, *sin;  // of this step's tokens, [max_tokens, dim / 2]
    int half() const { return static_cast<int>(config.frequencies.size()); }
  };
  // What one member of the pool works in.
  struct Scratch {
    uint8_t* linear;
    float *gate, *up;  // [row block, a tile's outputs]
    float* attention;  // one tile
    float* normed;     // one row
  };
  // A stretch of query rows of one sequence, small enough for one AttentionTile.
  struct Tile {
    int sequence, first_token, rows;
  };

  // Where a weight goes, and the shape it must have; null for an unknown name.
  struct LinearSlot { Linear* linear; int outputs, inputs; };
  LinearSlot linear_slot(const std::string& name, int layer);
  Norm* norm_slot(const std::string& name, int layer);
  void check_norm(const Norm& norm, const char* name, std::initializer_list<int> sizes) const;

  void check(const Batch& batch) const;
  Rows allocate_rows(int rows, int k, const std::vector<const Matrix*>& readers);
  Rows rows_for(std::initializer_list<Linear Layer::*> readers, int k);
  float* allocate_floats(size_t n);
  const Matrix& head() const { return config_.tied_embeddings ? embedding_.weight : head_.weight; }

  std::vector<Tile> attention_tiles(const Batch& batch) const;
  static bool is_whole_sequence(const Batch& batch, const Tile& tile);
  static std::vector<Tile> stored_before_attention(const Batch& batch, const std::vector<Tile>& tiles);
  ptrdiff_t qkv_width() const { return config_.query_size() + 2 * ptrdiff_t{config_.kv_size()}; }
  int group_width() const { return config_.heads / config_.kv_heads * config_.head_dim; }
  class PanelUnits;
  PanelUnits units(const Matrix& w) const;

  // The forward pass: `consume` gets each row's logits, from whichever member of the pool is free. Below, what all
  // members call together.
  void run(const Batch& batch, const std::function<void(int member, int row, float* logits)>& consume);
  void copy_blocks(const Batch& batch);
  void embed(const Batch& batch);
  // The residual stream as the next linear layers read it, into normed_. A single row is left to them: each member
  // makes its own once it takes part in the phase that reads it. Earlier, a member that is late would read a stream that
  // others are already adding to, and later would be too late where both halves of a layer read the same row.
  bool own_row(int tokens) const { return tokens == 1 && !config_.parallel_residual; }
  void normalize(const Norm& norm, int tokens, int member);
  void project_qkv(const Layer& layer, int tokens, int member);
  void rotate_and_store(const Batch& batch, const Layer& layer, const std::vector<Tile>& stretches);
  AttentionTile attention_tile(const Batch& batch, const Layer& layer, const Tile& tile, int kv_head) const;
  void attend(const Batch& batch, const Layer& layer, const std::vector<Tile>& tiles, int member);
  void feed_forward(const Layer& layer, int tokens, int member);
  // x += residual_scale * norm(linear(in))
  void add_to_stream(const Linear& linear, const Rows& in, const Norm& norm, int tokens, int member);
  void project(const Matrix& w, const std::vector<float>& bias, const Rows& in, int rows, float* out, ptrdiff_t stride,
               bool accumulate, int member);

  // What one member does.
  void normalize_row(const Norm& norm, int token, int row, int member);
  void linear_unit(const Matrix& w, const std::vector<float>& bias, const Rows& in, int first, int rows, int unit,
                   float* out, ptrdiff_t stride, bool accumulate, int member);
  void linear_panels(const Matrix& w, const std::vector<float>& bias, const Rows& in, int first, int rows, int begin,
                     int end, float* out, ptrdiff_t stride, bool accumulate, int member);
  void feed_forward_panels(const Layer& layer, int first_row, int tokens, int begin, int end, int member);
  void rotate_and_store_head(const Batch& batch, const Layer& layer, const Tile& tile, int kv_head);
  void normalize_heads(const Norm& norm, int size, float* x) const;
  bool wide(const Norm& norm) const { return norm.weight.size() > static_cast<size_t>(config_.head_dim); }
  void apply(const Norm& norm, const float* x, int n, float* out) const;
  void finish_logits(float* logits, int width) const;

  std::mutex turn_;
  bool ready_ = false;
  const ModelConfig config_;
  const Kernels& kernels_;
  ThreadPool pool_;
  Arena arena_;      // weights
  Arena buffers_;    // activations
  Mapping kv_memory_;
  Linear embedding_, head_;
  std::vector<float> positions_;  // [max_positions, hidden], or empty
  Norm final_norm_;
  std::vector<Layer> layers_;
  std::vector<Rope> ropes_;

  // Activations, [max_tokens, ...]
  float* x_ = nullptr;      // residual stream
  float* qkv_ = nullptr;    // queries, keys, values side by side
  float* branch_ = nullptr;     // what a layer adds to the stream, where it is not added at once
  float* attention_ = nullptr;  // heads' outputs, where a head's share of a row is no whole number of groups
  Rows normed_, attended_, activated_, head_in_;
  float* logits_ = nullptr;  // [kLogitsChunk, padded vocabulary]
  std::vector<Scratch> scratch_;  // one per pool member
  std::vector<std::unique_ptr<Sampler>> samplers_;
};

}  // namespace paceline
