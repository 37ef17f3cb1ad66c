// The Python face: paceline._native.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "cpu.hpp"
#include "model.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {

namespace {

template <typename T, int kDims = 1>
using Array = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

// An array of another type or layout is refused, never converted: a converted copy would not outlive this function.
template <typename T, int kDims>
Array<T, kDims> array(nb::handle batch, const char* name) {
  Array<T, kDims> a;
  const nb::object value = batch.attr(name);  // not within try_cast, which must not throw
  if (!nb::try_cast(value, a, false))
    throw std::invalid_argument(std::string("batch: ") + name + " has the wrong dtype, dimensions or layout");
  return a;
}

template <typename T>
Span<T> span(nb::handle batch, const char* name) {
  const auto a = array<T, 1>(batch, name);
  return {a.data(), a.size()};
}

template <typename T>
Span<T> span2(nb::handle batch, const char* name, size_t& width) {
  const auto a = array<T, 2>(batch, name);
  width = a.shape(1);
  return {a.data(), a.size()};
}

// The views stay valid while the Python Batch, which is never written, is alive: for the whole call.
Batch view(nb::handle b) {
  Batch v;
  size_t pair = 0;
  v.token_ids = span<int32_t>(b, "token_ids");
  v.positions = span<int32_t>(b, "positions");
  v.query_start = span<int32_t>(b, "query_start");
  v.context_len = span<int32_t>(b, "context_len");
  v.block_tables = span2<int32_t>(b, "block_tables", v.blocks_per_table);
  if (v.block_tables.size != v.context_len.size * v.blocks_per_table)
    throw std::invalid_argument("batch: block_tables and context_len differ in length");
  v.adapter = span<int32_t>(b, "adapter");
  v.block_copies = span2<int32_t>(b, "block_copies", pair);
  if (!v.block_copies.empty() && pair != 2) throw std::invalid_argument("batch: block_copies must be pairs");
  v.logits_rows = span<int32_t>(b, "logits_rows");
  v.target_ids = span<int32_t>(b, "target_ids");
  v.seed = span<uint64_t>(b, "seed");
  v.draw_position = span<int64_t>(b, "draw_position");
  v.temperature = span<float>(b, "temperature");
  v.top_p = span<float>(b, "top_p");
  v.min_p = span<float>(b, "min_p");
  v.repetition = span<float>(b, "repetition");
  v.presence = span<float>(b, "presence");
  v.frequency = span<float>(b, "frequency");
  v.top_k = span<int32_t>(b, "top_k");
  v.num_logprobs = span<int32_t>(b, "num_logprobs");
  v.seen_start = span<int32_t>(b, "seen_start");
  v.seen_ids = span<int32_t>(b, "seen_ids");
  v.seen_output_count = span<int32_t>(b, "seen_output_count");
  v.bias_start = span<int32_t>(b, "bias_start");
  v.bias_ids = span<int32_t>(b, "bias_ids");
  v.bias = span<float>(b, "bias");
  v.mask_row = span<int32_t>(b, "mask_row");
  v.masks = span2<uint32_t>(b, "masks", v.words_per_mask);
  return v;
}

// Hands a vector's memory to numpy.
template <typename T>
nb::object to_numpy(std::vector<T>&& values, std::initializer_list<size_t> shape) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T>(owned->data(), shape, owner));
}

using StoredMatrix = std::tuple<std::string, int, int, int, int, Array<uint8_t>, int>;

// `layers` are (index into ropes or -1, window or 0); `ropes` are (frequencies, magnitude).
void construct(Model* self, int vocab_size, int hidden, int heads, int kv_heads, int head_dim, int intermediate,
               const std::vector<std::pair<int, int>>& layers,
               const std::vector<std::pair<std::vector<double>, double>>& ropes, double norm_eps, double attention_scale,
               double attention_softcap, double logits_softcap, double logits_scale, double embedding_scale,
               double residual_scale, bool tied_embeddings, bool parallel_residual, Activation activation,
               int num_blocks, int max_positions, int max_tokens, int threads, KVType kv_type, const std::string& isa) {
  ModelConfig config{
      .vocab_size = vocab_size,
      .hidden = hidden,
      .heads = heads,
      .kv_heads = kv_heads,
      .head_dim = head_dim,
      .intermediate = intermediate,
      .layers = {},
      .ropes = {},
      .norm_eps = norm_eps,
      .attention_scale = attention_scale,
      .attention_softcap = attention_softcap,
      .logits_softcap = logits_softcap,
      .logits_scale = logits_scale,
      .embedding_scale = embedding_scale,
      .residual_scale = residual_scale,
      .tied_embeddings = tied_embeddings,
      .parallel_residual = parallel_residual,
      .activation = activation,
      .num_blocks = num_blocks,
      .max_positions = max_positions,
      .max_tokens = max_tokens,
      .threads = threads,
      .kv_type = kv_type,
  };
  for (const auto& [rope, window] : layers) config.layers.push_back({rope, window});
  for (const auto& [frequencies, magnitude] : ropes) config.ropes.push_back({frequencies, magnitude});
  new (self) Model(config, choose_kernels(isa));
}

nb::tuple step(Model& model, nb::handle batch) {
  const Batch b = view(batch);
  StepResult r;
  {
    nb::gil_scoped_release release;
    r = model.step(b);
  }
  const size_t rows = r.token_ids.size(), reported = r.logprobs.empty() ? 0 : rows, logprobs = r.logprobs.size();
  return nb::make_tuple(to_numpy(std::move(r.token_ids), {rows}), to_numpy(std::move(r.status), {rows}),
                        to_numpy(std::move(r.logprobs), {logprobs}), to_numpy(std::move(r.top_ids), {reported, r.top}),
                        to_numpy(std::move(r.top_logprobs), {reported, r.top}));
}

nb::object logits(Model& model, nb::handle batch) {
  const Batch b = view(batch);
  std::vector<float> values;
  {
    nb::gil_scoped_release release;
    values = model.logits(b);
  }
  const size_t rows = b.logits_rows.size;
  return to_numpy(std::move(values), {rows, rows ? values.size() / rows : 0});
}

Matrix pack(int type, int n, int k, Array<uint8_t> stored, int kept_as, Arena& arena) {
  const size_t expected = stored_bytes(static_cast<StoredType>(type), n, k);
  if (stored.size() != expected)
    throw std::invalid_argument("a matrix of " + std::to_string(n) + " x " + std::to_string(k) + " has " +
                                std::to_string(stored.size()) + " bytes instead of " + std::to_string(expected));
  ThreadPool pool(1);
  return pack(static_cast<StoredType>(type), n, k, stored.data(), static_cast<StoredType>(kept_as), arena, pool);
}

// The rows of a packed matrix, as the embedding reads them: for tests of the kernels.
nb::object unpack(int type, int n, int k, Array<uint8_t> stored, const std::string& isa, std::optional<int> kept_as) {
  const Kernels& kernels = choose_kernels(isa);
  Arena arena;
  const Matrix w = pack(type, n, k, stored, kept_as.value_or(type), arena);
  std::vector<float> values(static_cast<size_t>(n) * k);
  for (int row = 0; row < n; ++row) kernels.unpack_row(w, row, &values[static_cast<size_t>(row) * k]);
  return to_numpy(std::move(values), {static_cast<size_t>(n), static_cast<size_t>(k)});
}

// One linear layer by itself: quantizes the rows as the forward pass does, for tests of the kernels.
nb::object linear(int type, int n, int k, Array<uint8_t> stored, Array<float, 2> rows, const std::string& isa) {
  const Kernels& kernels = choose_kernels(isa);
  Arena arena;
  const Matrix w = pack(type, n, k, stored, type, arena);
  if (rows.shape(1) != static_cast<size_t>(k))
    throw std::invalid_argument("rows of " + std::to_string(rows.shape(1)) + " values for a matrix with " +
                                std::to_string(k) + " inputs");
  const size_t count = rows.shape(0), values = count * k, groups = values / kGroup, width = w.panels() * kPanel;
  std::vector<int8_t> q(values);
  std::vector<float> scale(groups), sum(groups), f(values), out(count * width);
  std::vector<int32_t> code_sum(groups), low_sum(groups);
  Rows x;
  x.k = k;
  if (w.quantized()) {
    x.q = q.data(), x.scale = scale.data(), x.sum = sum.data(), x.code_sum = code_sum.data();
    x.low_sum = low_sum.data();
  } else {
    x.f = f.data();
  }
  for (size_t r = 0; r < count; ++r) kernels.store_row(rows.data() + r * k, k, x, static_cast<int>(r), 0);
  Mapping scratch(linear_scratch_bytes(static_cast<int>(count)));
  kernels.linear(w, x, 0, static_cast<int>(count), 0, w.panels(), out.data(), static_cast<ptrdiff_t>(width), false,
                 scratch.data());
  std::vector<float> result;
  for (size_t r = 0; r < count; ++r) result.insert(result.end(), &out[r * width], &out[r * width] + n);
  return to_numpy(std::move(result), {count, static_cast<size_t>(n)});
}

}  // namespace

}  // namespace paceline

NB_MODULE(_native, m) {
  using namespace paceline;
  m.doc() = "Paceline's kernels and native forward pass; see csrc/";

  nb::enum_<Activation>(m, "Activation")
      .value("SILU", Activation::kSilu)
      .value("GELU_TANH", Activation::kGeluTanh);
  nb::enum_<KVType>(m, "KVType")
      .value("F32", KVType::kF32)
      .value("F16", KVType::kF16)
      .value("INT8", KVType::kInt8);

  m.def("isa", [](const std::string& wanted) { return std::string(choose_kernels(wanted).name); }, "wanted"_a = "",
        "The instruction set that kernels are compiled for on this machine, or a check of the one wanted.");

  m.def("linear", &linear, "type"_a, "n"_a, "k"_a, "stored"_a, "rows"_a, "isa"_a = "",
        "Rows [M, k] times a stored n x k matrix, float32 [M, n], with the forward pass's kernels: for their tests.");

  m.def("unpack", &unpack, "type"_a, "n"_a, "k"_a, "stored"_a, "isa"_a = "", "kept_as"_a = nb::none(),
        "A stored n x k matrix packed, or quantized first, and unpacked again, float32 [n, k]: for tests.");

  m.def(
      "packed_bytes", [](int type, int n, int k) { return packed_bytes(static_cast<StoredType>(type), n, k); },
      "type"_a, "n"_a, "k"_a, "Bytes that an n x k matrix of a stored type takes once it is packed.");

  nb::class_<Model>(m, "Model")
      .def("__init__", &construct, nb::kw_only(), "vocab_size"_a, "hidden"_a, "heads"_a, "kv_heads"_a, "head_dim"_a,
           "intermediate"_a, "layers"_a, "ropes"_a, "norm_eps"_a, "attention_scale"_a, "attention_softcap"_a,
           "logits_softcap"_a, "logits_scale"_a, "embedding_scale"_a, "residual_scale"_a, "tied_embeddings"_a,
           "parallel_residual"_a, "activation"_a, "num_blocks"_a, "max_positions"_a, "max_tokens"_a, "threads"_a,
           "kv_type"_a, "isa"_a = "")
      .def(
          "set_matrices",
          [](Model& self, const std::vector<StoredMatrix>& matrices) {
            // Released once for all: with another thread at work each return of the lock may take 5 ms.
            nb::gil_scoped_release release;
            for (const auto& [name, layer, type, n, k, stored, kept_as] : matrices)
              self.set_matrix(name, layer, static_cast<StoredType>(type), n, k, stored.data(), stored.size(),
                              static_cast<StoredType>(kept_as));
          },
          "matrices"_a, "Packs matrices, each given as (name, layer, type, n, k, stored, kept_as).")
      .def(
          "set_norm",
          [](Model& self, const std::string& name, int layer, Array<float> values) {
            self.set_norm(name, layer, values.data(), values.size());
          },
          "name"_a, "layer"_a, "values"_a)
      .def(
          "set_bias",
          [](Model& self, const std::string& name, int layer, Array<float> values) {
            self.set_bias(name, layer, values.data(), values.size());
          },
          "name"_a, "layer"_a, "values"_a)
      .def("set_positions", [](Model& self, Array<float> values) { self.set_positions(values.data(), values.size()); },
           "values"_a)
      .def("finish_loading", &Model::finish_loading)
      .def("step", &step, "batch"_a,
           "Runs a Batch (executors/base.py); returns token_ids, status, logprobs, top_ids, top_logprobs.")
      .def("logits", &logits, "batch"_a, "Runs a Batch and returns its rows' raw logits, float32 [R, V].")
      .def("touch_kv", &Model::touch_kv, nb::call_guard<nb::gil_scoped_release>(), "begin"_a, "size"_a,
           "Takes a part of the KV cache's memory now, in bytes; may run beside step().")
      .def_prop_ro("kv_bytes", &Model::kv_bytes)
      .def_prop_ro("isa", [](const Model& self) { return std::string(self.kernels().name); })
      .def_prop_ro("weight_bytes", &Model::weight_bytes)
      .def_prop_ro("buffer_bytes", &Model::buffer_bytes)
      .def_prop_ro("bytes_per_block", &Model::bytes_per_block);
}
