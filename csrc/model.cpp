#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>

namespace paceline {

namespace {

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

}  // namespace

Model::Model(const ModelConfig& config, const Kernels& kernels)
    : config_(config), kernels_(kernels), pool_(config.threads), layers_(config.layers.size()) {
  require(!config.layers.empty() && config.vocab_size > 0 && config.hidden > 0 && config.intermediate > 0 &&
              config.max_positions > 0 && config.threads > 0,
          "a size of the model or the pool is not positive");
  require(config.kv_heads > 0 && config.heads > 0 && config.heads % config.kv_heads == 0 &&
              config.heads / config.kv_heads <= kMaxHeadGroup,
          "query heads must be 1 to 8 times the KV heads");
  require(config.head_dim % 16 == 0 && config.head_dim > 0 && config.head_dim <= kMaxHeadDim,
          "head_dim must be a multiple of 16 up to 256, not " + std::to_string(config.head_dim));
  require(config.num_blocks > 0 && config.max_tokens > 0, "the KV pool and the step need room");
  // So that no product below leaves its type.
  constexpr int kMostHeads = 1 << 10, kMostTokens = 1 << 20, kMostValues = 1 << 24;
  require(config.heads <= kMostHeads && config.max_tokens <= kMostTokens &&
              std::max({config.vocab_size, config.hidden, config.intermediate, config.max_positions}) <= kMostValues &&
              static_cast<size_t>(config.num_blocks) <= SIZE_MAX / bytes_per_block(),
          "a size of the model, the pool or the step is beyond all reason");
  require(config.hidden % kGroup == 0 && config.intermediate % kGroup == 0 && config.query_size() % kGroup == 0,
          "hidden, intermediate and query sizes must be multiples of 32");

  for (const RopeConfig& rope : config.ropes) {
    require(2 * rope.frequencies.size() <= static_cast<size_t>(config.head_dim), "more dimensions rotate than a head has");
    const size_t values = rope.frequencies.size() * config.max_tokens;
    ropes_.push_back({rope, allocate_floats(values), allocate_floats(values)});
  }

  kv_memory_ = Mapping(bytes_per_block() * config.num_blocks);
  const size_t layer_bytes = bytes_per_block() / layers_.size();
  for (size_t i = 0; i < layers_.size(); ++i) {
    layers_[i].config = config.layers[i];
    require(config.layers[i].rope < static_cast<int>(ropes_.size()) && config.layers[i].window >= 0,
            "a layer's rotation or window is out of range");
    KVLayer& kv = layers_[i].kv;
    kv.block_bytes = bytes_per_block();
    kv.type = config.kv_type;
    kv.kv_heads = config.kv_heads;
    kv.head_dim = config.head_dim;
    const size_t codes = kBlockTokens * config.kv_size() * kv_element_bytes(kv.type);
    kv.k = kv_memory_.data() + layer_bytes * i;
    kv.v = kv.k + codes;
    kv.k_scale = kv.v + codes;
    kv.v_scale = kv.k_scale + kBlockTokens * sizeof(uint16_t) * kv.groups() * kv.kv_heads;
  }
  for (int member = 0; member < pool_.size(); ++member) {
    const size_t gate = static_cast<size_t>(kRowBlock) * kMostTilePanels * kPanel;
    scratch_.push_back({buffers_.allocate(linear_scratch_bytes(kRowBlock)), allocate_floats(gate), allocate_floats(gate),
                        allocate_floats(kMostTileQueries * config.head_dim), allocate_floats(config.hidden)});
    samplers_.push_back(std::make_unique<Sampler>(kernels, config.vocab_size));
  }
}

size_t Model::bytes_per_block() const {
  const size_t groups = (config_.head_dim + kKVGroup - 1) / kKVGroup;
  const size_t scales = config_.kv_type == KVType::kInt8 ? config_.kv_heads * groups * sizeof(uint16_t) : 0;
  return 2 * layers_.size() * kBlockTokens * (config_.kv_size() * kv_element_bytes(config_.kv_type) + scales);
}

Model::LinearSlot Model::linear_slot(const std::string& name, int layer) {
  const int hidden = config_.hidden, inner = config_.intermediate, query = config_.query_size();
  if (layer < 0) {
    if (name == "token_embd") return {&embedding_, config_.vocab_size, hidden};
    if (name == "output") return {&head_, config_.vocab_size, hidden};
    return {};
  }
  Layer& l = layers_.at(layer);
  if (name == "attn_q") return {&l.query, query, hidden};
  if (name == "attn_k") return {&l.key, config_.kv_size(), hidden};
  if (name == "attn_v") return {&l.value, config_.kv_size(), hidden};
  if (name == "attn_output") return {&l.attention_output, hidden, query};
  if (name == "ffn_gate") return {&l.gate, inner, hidden};
  if (name == "ffn_up") return {&l.up, inner, hidden};
  if (name == "ffn_down") return {&l.down, hidden, inner};
  return {};
}

Model::Norm* Model::norm_slot(const std::string& name, int layer) {
  if (layer < 0) return name == "output_norm" ? &final_norm_ : nullptr;
  static const std::map<std::string, Norm Layer::*> norms = {
      {"attn_norm", &Layer::attention_norm},
      {"ffn_norm", &Layer::feed_forward_norm},
      {"attn_q_norm", &Layer::query_norm},
      {"attn_k_norm", &Layer::key_norm},
      {"post_attention_norm", &Layer::post_attention_norm},
      {"post_ffw_norm", &Layer::post_feed_forward_norm},
  };
  const auto found = norms.find(name);
  return found == norms.end() ? nullptr : &(layers_.at(layer).*found->second);
}

void Model::set_matrix(const std::string& name, int layer, StoredType type, int n, int k, const uint8_t* stored,
                       size_t bytes, StoredType kept_as) {
  require(!ready_, "the model is already loaded");
  const LinearSlot slot = linear_slot(name, layer);
  require(slot.linear != nullptr, "there is no matrix " + name);
  require(n == slot.outputs && k == slot.inputs,
          name + " has " + std::to_string(n) + " x " + std::to_string(k) + " weights where the model has " +
              std::to_string(slot.outputs) + " x " + std::to_string(slot.inputs));
  require(bytes == stored_bytes(type, n, k), name + " has " + std::to_string(bytes) + " bytes instead of " +
                                                 std::to_string(stored_bytes(type, n, k)));
  slot.linear->weight = pack(type, n, k, stored, kept_as, arena_, pool_);
}

void Model::set_bias(const std::string& name, int layer, const float* values, size_t n) {
  require(!ready_, "the model is already loaded");
  if (Norm* norm = norm_slot(name, layer)) {
    norm->bias.assign(values, values + n);
    return;
  }
  const LinearSlot slot = linear_slot(name, layer);
  require(slot.linear != nullptr && n == static_cast<size_t>(slot.outputs),
          "a bias of " + std::to_string(n) + " values does not fit " + name);
  slot.linear->bias.assign(values, values + n);
  slot.linear->bias.resize((n + kPanel - 1) / kPanel * kPanel);
}

void Model::set_norm(const std::string& name, int layer, const float* values, size_t n) {
  require(!ready_, "the model is already loaded");
  Norm* norm = norm_slot(name, layer);
  require(norm != nullptr, "there is no norm " + name);
  norm->weight.assign(values, values + n);
}

void Model::set_positions(const float* values, size_t n) {
  require(!ready_, "the model is already loaded");
  require(n % config_.hidden == 0 && n / config_.hidden >= static_cast<size_t>(config_.max_positions),
          "fewer position embeddings than positions");
  positions_.assign(values, values + static_cast<size_t>(config_.max_positions) * config_.hidden);
}

float* Model::allocate_floats(size_t n) { return reinterpret_cast<float*>(buffers_.allocate(n * sizeof(float))); }

// Rows as their readers want them: int8 where one is quantized, float32 where one is not.
Rows Model::allocate_rows(int rows, int k, const std::vector<const Matrix*>& readers) {
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
    if (runs_per_group(form_of(reader->type)) > 1 && !out.low_sum)
      out.low_sum = reinterpret_cast<int32_t*>(buffers_.allocate(groups * sizeof(int32_t)));
    if (!reader->quantized() && !out.f) out.f = allocate_floats(values);
  }
  return out;
}

// One set of buffers serves all layers, so each must suit the readers of every layer.
Rows Model::rows_for(std::initializer_list<Linear Layer::*> readers, int k) {
  std::vector<const Matrix*> all;
  for (const Layer& l : layers_)
    for (const auto reader : readers)
      if ((l.*reader).weight.data) all.push_back(&(l.*reader).weight);
  return allocate_rows(std::max(config_.max_tokens, pool_.size()), k, all);  // normalize has rows for each member
}

void Model::check_norm(const Norm& norm, const char* name, std::initializer_list<int> sizes) const {
  if (!norm) return require(norm.bias.empty(), std::string(name) + " has a bias but no weight");
  const size_t n = norm.weight.size();
  require(std::find(sizes.begin(), sizes.end(), static_cast<int>(n)) != sizes.end(),
          std::string(name) + " has " + std::to_string(n) + " weights instead of " + std::to_string(*sizes.begin()));
  require(norm.bias.empty() || norm.bias.size() == n, std::string(name) + " has a bias of another size");
}

void Model::finish_loading() {
  require(!ready_, "the model is already loaded");
  require(embedding_.weight.data && (config_.tied_embeddings || head_.weight.data) && final_norm_,
          "weights are missing");
  const int hidden = config_.hidden, head_dim = config_.head_dim;
  check_norm(final_norm_, "output_norm", {hidden});
  bool branches = config_.residual_scale != 1.0;
  for (const Layer& l : layers_) {
    for (const Linear* linear : {&l.query, &l.key, &l.value, &l.attention_output, &l.up, &l.down})
      require(linear->weight.data != nullptr, "weights of a layer are missing");
    check_norm(l.attention_norm, "attn_norm", {hidden});
    check_norm(l.feed_forward_norm, "ffn_norm", {hidden});
    check_norm(l.post_attention_norm, "post_attention_norm", {hidden});
    check_norm(l.post_feed_forward_norm, "post_ffw_norm", {hidden});
    check_norm(l.query_norm, "attn_q_norm", {head_dim, config_.query_size()});
    check_norm(l.key_norm, "attn_k_norm", {head_dim, config_.kv_size()});
    branches = branches || l.post_attention_norm || l.post_feed_forward_norm;
  }
  const size_t tokens = config_.max_tokens;
  normed_ = rows_for({&Layer::query, &Layer::key, &Layer::value, &Layer::gate, &Layer::up}, hidden);
  attended_ = rows_for({&Layer::attention_output}, config_.query_size());
  activated_ = rows_for({&Layer::down}, config_.intermediate);
  head_in_ = allocate_rows(kLogitsChunk, hidden, {&head()});
  x_ = allocate_floats(tokens * hidden);
  qkv_ = allocate_floats(tokens * qkv_width());
  if (branches) branch_ = allocate_floats(tokens * hidden);
  if (group_width() % kGroup) attention_ = allocate_floats(tokens * config_.query_size());
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

}  // namespace paceline
