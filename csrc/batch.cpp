#include "batch.hpp"

#include <cmath>
#include <stdexcept>
#include <string>

#include "matrix.hpp"

namespace paceline {

namespace {

void require(bool ok, const char* what, long long got, long long limit) {
  if (!ok)
    throw std::invalid_argument(std::string("batch: ") + what + " (" + std::to_string(got) + ", limit " +
                                std::to_string(limit) + ")");
}

template <typename T>
void require_size(const Span<T>& span, size_t size, const char* name) {
  require(span.size == size, name, static_cast<long long>(span.size), static_cast<long long>(size));
}

// start is [rows + 1], ascending from 0 to the length of the arrays it cuts; or empty.
void validate_ragged(const Span<int32_t>& start, size_t rows, size_t total, const char* name) {
  if (start.empty()) return require(total == 0, name, static_cast<long long>(total), 0);
  require_size(start, rows + 1, name);
  require(start[0] == 0, name, start[0], 0);
  for (size_t r = 0; r < rows; ++r) require(start[r] <= start[r + 1], name, start[r], start[r + 1]);
  require(static_cast<size_t>(start[rows]) == total, name, start[rows], static_cast<long long>(total));
}

void validate_sequences(const Batch& b, const BatchLimits& limits) {
  const int tokens = b.tokens(), sequences = b.sequences();
  require_size(b.positions, b.token_ids.size, "positions has another length than token_ids");
  require_size(b.query_start, b.context_len.size + 1, "query_start must have one entry more than context_len");
  require_size(b.adapter, b.context_len.size, "adapter has another length than context_len");
  require(sequences > 0 && b.query_start[0] == 0, "query_start must begin with 0", sequences, 0);
  require(b.query_start[sequences] == tokens, "query_start must end with the number of tokens",
          b.query_start[sequences], tokens);
  std::vector<bool> written(limits.num_blocks);
  for (int s = 0; s < sequences; ++s) {
    const int begin = b.query_start[s], end = b.query_start[s + 1];
    require(begin >= 0 && begin < end && end <= tokens, "a sequence has no tokens", begin, end);
    require(b.adapter[s] == 0, "adapters are not supported", b.adapter[s], 0);
    require(b.context_len[s] <= limits.max_positions, "context_len is beyond the model's", b.context_len[s],
            limits.max_positions);
    require(b.context_len[s] >= end - begin, "context_len is shorter than the query", b.context_len[s], end - begin);
    const size_t blocks = (static_cast<size_t>(b.context_len[s]) + kBlockTokens - 1) / kBlockTokens;
    require(blocks <= b.blocks_per_table, "a block table is too short for its context",
            static_cast<long long>(b.blocks_per_table), static_cast<long long>(blocks));
    for (size_t i = 0; i < blocks; ++i)
      require(b.block_table(s)[i] >= 0 && b.block_table(s)[i] < limits.num_blocks, "block out of range",
              b.block_table(s)[i], limits.num_blocks);
    const int first = b.context_len[s] - (end - begin);
    for (size_t i = first / kBlockTokens; i < blocks; ++i) {
      const int block = b.block_table(s)[i];
      require(!written[block], "two sequences write the same block", block, s);
      written[block] = true;
    }
    for (int t = begin; t < end; ++t)
      require(b.positions[t] == first + t - begin, "positions must run up to context_len", b.positions[t],
              first + t - begin);
  }
  for (int t = 0; t < tokens; ++t)
    require(b.token_ids[t] >= 0 && b.token_ids[t] < limits.vocab_size, "token out of range", b.token_ids[t],
            limits.vocab_size);
  for (size_t i = 0; i < b.block_copies.size; ++i)
    require(b.block_copies[i] >= 0 && b.block_copies[i] < limits.num_blocks, "copied block out of range",
            b.block_copies[i], limits.num_blocks);
}

void validate_rows(const Batch& b, const BatchLimits& limits) {
  const size_t rows = b.logits_rows.size;
  require_size(b.target_ids, rows, "target_ids");
  require_size(b.seed, rows, "seed");
  require_size(b.draw_position, rows, "draw_position");
  for (const Span<float>* span : {&b.temperature, &b.top_p, &b.min_p, &b.repetition, &b.presence, &b.frequency})
    require_size(*span, rows, "a sampling parameter has another length than logits_rows");
  require_size(b.top_k, rows, "top_k");
  require_size(b.num_logprobs, rows, "num_logprobs");
  for (size_t r = 0; r < rows; ++r) {
    require(b.logits_rows[r] >= 0 && b.logits_rows[r] < b.tokens(), "logits row out of range", b.logits_rows[r],
            b.tokens());
    require(b.target_ids[r] >= -1 && b.target_ids[r] < limits.vocab_size, "target out of range", b.target_ids[r],
            limits.vocab_size);
    require(b.num_logprobs[r] >= -1 && b.num_logprobs[r] <= limits.vocab_size, "num_logprobs out of range",
            b.num_logprobs[r], limits.vocab_size);
    require(b.temperature[r] >= 0 && std::isfinite(b.temperature[r]), "a temperature is negative or not finite",
            static_cast<long long>(r), static_cast<long long>(rows));
    require(b.repetition[r] > 0 && std::isfinite(b.repetition[r]) && std::isfinite(b.presence[r]) &&
                std::isfinite(b.frequency[r]),
            "a penalty is not finite, or a repetition penalty not above 0", static_cast<long long>(r),
            static_cast<long long>(rows));
    require(!std::isnan(b.top_p[r]) && !std::isnan(b.min_p[r]), "top_p or min_p is NaN", static_cast<long long>(r),
            static_cast<long long>(rows));
  }
  require_size(b.seen_output_count, b.seen_ids.size, "seen_output_count");
  validate_ragged(b.seen_start, rows, b.seen_ids.size, "seen_start");
  require_size(b.bias, b.bias_ids.size, "bias");
  validate_ragged(b.bias_start, rows, b.bias_ids.size, "bias_start");
  for (const Span<int32_t>* ids : {&b.seen_ids, &b.bias_ids})
    for (size_t i = 0; i < ids->size; ++i)
      require((*ids)[i] >= 0 && (*ids)[i] < limits.vocab_size, "token out of range", (*ids)[i], limits.vocab_size);
  for (size_t i = 0; i < b.bias.size; ++i)
    require(b.bias[i] < INFINITY, "a bias is NaN or +infinity", static_cast<long long>(i),
            static_cast<long long>(b.bias.size));
  if (b.mask_row.empty()) return;
  require_size(b.mask_row, rows, "mask_row");
  const size_t words = (static_cast<size_t>(limits.vocab_size) + 31) / 32;
  require(b.masks.empty() || b.words_per_mask == words, "masks have the wrong width",
          static_cast<long long>(b.words_per_mask), static_cast<long long>(words));
  for (size_t r = 0; r < rows; ++r)
    require(b.mask_row[r] >= -1 && (b.mask_row[r] < 0 || b.mask_row[r] * words < b.masks.size), "mask out of range",
            b.mask_row[r], static_cast<long long>(b.masks.size / words));
}

}  // namespace

void validate(const Batch& batch, const BatchLimits& limits) {
  require(batch.tokens() > 0 && batch.tokens() <= limits.max_tokens, "number of tokens", batch.tokens(),
          limits.max_tokens);
  validate_sequences(batch, limits);
  validate_rows(batch, limits);
}

}  // namespace paceline
