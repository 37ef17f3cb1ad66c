// One step's work and its result, as views of the arrays of executors/base.py (same names, same shapes).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

template <typename T>
struct Span {
  const T* data = nullptr;
  size_t size = 0;
  const T& operator[](size_t i) const { return data[i]; }
  bool empty() const { return size == 0; }
  const T* begin() const { return data; }
  const T* end() const { return data + size; }
};

struct Batch {
  Span<int32_t> token_ids, positions, query_start, context_len;
  Span<int32_t> block_tables;  // [sequences, blocks_per_table]
  size_t blocks_per_table = 0;
  Span<int32_t> adapter;
  Span<int32_t> block_copies;  // [copies, 2]
  Span<int32_t> logits_rows, target_ids;
  Span<uint64_t> seed;
  Span<int64_t> draw_position;
  Span<float> temperature, top_p, min_p, repetition, presence, frequency;
  Span<int32_t> top_k, num_logprobs;
  Span<int32_t> seen_start, seen_ids, seen_output_count;
  Span<int32_t> bias_start, bias_ids;
  Span<float> bias;
  Span<int32_t> mask_row;
  Span<uint32_t> masks;  // [masks, words_per_mask]
  size_t words_per_mask = 0;

  int tokens() const { return static_cast<int>(token_ids.size); }
  int sequences() const { return static_cast<int>(context_len.size); }
  int rows() const { return static_cast<int>(logits_rows.size); }
  const int32_t* block_table(int sequence) const { return block_tables.data + sequence * blocks_per_table; }
};

enum class RowStatus : uint8_t { kOk = 0, kNonFinite = 1, kNothingAllowed = 2 };

struct StepResult {
  std::vector<int32_t> token_ids;
  std::vector<uint8_t> status;
  std::vector<float> logprobs;   // empty when no row asked
  std::vector<int32_t> top_ids;  // [rows, top]
  std::vector<float> top_logprobs;
  size_t top = 0;
};

struct BatchLimits {
  int vocab_size, num_blocks, max_tokens, max_positions;
};

// Checks every size and index that the computation relies on. Throws std::invalid_argument.
void validate(const Batch& batch, const BatchLimits& limits);

}  // namespace paceline
