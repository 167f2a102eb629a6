#include "maths/matrix.h"

#include <algorithm>

#include <cblas.h>

namespace ascend_emulator {
namespace {

#ifdef OPEN_BLAS_SCIPY
constexpr auto sgemm = scipy_cblas_sgemm;
constexpr auto set_num_threads = scipy_openblas_set_num_threads;
#else
constexpr auto sgemm = cblas_sgemm;
constexpr auto set_num_threads = openblas_set_num_threads;
#endif

} // namespace

void multiply(
    std::int64_t m, std::int64_t n, std::int64_t k, Matrix left, Matrix right, Right form, float* product,
    std::int64_t product_stride
) {
    // Kernels share their work themselves, in pieces that do not depend on the number of threads.
    [[maybe_unused]] static const bool once = (set_num_threads(1), true);
    if (m == 0 || n == 0) {
        return;
    }
    if (k == 0) {
        for (std::int64_t row = 0; row < m; ++row) {
            std::fill_n(product + row * product_stride, n, 0.0f);
        }
        return;
    }
    sgemm(
        CblasRowMajor, CblasNoTrans, form == Right::Transposed ? CblasTrans : CblasNoTrans, int(m), int(n), int(k),
        1.0f, left.data, int(left.stride), right.data, int(right.stride), 0.0f, product, int(product_stride)
    );
}

} // namespace ascend_emulator
