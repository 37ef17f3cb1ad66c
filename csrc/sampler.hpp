// From one row of logits to a token, in vLLM's order: mask, bias, penalties, temperature, min-p, top-k, top-p, draw.
// Ties go to the lowest id. Log-probabilities are those of the raw distribution.
#pragma once

#include <vector>

#include "batch.hpp"
#include "matrix.hpp"

namespace paceline {

// What one thread needs to sample; reused from row to row.
class Sampler {
 public:
  Sampler(const Kernels& kernels, int vocab_size);

  // Samples or scores row `row` of the batch from its logits (vocab_size floats, changed in place) into `result`, whose
  // vectors already have their size.
  void sample(const Batch& batch, int row, float* logits, StepResult& result);

 private:
  struct Candidate {
    float logit;
    int32_t id;
    float weight;
  };

  // Returns whether the logits were changed.
  bool adjust(const Batch& batch, int row, float* logits);
  int draw(const Batch& batch, int row, const float* logits, int likeliest);
  int draw_from_all(double uniform) const;
  int draw_from_kept(const Batch& batch, int row, double uniform, const float* logits);
  // The weight from which on a token can be among the top_k likeliest, or in the set that reaches top_p.
  float lowest_useful_weight(int top_k, float min_p, double enough);
  void report_logprobs(const Batch& batch, int row, const float* logits, float max_logit, StepResult& result);

  static bool likelier(const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  }

  const Kernels& kernels_;
  const int vocab_size_;
  // All as large as they get from the start: nothing may fail while the pool's members run together.
  std::vector<float> raw_;      // logits before they are adjusted
  std::vector<float> weights_;  // exp((logit - max) / temperature), padded to whole vectors
  std::vector<Candidate> candidates_;
  std::vector<int> bin_count_;
  std::vector<double> bin_sum_;
};

}  // namespace paceline
