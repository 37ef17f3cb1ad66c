// Work on one row at a time: norms, activation functions, quantization, rotary embedding, KV writes, and the vector
// passes of the sampler. Included by kernels.inl.

// Quantizes 32 values to q = round(x * 127 / max|x|) with scale max|x| / 127.
inline void quantize_group(F32 low, F32 high, const Rows& out, size_t group) {
  const float largest = largest_magnitude(low, high);
  // Below, 127 / largest would overflow; NaN and infinity must not vanish in the rounding, so the scale carries them.
  const bool regular = largest > 1e-30f && largest <= 3.4e38f;
  const F32 inverse = splat(regular ? 127.0f / largest : 0.0f);
  const F32 a = regular ? round_even(mul(low, inverse)) : zero();
  const F32 b = regular ? round_even(mul(high, inverse)) : zero();
  store_int8(out.q + group * kGroup, a);
  store_int8(out.q + group * kGroup + 16, b);
  const float code_sum = reduce_add(add(a, b));  // exact: at most 32 * 127
  const float scale = largest / 127.0f;
  out.scale[group] = scale;
  out.sum[group] = scale * code_sum;
  out.code_sum[group] = static_cast<int32_t>(code_sum);
}

void store_row(const float* values, int n, const Rows& out, int row, int column) {
  const size_t at = static_cast<size_t>(row) * out.k + column;
  for (int i = 0; i < n; i += kGroup) {
    const F32 low = load(values + i), high = load(values + i + 16);
    if (out.q) quantize_group(low, high, out, (at + i) / kGroup);
    if (out.f) {
      store(out.f + at + i, low);
      store(out.f + at + i + 16, high);
    }
  }
}

void rms_norm(const float* x, const float* weight, float eps, const Rows& out, int row) {
  F32 squares = zero();
  for (int i = 0; i < out.k; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const float mean = reduce_add(squares) / static_cast<float>(out.k);
  const F32 inverse = splat(1.0f / __builtin_sqrtf(mean + eps));
  for (int i = 0; i < out.k; i += kGroup) {
    alignas(64) float values[kGroup];
    for (int half = 0; half < kGroup; half += 16)
      store(values + half, mul(mul(load(x + i + half), inverse), load(weight + i + half)));
    store_row(values, kGroup, out, row, i);
  }
}

void silu_mul(const float* gate, const float* up, int n, float* out) {
  const F32 one = splat(1.0f);
  for (int i = 0; i < n; i += 16) {
    const F32 g = load(gate + i);
    // exp is for arguments up to 88; beyond, the sigmoid is below 1e-38 and g times it close enough to 0
    const F32 e = exp(sub(zero(), max(g, splat(-88.0f))));
    store(out + i, mul(div(g, add(one, e)), load(up + i)));
  }
}

void rope(float* x, int heads, int head_dim, int dim, const float* cos, const float* sin) {
  const int half = dim / 2;
  for (int h = 0; h < heads; ++h, x += head_dim) {
    for (int i = 0; i < half; i += 16) {
      const F32 a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
      store(x + i, sub(mul(a, c), mul(b, s)));
      store(x + half + i, add(mul(b, c), mul(a, s)));
    }
  }
}

void store_kv(const KVLayer& kv, int block, int kv_head, int slot, const float* k, const float* v) {
  const size_t at = block * kv.block_stride + static_cast<size_t>(kv_head) * kv.head_dim * kBlockTokens;
  if (kv.half) {
    uint16_t* keys = static_cast<uint16_t*>(kv.k) + at + slot;
    uint16_t* values = static_cast<uint16_t*>(kv.v) + at + static_cast<size_t>(slot) * kv.head_dim;
    for (int d = 0; d < kv.head_dim; d += 16) {
      uint16_t column[16];
      store_half(column, load(k + d));
      for (int i = 0; i < 16; ++i) keys[(d + i) * kBlockTokens] = column[i];
      store_half(values + d, load(v + d));
    }
  } else {
    float* keys = static_cast<float*>(kv.k) + at + slot;
    float* values = static_cast<float*>(kv.v) + at + static_cast<size_t>(slot) * kv.head_dim;
    for (int d = 0; d < kv.head_dim; ++d) {
      keys[d * kBlockTokens] = k[d];
      values[d] = v[d];
    }
  }
}

bool argmax(const float* x, int n, int* index) {
  const F32 lowest = splat(-3.0e38f);
  F32 largest = lowest, poison = zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const F32 v = load(x + i);
    largest = max(largest, v);
    poison = fma(v, zero(), poison);
  }
  float best = reduce_max(largest);
  float bad = reduce_add(poison);
  for (int j = i; j < n; ++j) {
    best = x[j] > best ? x[j] : best;
    bad += x[j] * 0.0f;
  }
  int at = 0;
  while (at < n && x[at] < best) ++at;
  *index = at < n ? at : 0;
  return bad == 0.0f;
}

void exp_scaled(const float* x, int n, float highest, float inverse_temperature, float* out) {
  const F32 top = splat(highest), factor = splat(inverse_temperature);
  // max(0, ...): the columns that pad the last vector may be above the maximum
  for (int i = 0; i < n; i += 16)
    store(out + i, exp(sub(zero(), max(zero(), mul(sub(top, load(x + i)), factor)))));
}
