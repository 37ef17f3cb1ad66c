// The forward pass: what all members of the pool compute together, layer by layer.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "model.hpp"

namespace paceline {

namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

void Model::run(const Batch& batch, const std::function<void(int member, int row, float* logits)>& consume) {
  const std::vector<Tile> tiles = attention_tiles(batch), stretches = stored_before_attention(batch, tiles);
  const int tokens = batch.tokens();
  const std::lock_guard<std::mutex> lock(turn_);
  pool_.run([&](int member) {
    copy_blocks(batch);
    embed(batch);
    for (const Layer& layer : layers_) {
      normalize(layer.attention_norm, tokens, member);
      project_qkv(layer, tokens, member);
      rotate_and_store(batch, layer, stretches);
      attend(batch, layer, tiles, member);
      add_to_stream(layer.attention_output, attended_, layer.post_attention_norm, tokens, member);
      if (!config_.parallel_residual) normalize(layer.feed_forward_norm, tokens, member);
      feed_forward(layer, tokens, member);
      add_to_stream(layer.down, activated_, layer.post_feed_forward_norm, tokens, member);
    }
    const int width = head().panels() * kPanel;
    for (int first = 0; first < batch.rows(); first += kLogitsChunk) {
      const int rows = std::min(kLogitsChunk, batch.rows() - first);
      pool_.for_each(rows, [&](int i) {
        const float* x = x_ + static_cast<size_t>(batch.logits_rows[first + i]) * config_.hidden;
        apply(final_norm_, x, config_.hidden, scratch_[member].normed);
        kernels_.store_row(scratch_[member].normed, config_.hidden, head_in_, i, 0);
      });
      project(head(), head_.bias, head_in_, rows, logits_, width, false, member);
      pool_.for_each(rows, [&](int i) {
        float* logits = logits_ + static_cast<size_t>(i) * width;
        finish_logits(logits, width);
        consume(member, first + i, logits);
      });
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

// Starts the residual stream, and works out the step's rotations.
void Model::embed(const Batch& batch) {
  const int hidden = config_.hidden;
  const float scale = static_cast<float>(config_.embedding_scale);
  pool_.for_each(batch.tokens(), [&](int t) {
    float* x = x_ + static_cast<size_t>(t) * hidden;
    const int position = batch.positions[t];
    kernels_.unpack_row(embedding_.weight, batch.token_ids[t], x);
    for (int i = 0; i < hidden; ++i) x[i] *= scale;
    if (!positions_.empty()) kernels_.add_scaled(&positions_[static_cast<size_t>(position) * hidden], 1.0f, hidden, x);
    for (const Rope& rope : ropes_) {
      for (int i = 0; i < rope.half(); ++i) {
        const double angle = position * rope.config.frequencies[i];
        rope.cos[t * rope.half() + i] = static_cast<float>(std::cos(angle) * rope.config.magnitude);
        rope.sin[t * rope.half() + i] = static_cast<float>(std::sin(angle) * rope.config.magnitude);
      }
    }
  });
}

void Model::apply(const Norm& norm, const float* x, int n, float* out) const {
  kernels_.norm(x, norm.weight.data(), norm.bias.empty() ? nullptr : norm.bias.data(),
                static_cast<float>(config_.norm_eps), n, out);
}

void Model::normalize(const Norm& norm, int tokens, int member) {
  if (!own_row(tokens)) pool_.for_each(tokens, [&](int t) { normalize_row(norm, t, t, member); });
}

void Model::normalize_row(const Norm& norm, int token, int row, int member) {
  const float* x = x_ + static_cast<size_t>(token) * config_.hidden;
  float* normed = scratch_[member].normed;
  if (norm) apply(norm, x, config_.hidden, normed);
  kernels_.store_row(norm ? normed : x, config_.hidden, normed_, row, 0);
}

// A linear layer's panels in units: whole ones, as many for every member, and the rest in twos, so that members finish
// together. A whole unit is what a kernel's tile is wide, or more where there are very many. Members that keep pace take
// units in turn: each then goes through panels that lie one after another in memory.
class Model::PanelUnits {
 public:
  PanelUnits(int panels, int members)
      : panels_(panels),
        members_(members),
        step_(std::max(kMostTilePanels, panels / (32 * members) / kMostTilePanels * kMostTilePanels)),
        turns_(panels / step_ / members) {}

  int count() const { return whole() + ceil_div(panels_ - whole() * step_, 2); }
  int begin(int unit) const {
    if (unit < whole()) return (unit % members_ * turns_ + unit / members_) * step_;
    return whole() * step_ + 2 * (unit - whole());
  }
  int end(int unit) const { return unit < whole() ? begin(unit) + step_ : std::min(begin(unit) + 2, panels_); }

 private:
  int whole() const { return turns_ * members_; }

  const int panels_, members_, step_, turns_;
};

Model::PanelUnits Model::units(const Matrix& w) const { return PanelUnits(w.panels(), pool_.size()); }

void Model::linear_unit(const Matrix& w, const std::vector<float>& bias, const Rows& in, int first, int rows, int unit,
                        float* out, ptrdiff_t stride, bool accumulate, int member) {
  const int begin = units(w).begin(unit);
  linear_panels(w, bias, in, first, rows, begin, units(w).end(unit), out + static_cast<ptrdiff_t>(begin) * kPanel, stride,
                accumulate, member);
}

void Model::project(const Matrix& w, const std::vector<float>& bias, const Rows& in, int rows, float* out,
                    ptrdiff_t stride, bool accumulate, int member) {
  pool_.for_each(units(w).count(),
                 [&](int unit) { linear_unit(w, bias, in, 0, rows, unit, out, stride, accumulate, member); });
}

// Rows first .. first + rows of w . in + bias, for some panels; `out` is where the first of both goes.
void Model::linear_panels(const Matrix& w, const std::vector<float>& bias, const Rows& in, int first, int rows,
                          int begin, int end, float* out, ptrdiff_t stride, bool accumulate, int member) {
  for (int row = 0; row < rows; row += kRowBlock) {
    const int count = std::min(kRowBlock, rows - row);
    float* to = out + row * stride;
    kernels_.linear(w, in, first + row, count, begin, end, to, stride, accumulate, scratch_[member].linear);
    if (bias.empty()) continue;
    for (int r = 0; r < count; ++r)
      kernels_.add_scaled(&bias[static_cast<size_t>(begin) * kPanel], 1.0f, (end - begin) * kPanel, to + r * stride);
  }
}

void Model::project_qkv(const Layer& layer, int tokens, int member) {
  const int row = own_row(tokens) ? member : 0;
  const auto prepare = [&] {
    if (own_row(tokens)) normalize_row(layer.attention_norm, 0, row, member);
  };
  const Linear* parts[] = {&layer.query, &layer.key, &layer.value};
  int counts[3];
  for (int i = 0; i < 3; ++i) counts[i] = units(parts[i]->weight).count();
  pool_.for_each(counts[0] + counts[1] + counts[2], prepare, [&](int unit) {
    float* out = qkv_;
    int part = 0;
    for (; unit >= counts[part]; ++part) {
      unit -= counts[part];
      out += parts[part]->weight.n;
    }
    linear_unit(parts[part]->weight, parts[part]->bias, normed_, row, tokens, unit, out, qkv_width(), false, member);
  });
}

// QK-norm is over one head or over all, as its weight is wide.
void Model::normalize_heads(const Norm& norm, int size, float* x) const {
  const int width = static_cast<int>(norm.weight.size());
  for (int at = 0; norm && at < size; at += width) apply(norm, x + at, width, x + at);
}

void Model::rotate_and_store(const Batch& batch, const Layer& layer, const std::vector<Tile>& stretches) {
  if (wide(layer.query_norm) || wide(layer.key_norm)) {
    pool_.for_each(batch.tokens(), [&](int t) {
      float* q = qkv_ + static_cast<size_t>(t) * qkv_width();
      if (wide(layer.query_norm)) normalize_heads(layer.query_norm, config_.query_size(), q);
      if (wide(layer.key_norm)) normalize_heads(layer.key_norm, config_.kv_size(), q + config_.query_size());
    });
  }
  const int heads = config_.kv_heads;
  pool_.for_each(static_cast<int>(stretches.size()) * heads,
                 [&](int unit) { rotate_and_store_head(batch, layer, stretches[unit / heads], unit % heads); });
}

void Model::rotate_and_store_head(const Batch& batch, const Layer& layer, const Tile& tile, int kv_head) {
  const int head_dim = config_.head_dim;
  const Rope* rope = layer.config.rope < 0 ? nullptr : &ropes_[layer.config.rope];
  for (int t = tile.first_token; t < tile.first_token + tile.rows; ++t) {
    const int position = batch.positions[t];
    float* heads = qkv_ + static_cast<size_t>(t) * qkv_width();
    float* q = heads + kv_head * group_width();
    float* k = heads + config_.query_size() + kv_head * head_dim;
    if (!wide(layer.query_norm)) normalize_heads(layer.query_norm, group_width(), q);
    if (!wide(layer.key_norm)) normalize_heads(layer.key_norm, head_dim, k);
    if (rope) {
      const float *cos = rope->cos + t * rope->half(), *sin = rope->sin + t * rope->half();
      kernels_.rope(q, config_.heads / config_.kv_heads, head_dim, 2 * rope->half(), cos, sin);
      kernels_.rope(k, 1, head_dim, 2 * rope->half(), cos, sin);
    }
    const int block = batch.block_table(tile.sequence)[position / kBlockTokens];
    kernels_.store_kv(layer.kv, block, kv_head, position % kBlockTokens, k, k + config_.kv_size());
  }
}

std::vector<Model::Tile> Model::attention_tiles(const Batch& batch) const {
  const int most = std::max(1, kernels_.tile_queries / (config_.heads / config_.kv_heads));
  std::vector<Tile> tiles;
  for (int s = 0; s < batch.sequences(); ++s)
    for (int t = batch.query_start[s]; t < batch.query_start[s + 1]; t += most)
      tiles.push_back({s, t, std::min(most, batch.query_start[s + 1] - t)});
  return tiles;
}

bool Model::is_whole_sequence(const Batch& batch, const Tile& tile) {
  return tile.rows == batch.query_start[tile.sequence + 1] - batch.query_start[tile.sequence];
}

// What several tiles read must be stored before any of them attends: cut by KV block, so that one member fills a block's
// cache lines. A tile that is all of its sequence is left to attend, for no other tile reads what it stores.
std::vector<Model::Tile> Model::stored_before_attention(const Batch& batch, const std::vector<Tile>& tiles) {
  std::vector<Tile> stretches;
  for (const Tile& tile : tiles) {
    if (is_whole_sequence(batch, tile)) continue;
    const int end = tile.first_token + tile.rows;
    for (int token = tile.first_token; token < end;) {
      const int rows = std::min(end - token, kBlockTokens - batch.positions[token] % kBlockTokens);
      const bool goes_on = token > batch.query_start[tile.sequence] && batch.positions[token] % kBlockTokens != 0;
      if (goes_on) stretches.back().rows += rows;
      else stretches.push_back({tile.sequence, token, rows});
      token += rows;
    }
  }
  return stretches;
}

AttentionTile Model::attention_tile(const Batch& batch, const Layer& layer, const Tile& tile, int kv_head) const {
  return {
      .q = qkv_ + static_cast<size_t>(tile.first_token) * qkv_width() + kv_head * group_width(),
      .q_stride = qkv_width(),
      .rows = tile.rows,
      .heads = config_.heads / config_.kv_heads,
      .position = batch.positions[tile.first_token],
      .window = layer.config.window ? layer.config.window : std::numeric_limits<int>::max(),
      .block_table = batch.block_table(tile.sequence),
      .kv_head = kv_head,
      .scale = static_cast<float>(config_.attention_scale),
      .softcap = static_cast<float>(config_.attention_softcap),
      .next = nullptr,
  };
}

void Model::attend(const Batch& batch, const Layer& layer, const std::vector<Tile>& tiles, int member) {
  const int width = group_width(), num_tiles = static_cast<int>(tiles.size()), units = num_tiles * config_.kv_heads;
  // From the last tile back: the longest contexts first, so that members finish together.
  const auto tile_of = [&](int unit) { return tiles[num_tiles - 1 - unit % num_tiles]; };
  float* out = scratch_[member].attention;
  pool_.for_each(units, [&](int unit) {
    const Tile tile = tile_of(unit);
    const int kv_head = unit / num_tiles, column = kv_head * width;
    AttentionTile work = attention_tile(batch, layer, tile, kv_head), next;
    if (is_whole_sequence(batch, tile)) {
      rotate_and_store_head(batch, layer, tile, kv_head);
      const int likely_next = unit + pool_.size();
      if (likely_next < units) {
        next = attention_tile(batch, layer, tile_of(likely_next), likely_next / num_tiles);
        work.next = &next;
      }
    }
    if (attention_) {
      kernels_.attention(layer.kv, work, attention_ + static_cast<size_t>(tile.first_token) * config_.query_size() + column,
                         config_.query_size());
      return;
    }
    kernels_.attention(layer.kv, work, out, width);
    for (int r = 0; r < tile.rows; ++r)
      kernels_.store_row(out + r * width, width, attended_, tile.first_token + r, column);
  });
  if (!attention_) return;
  pool_.for_each(batch.tokens(), [&](int t) {
    kernels_.store_row(attention_ + static_cast<size_t>(t) * config_.query_size(), config_.query_size(), attended_, t, 0);
  });
}

// A unit's outputs of gate and the same of up are together some groups of the activations that `down` reads.
void Model::feed_forward(const Layer& layer, int tokens, int member) {
  const int first_row = own_row(tokens) ? member : 0;
  const auto prepare = [&] {
    if (own_row(tokens)) normalize_row(layer.feed_forward_norm, 0, first_row, member);
  };
  const PanelUnits shares = units(layer.up.weight);
  pool_.for_each(shares.count(), prepare, [&](int unit) {
    for (int begin = shares.begin(unit), end = shares.end(unit); begin < end; begin += kMostTilePanels)
      feed_forward_panels(layer, first_row, tokens, begin, std::min(begin + kMostTilePanels, end), member);
  });
}

void Model::feed_forward_panels(const Layer& layer, int first_row, int tokens, int begin, int end, int member) {
  float *gate = scratch_[member].gate, *up = scratch_[member].up;
  const bool gated = layer.gate.weight.data != nullptr;
  const Linear& activated = gated ? layer.gate : layer.up;
  const int width = (end - begin) * kPanel;
  for (int row = 0; row < tokens; row += kRowBlock) {
    const int rows = std::min(kRowBlock, tokens - row), in = first_row + row;
    linear_panels(activated.weight, activated.bias, normed_, in, rows, begin, end, gate, width, false, member);
    if (gated) linear_panels(layer.up.weight, layer.up.bias, normed_, in, rows, begin, end, up, width, false, member);
    for (int r = 0; r < rows; ++r) {
      float* values = gate + r * width;
      kernels_.activate(config_.activation, values, gated ? up + r * width : nullptr, width, values);
      kernels_.store_row(values, width, activated_, row + r, begin * kPanel);
    }
  }
}

void Model::add_to_stream(const Linear& linear, const Rows& in, const Norm& norm, int tokens, int member) {
  const int hidden = config_.hidden;
  const float scale = static_cast<float>(config_.residual_scale);
  if (!norm && scale == 1.0f) {
    project(linear.weight, linear.bias, in, tokens, x_, hidden, true, member);
    return;
  }
  project(linear.weight, linear.bias, in, tokens, branch_, hidden, false, member);
  pool_.for_each(tokens, [&](int t) {
    float* branch = branch_ + static_cast<size_t>(t) * hidden;
    if (norm) apply(norm, branch, hidden, branch);
    kernels_.add_scaled(branch, scale, hidden, x_ + static_cast<size_t>(t) * hidden);
  });
}

void Model::finish_logits(float* logits, int width) const {
  const float scale = static_cast<float>(config_.logits_scale), cap = static_cast<float>(config_.logits_softcap);
  if (scale != 1.0f)
    for (int i = 0; i < width; ++i) logits[i] *= scale;
  if (cap > 0.0f) kernels_.softcap(cap, width, logits);
}

}  // namespace paceline
