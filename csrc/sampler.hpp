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

  RowStatus adjust(const Batch& batch, int row, float* logits);
  int draw(const Batch& batch, int row, const float* logits, int likeliest);
  int draw_from_all(double uniform, const float* weights) const;
  int draw_from_kept(const Batch& batch, int row, double uniform, const float* logits, const float* weights);
  void report_logprobs(const Batch& batch, int row, const float* logits, float max_logit, StepResult& result);

  const Kernels& kernels_;
  const int vocab_size_;
  std::vector<float> weights_;  // padded to whole vectors
  std::vector<Candidate> candidates_;
};

}  // namespace paceline
