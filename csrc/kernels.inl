// All kernels, once per instruction set: the including file defines PACELINE_KERNELS (the table's name),
// PACELINE_NAMESPACE and the tile sizes.
#include "half.hpp"
#include "matrix.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace PACELINE_NAMESPACE {

#include "simd.hpp"

#include "kernels_weights.inl"

#include "kernels_dense.inl"

#include "kernels_linear.inl"

#include "kernels_row.inl"

#include "kernels_attention.inl"

}  // namespace PACELINE_NAMESPACE

const Kernels PACELINE_KERNELS = {
    .name = PACELINE_ISA_NAME,
    .tile_queries = PACELINE_NAMESPACE::kTileQueries,
    .linear = PACELINE_NAMESPACE::linear,
    .norm = PACELINE_NAMESPACE::norm,
    .store_row = PACELINE_NAMESPACE::store_row,
    .activate = PACELINE_NAMESPACE::activate,
    .add_scaled = PACELINE_NAMESPACE::add_scaled,
    .softcap = PACELINE_NAMESPACE::softcap,
    .rope = PACELINE_NAMESPACE::rope,
    .store_kv = PACELINE_NAMESPACE::store_kv,
    .attention = PACELINE_NAMESPACE::attention,
    .argmax = PACELINE_NAMESPACE::argmax,
    .exp_scaled = PACELINE_NAMESPACE::exp_scaled,
    .unpack_row = PACELINE_NAMESPACE::unpack_row,
};

}  // namespace paceline
