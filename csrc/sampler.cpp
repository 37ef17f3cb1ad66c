#include "sampler.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace paceline {

namespace {

// SplitMix64's finalizer (Steele, Lea, Flood 2014, doi:10.1145/2714064.2660195).
uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x;
}

// A number in [0, 1) that depends on (seed, position) alone.
double uniform(uint64_t seed, int64_t position) {
  const uint64_t golden = 0x9e3779b97f4a7c15u;
  const uint64_t bits = mix(mix(seed + golden) + golden * (static_cast<uint64_t>(position) + 1));
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

constexpr float kBanned = -std::numeric_limits<float>::infinity();

// Bins of weights in (0, 1] by the leading bits of the float: exponent and four bits of the fraction.
constexpr int kBinShift = 19;
constexpr int kBins = (0x3f800000 >> kBinShift) + 1;

int bin_of(float weight) { return static_cast<int>(std::bit_cast<uint32_t>(weight) >> kBinShift); }

}  // namespace

Sampler::Sampler(const Kernels& kernels, int vocab_size)
    : kernels_(kernels),
      vocab_size_(vocab_size),
      raw_(vocab_size),
      weights_((vocab_size + 15) / 16 * 16),
      bin_count_(kBins),
      bin_sum_(kBins) {
  candidates_.reserve(vocab_size);
}

void Sampler::sample(const Batch& batch, int row, float* logits, StepResult& result) {
  int likeliest = 0;
  if (!kernels_.argmax(logits, vocab_size_, &likeliest)) {
    result.token_ids[row] = -1;
    result.status[row] = static_cast<uint8_t>(RowStatus::kNonFinite);
    return;
  }
  const bool wants_logprobs = batch.num_logprobs[row] >= 0;
  if (wants_logprobs) std::copy(logits, logits + vocab_size_, raw_.begin());
  const float raw_max = logits[likeliest];

  int token = batch.target_ids[row];
  if (token < 0) {
    if (adjust(batch, row, logits)) {
      likeliest = static_cast<int>(std::max_element(logits, logits + vocab_size_) - logits);
      if (logits[likeliest] == kBanned) {
        result.token_ids[row] = -1;
        result.status[row] = static_cast<uint8_t>(RowStatus::kNothingAllowed);
        return;
      }
    }
    token = batch.temperature[row] > 0.0f ? draw(batch, row, logits, likeliest) : likeliest;
  }
  result.token_ids[row] = token;
  result.status[row] = static_cast<uint8_t>(RowStatus::kOk);
  if (wants_logprobs) report_logprobs(batch, row, raw_.data(), raw_max, result);
}

bool Sampler::adjust(const Batch& batch, int row, float* logits) {
  bool changed = false;
  if (!batch.mask_row.empty() && batch.mask_row[row] >= 0) {
    const uint32_t* mask = batch.masks.data + batch.mask_row[row] * batch.words_per_mask;
    for (int i = 0; i < vocab_size_; ++i)
      if (!(mask[i / 32] >> (i % 32) & 1)) logits[i] = kBanned;
    changed = true;
  }
  if (!batch.bias_start.empty()) {
    for (int i = batch.bias_start[row]; i < batch.bias_start[row + 1]; ++i) logits[batch.bias_ids[i]] += batch.bias[i];
    changed = changed || batch.bias_start[row] < batch.bias_start[row + 1];
  }
  if (!batch.seen_start.empty()) {
    const float repetition = batch.repetition[row];
    for (int i = batch.seen_start[row]; i < batch.seen_start[row + 1]; ++i) {
      float& logit = logits[batch.seen_ids[i]];
      logit = logit > 0 ? logit / repetition : logit * repetition;
      const int count = batch.seen_output_count[i];
      if (count > 0) logit -= batch.frequency[row] * static_cast<float>(count) + batch.presence[row];
    }
    changed = changed || batch.seen_start[row] < batch.seen_start[row + 1];
  }
  return changed;
}

int Sampler::draw(const Batch& batch, int row, const float* logits, int likeliest) {
  // Clamped, so that logits and weights stay finite however small the temperature.
  const float inverse = 1.0f / std::max(batch.temperature[row], 1e-6f);
  kernels_.exp_scaled(logits, vocab_size_, logits[likeliest], inverse, weights_.data());
  const double u = uniform(batch.seed[row], batch.draw_position[row]);
  const bool filtered = batch.min_p[row] > 0.0f || batch.top_k[row] > 0 || batch.top_p[row] < 1.0f;
  const int token = filtered ? draw_from_kept(batch, row, u, logits) : draw_from_all(u);
  return token < 0 ? likeliest : token;
}

int Sampler::draw_from_all(double uniform) const {
  double total = 0;
  for (int i = 0; i < vocab_size_; ++i) total += weights_[i];
  double left = uniform * total;
  int last = -1;
  for (int i = 0; i < vocab_size_; ++i) {
    if (weights_[i] <= 0.0f) continue;
    last = i;
    left -= weights_[i];
    if (left < 0) break;
  }
  return last;
}

float Sampler::lowest_useful_weight(int top_k, float min_p, double enough) {
  std::fill(bin_count_.begin(), bin_count_.end(), 0);
  std::fill(bin_sum_.begin(), bin_sum_.end(), 0.0);
  for (int i = 0; i < vocab_size_; ++i) {
    if (weights_[i] <= 0.0f || weights_[i] < min_p) continue;
    const int bin = bin_of(weights_[i]);
    ++bin_count_[bin];
    bin_sum_[bin] += weights_[i];
  }
  long long count = 0;
  double sum = 0;
  for (int bin = kBins - 1; bin >= 0; --bin) {
    count += bin_count_[bin];
    sum += bin_sum_[bin];
    // A little more than enough, since the exact sum is made in another order.
    if (top_k > 0 ? count >= top_k : sum >= enough * (1 + 1e-9))
      return std::bit_cast<float>(static_cast<uint32_t>(bin) << kBinShift);
  }
  return 0.0f;
}

int Sampler::draw_from_kept(const Batch& batch, int row, double uniform, const float* logits) {
  const int top_k = batch.top_k[row];
  const float top_p = batch.top_p[row], min_p = batch.min_p[row];
  double total = 0;
  for (int i = 0; i < vocab_size_; ++i)
    if (weights_[i] >= min_p) total += weights_[i];

  // Only what can be kept has to be sorted, and that is mostly little.
  const bool ranked = top_k > 0 || top_p < 1.0f;
  const float lowest = ranked ? lowest_useful_weight(top_k, min_p, top_p * total) : 0.0f;
  candidates_.clear();
  for (int i = 0; i < vocab_size_; ++i)
    if (weights_[i] > 0.0f && weights_[i] >= min_p && weights_[i] >= lowest)
      candidates_.push_back({logits[i], i, weights_[i]});
  if (ranked) std::sort(candidates_.begin(), candidates_.end(), likelier);

  if (top_k > 0) {
    candidates_.resize(std::min(candidates_.size(), static_cast<size_t>(top_k)));
    total = 0;
    for (const Candidate& c : candidates_) total += c.weight;
  }
  if (top_p < 1.0f) {  // the smallest set of likeliest tokens that reaches top_p
    const double enough = top_p * total;
    size_t kept = 0;
    for (total = 0; kept < candidates_.size() && (kept == 0 || total < enough); ++kept) total += candidates_[kept].weight;
    candidates_.resize(kept);
  }

  double left = uniform * total;
  for (const Candidate& c : candidates_) {
    left -= c.weight;
    if (left < 0) return c.id;
  }
  return candidates_.empty() ? -1 : candidates_.back().id;
}

void Sampler::report_logprobs(const Batch& batch, int row, const float* logits, float max_logit, StepResult& result) {
  double total = 0;
  for (int i = 0; i < vocab_size_; ++i) total += std::exp(static_cast<double>(logits[i]) - max_logit);
  const double log_total = max_logit + std::log(total);
  result.logprobs[row] = static_cast<float>(logits[result.token_ids[row]] - log_total);
  const size_t wanted = static_cast<size_t>(batch.num_logprobs[row]);
  if (wanted == 0) return;
  candidates_.clear();
  for (int i = 0; i < vocab_size_; ++i) candidates_.push_back({logits[i], i, 0.0f});
  std::partial_sort(candidates_.begin(), candidates_.begin() + wanted, candidates_.end(), likelier);
  for (size_t i = 0; i < wanted; ++i) {
    result.top_ids[row * result.top + i] = candidates_[i].id;
    result.top_logprobs[row * result.top + i] = static_cast<float>(candidates_[i].logit - log_total);
  }
}

}  // namespace paceline
