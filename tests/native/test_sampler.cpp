// From logits to tokens; the engine's tests have every combination, these the basics on every machine.
#include <algorithm>
#include <limits>
#include <numeric>

#include "sampler.hpp"
#include "testing.hpp"

namespace paceline::testing {

namespace {

constexpr int kVocabulary = 151;  // no multiple of 16

// One row, greedy by default.
struct Asked {
  std::vector<int32_t> target_ids{-1}, top_k{0}, num_logprobs{-1};
  std::vector<uint64_t> seed{0};
  std::vector<int64_t> draw_position{0};
  std::vector<float> temperature{0}, top_p{1}, min_p{0}, repetition{1}, presence{0}, frequency{0};
  std::vector<int32_t> seen_start{0, 0}, seen_ids, seen_output_count, bias_start{0, 0}, bias_ids, mask_row{-1};
  std::vector<float> bias;
  std::vector<uint32_t> masks;
};

template <typename T>
Span<T> span(const std::vector<T>& values) { return {values.data(), values.size()}; }

StepResult sample(const Kernels& kernels, const Asked& asked, std::vector<float> logits) {
  Batch batch;
  batch.target_ids = span(asked.target_ids), batch.top_k = span(asked.top_k);
  batch.num_logprobs = span(asked.num_logprobs), batch.seed = span(asked.seed);
  batch.draw_position = span(asked.draw_position), batch.temperature = span(asked.temperature);
  batch.top_p = span(asked.top_p), batch.min_p = span(asked.min_p), batch.repetition = span(asked.repetition);
  batch.presence = span(asked.presence), batch.frequency = span(asked.frequency);
  batch.seen_start = span(asked.seen_start), batch.seen_ids = span(asked.seen_ids);
  batch.seen_output_count = span(asked.seen_output_count), batch.bias_start = span(asked.bias_start);
  batch.bias_ids = span(asked.bias_ids), batch.bias = span(asked.bias), batch.mask_row = span(asked.mask_row);
  batch.masks = span(asked.masks), batch.words_per_mask = asked.masks.size();
  StepResult result;
  result.token_ids.resize(1);
  result.status.resize(1);
  result.logprobs.resize(1);
  result.top = static_cast<size_t>(std::max(0, asked.num_logprobs[0]));
  result.top_ids.resize(result.top);
  result.top_logprobs.resize(result.top);
  logits.resize((kVocabulary + 15) / 16 * 16, 1e30f);  // what pads a row must not be seen
  Sampler(kernels, kVocabulary).sample(batch, 0, logits.data(), result);
  return result;
}

int token(const Kernels& kernels, const Asked& asked, const std::vector<float>& logits) {
  const StepResult result = sample(kernels, asked, logits);
  require(result.status[0] == static_cast<uint8_t>(RowStatus::kOk), "status " + std::to_string(result.status[0]));
  return result.token_ids[0];
}

std::vector<float> some_logits() {
  Random random(1);
  return normals(random, kVocabulary, 2);
}

std::vector<double> softmax(const std::vector<float>& logits, double temperature = 1) {
  std::vector<double> p;
  for (const float logit : logits) p.push_back(std::exp(logit / temperature));
  const double total = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& each : p) each /= total;
  return p;
}

void test_greedy(const Kernels& kernels) {
  std::vector<float> logits = some_logits();
  logits[20] = logits[150] = 50;
  require(token(kernels, {}, logits) == 20, "a tie goes to the lowest id");
  Asked biased;
  biased.bias_start = {0, 1}, biased.bias_ids = {20}, biased.bias = {-std::numeric_limits<float>::infinity()};
  require(token(kernels, biased, logits) == 150, "a bias of -infinity bans");
  Asked penalized;
  penalized.seen_start = {0, 1}, penalized.seen_ids = {20}, penalized.seen_output_count = {0};
  penalized.repetition = {1.5f};
  require(token(kernels, penalized, logits) == 150, "a repetition penalty counts for tokens of the prompt");
  Asked masked;
  masked.mask_row = {0}, masked.masks.assign(5, 0);
  masked.masks[1] = 1u << 3;
  require(token(kernels, masked, logits) == 35, "a mask leaves what it allows");
  masked.masks[1] = 0;
  require(sample(kernels, masked, logits).status[0] == static_cast<uint8_t>(RowStatus::kNothingAllowed), "an empty mask");
  logits[3] = std::numeric_limits<float>::quiet_NaN();
  require(sample(kernels, {}, logits).status[0] == static_cast<uint8_t>(RowStatus::kNonFinite), "NaN among the logits");
}
const Listed greedy("greedy tokens, bans and masks", test_greedy);

void test_frequencies(const Kernels& kernels) {
  constexpr int kDraws = 20000;
  const std::vector<float> logits = some_logits();
  const std::vector<double> p = softmax(logits, 0.8);
  std::vector<int> count(kVocabulary);
  Asked asked;
  asked.temperature = {0.8f};
  for (int i = 0; i < kDraws; ++i) {
    asked.seed = {static_cast<uint64_t>(i % 100)}, asked.draw_position = {i / 100};
    ++count[token(kernels, asked, logits)];
  }
  for (int id = 0; id < kVocabulary; ++id) {
    const double deviation = std::sqrt(kDraws * p[id] * (1 - p[id]));
    require(std::fabs(count[id] - kDraws * p[id]) <= 5 * deviation + 1, "token " + std::to_string(id) + " is drawn " +
                std::to_string(count[id]) + " times instead of " + std::to_string(kDraws * p[id]));
  }
}
const Listed frequencies("tokens are drawn as often as they are likely", test_frequencies);

void test_filters(const Kernels& kernels) {
  const std::vector<float> logits = some_logits();
  const std::vector<double> p = softmax(logits);
  std::vector<int> ranked(kVocabulary);
  std::iota(ranked.begin(), ranked.end(), 0);
  std::sort(ranked.begin(), ranked.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  double sum = 0;
  size_t nucleus = 0;
  while (sum < 0.5) sum += p[ranked[nucleus++]];
  const auto drawn = [&](const Asked& filters) {
    std::vector<bool> seen(kVocabulary);
    Asked asked = filters;
    asked.temperature = {1};
    for (uint64_t seed = 0; seed < 2000; ++seed) {
      asked.seed = {seed};
      seen[token(kernels, asked, logits)] = true;
    }
    return seen;
  };
  Asked top_k, top_p, min_p;
  top_k.top_k = {3}, top_p.top_p = {0.5f}, min_p.min_p = {0.3f};
  const std::vector<bool> of_k = drawn(top_k), of_p = drawn(top_p), of_min = drawn(min_p);
  for (int rank = 0; rank < kVocabulary; ++rank) {
    const int id = ranked[rank];
    require(of_k[id] == (rank < 3), "top-k at rank " + std::to_string(rank));
    require(of_p[id] == (rank < static_cast<int>(nucleus)), "top-p at rank " + std::to_string(rank));
    require(of_min[id] == (p[id] >= 0.3 * p[ranked[0]]), "min-p at rank " + std::to_string(rank));
  }
}
const Listed filters("top-k, top-p and min-p keep what they should", test_filters);

void test_logprobs(const Kernels& kernels) {
  const std::vector<float> logits = some_logits();
  const std::vector<double> p = softmax(logits);
  Asked asked;
  asked.target_ids = {17}, asked.num_logprobs = {4};
  const StepResult result = sample(kernels, asked, logits);
  require(result.token_ids[0] == 17, "a target is scored, not drawn");
  require(std::fabs(result.logprobs[0] - std::log(p[17])) < 1e-5, "its log-probability");
  for (int i = 0; i < 4; ++i) {
    const double mine = p[result.top_ids[i]];
    require(std::fabs(result.top_logprobs[i] - std::log(mine)) < 1e-5, "a likely token's log-probability");
    int likelier = 0;
    for (const double each : p) likelier += each > mine;
    require(likelier == i, "the order of the likeliest tokens");
  }
}
const Listed logprobs("log-probabilities", test_logprobs);

}  // namespace

}  // namespace paceline::testing
