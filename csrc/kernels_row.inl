// Work on one row at a time: norms, activation functions, quantization, rotary embedding, KV writes, and the vector
// passes of the sampler. Included by kernels.inl.

// Quantizes 32 values to q = round(x * 127 / max|x|) with scale max|x| / 127.
inline void quantize_group(F32 low, F32 high, const Rows& out, size_t group) {
  const float largest = largest_magnitude(low, high);
  // Below, 127 / largest would overflow; NaN and infinity must not vanish in the rounding, so the scale carries them.
  const bool regular = largest > 1e-30f && largest <= __FLT_MAX__;
  const F32 inverse = splat(regular ? 127.0f / largest : 0.0f);
  const F32 a = regular ? round_even(mul(low, inverse)) : zero();
  const F32 b = regular ? round_even(mul(high, inverse)) : zero();
  store_int8(out.q + group * kGroup, a);
  store_int8(out.q + group * kGroup + 16, b);
  const float code_sum = reduce_add(add(a, b));  // sums of codes are exact: at most 32 * 127
  const float scale = largest / 127.0f;
  out.scale[group] = scale;
  out.sum[group] = scale * code_sum;
  out.code_sum[group] = static_cast<int32_t>(code_sum);
  if (out.low_sum) out.low_sum[group] = static_cast<int32_t>(reduce_add(a));
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

void norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
  F32 mean = zero();
  if (bias) {
    F32 total = zero();
    for (int i = 0; i < n; i += 16) total = add(load(x + i), total);
    mean = splat(reduce_add(total) / static_cast<float>(n));
  }
  F32 squares = zero();
  for (int i = 0; i < n; i += 16) {
    const F32 centred = sub(load(x + i), mean);
    squares = fma(centred, centred, squares);
  }
  const float variance = reduce_add(squares) / static_cast<float>(n);
  const F32 inverse = splat(1.0f / __builtin_sqrtf(variance + eps));
  for (int i = 0; i < n; i += 16) {
    const F32 scaled = mul(mul(sub(load(x + i), mean), inverse), load(weight + i));
    store(out + i, bias ? add(scaled, load(bias + i)) : scaled);
  }
}

// x * sigmoid(factor): exp is for arguments up to 88; beyond, the sigmoid is below 1e-38 and x times it close to 0
inline F32 times_sigmoid(F32 x, F32 factor) {
  return div(x, add(splat(1.0f), exp(sub(zero(), max(factor, splat(-88.0f))))));
}

// x * (1 + tanh(u)) / 2 = x * sigmoid(2u), with u = sqrt(2 / pi) * (x + 0.044715 x^3)
inline F32 gelu_tanh(F32 x) {
  const F32 inner = fma(mul(mul(x, x), x), splat(0.044715f), x);
  return times_sigmoid(x, mul(inner, splat(1.5957691216057308f)));
}

void activate(Activation activation, const float* gate, const float* up, int n, float* out) {
  for (int i = 0; i < n; i += 16) {
    const F32 g = load(gate + i);
    const F32 active = activation == Activation::kSilu ? times_sigmoid(g, g) : gelu_tanh(g);
    store(out + i, up ? mul(active, load(up + i)) : active);
  }
}

void add_scaled(const float* y, float factor, int n, float* x) {
  const F32 f = splat(factor);
  for (int i = 0; i < n; i += 16) store(x + i, fma(load(y + i), f, load(x + i)));
}

void softcap(float cap, int n, float* x) {
  const F32 c = splat(cap);
  for (int i = 0; i < n; i += 16) store(x + i, mul(c, tanh(div(load(x + i), c))));
}

void rope(float* x, int heads, int head_dim, int dim, const float* cos, const float* sin) {
  const int half = dim / 2, vectors = half / 16 * 16;
  for (int h = 0; h < heads; ++h, x += head_dim) {
    for (int i = 0; i < vectors; i += 16) {
      const F32 a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
      store(x + i, sub(mul(a, c), mul(b, s)));
      store(x + half + i, add(mul(b, c), mul(a, s)));
    }
    for (int i = vectors; i < half; ++i) {
      const float a = x[i], b = x[half + i];
      x[i] = a * cos[i] - b * sin[i];
      x[half + i] = b * cos[i] + a * sin[i];
    }
  }
}

// Quantizes up to 32 dimensions (a multiple of 16) of one head: codes of round(x / scale) with the scale as it is stored.
inline uint16_t quantize_kv_group(const float* x, int n, int8_t* codes) {
  const F32 low = load(x), high = n > 16 ? load(x + 16) : zero();
  const uint16_t stored = float_to_half(largest_magnitude(low, high) / 127.0f);
  const float scale = half_to_float(stored);
  // A scale that is 0, infinite or NaN gives codes of 0; the latter two still reach every score through the scale.
  const bool regular = scale > 0.0f && scale < 65536.0f;
  const F32 inverse = splat(regular ? 1.0f / scale : 0.0f), most = splat(127.0f), least = splat(-127.0f);
  const auto code = [&](F32 v) {
    return regular ? round_even(min(max(mul(v, inverse), least), most)) : zero();
  };
  store_int8(codes, code(low));
  if (n > 16) store_int8(codes + 16, code(high));
  return stored;
}

void store_kv_int8(const KVLayer& kv, int block, int kv_head, int slot, const float* k, const float* v) {
  const size_t head = static_cast<size_t>(kv_head) * kv.head_dim * kBlockTokens;
  const size_t scales = (static_cast<size_t>(kv_head) * kv.groups() * kBlockTokens + slot) * sizeof(uint16_t);
  const size_t at = block * kv.block_bytes;
  int8_t* keys = reinterpret_cast<int8_t*>(kv.k + at) + head + slot;
  int8_t* values = reinterpret_cast<int8_t*>(kv.v + at) + head + static_cast<size_t>(slot) * kv.head_dim;
  for (int d = 0; d < kv.head_dim; d += kKVGroup) {
    const int n = kv.head_dim - d < kKVGroup ? kv.head_dim - d : kKVGroup;
    const size_t scale = at + scales + static_cast<size_t>(d / kKVGroup) * kBlockTokens * sizeof(uint16_t);
    int8_t column[kKVGroup];
    *reinterpret_cast<uint16_t*>(kv.k_scale + scale) = quantize_kv_group(k + d, n, column);
    for (int i = 0; i < n; ++i) keys[(d + i) * kBlockTokens] = column[i];
    *reinterpret_cast<uint16_t*>(kv.v_scale + scale) = quantize_kv_group(v + d, n, values + d);
  }
}

void store_kv(const KVLayer& kv, int block, int kv_head, int slot, const float* k, const float* v) {
  if (kv.type == KVType::kInt8) return store_kv_int8(kv, block, kv_head, slot, k, v);
  const size_t head = static_cast<size_t>(kv_head) * kv.head_dim * kBlockTokens, at = block * kv.block_bytes;
  if (kv.type == KVType::kF16) {
    uint16_t* keys = reinterpret_cast<uint16_t*>(kv.k + at) + head + slot;
    uint16_t* values = reinterpret_cast<uint16_t*>(kv.v + at) + head + static_cast<size_t>(slot) * kv.head_dim;
    for (int d = 0; d < kv.head_dim; d += 16) {
      uint16_t column[16];
      store_half(column, load(k + d));
      for (int i = 0; i < 16; ++i) keys[(d + i) * kBlockTokens] = column[i];
      store_half(values + d, load(v + d));
    }
  } else {
    float* keys = reinterpret_cast<float*>(kv.k + at) + head + slot;
    float* values = reinterpret_cast<float*>(kv.v + at) + head + static_cast<size_t>(slot) * kv.head_dim;
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
  // At least 0: the columns that pad the last vector may be above the maximum, and infinity minus infinity, where a
  // penalty overflowed, is NaN and becomes 0.
  for (int i = 0; i < n; i += 16)
    store(out + i, exp(sub(zero(), max(mul(sub(top, load(x + i)), factor), zero()))));
}
