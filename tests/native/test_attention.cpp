// The KV cache and attention over it, against softmax in double.
#include <limits>

#include "half.hpp"
#include "memory.hpp"
#include "testing.hpp"

namespace paceline::testing {

namespace {

// A layer's cache by itself: `blocks` blocks, and the last tokens' order in them scattered by `table`.
struct Cache {
  Cache(KVType type, int kv_heads, int head_dim, int blocks)
      : memory(static_cast<size_t>(blocks) * bytes_per_block(type, kv_heads, head_dim)) {
    const size_t codes = static_cast<size_t>(kBlockTokens) * kv_heads * head_dim * kv_element_bytes(type);
    kv.type = type;
    kv.kv_heads = kv_heads;
    kv.head_dim = head_dim;
    kv.block_bytes = bytes_per_block(type, kv_heads, head_dim);
    kv.k = memory.data();
    kv.v = kv.k + codes;
    kv.k_scale = kv.v + codes;
    kv.v_scale = kv.k_scale + sizeof(uint16_t) * kBlockTokens * kv_heads * kv.groups();
    for (int i = 0; i < blocks; ++i) table.push_back((i * 5 + 3) % blocks);
  }
  static size_t bytes_per_block(KVType type, int kv_heads, int head_dim) {
    const int groups = (head_dim + kKVGroup - 1) / kKVGroup;
    const size_t scales = type == KVType::kInt8 ? sizeof(uint16_t) * groups : 0;
    return 2 * static_cast<size_t>(kBlockTokens) * kv_heads * (head_dim * kv_element_bytes(type) + scales);
  }

  double read(const uint8_t* values, const uint8_t* scales, int token, int kv_head, int d, bool dimension_major) const {
    const size_t slot = token % kBlockTokens, head = static_cast<size_t>(kv_head) * kv.head_dim * kBlockTokens;
    const size_t at = head + (dimension_major ? d * size_t{kBlockTokens} + slot : slot * kv.head_dim + d);
    const size_t block = table[token / kBlockTokens] * kv.block_bytes;
    const uint8_t* base = values + block;
    if (kv.type == KVType::kF32) return reinterpret_cast<const float*>(base)[at];
    if (kv.type == KVType::kF16) return half_to_float(reinterpret_cast<const uint16_t*>(base)[at]);
    const size_t group = (static_cast<size_t>(kv_head) * kv.groups() + d / kKVGroup) * kBlockTokens + slot;
    return reinterpret_cast<const int8_t*>(base)[at] *
           static_cast<double>(half_to_float(reinterpret_cast<const uint16_t*>(scales + block)[group]));
  }
  double key(int token, int kv_head, int d) const { return read(kv.k, kv.k_scale, token, kv_head, d, true); }
  double value(int token, int kv_head, int d) const { return read(kv.v, kv.v_scale, token, kv_head, d, false); }

  Mapping memory;
  KVLayer kv;
  std::vector<int32_t> table;
};

constexpr int kHeads = 2;  // KV heads
constexpr int kTokens = 600;  // three partitions of 256
const char* const kTypeNames[] = {"f32", "f16", "int8"};
constexpr KVType kTypes[] = {KVType::kF32, KVType::kF16, KVType::kInt8};

Cache filled(const Kernels& kernels, KVType type, int head_dim, Random& random) {
  Cache cache(type, kHeads, head_dim, kTokens / kBlockTokens + 1);
  for (int token = 0; token < kTokens; ++token) {
    for (int head = 0; head < kHeads; ++head) {
      const std::vector<float> k = normals(random, head_dim), v = normals(random, head_dim);
      kernels.store_kv(cache.kv, cache.table[token / kBlockTokens], head, token % kBlockTokens, k.data(), v.data());
      std::vector<float> read_k, read_v;
      for (int d = 0; d < head_dim; ++d) {
        read_k.push_back(static_cast<float>(cache.key(token, head, d)));
        read_v.push_back(static_cast<float>(cache.value(token, head, d)));
      }
      const double tolerance = type == KVType::kF32 ? 0 : type == KVType::kF16 ? 5e-4 : 0.5 / 127 + 1e-3;
      require_close(read_k, {k.begin(), k.end()}, tolerance, "a stored key");
      require_close(read_v, {v.begin(), v.end()}, tolerance, "a stored value");
    }
  }
  return cache;
}

// What one query head gets.
std::vector<double> attended(const Cache& cache, const AttentionTile& tile, int row, int head) {
  const int head_dim = cache.kv.head_dim, last = tile.position + row;
  const float* q = tile.q + row * tile.q_stride + head * head_dim;
  std::vector<double> scores, out(head_dim);
  const int first = std::max(0, last < tile.window ? 0 : last + 1 - tile.window);
  double highest = -std::numeric_limits<double>::infinity(), total = 0;
  for (int token = first; token <= last; ++token) {
    double score = 0;
    for (int d = 0; d < head_dim; ++d) score += q[d] * cache.key(token, tile.kv_head, d);
    score *= tile.scale;
    if (tile.softcap > 0) score = tile.softcap * std::tanh(score / tile.softcap);
    scores.push_back(score);
    highest = std::max(highest, score);
  }
  for (double& score : scores) total += score = std::exp(score - highest);
  for (int token = first; token <= last; ++token)
    for (int d = 0; d < head_dim; ++d)
      out[d] += scores[token - first] / total * cache.value(token, tile.kv_head, d);
  return out;
}

struct Case {
  int head_dim, heads, rows, position;
  int window = std::numeric_limits<int>::max();
  float softcap = 0;
};

// One row and several, from the first token to the third partition, ends of blocks and windows within and across tiles.
constexpr Case kCases[] = {
    {64, 3, 1, 0},         {64, 3, 1, 31},           {64, 3, 1, 255},       {64, 3, 1, 256},
    {64, 3, 1, 599},       {64, 3, 2, 254},          {64, 1, 6, 510},       {32, 1, 3, 20},
    {80, 2, 3, 300},       {256, 4, 1, 400},         {128, 8, 1, 290},      {48, 6, 1, 100, 45},
    {64, 3, 2, 300, 45},   {64, 1, 6, 253, 2},       {64, 3, 1, 590, 1},    {96, 1, 6, 520, 300, 1.5f},
    {64, 3, 1, 400, std::numeric_limits<int>::max(), 50.0f},
};

void test_attention(const Kernels& kernels) {
  Random random(1);
  for (const KVType type : kTypes) {
    for (const Case& c : kCases) {
      const Cache cache = filled(kernels, type, c.head_dim, random);
      const ptrdiff_t width = c.heads * c.head_dim;
      const std::vector<float> q = normals(random, c.rows * width, 2);
      const AttentionTile next{q.data(), width, 1, c.heads, c.position, c.window, cache.table.data(), 0, 1, 0, nullptr};
      const AttentionTile tile{q.data(), width, c.rows, c.heads, c.position, c.window, cache.table.data(), 1,
                               1 / std::sqrt(static_cast<float>(c.head_dim)), c.softcap, &next};
      std::vector<float> out(c.rows * width);
      kernels.attention(cache.kv, tile, out.data(), width);
      std::vector<double> expected;
      for (int row = 0; row < c.rows; ++row) {
        for (int head = 0; head < c.heads; ++head) {
          const std::vector<double> one = attended(cache, tile, row, head);
          expected.insert(expected.end(), one.begin(), one.end());
        }
      }
      require_close(out, expected, 1e-5,
                    std::string(kTypeNames[static_cast<int>(type)]) + ", head_dim " + std::to_string(c.head_dim) +
                        ", position " + std::to_string(c.position));
    }
  }
}
const Listed attention("attention over every type of cache", test_attention);

// What was there before must not be seen: 0 times NaN is NaN.
void test_hidden(const Kernels& kernels) {
  Random random(2);
  constexpr int kDim = 64;
  for (const KVType type : kTypes) {
    const Cache clean(type, kHeads, kDim, 4), dirty(type, kHeads, kDim, 4);
    std::fill_n(dirty.memory.data(), dirty.memory.bytes(), uint8_t{0xff});  // NaN in every float type
    for (const Cache* cache : {&clean, &dirty}) {
      Random same(3);
      for (int token = 0; token < 40; ++token) {
        const std::vector<float> k = normals(same, kDim), v = normals(same, kDim);
        kernels.store_kv(cache->kv, cache->table[token / kBlockTokens], 0, token % kBlockTokens, k.data(), v.data());
      }
    }
    const std::vector<float> q = normals(random, 2 * kDim);
    std::vector<float> got[2] = {std::vector<float>(2 * kDim), std::vector<float>(2 * kDim)};
    for (int i = 0; i < 2; ++i) {
      const Cache& cache = i == 0 ? clean : dirty;
      const AttentionTile tile{q.data(), kDim, 2, 1, 38, std::numeric_limits<int>::max(), cache.table.data(), 0, 0.125f, 0, nullptr};
      kernels.attention(cache.kv, tile, got[i].data(), kDim);
    }
    require(got[0] == got[1], std::string(kTypeNames[static_cast<int>(type)]) + ": tokens that come later are seen");
  }
}
const Listed hidden("what a block held before is never seen", test_hidden);

}  // namespace

}  // namespace paceline::testing
