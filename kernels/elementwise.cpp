// Rotary embedding and the last step of RMSNorm in one pass each, at the rounding points of the modelling code.
//
// Each value is a fixed sequence of correctly rounded operations on its own inputs, the ones that the same formula
// makes as separate tensors: the bits are those of the plain tensor code (kernels/rotary.py, kernels/rms_norm.py).
#include "simd.h"
#ifdef _OPENMP
#include <omp.h>
#endif

template <int DTYPE>
static inline float load(const void* p, int64_t i) {
  return load_as_float(p, i, DTYPE);
}

template <int DTYPE>
static inline float rounded(float x) {
  if (DTYPE == BF16) return bf16_to_float(float_to_bf16(x));
  if (DTYPE == FP16) return (float)(_Float16)x;
  return x;
}

static constexpr int64_t MAX_HALF = 256;

// x, y [tokens, heads, size]; table [positions, 2 * half] = cos, sin; the first 2 * half of each head turn.
// Plain arrays between the loads and the stores, so that the compiler can use whole registers.
template <int DTYPE, bool NEOX>
static void rotate(const void* x, int64_t x_stride, void* y, const int64_t* positions, const void* table, int64_t tokens,
                   int64_t heads, int64_t size, int64_t half, bool each_product, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 8)
  for (int64_t t = 0; t < tokens; t++) {
    float c[MAX_HALF], s[MAX_HALF], p[MAX_HALF], q[MAX_HALF], u[MAX_HALF], v[MAX_HALF];
    const int64_t row = positions[t] * 2 * half, step = NEOX ? 1 : 2, second = NEOX ? half : 1;
    for (int64_t i = 0; i < half; i++) c[i] = load<DTYPE>(table, row + i);
    for (int64_t i = 0; i < half; i++) s[i] = load<DTYPE>(table, row + half + i);
    for (int64_t h = 0; h < heads; h++) {
      const int64_t from = t * x_stride + h * size, to = (t * heads + h) * size;
      for (int64_t i = 0; i < half; i++) p[i] = load<DTYPE>(x, from + i * step);
      for (int64_t i = 0; i < half; i++) q[i] = load<DTYPE>(x, from + i * step + second);
      if (each_product) {
        for (int64_t i = 0; i < half; i++) u[i] = rounded<DTYPE>(p[i] * c[i]) + rounded<DTYPE>(-q[i] * s[i]);
        for (int64_t i = 0; i < half; i++) v[i] = rounded<DTYPE>(q[i] * c[i]) + rounded<DTYPE>(p[i] * s[i]);
      } else {
        for (int64_t i = 0; i < half; i++) u[i] = p[i] * c[i] + -q[i] * s[i];
        for (int64_t i = 0; i < half; i++) v[i] = q[i] * c[i] + p[i] * s[i];
      }
      for (int64_t i = 0; i < half; i++) store_from_float(y, to + i * step, u[i], DTYPE);
      for (int64_t i = 0; i < half; i++) store_from_float(y, to + i * step + second, v[i], DTYPE);
      for (int64_t i = 2 * half; i < size; i++) store_from_float(y, to + i, load<DTYPE>(x, from + i), DTYPE);
    }
  }
}

// y = w * x / sqrt(mean_square + eps); x, y [rows, size], mean_square [rows], weight [size] or null.
template <int DTYPE>
static void scale(const void* x, const float* mean_square, const void* weight, void* y, int64_t rows, int64_t size, float eps,
                  bool before_weight, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 8)
  for (int64_t r = 0; r < rows; r++) {
    const float inverse = 1.0f / sqrtf(mean_square[r] + eps);
    for (int64_t i = 0; i < size; i++) {
      float v = load<DTYPE>(x, r * size + i) * inverse;
      if (before_weight) v = rounded<DTYPE>(v);
      if (weight) v = v * load<DTYPE>(weight, i);
      store_from_float(y, r * size + i, v, DTYPE);
    }
  }
}

extern "C" {

// Returns 1 when a head is larger than the kernel takes, 2 when a position is outside the table's `rows`.
int rotary(const void* x, int64_t x_stride, void* y, const int64_t* positions, const void* table, int64_t rows, int64_t tokens, int64_t heads,
            int64_t size, int64_t half, int neox, int each_product, int dtype, int threads) {
  if (half > MAX_HALF) return 1;
  for (int64_t t = 0; t < tokens; t++)
    if (positions[t] < 0 || positions[t] >= rows) return 2;
  auto halves = dtype == BF16 ? rotate<BF16, true> : dtype == FP16 ? rotate<FP16, true> : rotate<FP32, true>;
  auto pairs = dtype == BF16 ? rotate<BF16, false> : dtype == FP16 ? rotate<FP16, false> : rotate<FP32, false>;
  (neox ? halves : pairs)(x, x_stride, y, positions, table, tokens, heads, size, half, each_product, threads);
  return 0;
}

void rms_norm_scale(const void* x, const float* mean_square, const void* weight, void* y, int64_t rows, int64_t size, float eps,
                    int before_weight, int dtype, int threads) {
  auto run = dtype == BF16 ? scale<BF16> : dtype == FP16 ? scale<FP16> : scale<FP32>;
  run(x, mean_square, weight, y, rows, size, eps, before_weight, threads);
}
}
