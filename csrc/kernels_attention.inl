// Attention over the paged KV cache. Included by kernels.inl.
//
// Positions are walked in partitions of kPartition tokens aligned to absolute positions. Within one, all scores are
// computed, then their maximum, then exp and the weighted sum of V token by token; partitions are merged in ascending
// order. A query's result depends on what it may see alone: the scores of later tokens are masked, their values never
// touched (0 times NaN is NaN), and a partition that lies wholly behind its position is left out.

template <bool kHalf>
inline F32 load_kv(const void* base, size_t at) {
  if constexpr (kHalf) return load_half(static_cast<const uint16_t*>(base) + at);
  return load(static_cast<const float*>(base) + at);
}

template <bool kHalf, int kQueries>
struct Attention {
  const KVLayer& kv;
  const AttentionTile& tile;
  const float* query[kQueries];
  int position[kQueries];
  alignas(64) float weights[kQueries][kPartition];  // scores, then exp(score - max)
  alignas(64) float sums[kQueries][kMaxHeadDim];    // weighted V so far, relative to running_max
  float running_max[kQueries];
  float running_sum[kQueries];
  float keep[kQueries], take[kQueries];  // factors of the merge: what was, what comes

  Attention(const KVLayer& layer, const AttentionTile& t) : kv(layer), tile(t) {
    for (int i = 0; i < kQueries; ++i) {
      query[i] = t.q + (i / t.heads) * t.q_stride + (i % t.heads) * kv.head_dim;
      position[i] = t.position + i / t.heads;
      running_max[i] = -__builtin_inff();
      running_sum[i] = 0.0f;
      for (int d = 0; d < kv.head_dim; ++d) sums[i][d] = 0.0f;
    }
  }

  size_t block_offset(int token) const {
    const size_t block = static_cast<size_t>(tile.block_table[token / kBlockTokens]);
    return block * kv.block_stride + static_cast<size_t>(tile.kv_head) * kv.head_dim * kBlockTokens;
  }

  // Scores of the 32 tokens from `token` on, at full width, to weights[.][at ..]; -infinity where a query may not see.
  void score_block(int token, int at) {
    const size_t keys = block_offset(token);
    F32 acc[kQueries][2];
    for (int i = 0; i < kQueries; ++i) acc[i][0] = acc[i][1] = zero();
    for (int d = 0; d < kv.head_dim; ++d) {
      const F32 low = load_kv<kHalf>(kv.k, keys + d * kBlockTokens);
      const F32 high = load_kv<kHalf>(kv.k, keys + d * kBlockTokens + 16);
      for (int i = 0; i < kQueries; ++i) {
        const F32 q = splat(query[i][d]);
        acc[i][0] = fma(q, low, acc[i][0]);
        acc[i][1] = fma(q, high, acc[i][1]);
      }
    }
    const F32 scale = splat(tile.scale), hidden = splat(-__builtin_inff());
    for (int i = 0; i < kQueries; ++i) {
      const int visible = position[i] + 1 - token;
      store(weights[i] + at, select_first(visible, mul(acc[i][0], scale), hidden));
      store(weights[i] + at + 16, select_first(visible - 16, mul(acc[i][1], scale), hidden));
    }
  }

  // Turns query i's scores into weights and works out how the partition merges with what came before.
  void softmax(int i, int begin, int padded) {
    if (position[i] < begin) return;
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

  void add_values(int begin, int tokens) {
    // All queries see the tokens up to the first one's position; the few after that are for the later ones only.
    const int common = position[0] + 1 - begin < 0 ? 0 : position[0] + 1 - begin < tokens ? position[0] + 1 - begin : tokens;
    for (int d = 0; d < kv.head_dim; d += 32) {
      F32 acc[kQueries][2];
      for (int i = 0; i < kQueries; ++i) acc[i][0] = acc[i][1] = zero();
      for (int block = 0; block < common; block += kBlockTokens) {
        const size_t values = block_offset(begin + block) + d;
        const int count = common - block < kBlockTokens ? common - block : kBlockTokens;
        for (int t = 0; t < count; ++t) {
          const F32 low = load_kv<kHalf>(kv.v, values + static_cast<size_t>(t) * kv.head_dim);
          const F32 high = load_kv<kHalf>(kv.v, values + static_cast<size_t>(t) * kv.head_dim + 16);
          for (int i = 0; i < kQueries; ++i) {
            const F32 weight = splat(weights[i][block + t]);
            acc[i][0] = fma(weight, low, acc[i][0]);
            acc[i][1] = fma(weight, high, acc[i][1]);
          }
        }
      }
      for (int t = common; t < tokens; ++t) {
        const size_t values = block_offset(begin + t) + static_cast<size_t>(t % kBlockTokens) * kv.head_dim + d;
        for (int i = 0; i < kQueries; ++i) {
          if (position[i] < begin + t) continue;
          const F32 weight = splat(weights[i][t]);
          acc[i][0] = fma(weight, load_kv<kHalf>(kv.v, values), acc[i][0]);
          acc[i][1] = fma(weight, load_kv<kHalf>(kv.v, values + 16), acc[i][1]);
        }
      }
      for (int i = 0; i < kQueries; ++i) {
        if (position[i] < begin) continue;
        for (int half = 0; half < 2; ++half) {
          float* sum = sums[i] + d + 16 * half;
          store(sum, fma(load(sum), splat(keep[i]), mul(acc[i][half], splat(take[i]))));
        }
      }
    }
  }

  void run(float* out, ptrdiff_t out_stride) {
    const int last = position[kQueries - 1];
    for (int begin = 0; begin <= last; begin += kPartition) {
      const int tokens = last + 1 - begin < kPartition ? last + 1 - begin : kPartition;
      const int padded = (tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
      for (int t = 0; t < padded; t += kBlockTokens) score_block(begin + t, t);
      for (int i = 0; i < kQueries; ++i) softmax(i, begin, padded);
      add_values(begin, tokens);
    }
    for (int i = 0; i < kQueries; ++i) {
      const F32 total = splat(running_sum[i]);
      float* to = out + (i / tile.heads) * out_stride + (i % tile.heads) * kv.head_dim;
      for (int d = 0; d < kv.head_dim; d += 16) store(to + d, div(load(sums[i] + d), total));
    }
  }
};

template <bool kHalf>
void attend(const KVLayer& kv, const AttentionTile& tile, float* out, ptrdiff_t out_stride) {
  switch (tile.rows * tile.heads) {
    case 1: return Attention<kHalf, 1>(kv, tile).run(out, out_stride);
    case 2: return Attention<kHalf, 2>(kv, tile).run(out, out_stride);
    case 3: return Attention<kHalf, 3>(kv, tile).run(out, out_stride);
    case 4: return Attention<kHalf, 4>(kv, tile).run(out, out_stride);
    case 5: return Attention<kHalf, 5>(kv, tile).run(out, out_stride);
    case 6: return Attention<kHalf, 6>(kv, tile).run(out, out_stride);
    case 7: return Attention<kHalf, 7>(kv, tile).run(out, out_stride);
    default: return Attention<kHalf, 8>(kv, tile).run(out, out_stride);
  }
}

void attention(const KVLayer& kv, const AttentionTile& tile, float* out, ptrdiff_t out_stride) {
  if (kv.half) return attend<true>(kv, tile, out, out_stride);
  return attend<false>(kv, tile, out, out_stride);
}
