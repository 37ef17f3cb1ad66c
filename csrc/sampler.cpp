#include "sampler.hpp"

#include <algorithm>
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

}  // namespace

Sampler::Sampler(const Kernels& kernels, int vocab_size)
    : kernels_(kernels), vocab_size_(vocab_size), weights_((vocab_size + 15) / 16 * 16) {}

void Sampler::sample(const Batch& batch, int row, float* logits, StepResult& result) {
  int likeliest = 0;
  if (!kernels_.argmax(logits, vocab_size_, &likeliest)) {
    result.token_ids[row] = -1;
    result.status[row] = static_cast<uint8_t>(RowStatus::kNonFinite);
    return;
  }
  // What log-probabilities need of the raw logits is taken before adjust() changes them; the token comes after.
  const bool wants_logprobs = batch.num_logprobs[row] >= 0;
  const std::vector<float> raw = wants_logprobs ? std::vector<float>(logits, logits + vocab_size_) : std::vector<float>();
  const float raw_max = logits[likeliest];

  int token = batch.target_ids[row];
  RowStatus status = RowStatus::kOk;
  if (token < 0) {
    status = adjust(batch, row, logits);
    if (status == RowStatus::kOk) {
      likeliest = static_cast<int>(std::max_element(logits, logits + vocab_size_) - logits);
      token = batch.temperature[row] > 0.0f ? draw(batch, row, logits, likeliest) : likeliest;
    }
  }
  result.token_ids[row] = token;
  result.status[row] = static_cast<uint8_t>(status);
  if (wants_logprobs && status == RowStatus::kOk) report_logprobs(batch, row, raw.data(), raw_max, result);
}

RowStatus Sampler::adjust(const Batch& batch, int row, float* logits) {
  bool banned = false;
  if (!batch.mask_row.empty() && batch.mask_row[row] >= 0) {
    const uint32_t* mask = batch.masks.data + batch.mask_row[row] * batch.words_per_mask;
    for (int i = 0; i < vocab_size_; ++i)
      if (!(mask[i / 32] >> (i % 32) & 1)) logits[i] = kBanned;
    banned = true;
  }
  if (!batch.bias_start.empty()) {
    for (int i = batch.bias_start[row]; i < batch.bias_start[row + 1]; ++i) logits[batch.bias_ids[i]] += batch.bias[i];
    banned = banned || batch.bias_start[row] < batch.bias_start[row + 1];
  }
  if (!batch.seen_start.empty()) {
    const float repetition = batch.repetition[row];
    for (int i = batch.seen_start[row]; i < batch.seen_start[row + 1]; ++i) {
      float& logit = logits[batch.seen_ids[i]];
      logit = logit > 0 ? logit / repetition : logit * repetition;
      const int count = batch.seen_output_count[i];
      if (count > 0) logit -= batch.frequency[row] * static_cast<float>(count) + batch.presence[row];
    }
  }
  if (banned && std::all_of(logits, logits + vocab_size_, [](float x) { return x == kBanned; }))
    return RowStatus::kNothingAllowed;
  return RowStatus::kOk;
}

int Sampler::draw(const Batch& batch, int row, const float* logits, int likeliest) {
  // Clamped, so that logits and weights stay finite however small the temperature.
  const float inverse = 1.0f / std::max(batch.temperature[row], 1e-6f);
  kernels_.exp_scaled(logits, vocab_size_, logits[likeliest], inverse, weights_.data());
  const double u = uniform(batch.seed[row], batch.draw_position[row]);
  const bool filtered = batch.min_p[row] > 0.0f || batch.top_k[row] > 0 || batch.top_p[row] < 1.0f;
  const int token = filtered ? draw_from_kept(batch, row, u, logits, weights_.data()) : draw_from_all(u, weights_.data());
  return token < 0 ? likeliest : token;
}

int Sampler::draw_from_all(double uniform, const float* weights) const {
  double total = 0;
  for (int i = 0; i < vocab_size_; ++i) total += weights[i];
  double left = uniform * total;
  int last = -1;
  for (int i = 0; i < vocab_size_; ++i) {
    if (weights[i] <= 0.0f) continue;
    last = i;
    left -= weights[i];
    if (left < 0) break;
  }
  return last;
}

int Sampler::draw_from_kept(const Batch& batch, int row, double uniform, const float* logits, const float* weights) {
  candidates_.clear();
  for (int i = 0; i < vocab_size_; ++i)
    if (weights[i] > 0.0f && weights[i] >= batch.min_p[row]) candidates_.push_back({logits[i], i, weights[i]});

  const auto likelier = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  };
  const size_t limit = batch.top_k[row] > 0 ? static_cast<size_t>(batch.top_k[row]) : candidates_.size();
  if (limit < candidates_.size()) {
    std::nth_element(candidates_.begin(), candidates_.begin() + limit, candidates_.end(), likelier);
    candidates_.resize(limit);
  }
  // In one order whatever nth_element left behind, since sums depend on it.
  const auto by_id = [](const Candidate& a, const Candidate& b) { return a.id < b.id; };
  std::sort(candidates_.begin(), candidates_.end(), by_id);
  double total = 0;
  for (const Candidate& c : candidates_) total += c.weight;

  if (batch.top_p[row] < 1.0f) {  // the smallest set of likeliest tokens that reaches top_p
    const double enough = batch.top_p[row] * total;
    size_t sorted = 0, kept = 0;
    double sum = 0;
    while (kept < candidates_.size() && (kept == 0 || sum < enough)) {
      if (kept == sorted) {
        const size_t next = std::min(candidates_.size(), std::max<size_t>(64, 4 * sorted));
        std::partial_sort(candidates_.begin() + sorted, candidates_.begin() + next, candidates_.end(), likelier);
        sorted = next;
      }
      sum += candidates_[kept++].weight;
    }
    candidates_.resize(kept);
    std::sort(candidates_.begin(), candidates_.end(), by_id);
    total = 0;
    for (const Candidate& c : candidates_) total += c.weight;
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
  std::partial_sort(candidates_.begin(), candidates_.begin() + wanted, candidates_.end(),
                    [](const Candidate& a, const Candidate& b) {
                      return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
                    });
  for (size_t i = 0; i < wanted; ++i) {
    result.top_ids[row * result.top + i] = candidates_[i].id;
    result.top_logprobs[row * result.top + i] = static_cast<float>(candidates_[i].logit - log_total);
  }
}

}  // namespace paceline
