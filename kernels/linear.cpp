// y[M,N] = x[M,K] w[N,K]^T + bias[N], invariant by construction.
//
// Each output element is one float accumulator walked over k in order with fused multiply-add. Threads and
// register tiles split M and N only, so neither the number of rows nor their place in the batch can matter.
// With AVX512-BF16 the step is the instruction that adds two bf16 products at once: other bits than without it,
// the same rule. Both sides of a port run on one machine, so both run one of the two.
//
// Shapes: x [M, K], w [N, K], y [M, N], all one dtype (bf16, fp16 or fp32).
// Packed weight: panels of 16 output columns, [ceil(N/16)][K'][16]; bf16 holds two k per 32-bit word (K' =
// ceil(K/2)), the other dtypes are widened to float (K' = K). Padding columns and the odd k are zero.
#include "simd.h"
#include <algorithm>
#include <cstdlib>
#ifdef _OPENMP
#include <omp.h>
#endif

static constexpr int LANES = 16;
#if defined(__AVX512BF16__) && defined(__AVX512F__)
static constexpr bool PAIRS = true;   // bf16 activations stay pairs of bf16 in one 32-bit word
static inline F16 pair16(const float* x, const uint32_t* w, F16 acc) {
  int bits;
  memcpy(&bits, x, 4);
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)_mm512_loadu_si512(w))};
}
#else
static constexpr bool PAIRS = false;
static inline F16 pair16(const float*, const uint32_t*, F16 acc) { return acc; }
#endif

static int64_t panel_words(int64_t k, int dtype) { return (dtype == BF16 ? (k + 1) / 2 : k) * LANES; }

static void pack_panel(const void* w, uint32_t* out, int64_t first, int64_t n, int64_t k, int dtype) {
  const int64_t words = dtype == BF16 ? (k + 1) / 2 : k;
  for (int c = 0; c < LANES; c++) {
    const int64_t row = first + c;
    if (row >= n) {
      for (int64_t i = 0; i < words; i++) out[i * LANES + c] = 0;
    } else if (dtype == BF16) {
      const uint16_t* p = (const uint16_t*)w + row * k;
      for (int64_t i = 0; i < k / 2; i++) out[i * LANES + c] = p[2 * i] | ((uint32_t)p[2 * i + 1] << 16);
      if (k & 1) out[(words - 1) * LANES + c] = p[k - 1];
    } else {
      for (int64_t i = 0; i < k; i++) {
        const float f = load_as_float(w, row * k + i, dtype);
        memcpy(&out[i * LANES + c], &f, 4);
      }
    }
  }
}

// MR rows times NP panels; a is [MR][lda] words: floats, or pairs of bf16 where PAIRS says so.
template <int MR, int NP>
static inline __attribute__((always_inline)) void tile(const float* a, int64_t lda, const uint32_t* panels, int64_t stride,
                                                       int64_t k, int dtype, F16 (&acc)[MR][NP]) {
  for (int r = 0; r < MR; r++)
    for (int p = 0; p < NP; p++) acc[r][p] = zero16();
  if (dtype == BF16 && PAIRS) {
    const int64_t words = (k + 1) / 2;
    for (int64_t i = 0; i < words; i++)
      for (int r = 0; r < MR; r++)
        for (int p = 0; p < NP; p++) acc[r][p] = pair16(a + r * lda + i, panels + p * stride + i * LANES, acc[r][p]);
  } else if (dtype == BF16) {
    const int64_t words = (k + 1) / 2;
    for (int64_t i = 0; i < words; i++) {
      F16 w[NP];
      for (int p = 0; p < NP; p++) w[p] = bf16_low16(panels + p * stride + i * LANES);
      for (int r = 0; r < MR; r++) {
        const F16 x = set16(a[r * lda + 2 * i]);
        for (int p = 0; p < NP; p++) acc[r][p] = fma16(x, w[p], acc[r][p]);
      }
      for (int p = 0; p < NP; p++) w[p] = bf16_high16(panels + p * stride + i * LANES);
      for (int r = 0; r < MR; r++) {
        const F16 x = set16(a[r * lda + 2 * i + 1]);
        for (int p = 0; p < NP; p++) acc[r][p] = fma16(x, w[p], acc[r][p]);
      }
    }
  } else {
    for (int64_t i = 0; i < k; i++) {
      F16 w[NP];
      for (int p = 0; p < NP; p++) w[p] = load16((const float*)(panels + p * stride + i * LANES));
      for (int r = 0; r < MR; r++) {
        const F16 x = set16(a[r * lda + i]);
        for (int p = 0; p < NP; p++) acc[r][p] = fma16(x, w[p], acc[r][p]);
      }
    }
  }
}

template <int MR, int NP>
static void block(const float* a, int64_t lda, const uint32_t* panels, int64_t stride, int64_t k, int dtype,
                  const void* bias, void* y, int64_t row, int64_t column, int64_t n) {
  F16 acc[MR][NP];
  tile<MR, NP>(a + row * lda, lda, panels, stride, k, dtype, acc);
  if (dtype == BF16 && !bias && column + NP * LANES <= n) {  // the common case, in whole registers
    for (int r = 0; r < MR; r++)
      for (int p = 0; p < NP; p++) store_bf16((uint16_t*)y + (row + r) * n + column + p * LANES, acc[r][p]);
    return;
  }
  for (int r = 0; r < MR; r++)
    for (int p = 0; p < NP; p++) {
      const int64_t first = column + p * LANES, count = std::min<int64_t>(LANES, n - first);
      float out[LANES];
      store16(out, acc[r][p]);
      for (int64_t c = 0; c < count; c++) {
        float v = out[c];
        if (bias) v = v + load_as_float(bias, first + c, dtype);
        store_from_float(y, (row + r) * n + first + c, v, dtype);
      }
    }
}

static constexpr int ROWS = 6;
static constexpr bool ONE_REGISTER = sizeof(F16) == 64 && alignof(F16) == 64;   // AVX-512

template <int NP>
static void block_of(int rows, const float* a, int64_t lda, const uint32_t* panels, int64_t stride, int64_t k, int dtype,
                     const void* bias, void* y, int64_t row, int64_t column, int64_t n) {
  switch (rows) {
    case 1: return block<1, NP>(a, lda, panels, stride, k, dtype, bias, y, row, column, n);
    case 2: return block<2, NP>(a, lda, panels, stride, k, dtype, bias, y, row, column, n);
    case 3: return block<3, NP>(a, lda, panels, stride, k, dtype, bias, y, row, column, n);
    case 4: return block<4, NP>(a, lda, panels, stride, k, dtype, bias, y, row, column, n);
    case 5: return block<5, NP>(a, lda, panels, stride, k, dtype, bias, y, row, column, n);
    default: return block<6, NP>(a, lda, panels, stride, k, dtype, bias, y, row, column, n);
  }
}

// Panels taken together: as many as the registers hold beside ROWS rows. Few rows are bound by memory, and more
// panels at once hide the latency of the accumulation.
static int panels_together(int64_t m) { return ONE_REGISTER || m == 1 ? 4 : m <= 3 ? 2 : 1; }

// Rows are cut as evenly as blocks of at most ROWS allow: a last block of one row would read every panel for itself.
static void rows_of(const float* a, int64_t lda, const uint32_t* panels, int count, int64_t stride, int64_t k, int dtype,
                    const void* bias, void* y, int64_t first_row, int64_t last_row, int64_t column, int64_t n) {
  const int64_t most = count == 4 && !ONE_REGISTER ? 1 : count == 2 && !ONE_REGISTER ? 3 : ROWS;
  int64_t row = first_row;
  for (int64_t left = (last_row - first_row + most - 1) / most; left > 0; left--) {
    const int rows = (int)((last_row - row + left - 1) / left);
    auto run = count == 4 ? block_of<4> : count == 2 ? block_of<2> : block_of<1>;
    run(rows, a, lda, panels, stride, k, dtype, bias, y, row, column, n);
    row += rows;
  }
}

// The activations as the tiles read them: floats, or pairs of bf16 in a word. They are used where they lie when they
// already are that; else a copy is made, to be freed. Null: no memory.
static const float* activations(const void* x, int64_t x_stride, int64_t m, int64_t k, int dtype, int threads,
                                int64_t* lda, float** copy) {
  const bool pairs = dtype == BF16 && PAIRS;
  *copy = nullptr;
  *lda = pairs ? x_stride / 2 : x_stride;
  if (pairs ? k % 2 == 0 && x_stride % 2 == 0 : dtype == FP32) return (const float*)x;
  *lda = pairs ? (k + 1) / 2 : (k + 1) / 2 * 2;
  float* a = *copy = (float*)aligned_alloc(64, (m * *lda * 4 + 63) / 64 * 64 + 64);
  if (!a) return nullptr;
  const int64_t width = *lda;
#pragma omp parallel for num_threads(threads) if (m * width > 16384)
  for (int64_t r = 0; r < m; r++) {
    const char* p = (const char*)x + r * x_stride * 2;
    if (pairs) {
      if (k & 1) a[r * width + k / 2] = 0.0f;
      memcpy(a + r * width, p, k * 2);
      continue;
    }
    for (int64_t i = 0; i < k; i++) a[r * width + i] = load_as_float(p, i, dtype);
    if (width > k) a[r * width + k] = 0.0f;
  }
  return a;
}

extern "C" {

int64_t linear_packed_words(int64_t n, int64_t k, int dtype) { return (n + LANES - 1) / LANES * panel_words(k, dtype); }

void linear_pack(const void* w, uint32_t* packed, int64_t n, int64_t k, int dtype, int threads) {
  const int64_t panels = (n + LANES - 1) / LANES, words = panel_words(k, dtype);
#pragma omp parallel for num_threads(threads)
  for (int64_t p = 0; p < panels; p++) pack_panel(w, packed + p * words, p * LANES, n, k, dtype);
}

// `packed` may be null: then each panel of `w` is packed into a scratch buffer just before it is used.
// Returns 0, or 1 when memory is short.
int linear(const void* x, int64_t x_stride, const void* w, const uint32_t* packed, const void* bias, void* y, int64_t m,
           int64_t n, int64_t k, int dtype, int threads) {
  if (!m || !n) return 0;
  const int64_t words = panel_words(k, dtype), panels = (n + LANES - 1) / LANES;
  int64_t lda;
  float* copy;
  const float* a = activations(x, x_stride, m, k, dtype, threads, &lda, &copy);
  if (!a) return 1;
  int failed = 0;
  const int wide = panels_together(m);
  const int64_t groups = (panels + wide - 1) / wide;
  // rows of x that stay in L2
  const int64_t chunk = std::max<int64_t>(ROWS, 196608 / (words / LANES * 4) / ROWS * ROWS);
  const int64_t chunks = (m + chunk - 1) / chunk;
#pragma omp parallel num_threads(threads)
  {
    uint32_t* scratch = packed ? nullptr : (uint32_t*)malloc(words * wide * 4);
    if (!packed && !scratch) {
#pragma omp atomic write
      failed = 1;
    }
    // packed: rows outside, so a chunk of x stays in cache; unpacked: panels outside, so each is packed once
    const int64_t outer = packed ? chunks : 1;
    for (int64_t o = 0; o < outer; o++) {
#pragma omp for schedule(static) nowait
      for (int64_t g = 0; g < groups; g++) {
        if (!packed && !scratch) continue;
        const int64_t first = g * wide;
        const int count = (int)std::min<int64_t>(wide, panels - first);
        const uint32_t* source = packed ? packed + first * words : scratch;
        if (!packed)
          for (int p = 0; p < count; p++) pack_panel(w, scratch + p * words, (first + p) * LANES, n, k, dtype);
        const int64_t lo = packed ? o * chunk : 0, hi = packed ? std::min(m, lo + chunk) : m;
        if (count == wide) {
          rows_of(a, lda, source, count, words, k, dtype, bias, y, lo, hi, first * LANES, n);
        } else {
          for (int p = 0; p < count; p++)
            rows_of(a, lda, source + p * words, 1, words, k, dtype, bias, y, lo, hi, (first + p) * LANES, n);
        }
      }
    }
    free(scratch);
  }
  free(copy);
  return failed;
}
}
