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

#include "kernels_linear.inl"

#include "kernels_row.inl"

#include "kernels_attention.inl"

}  // namespace PACELINE_NAMESPACE

const Kernels PACELINE_KERNELS = {
    PACELINE_ISA_NAME,          PACELINE_NAMESPACE::linear,    PACELINE_NAMESPACE::rms_norm,
    PACELINE_NAMESPACE::store_row, PACELINE_NAMESPACE::silu_mul, PACELINE_NAMESPACE::rope,
    PACELINE_NAMESPACE::store_kv, PACELINE_NAMESPACE::attention, PACELINE_NAMESPACE::argmax,
    PACELINE_NAMESPACE::exp_scaled, PACELINE_NAMESPACE::unpack_row,
};

}  // namespace paceline
