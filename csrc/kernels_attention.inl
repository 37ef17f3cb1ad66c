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
  const KVLayer& kv;
  const AttentionTile& tile;
  const float* query[kQueries];
  int first[kQueries];  // position that a query sees first, and its own, which it sees last
  int last[kQueries];
  alignas(64) float weights[kQueries][kPartition];  // scores, then exp(score - max)
  alignas(64) float sums[kQueries][kMaxHeadDim];    // weighted V so far, relative to running_max
  float running_max[kQueries];
  float running_sum[kQueries];
  float keep[kQueries], take[kQueries];  // factors of the merge: what was, what comes

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

  // Adds q . K over dimensions begin .. end to acc, for the 32 tokens of a block. Inlined, as is add_tokens, or acc would
  // live in memory.
  [[gnu::always_inline]] inline void dot_keys(const uint8_t* keys, int begin, int end, F32 (&acc)[kQueries][2]) const {
    const size_t at = head();
    for (int d = begin; d < end; ++d) {
      const F32 low = load_kv<kType>(keys, at + d * kBlockTokens);
      const F32 high = load_kv<kType>(keys, at + d * kBlockTokens + 16);
      for (int i = 0; i < kQueries; ++i) {
        const F32 q = splat(query[i][d]);
        acc[i][0] = fma(q, low, acc[i][0]);
        acc[i][1] = fma(q, high, acc[i][1]);
      }
    }
  }

  // Scores of the 32 tokens from `token` on, at full width, to weights[.][at ..]; -infinity where a query may not see.
  void score_block(int token, int at) {
    const uint8_t* keys = kv.k + block(token);
    F32 acc[kQueries][2];
    for (int i = 0; i < kQueries; ++i) acc[i][0] = acc[i][1] = zero();
    if constexpr (kType == KVType::kInt8) {
      for (int d = 0; d < kv.head_dim; d += kKVGroup) {
        F32 part[kQueries][2];
        for (int i = 0; i < kQueries; ++i) part[i][0] = part[i][1] = zero();
        dot_keys(keys, d, d + kKVGroup < kv.head_dim ? d + kKVGroup : kv.head_dim, part);
        const F32 low = load_half(scales(kv.k_scale, token, d)), high = load_half(scales(kv.k_scale, token, d) + 16);
        for (int i = 0; i < kQueries; ++i) {
          acc[i][0] = fma(part[i][0], low, acc[i][0]);
          acc[i][1] = fma(part[i][1], high, acc[i][1]);
        }
      }
    } else {
      dot_keys(keys, 0, kv.head_dim, acc);
    }
    const F32 scale = splat(tile.scale), hidden = splat(-__builtin_inff());
    for (int i = 0; i < kQueries; ++i) {
      for (int half = 0; half < 2; ++half) {
        F32 score = mul(acc[i][half], scale);
        if (tile.softcap > 0.0f) score = mul(splat(tile.softcap), tanh(div(score, splat(tile.softcap))));
        const int from = token + 16 * half;
        score = select_first(first[i] - from, hidden, score);
        store(weights[i] + at + 16 * half, select_first(last[i] + 1 - from, score, hidden));
      }
    }
  }

  // A block that lies before every window needs no scores: all of it is hidden.
  void hide_block(int at) {
    for (int i = 0; i < kQueries; ++i)
      for (int half = 0; half < 2; ++half) store(weights[i] + at + 16 * half, splat(-__builtin_inff()));
  }

  // Turns query i's scores into weights and works out how the partition merges with what came before.
  void softmax(int i, int padded) {
    float* w = weights[i];
    F32 largest = load(w);
    for (int t = 16; t < padded; t += 16) largest = max(largest, load(w + t));
    const float top = reduce_max(largest);
    F32 total = zero();
    for (int t = 0; t < padded; t += 16) {
      const F32 e = exp(sub(load(w + t), splat(top)));
      store(w + t, e);
      total = add(total, e);
    }
    const float merged = running_max[i] > top ? running_max[i] : top;
    keep[i] = exp_one(running_max[i] - merged);
    take[i] = exp_one(top - merged);
    running_sum[i] = running_sum[i] * keep[i] + reduce_add(total) * take[i];
    running_max[i] = merged;
  }

  static float exp_one(float x) {
    float v[16];
    store(v, exp(splat(x)));
    return v[0];
  }

  // Adds weight * V of tokens from .. to of the partition to acc, over kVectors * 16 dimensions from d on. Where not
  // every query sees every token, kRagged asks for each.
  template <int kVectors, bool kRagged>
  [[gnu::always_inline]] inline void add_tokens(int begin, int from, int to, int d, F32 (&acc)[kQueries][kVectors]) const {
    for (int t = from; t < to;) {
      const int token = begin + t;
      const uint8_t* values = kv.v + block(token);
      const int slot = token % kBlockTokens, count = to - t < kBlockTokens - slot ? to - t : kBlockTokens - slot;
      [[maybe_unused]] alignas(64) float scale[kBlockTokens];
      if constexpr (kType == KVType::kInt8) {
        store(scale, load_half(scales(kv.v_scale, token, d)));
        store(scale + 16, load_half(scales(kv.v_scale, token, d) + 16));
      }
      for (int j = 0; j < count; ++j) {
        const size_t at = head() + static_cast<size_t>(slot + j) * kv.head_dim + d;
        F32 v[kVectors];
        for (int half = 0; half < kVectors; ++half) v[half] = load_kv<kType>(values, at + 16 * half);
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
        else score_block(begin + t, t);
      }
      for (int i = 0; i < kQueries; ++i)
        if (sees_partition(i, begin)) softmax(i, padded);
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

template <KVType kType>
void attend(const KVLayer& kv, const AttentionTile& tile, float* out, ptrdiff_t out_stride) {
  switch (tile.rows * tile.heads) {
    case 1: return Attention<kType, 1>(kv, tile).run(out, out_stride);
    case 2: return Attention<kType, 2>(kv, tile).run(out, out_stride);
    case 3: return Attention<kType, 3>(kv, tile).run(out, out_stride);
    case 4: return Attention<kType, 4>(kv, tile).run(out, out_stride);
    case 5: return Attention<kType, 5>(kv, tile).run(out, out_stride);
    case 6: return Attention<kType, 6>(kv, tile).run(out, out_stride);
    case 7: return Attention<kType, 7>(kv, tile).run(out, out_stride);
    default: return Attention<kType, 8>(kv, tile).run(out, out_stride);
  }
}

void attention(const KVLayer& kv, const AttentionTile& tile, float* out, ptrdiff_t out_stride) {
  switch (kv.type) {
    case KVType::kF32: return attend<KVType::kF32>(kv, tile, out, out_stride);
    case KVType::kF16: return attend<KVType::kF16>(kv, tile, out, out_stride);
    case KVType::kInt8: return attend<KVType::kInt8>(kv, tile, out, out_stride);
  }
}
