#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace paceline {

namespace {

constexpr int kRowBlock = 128;    // rows a linear layer takes at a time: their activations stay in L2
constexpr int kLogitsChunk = 32;  // rows whose logits exist at a time

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

Model::Model(const ModelConfig& config, const Kernels& kernels)
    : config_(config), kernels_(kernels), pool_(config.threads), layers_(config.layers) {
  require(config.layers > 0 && config.vocab_size > 0 && config.hidden > 0 && config.intermediate > 0 &&
              config.max_positions > 0 && config.threads > 0,
          "a size of the model or the pool is not positive");
  require(config.kv_heads > 0 && config.heads > 0 && config.heads % config.kv_heads == 0 &&
              config.heads / config.kv_heads <= kMaxHeadGroup,
          "query heads must be 1 to 8 times the KV heads");
  require(config.head_dim % 32 == 0 && config.head_dim > 0 && config.head_dim <= kMaxHeadDim,
          "head_dim must be a multiple of 32 up to 256, not " + std::to_string(config.head_dim));
  require(config.rope_dim % 32 == 0 && config.rope_dim >= 0 && config.rope_dim <= config.head_dim,
          "the rotated dimensions must be a multiple of 32 within the head, not " + std::to_string(config.rope_dim));
  require(config.hidden % kGroup == 0 && config.intermediate % kGroup == 0,
          "hidden and intermediate sizes must be multiples of 32");
  require(config.num_blocks > 0 && config.max_tokens > 0, "the KV pool and the step need room");

  const size_t half = static_cast<size_t>(config.rope_dim) / 2;
  rope_cos_.resize(static_cast<size_t>(config.max_positions) * half);
  rope_sin_.resize(rope_cos_.size());
  for (size_t i = 0; i < half; ++i) {
    const double frequency = std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / config.rope_dim);
    for (int p = 0; p < config.max_positions; ++p) {
      rope_cos_[p * half + i] = static_cast<float>(std::cos(p * frequency));
      rope_sin_[p * half + i] = static_cast<float>(std::sin(p * frequency));
    }
  }

  kv_memory_ = Mapping(bytes_per_block() * config.num_blocks);
  const size_t element = config.half_kv ? sizeof(uint16_t) : sizeof(float);
  const size_t part = bytes_per_block() / config.layers / 2;
  for (int i = 0; i < config.layers; ++i) {
    uint8_t* base = kv_memory_.data() + 2 * part * i;
    layers_[i].kv = {base, base + part, bytes_per_block() / element, config.half_kv, config.kv_heads, config.head_dim};
  }
  for (int member = 0; member < pool_.size(); ++member) {
    scratch_.push_back({buffers_.allocate(linear_scratch_bytes(kRowBlock)), allocate_floats(kRowBlock * kGroup),
                        allocate_floats(kRowBlock * kGroup), allocate_floats(kTileQueries * config.head_dim)});
    samplers_.push_back(std::make_unique<Sampler>(kernels, config.vocab_size));
  }
}

size_t Model::bytes_per_block() const {
  return size_t{2} * config_.layers * config_.kv_heads * config_.head_dim * kBlockTokens *
         (config_.half_kv ? sizeof(uint16_t) : sizeof(float));
}

Matrix& Model::slot(MatrixRole role, int layer) {
  if (role == MatrixRole::kEmbedding) return embedding_;
  if (role == MatrixRole::kHead) return head_;
  require(layer >= 0 && layer < config_.layers, "no such layer: " + std::to_string(layer));
  Layer& l = layers_[layer];
  switch (role) {
    case MatrixRole::kQuery: return l.query;
    case MatrixRole::kKey: return l.key;
    case MatrixRole::kValue: return l.value;
    case MatrixRole::kAttentionOutput: return l.attention_output;
    case MatrixRole::kGate: return l.gate;
    case MatrixRole::kUp: return l.up;
    default: return l.down;
  }
}

void Model::set_matrix(MatrixRole role, int layer, StoredType type, int n, int k, const uint8_t* stored, size_t bytes) {
  const int q = config_.heads * config_.head_dim, kv = config_.kv_heads * config_.head_dim;
  int outputs = 0, inputs = config_.hidden;
  switch (role) {
    case MatrixRole::kEmbedding:
    case MatrixRole::kHead: outputs = config_.vocab_size; break;
    case MatrixRole::kQuery: outputs = q; break;
    case MatrixRole::kKey:
    case MatrixRole::kValue: outputs = kv; break;
    case MatrixRole::kAttentionOutput: outputs = config_.hidden, inputs = q; break;
    case MatrixRole::kGate:
    case MatrixRole::kUp: outputs = config_.intermediate; break;
    case MatrixRole::kDown: outputs = config_.hidden, inputs = config_.intermediate; break;
  }
  require(n == outputs && k == inputs, "a matrix of " + std::to_string(n) + " x " + std::to_string(k) +
                                           " where the model has " + std::to_string(outputs) + " x " +
                                           std::to_string(inputs));
  require(bytes == stored_bytes(type, n, k), "a matrix has " + std::to_string(bytes) + " bytes instead of " +
                                                 std::to_string(stored_bytes(type, n, k)));
  require(!ready_, "the model is already loaded");
  slot(role, layer) = pack(type, n, k, stored, arena_, pool_);
}

void Model::set_norm(NormRole role, int layer, const float* weight, size_t n) {
  require(n == static_cast<size_t>(config_.hidden), "a norm has " + std::to_string(n) + " weights instead of " +
                                                        std::to_string(config_.hidden));
  require(role == NormRole::kFinal || (layer >= 0 && layer < config_.layers), "no such layer");
  std::vector<float>& to = role == NormRole::kFinal       ? final_norm_
                           : role == NormRole::kAttention ? layers_[layer].attention_norm
                                                          : layers_[layer].feed_forward_norm;
  to.assign(weight, weight + n);
}

float* Model::allocate_floats(size_t n) { return reinterpret_cast<float*>(buffers_.allocate(n * sizeof(float))); }

// Rows as their readers want them: int8 where one is quantized, float32 where one is not.
Rows Model::allocate_rows(int rows, int k, std::initializer_list<const Matrix*> readers) {
  Rows out;
  out.k = k;
  const size_t values = static_cast<size_t>(rows) * k, groups = values / kGroup;
  for (const Matrix* reader : readers) {
    if (reader->quantized() && !out.q) {
      out.q = reinterpret_cast<int8_t*>(buffers_.allocate(values));
      out.scale = allocate_floats(groups);
      out.sum = allocate_floats(groups);
      out.code_sum = reinterpret_cast<int32_t*>(buffers_.allocate(groups * sizeof(int32_t)));
    }
    if (!reader->quantized() && !out.f) out.f = allocate_floats(values);
  }
  return out;
}

void Model::finish_loading() {
  require(!ready_, "the model is already loaded");
  require(embedding_.data && (config_.tied_embeddings || head_.data) && !final_norm_.empty(), "weights are missing");
  for (const Layer& l : layers_) {
    for (const Matrix* w : {&l.query, &l.key, &l.value, &l.attention_output, &l.gate, &l.up, &l.down})
      require(w->data != nullptr, "weights of a layer are missing");
    require(!l.attention_norm.empty() && !l.feed_forward_norm.empty(), "norms of a layer are missing");
  }
  // One set of buffers serves all layers, so each must suit the readers of every layer.
  Matrix quantized, dense;
  quantized.form = Form::kAffine4;
  const auto readers = [&](int k, int rows, auto... member) {
    bool any_quantized = false, any_dense = false;
    for (const Layer& l : layers_)
      for (const Matrix* w : {&(l.*member)...}) (w->quantized() ? any_quantized : any_dense) = true;
    if (any_quantized && any_dense) return allocate_rows(rows, k, {&quantized, &dense});
    return allocate_rows(rows, k, {any_quantized ? &quantized : &dense});
  };
  const int q = config_.heads * config_.head_dim, kv = config_.kv_heads * config_.head_dim, tokens = config_.max_tokens;
  normed_ = readers(config_.hidden, tokens, &Layer::query, &Layer::key, &Layer::value, &Layer::gate, &Layer::up);
  attended_ = readers(q, tokens, &Layer::attention_output);
  activated_ = readers(config_.intermediate, tokens, &Layer::down);
  head_in_ = allocate_rows(kLogitsChunk, config_.hidden, {&head()});
  x_ = allocate_floats(static_cast<size_t>(tokens) * config_.hidden);
  qkv_ = allocate_floats(static_cast<size_t>(tokens) * (q + 2 * kv));
  logits_ = allocate_floats(static_cast<size_t>(kLogitsChunk) * head().panels() * kPanel);
  ready_ = true;
}

void Model::check(const Batch& batch) const {
  require(ready_, "weights are missing");
  validate(batch, {config_.vocab_size, config_.num_blocks, config_.max_tokens, config_.max_positions});
}

StepResult Model::step(const Batch& batch) {
  check(batch);
  StepResult result;
  const size_t rows = batch.rows();
  result.token_ids.resize(rows);
  result.status.resize(rows);
  const int32_t asked = rows ? *std::max_element(batch.num_logprobs.data, batch.num_logprobs.data + rows) : -1;
  if (asked >= 0) {
    const float none = std::numeric_limits<float>::quiet_NaN();
    result.top = static_cast<size_t>(asked);
    result.logprobs.assign(rows, none);
    result.top_ids.assign(rows * result.top, -1);
    result.top_logprobs.assign(rows * result.top, none);
  }
  run(batch, [&](int member, int row, float* logits) { samplers_[member]->sample(batch, row, logits, result); });
  return result;
}

std::vector<float> Model::logits(const Batch& batch) {
  check(batch);
  const size_t vocab = config_.vocab_size;
  std::vector<float> all(batch.rows() * vocab);
  run(batch, [&](int, int row, const float* logits) { std::memcpy(&all[row * vocab], logits, vocab * sizeof(float)); });
  return all;
}

void Model::run(const Batch& batch, const std::function<void(int member, int row, float* logits)>& consume) {
  const std::vector<Tile> tiles = attention_tiles(batch);
  const int tokens = batch.tokens();
  const std::lock_guard<std::mutex> lock(turn_);
  pool_.run([&](int member) {
    copy_blocks(batch);
    embed(batch);
    for (const Layer& layer : layers_) {
      normalize(layer.attention_norm, tokens);
      project_qkv(layer, tokens, member);
      rotate_and_store(batch, layer, tiles);
      attend(batch, layer, tiles, member);
      project(layer.attention_output, attended_, tokens, x_, config_.hidden, true, member);
      normalize(layer.feed_forward_norm, tokens);
      feed_forward(layer, tokens, member);
      project(layer.down, activated_, tokens, x_, config_.hidden, true, member);
    }
    const int width = head().panels() * kPanel;
    for (int first = 0; first < batch.rows(); first += kLogitsChunk) {
      const int rows = std::min(kLogitsChunk, batch.rows() - first);
      pool_.for_each(rows, [&](int i) {
        const float* x = x_ + static_cast<size_t>(batch.logits_rows[first + i]) * config_.hidden;
        kernels_.rms_norm(x, final_norm_.data(), config_.norm_eps, head_in_, i);
      });
      project(head(), head_in_, rows, logits_, width, false, member);
      pool_.for_each(rows, [&](int i) { consume(member, first + i, logits_ + static_cast<size_t>(i) * width); });
    }
  });
}

void Model::copy_blocks(const Batch& batch) {
  if (batch.block_copies.empty()) return;
  pool_.for_each(1, [&](int) {  // in order: a copy's source may be the target of the one before
    for (size_t c = 0; c < batch.block_copies.size; c += 2)
      std::memmove(kv_memory_.data() + bytes_per_block() * batch.block_copies[c + 1],
                   kv_memory_.data() + bytes_per_block() * batch.block_copies[c], bytes_per_block());
  });
}

void Model::embed(const Batch& batch) {
  pool_.for_each(batch.tokens(), [&](int t) {
    kernels_.unpack_row(embedding_, batch.token_ids[t], x_ + static_cast<size_t>(t) * config_.hidden);
  });
}

void Model::normalize(const std::vector<float>& weight, int tokens) {
  pool_.for_each(tokens, [&](int t) {
    kernels_.rms_norm(x_ + static_cast<size_t>(t) * config_.hidden, weight.data(), config_.norm_eps, normed_, t);
  });
}

// A unit of a linear layer is an even number of panels: enough units that members even out, few enough that taking one
// costs nothing.
int Model::panels_per_unit(const Matrix& w) const {
  return std::max(2, w.panels() / (pool_.size() * 8) / 2 * 2);
}

void Model::linear_unit(const Matrix& w, const Rows& in, int rows, int unit, float* out, ptrdiff_t stride,
                        bool accumulate, int member) {
  const int step = panels_per_unit(w);
  const int begin = unit * step, end = std::min(begin + step, w.panels());
  for (int row = 0; row < rows; row += kRowBlock)
    kernels_.linear(w, in, row, std::min(kRowBlock, rows - row), begin, end,
                    out + row * stride + static_cast<ptrdiff_t>(begin) * kPanel, stride, accumulate,
                    scratch_[member].linear);
}

void Model::project(const Matrix& w, const Rows& in, int rows, float* out, ptrdiff_t stride, bool accumulate,
                    int member) {
  pool_.for_each(ceil_div(w.panels(), panels_per_unit(w)),
                 [&](int unit) { linear_unit(w, in, rows, unit, out, stride, accumulate, member); });
}

void Model::project_qkv(const Layer& layer, int tokens, int member) {
  const Matrix* parts[] = {&layer.query, &layer.key, &layer.value};
  int units[3];
  for (int i = 0; i < 3; ++i) units[i] = ceil_div(parts[i]->panels(), panels_per_unit(*parts[i]));
  pool_.for_each(units[0] + units[1] + units[2], [&](int unit) {
    float* out = qkv_;
    int part = 0;
    for (; unit >= units[part]; ++part) {
      unit -= units[part];
      out += parts[part]->n;
    }
    linear_unit(*parts[part], normed_, tokens, unit, out, qkv_width(), false, member);
  });
}

void Model::rotate_and_store(const Batch& batch, const Layer& layer, const std::vector<Tile>& tiles) {
  const int head_dim = config_.head_dim, q_width = config_.heads * head_dim, kv_width = config_.kv_heads * head_dim;
  const size_t half = static_cast<size_t>(config_.rope_dim) / 2;
  pool_.for_each(static_cast<int>(tiles.size()), [&](int unit) {
    const Tile& tile = tiles[unit];
    for (int t = tile.first_token; t < tile.first_token + tile.rows; ++t) {
      const int position = batch.positions[t];
      float* q = qkv_ + static_cast<size_t>(t) * qkv_width();
      float* k = q + q_width;
      const float* v = k + kv_width;
      const float* cos = &rope_cos_[position * half];
      const float* sin = &rope_sin_[position * half];
      kernels_.rope(q, config_.heads, head_dim, config_.rope_dim, cos, sin);
      kernels_.rope(k, config_.kv_heads, head_dim, config_.rope_dim, cos, sin);
      const int block = batch.block_table(tile.sequence)[position / kBlockTokens];
      for (int h = 0; h < config_.kv_heads; ++h)
        kernels_.store_kv(layer.kv, block, h, position % kBlockTokens, k + h * head_dim, v + h * head_dim);
    }
  });
}

std::vector<Model::Tile> Model::attention_tiles(const Batch& batch) const {
  const int most = kTileQueries / (config_.heads / config_.kv_heads);
  std::vector<Tile> tiles;
  for (int s = 0; s < batch.sequences(); ++s)
    for (int t = batch.query_start[s]; t < batch.query_start[s + 1]; t += most)
      tiles.push_back({s, t, std::min(most, batch.query_start[s + 1] - t)});
  return tiles;
}

void Model::attend(const Batch& batch, const Layer& layer, const std::vector<Tile>& tiles, int member) {
  const int head_dim = config_.head_dim, group = config_.heads / config_.kv_heads;
  const int num_tiles = static_cast<int>(tiles.size());
  float* out = scratch_[member].attention;
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  pool_.for_each(num_tiles * config_.kv_heads, [&](int unit) {
    // From the last tile back: the longest contexts first, so that members finish together.
    const Tile& tile = tiles[num_tiles - 1 - unit % num_tiles];
    const int kv_head = unit / num_tiles, column = kv_head * group * head_dim;
    const AttentionTile work{qkv_ + static_cast<size_t>(tile.first_token) * qkv_width() + column,
                             qkv_width(),
                             tile.rows,
                             group,
                             batch.positions[tile.first_token],
                             batch.block_table(tile.sequence),
                             kv_head,
                             scale};
    kernels_.attention(layer.kv, work, out, group * head_dim);
    for (int r = 0; r < tile.rows; ++r)
      kernels_.store_row(out + r * group * head_dim, group * head_dim, attended_, tile.first_token + r, column);
  });
}

// A unit is 32 outputs of gate and the same of up: together one group of the activations that `down` reads.
void Model::feed_forward(const Layer& layer, int tokens, int member) {
  const auto [scratch, gate, up, _] = scratch_[member];
  pool_.for_each(config_.intermediate / kGroup, [&](int unit) {
    for (int row = 0; row < tokens; row += kRowBlock) {
      const int rows = std::min(kRowBlock, tokens - row);
      kernels_.linear(layer.gate, normed_, row, rows, 2 * unit, 2 * unit + 2, gate, kGroup, false, scratch);
      kernels_.linear(layer.up, normed_, row, rows, 2 * unit, 2 * unit + 2, up, kGroup, false, scratch);
      for (int r = 0; r < rows; ++r) {
        kernels_.silu_mul(gate + r * kGroup, up + r * kGroup, kGroup, gate + r * kGroup);
        kernels_.store_row(gate + r * kGroup, kGroup, activated_, row + r, unit * kGroup);
      }
    }
  });
}

}  // namespace paceline
