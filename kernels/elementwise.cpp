// Rotary embedding and RMSNorm in one pass each, at the rounding points of the modelling code.
//
// Each value is a fixed sequence of correctly rounded operations on its own inputs, the ones that the same formula
// makes as separate tensors: the bits are those of the plain tensor code (kernels/rotary.py, kernels/rms_norm.py).
#include "simd.h"
#include <vector>
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

template <int DTYPE>
static inline void store(void* p, int64_t i, float x) {
  store_from_float(p, i, x, DTYPE);
}

// x [tokens, heads, size], rows x_stride apart, turned in place; table [positions, 2 * half] = cos, sin; the first
// 2 * half of each head turn.
template <int DTYPE, bool NEOX>
static void rotate(void* x, int64_t x_stride, const int64_t* positions, const void* table, int64_t tokens, int64_t heads,
                   int64_t size, int64_t half, bool each_product, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 8)
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t row = positions[t] * 2 * half, step = NEOX ? 1 : 2, second = NEOX ? half : 1;
    const int64_t whole = NEOX ? half / 16 * 16 : 0;
    for (int64_t h = 0; h < heads; h++) {
      const int64_t from = t * x_stride + h * size;
      for (int64_t i = 0; i < whole; i += 16) {
        const F16 c = load_wide<DTYPE>(table, row + i), s = load_wide<DTYPE>(table, row + half + i);
        const F16 p = load_wide<DTYPE>(x, from + i), q = load_wide<DTYPE>(x, from + half + i);
        F16 pc = mul16(p, c), qs = mul16(mul16(q, set16(-1.0f)), s), qc = mul16(q, c), ps = mul16(p, s);
        if (each_product) {
          pc = rounded_to<DTYPE>(pc), qs = rounded_to<DTYPE>(qs);
          qc = rounded_to<DTYPE>(qc), ps = rounded_to<DTYPE>(ps);
        }
        store_narrow<DTYPE>(x, from + i, add16(pc, qs));
        store_narrow<DTYPE>(x, from + half + i, add16(qc, ps));
      }
      for (int64_t i = whole; i < half; i++) {
        const float c = load<DTYPE>(table, row + i), s = load<DTYPE>(table, row + half + i);
        const float p = load<DTYPE>(x, from + i * step), q = load<DTYPE>(x, from + i * step + second);
        float pc = p * c, qs = -q * s, qc = q * c, ps = p * s;
        if (each_product) {
          pc = rounded<DTYPE>(pc), qs = rounded<DTYPE>(qs);
          qc = rounded<DTYPE>(qc), ps = rounded<DTYPE>(ps);
        }
        store<DTYPE>(x, from + i * step, pc + qs);
        store<DTYPE>(x, from + i * step + second, qc + ps);
      }
    }
  }
}

// The sum of a contiguous row in the order of torch's CPU kernel (aten/src/ATen/native/cpu/SumKernel.cpp): WIDTH lanes,
// four of them side by side, cascaded in four levels. The bits of a mean are those of its order, and the modelling
// code takes torch's; kernels/rms_norm.py asks torch whether this is still it.
template <int WIDTH>
static float torch_sum(const float* x, int64_t size) {
  constexpr int SIDE = 4, LEVELS = 4, NV = SIDE * WIDTH / 16;
  const int64_t vectors = size / WIDTH, steps = vectors / SIDE;
  int64_t log2 = 0;
  while ((int64_t(1) << log2) < steps) log2++;
  const int64_t power = log2 / LEVELS > 4 ? log2 / LEVELS : 4, step = int64_t(1) << power;
  F16 acc[LEVELS][NV];
  for (auto& level : acc)
    for (auto& a : level) a = zero16();
  int64_t i = 0;
  while (i + step <= steps) {
    for (int64_t j = 0; j < step; j++, i++)
      for (int v = 0; v < NV; v++) acc[0][v] = add16(acc[0][v], load16(x + (i * NV + v) * 16));
    for (int64_t j = 1; j < LEVELS; j++) {
      for (int v = 0; v < NV; v++) {
        acc[j][v] = add16(acc[j][v], acc[j - 1][v]);
        acc[j - 1][v] = zero16();
      }
      if (i & ((step - 1) << (j * power))) break;
    }
  }
  for (; i < steps; i++)
    for (int v = 0; v < NV; v++) acc[0][v] = add16(acc[0][v], load16(x + (i * NV + v) * 16));
  for (int j = 1; j < LEVELS; j++)
    for (int v = 0; v < NV; v++) acc[0][v] = add16(acc[0][v], acc[j][v]);
  float lanes[SIDE * WIDTH];
  for (int v = 0; v < NV; v++) store16(lanes + v * 16, acc[0][v]);
  for (int64_t v = steps * SIDE; v < vectors; v++)
    for (int l = 0; l < WIDTH; l++) lanes[l] += x[v * WIDTH + l];
  for (int k = 1; k < SIDE; k++)
    for (int l = 0; l < WIDTH; l++) lanes[l] += lanes[k * WIDTH + l];
  float sum = 0;
  for (int64_t r = vectors * WIDTH; r < size; r++) sum += x[r];
  for (int l = 0; l < WIDTH; l++) sum += lanes[l];
  return sum;
}

// total = x + residual; y = w * total / sqrt(mean(total^2) + eps). x, residual, total, y [rows, size]; weight [size].
// residual (and with it total) and weight may be null. Returns 1 when a row is longer than the kernel takes.
static constexpr int64_t MAX_ROW = 32768;  // torch cuts a longer single row between threads

template <int DTYPE>
static int norm(const void* x, const void* residual, const void* weight, void* total, void* y, int64_t rows, int64_t size,
                float eps, bool before_weight, int lanes, int threads) {
  if (size >= MAX_ROW) return 1;
  const int64_t whole = size / 16 * 16;
#pragma omp parallel num_threads(threads) if (rows > 8)
  {
    std::vector<float> wide(2 * size);
    float *v = wide.data(), *square = v + size;
#pragma omp for
    for (int64_t r = 0; r < rows; r++) {
      const int64_t at = r * size;
      for (int64_t i = 0; i < whole; i += 16) {
        F16 a = load_wide<DTYPE>(x, at + i);
        if (residual) {
          a = rounded_to<DTYPE>(add16(a, load_wide<DTYPE>(residual, at + i)));
          store_narrow<DTYPE>(total, at + i, a);
        }
        store16(v + i, a);
        store16(square + i, mul16(a, a));
      }
      for (int64_t i = whole; i < size; i++) {
        v[i] = load<DTYPE>(x, at + i);
        if (residual) {
          v[i] = rounded<DTYPE>(v[i] + load<DTYPE>(residual, at + i));
          store<DTYPE>(total, at + i, v[i]);
        }
        square[i] = v[i] * v[i];
      }
      const float sum = lanes == 16 ? torch_sum<16>(square, size) : torch_sum<8>(square, size);
      const float inverse = 1.0f / sqrtf(sum / (float)size + eps);
      const F16 scale = set16(inverse);
      for (int64_t i = 0; i < whole; i += 16) {
        F16 a = mul16(load16(v + i), scale);
        if (before_weight) a = rounded_to<DTYPE>(a);
        store_narrow<DTYPE>(y, at + i, weight ? mul16(a, load_wide<DTYPE>(weight, i)) : a);
      }
      for (int64_t i = whole; i < size; i++) {
        float a = v[i] * inverse;
        if (before_weight) a = rounded<DTYPE>(a);
        store<DTYPE>(y, at + i, weight ? a * load<DTYPE>(weight, i) : a);
      }
    }
  }
  return 0;
}

extern "C" {

// Queries and keys, in place. Returns 2 when a position is outside the table's `rows`.
int rotary(void* q, int64_t q_stride, int64_t q_heads, void* k, int64_t k_stride, int64_t k_heads, const int64_t* positions,
           const void* table, int64_t rows, int64_t tokens, int64_t size, int64_t half, int neox, int each_product, int dtype,
           int threads) {
  for (int64_t t = 0; t < tokens; t++)
    if (positions[t] < 0 || positions[t] >= rows) return 2;
  auto halves = dtype == BF16 ? rotate<BF16, true> : dtype == FP16 ? rotate<FP16, true> : rotate<FP32, true>;
  auto pairs = dtype == BF16 ? rotate<BF16, false> : dtype == FP16 ? rotate<FP16, false> : rotate<FP32, false>;
  auto run = neox ? halves : pairs;
  run(q, q_stride, positions, table, tokens, q_heads, size, half, each_product, threads);
  run(k, k_stride, positions, table, tokens, k_heads, size, half, each_product, threads);
  return 0;
}

int rms_norm(const void* x, const void* residual, const void* weight, void* total, void* y, int64_t rows, int64_t size, float eps,
             int before_weight, int lanes, int dtype, int threads) {
  auto run = dtype == BF16 ? norm<BF16> : dtype == FP16 ? norm<FP16> : norm<FP32>;
  return run(x, residual, weight, total, y, rows, size, eps, before_weight, lanes, threads);
}

void row_sum(const float* x, float* y, int64_t rows, int64_t size, int lanes) {
  for (int64_t r = 0; r < rows; r++)
    y[r] = lanes == 16 ? torch_sum<16>(x + r * size, size) : torch_sum<8>(x + r * size, size);
}
}
