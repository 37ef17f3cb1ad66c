// Attention over the paged KV cache. Included by kernels.inl.
//
// Positions are walked in partitions of kPartition tokens aligned to absolute positions. Within one, all scores are
// computed, then their maximum, then exp and the weighted sum of V token by token; partitions are merged in ascending
// order. A query's result depends on what it may see alone: the scores of other tokens are masked, their values never
// touched (0 times NaN is NaN), and a partition of which it sees nothing is left out.

template <KVType kType>
inline F32 load_kv(const uint8_t* block, size_t at) {
  if constexpr (kType == KVType::kF16) return load_half(reinterpret_cast<const uint16_t*>(block) + at);
  if constexpr (kType == KVType::kInt8) return load_int8(reinterpret_cast<const int8_t*>(block) + at);
  return load(reinterpret_cast<const float*>(block) + at);
}

template <KVType kType, int kQueries>
struct Attention {
  static_assert(kQueries <= 16);
  const KVLayer& kv;
  const AttentionTile& tile;
  const float* query[kQueries];
  int first[kQueries];  // position that a query sees first, and its own, which it sees last
  int last[kQueries];
  alignas(64) float weights[kQueries][kPartition];  // scores, then exp(score - max)
  alignas(64) float sums[kQueries][kMaxHeadDim];    // weighted V so far, relative to running_max
  // Of each query, a vector's worth: the partition's maximum and sum, those of all so far, and the factors of their merge,
  // for what was and for what comes.
  alignas(64) float top[16] = {}, total[16] = {}, running_max[16] = {}, running_sum[16] = {}, keep[16], take[16];

  Attention(const KVLayer& layer, const AttentionTile& t) : kv(layer), tile(t) {
    for (int i = 0; i < kQueries; ++i) {
      query[i] = t.q + (i / t.heads) * t.q_stride + (i % t.heads) * kv.head_dim;
      last[i] = t.position + i / t.heads;
      first[i] = last[i] < t.window ? 0 : last[i] + 1 - t.window;
      running_max[i] = -__builtin_inff();
      running_sum[i] = 0.0f;
      for (int d = 0; d < kv.head_dim; ++d) sums[i][d] = 0.0f;
    }
  }

  bool sees_partition(int i, int begin) const { return last[i] >= begin && first[i] < begin + kPartition; }

  size_t block(int token) const {
    return static_cast<size_t>(tile.block_table[token / kBlockTokens]) * kv.block_bytes;
  }
  size_t head() const { return static_cast<size_t>(tile.kv_head) * kv.head_dim * kBlockTokens; }
  // Scales of 32 dimensions from d on, of the block's 32 tokens.
  const uint16_t* scales(const uint8_t* base, int token, int d) const {
    const size_t group = static_cast<size_t>(tile.kv_head) * kv.groups() + d / kKVGroup;
    return reinterpret_cast<const uint16_t*>(base + block(token)) + group * kBlockTokens;
  }

  // Bytes from the block of a token to the same of the next tile, which is asked from memory line by line as this one is
  // read; 0 where there is none, which costs nothing.
  ptrdiff_t ahead(int token) const {
    if (!tile.next || token > tile.next->position) return 0;
    const ptrdiff_t blocks = tile.next->block_table[token / kBlockTokens] - tile.block_table[token / kBlockTokens];
    const ptrdiff_t heads = tile.next->kv_head - tile.kv_head;
    return blocks * static_cast<ptrdiff_t>(kv.block_bytes) +
           heads * static_cast<ptrdiff_t>(kv.head_dim * kBlockTokens * kv_element_bytes(kType));
  }

  // Adds q . K over dimensions begin .. end to acc, for tokens from slot `slot` of a block on. Inlined, as is add_tokens,
  // or acc would live in memory.
  [[gnu::always_inline]] inline void dot_keys(const uint8_t* keys, int slot, int begin, int end, ptrdiff_t ahead,
                                              F32 (&acc)[kQueries][kScoreVectors]) const {
    for (int d = begin; d < end; ++d) {
      const size_t at = head() + static_cast<size_t>(d) * kBlockTokens + slot;
      __builtin_prefetch(keys + at * kv_element_bytes(kType) + ahead);
      F32 k[kScoreVectors];
      for (int v = 0; v < kScoreVectors; ++v) k[v] = load_kv<kType>(keys, at + 16 * v);
#pragma GCC unroll kUnroll
      for (int i = 0; i < kQueries; ++i) {
        const F32 q = splat(query[i][d]);
        for (int v = 0; v < kScoreVectors; ++v) acc[i][v] = fma(q, k[v], acc[i][v]);
      }
    }
  }

  // Scores of the 32 tokens from `token` on, at full width, to weights[.][at ..]; -infinity where a query may not see.
  void score_block(int token, int at, ptrdiff_t ahead) {
    for (int slot = 0; slot < kBlockTokens; slot += 16 * kScoreVectors) score_tokens(token, slot, at, ahead);
  }

  void score_tokens(int token, int slot, int at, ptrdiff_t ahead) {
    const uint8_t* keys = kv.k + block(token);
    F32 acc[kQueries][kScoreVectors];
#pragma GCC unroll kUnroll
    for (int i = 0; i < kQueries; ++i)
      for (int v = 0; v < kScoreVectors; ++v) acc[i][v] = zero();
    if constexpr (kType == KVType::kInt8) {
      for (int d = 0; d < kv.head_dim; d += kKVGroup) {
        F32 part[kQueries][kScoreVectors];
#pragma GCC unroll kUnroll
        for (int i = 0; i < kQueries; ++i)
          for (int v = 0; v < kScoreVectors; ++v) part[i][v] = zero();
        dot_keys(keys, slot, d, d + kKVGroup < kv.head_dim ? d + kKVGroup : kv.head_dim, ahead, part);
        for (int v = 0; v < kScoreVectors; ++v) {
          const F32 scale = load_half(scales(kv.k_scale, token, d) + slot + 16 * v);
#pragma GCC unroll kUnroll
          for (int i = 0; i < kQueries; ++i) acc[i][v] = fma(part[i][v], scale, acc[i][v]);
        }
      }
    } else {
      dot_keys(keys, slot, 0, kv.head_dim, ahead, acc);
    }
    const F32 scale = splat(tile.scale), hidden = splat(-__builtin_inff());
    const bool all_visible = first[kQueries - 1] <= token && token + kBlockTokens - 1 <= last[0];
#pragma GCC unroll kUnroll
    for (int i = 0; i < kQueries; ++i) {
      for (int v = 0; v < kScoreVectors; ++v) {
        F32 score = mul(acc[i][v], scale);
        if (tile.softcap > 0.0f) score = mul(splat(tile.softcap), tanh(div(score, splat(tile.softcap))));
        const int offset = slot + 16 * v, from = token + offset;
        if (!all_visible) {
          score = select_first(first[i] - from, hidden, score);
          score = select_first(last[i] + 1 - from, score, hidden);
        }
        store(weights[i] + at + offset, score);
      }
    }
  }

  // A block that lies before every window needs no scores: all of it is hidden.
  void hide_block(int at) {
    for (int i = 0; i < kQueries; ++i)
      for (int half = 0; half < 2; ++half) store(weights[i] + at + 16 * half, splat(-__builtin_inff()));
  }

  // Turns query i's scores into weights.
  void softmax(int i, int padded) {
    float* w = weights[i];
    F32 largest = load(w);
    for (int t = 16; t < padded; t += 16) largest = max(largest, load(w + t));
    const F32 highest = splat(top[i] = reduce_max(largest));
    F32 sum = zero();
    for (int t = 0; t < padded; t += 16) {
      const F32 e = exp(sub(load(w + t), highest));
      store(w + t, e);
      sum = add(sum, e);
    }
    total[i] = reduce_add(sum);
  }

  // Works out how the partition merges with what came before: all queries in a vector, and those that saw it kept.
  void merge(int begin) {
    const F32 before = load(running_max), now = load(top), merged = select_ge(now, before, now, before);
    const F32 kept = exp(sub(before, merged)), taken = exp(sub(now, merged));
    alignas(64) float new_max[16], new_sum[16];
    store(keep, kept);
    store(take, taken);
    store(new_max, merged);
    store(new_sum, add(mul(load(running_sum), kept), mul(load(total), taken)));
    for (int i = 0; i < kQueries; ++i) {
      if (!sees_partition(i, begin)) continue;
      running_max[i] = new_max[i];
      running_sum[i] = new_sum[i];
    }
  }

  // Adds weight * V of tokens from .. to of the partition to acc, over kVectors * 16 dimensions from d on. Where not
  // every query sees every token, kRagged asks for each.
  template <int kVectors, bool kRagged>
  [[gnu::always_inline]] inline void add_tokens(int begin, int from, int to, int d, F32 (&acc)[kQueries][kVectors]) const {
    for (int t = from; t < to;) {
      const int token = begin + t;
      const uint8_t* values = kv.v + block(token);
      const ptrdiff_t next = ahead(token);
      const int slot = token % kBlockTokens, count = to - t < kBlockTokens - slot ? to - t : kBlockTokens - slot;
      [[maybe_unused]] alignas(64) float scale[kBlockTokens];
      if constexpr (kType == KVType::kInt8) {
        store(scale, load_half(scales(kv.v_scale, token, d)));
        store(scale + 16, load_half(scales(kv.v_scale, token, d) + 16));
      }
      for (int j = 0; j < count; ++j) {
        const size_t at = head() + static_cast<size_t>(slot + j) * kv.head_dim + d;
        __builtin_prefetch(values + at * kv_element_bytes(kType) + next);
        F32 v[kVectors];
        for (int half = 0; half < kVectors; ++half) v[half] = load_kv<kType>(values, at + 16 * half);
#pragma GCC unroll kUnroll
        for (int i = 0; i < kQueries; ++i) {
          if (kRagged && (token + j < first[i] || token + j > last[i])) continue;
          const F32 weight = splat(kType == KVType::kInt8 ? weights[i][t + j] * scale[slot + j] : weights[i][t + j]);
          for (int half = 0; half < kVectors; ++half) acc[i][half] = fma(weight, v[half], acc[i][half]);
        }
      }
      t += count;
    }
  }

  template <int kVectors>
  void add_values(int begin, int tokens, int d) {
    F32 acc[kQueries][kVectors];
#pragma GCC unroll kUnroll
    for (int i = 0; i < kQueries; ++i)
      for (int half = 0; half < kVectors; ++half) acc[i][half] = zero();
    // Later queries begin and end later: what all see lies between the last one's first token and the first one's last.
    const auto clamp = [&](int t) { return t < 0 ? 0 : t < tokens ? t : tokens; };
    const int lowest = clamp(first[0] - begin), from = clamp(first[kQueries - 1] - begin);
    const int to = clamp(last[0] + 1 - begin);
    if (from < to) {
      add_tokens<kVectors, true>(begin, lowest, from, d, acc);
      add_tokens<kVectors, false>(begin, from, to, d, acc);
      add_tokens<kVectors, true>(begin, to, tokens, d, acc);
    } else {
      add_tokens<kVectors, true>(begin, lowest, tokens, d, acc);
    }
#pragma GCC unroll kUnroll
    for (int i = 0; i < kQueries; ++i) {
      if (!sees_partition(i, begin)) continue;
      for (int half = 0; half < kVectors; ++half) {
        float* sum = sums[i] + d + 16 * half;
        store(sum, fma(load(sum), splat(keep[i]), mul(acc[i][half], splat(take[i]))));
      }
    }
  }

  void run(float* out, ptrdiff_t out_stride) {
    const int end = last[kQueries - 1] + 1;
    for (int begin = first[0] / kPartition * kPartition; begin < end; begin += kPartition) {
      const int tokens = end - begin < kPartition ? end - begin : kPartition;
      const int padded = (tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
      for (int t = 0; t < padded; t += kBlockTokens) {
        if (begin + t + kBlockTokens <= first[0]) hide_block(t);
        else score_block(begin + t, t, ahead(begin + t));
      }
      for (int i = 0; i < kQueries; ++i)
        if (sees_partition(i, begin)) softmax(i, padded);
      merge(begin);
      int d = 0;
      for (; d + 32 <= kv.head_dim; d += 32) add_values<2>(begin, tokens, d);
      if (d < kv.head_dim) add_values<1>(begin, tokens, d);
    }
    for (int i = 0; i < kQueries; ++i) {
      const F32 total = splat(running_sum[i]);
      float* to = out + (i / tile.heads) * out_stride + (i % tile.heads) * kv.head_dim;
      for (int d = 0; d < kv.head_dim; d += 16) store(to + d, div(load(sums[i] + d), total));
    }
  }
};

// Calls the attention of so many queries, 1 .. kMost.
template <KVType kType, int kMost>
void attend(const KVLayer& kv, const AttentionTile& tile, float* out, ptrdiff_t out_stride) {
  if (tile.rows * tile.heads == kMost) return Attention<kType, kMost>(kv, tile).run(out, out_stride);
  if constexpr (kMost > 1) attend<kType, kMost - 1>(kv, tile, out, out_stride);
}

void attention(const KVLayer& kv, const AttentionTile& tile, float* out, ptrdiff_t out_stride) {
  constexpr int kMost = kTileQueries > kMaxHeadGroup ? kTileQueries : kMaxHeadGroup;
  static_assert(kMost <= kMostTileQueries);
  switch (kv.type) {
    case KVType::kF32: return attend<KVType::kF32, kMost>(kv, tile, out, out_stride);
    case KVType::kF16: return attend<KVType::kF16, kMost>(kv, tile, out, out_stride);
    case KVType::kInt8: return attend<KVType::kInt8, kMost>(kv, tile, out, out_stride);
  }
}
