// Causal softmax attention over a paged key/value cache, invariant by construction.
//
// Keys are walked from position 0 of their sequence in groups of 32, each query row by itself: prefill, chunked
// prefill, decode, padded and packed batches therefore run the same arithmetic for a row. Online softmax:
// Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; tiling as in Dao et al. 2022.
//
// Shapes: q, y [tokens, heads, size]; new k, v [tokens, kv_heads, size]; cache [blocks, kv_heads, block, 2 * size]
// (any block that is a multiple of 32). Inside one block of one head the first block * size elements hold keys as
// [block / 32][size][32], the rest hold values as [block][size].
#include "simd.h"
#include <algorithm>
#ifdef _OPENMP
#include <omp.h>
#endif

static constexpr int GROUP = 32;   // keys that share one step of the online softmax
static constexpr int MAX_SIZE = 512;

// exp(x) for x <= 0: Cody-Waite reduction and a degree-6 polynomial (Cephes expf coefficients), error < 2 ulp.
// No branch, so that loops over it use whole registers; far below the range it is 0, NaN stays NaN.
static inline float exp_negative(float x) {
  const float in = x > -87.0f ? x : -87.0f;
  const float n = rintf(in * 1.44269504088896341f);
  float r = fmaf(n, -0.693359375f, in);
  r = fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = fmaf(p, r, 1.3981999507e-3f);
  p = fmaf(p, r, 8.3334519073e-3f);
  p = fmaf(p, r, 4.1665795894e-2f);
  p = fmaf(p, r, 1.6666665459e-1f);
  p = fmaf(p, r, 5.0000001201e-1f);
  const float y = fmaf(p, r * r, r) + 1.0f;
  const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
  float scale;
  memcpy(&scale, &bits, 4);
  const float value = x > -87.0f ? y * scale : 0.0f;
  return x != x ? x : value;
}

template <int DTYPE>
static inline F16 widen(const void* p, int64_t i) {
  if (DTYPE == BF16) return widen_bf16((const uint16_t*)p + i);
  if (DTYPE == FP32) return load16((const float*)p + i);
  return widen_fp16((const uint16_t*)p + i);
}

struct Shape {
  int64_t size;           // head size
  float scale, softcap;   // softcap 0: none
};

struct Row {
  const float* q;   // [size]
  float* acc;       // [size]
  float max, sum;
  int64_t first, limit;   // keys first <= j < limit are visible
  int64_t position;
  float slope;            // ALiBi slope, 0: none
};

// scores of R rows against one group of 32 keys
template <int DTYPE, int R>
static inline void scores_of(Row* const* rows, const void* k, int64_t size, float (*s)[GROUP]) {
  F16 a[R], b[R];
  for (int r = 0; r < R; r++) a[r] = b[r] = zero16();
  for (int64_t d = 0; d < size; d++) {
    const F16 k0 = widen<DTYPE>(k, d * GROUP), k1 = widen<DTYPE>(k, d * GROUP + 16);
    for (int r = 0; r < R; r++) {
      const F16 x = set16(rows[r]->q[d]);
      a[r] = fma16(x, k0, a[r]);
      b[r] = fma16(x, k1, b[r]);
    }
  }
  for (int r = 0; r < R; r++) {
    store16(s[r], a[r]);
    store16(s[r] + 16, b[r]);
  }
}

// acc = acc * alpha + p v over keys lo <= j < hi of the group
template <int DTYPE, int R>
static inline void add_values(Row* const* rows, const void* v, int64_t size, int lo, int hi, const float* alpha,
                              float (*p)[GROUP]) {
  int64_t d = 0;
  for (; d + 32 <= size; d += 32) {
    F16 a[R], b[R];
    for (int r = 0; r < R; r++) {
      a[r] = mul16(load16(rows[r]->acc + d), set16(alpha[r]));
      b[r] = mul16(load16(rows[r]->acc + d + 16), set16(alpha[r]));
    }
    for (int j = lo; j < hi; j++) {
      const F16 v0 = widen<DTYPE>(v, j * size + d), v1 = widen<DTYPE>(v, j * size + d + 16);
      for (int r = 0; r < R; r++) {
        const F16 x = set16(p[r][j]);
        a[r] = fma16(x, v0, a[r]);
        b[r] = fma16(x, v1, b[r]);
      }
    }
    for (int r = 0; r < R; r++) {
      store16(rows[r]->acc + d, a[r]);
      store16(rows[r]->acc + d + 16, b[r]);
    }
  }
  for (; d < size; d += 16) {
    for (int r = 0; r < R; r++) {
      F16 a = mul16(load16(rows[r]->acc + d), set16(alpha[r]));
      for (int j = lo; j < hi; j++) a = fma16(set16(p[r][j]), widen<DTYPE>(v, j * size + d), a);
      store16(rows[r]->acc + d, a);
    }
  }
}

// One step of the online softmax for R rows that all see the keys lo <= j < hi of this group, and no others.
template <int DTYPE, int R>
static inline void step(Row* const* rows, const void* k, const void* v, const Shape& shape, int64_t group, int lo, int hi) {
  alignas(64) float s[R][GROUP];
  float alpha[R];
  scores_of<DTYPE, R>(rows, k, shape.size, s);
  for (int r = 0; r < R; r++) {
    Row& row = *rows[r];
    for (int j = 0; j < GROUP; j++) s[r][j] = s[r][j] * shape.scale;
    if (shape.softcap != 0.0f)
      for (int j = 0; j < GROUP; j++) {   // cap * tanh(s / cap), tanh(x) = sign(x) (1 - e) / (1 + e), e = exp(-2|x|)
        const float x = s[r][j] / shape.softcap, e = exp_negative(-2.0f * fabsf(x));
        s[r][j] = shape.softcap * copysignf((1.0f - e) / (1.0f + e), x);
      }
    if (row.slope != 0.0f)
      for (int j = 0; j < GROUP; j++) s[r][j] = s[r][j] + row.slope * (float)(group * GROUP + j - row.position);
    if (lo > 0 || hi < GROUP)
      for (int j = 0; j < GROUP; j++) s[r][j] = j >= lo && j < hi ? s[r][j] : -INFINITY;
    float tops[16];   // the largest of a set does not depend on the order; a NaN score makes its sum NaN below
    for (int j = 0; j < 16; j++) tops[j] = s[r][j] > s[r][j + 16] ? s[r][j] : s[r][j + 16];
    for (int half = 8; half; half /= 2)
      for (int j = 0; j < half; j++) tops[j] = tops[j] > tops[j + half] ? tops[j] : tops[j + half];
    const float top = tops[0] > row.max ? tops[0] : row.max;
    alpha[r] = exp_negative(row.max - top);
    for (int j = 0; j < GROUP; j++) s[r][j] = s[r][j] - top;
    for (int j = 0; j < GROUP; j++) s[r][j] = exp_negative(s[r][j]);
    float t[16];
    for (int j = 0; j < 16; j++) t[j] = s[r][j] + s[r][j + 16];
    row.sum = row.sum * alpha[r] + sum_lanes(t);
    row.max = top;
  }
  add_values<DTYPE, R>(rows, v, shape.size, lo, hi, alpha, s);
}

// Every row that sees a key of this group: three at a time where they see all of it, else one by one.
template <int DTYPE>
static void rows_of_group(Row* rows, int count, const void* k, const void* v, int64_t key, const Shape& shape) {
  const int64_t group = key / GROUP;
  Row* full[3];
  int waiting = 0;
  for (int r = 0; r < count; r++) {
    const int64_t lo = std::max<int64_t>(rows[r].first - key, 0), hi = std::min<int64_t>(rows[r].limit - key, GROUP);
    if (lo >= hi) continue;
    if (lo == 0 && hi == GROUP) {
      full[waiting++] = &rows[r];
      if (waiting == 3) {
        step<DTYPE, 3>(full, k, v, shape, group, 0, GROUP);
        waiting = 0;
      }
    } else {
      Row* one = &rows[r];
      step<DTYPE, 1>(&one, k, v, shape, group, (int)lo, (int)hi);
    }
  }
  if (waiting == 2) step<DTYPE, 2>(full, k, v, shape, group, 0, GROUP);
  if (waiting == 1) step<DTYPE, 1>(full, k, v, shape, group, 0, GROUP);
}

template <int DTYPE>
static void walk(Row* rows, int count, const char* cache, const int32_t* table, int64_t block, int64_t block_bytes,
                 int64_t head_bytes, int64_t head, const Shape& shape) {
  constexpr int64_t bytes = DTYPE == FP32 ? 4 : 2;
  int64_t begin = rows[0].first, end = 0;
  for (int r = 0; r < count; r++) {
    begin = std::min(begin, rows[r].first);
    end = std::max(end, rows[r].limit);
  }
  for (int64_t group = begin / GROUP; group * GROUP < end; group++) {
    const int64_t key = group * GROUP, inside = key % block;
    const char* base = cache + (int64_t)table[key / block] * block_bytes + head * head_bytes;
    const void* k = base + inside * shape.size * bytes;
    const void* v = base + (block + inside) * shape.size * bytes;
    if (count > 6) {   // many rows share the group: widen it once
      alignas(64) static thread_local float wide_k[MAX_SIZE * GROUP], wide_v[MAX_SIZE * GROUP];
      for (int64_t i = 0; i < shape.size * GROUP; i += 16) store16(wide_k + i, widen<DTYPE>(k, i));
      const int64_t used = std::min<int64_t>(end - key, GROUP) * shape.size;   // beyond is not of this sequence
      for (int64_t i = 0; i < used; i += 16) store16(wide_v + i, widen<DTYPE>(v, i));
      rows_of_group<FP32>(rows, count, wide_k, wide_v, key, shape);
    } else {
      rows_of_group<DTYPE>(rows, count, k, v, key, shape);
    }
  }
}

static constexpr int TILE = 24;   // query rows that share the walk over the keys

template <int DTYPE>
static void attend(const char* q, int64_t q_stride, const char* cache, char* y, int64_t y_stride, const int32_t* query_start,
                   const int32_t* lengths, const int32_t* table, int64_t table_stride, int64_t sequences, int64_t heads,
                   int64_t kv_heads, int64_t block, int64_t block_bytes, int64_t head_bytes, int64_t window,
                   const float* slopes, const float* sinks, const Shape& shape, int threads) {
  constexpr int64_t bytes = DTYPE == FP32 ? 4 : 2;
  const int64_t share = heads / kv_heads;
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences; s++) longest = std::max<int64_t>(longest, query_start[s + 1] - query_start[s]);
  const int64_t tiles = (longest * share + TILE - 1) / TILE;
#pragma omp parallel for collapse(3) schedule(dynamic) num_threads(threads)
  for (int64_t s = 0; s < sequences; s++)
    for (int64_t head = 0; head < kv_heads; head++)
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t start = query_start[s], queries = query_start[s + 1] - start;
        const int64_t first = t * TILE, last = std::min(queries * share, first + TILE);
        if (first >= last) continue;
        alignas(64) float qs[TILE][MAX_SIZE], accs[TILE][MAX_SIZE];
        Row rows[TILE];
        for (int64_t i = first; i < last; i++) {
          const int64_t token = start + i / share, h = head * share + i % share;
          Row& row = rows[i - first];
          row.q = qs[i - first];
          row.acc = accs[i - first];
          const char* source = q + token * q_stride * bytes + h * shape.size * bytes;
          for (int64_t d = 0; d < shape.size; d++) {
            qs[i - first][d] = load_as_float(source, d, DTYPE);
            accs[i - first][d] = 0.0f;
          }
          row.max = sinks ? sinks[h] : -INFINITY;
          row.sum = sinks ? 1.0f : 0.0f;
          row.position = lengths[s] - queries + i / share;
          row.limit = row.position + 1;
          row.first = window > 0 ? std::max<int64_t>(0, row.position - window + 1) : 0;
          row.slope = slopes ? slopes[h] : 0.0f;
        }
        walk<DTYPE>(rows, (int)(last - first), cache, table + s * table_stride, block, block_bytes, head_bytes, head, shape);
        for (int64_t i = first; i < last; i++) {
          const Row& row = rows[i - first];
          char* target = y + (start + i / share) * y_stride * bytes + (head * share + i % share) * shape.size * bytes;
          for (int64_t d = 0; d < shape.size; d++) store_from_float(target, d, row.acc[d] / row.sum, DTYPE);
        }
      }
}

extern "C" {

// Writes new keys and values into their slots (block * block size + offset; a negative slot is skipped).
void attention_store(const char* k, int64_t k_stride, const char* v, int64_t v_stride, char* cache, const int64_t* slots,
                     int64_t tokens, int64_t kv_heads, int64_t size, int64_t block, int64_t block_bytes, int64_t head_bytes,
                     int dtype, int threads) {
  const int64_t bytes = dtype == FP32 ? 4 : 2;
#pragma omp parallel for num_threads(threads) if (tokens > 8)
  for (int64_t t = 0; t < tokens; t++) {
    if (slots[t] < 0) continue;
    const int64_t inside = slots[t] % block;
    for (int64_t h = 0; h < kv_heads; h++) {
      char* base = cache + slots[t] / block * block_bytes + h * head_bytes;
      const char* key = k + (t * k_stride + h * size) * bytes;
      char* group = base + (inside / GROUP * GROUP * size + inside % GROUP) * bytes;
      if (bytes == 2)
        for (int64_t d = 0; d < size; d++) ((uint16_t*)group)[d * GROUP] = ((const uint16_t*)key)[d];
      else
        for (int64_t d = 0; d < size; d++) ((uint32_t*)group)[d * GROUP] = ((const uint32_t*)key)[d];
      memcpy(base + (block + inside) * size * bytes, v + (t * v_stride + h * size) * bytes, size * bytes);
    }
  }
}

// Strides of q and y are in elements. window 0: none. slopes, sinks: [heads] or null. Returns 1 on a bad shape.
int attention(const char* q, int64_t q_stride, const char* cache, char* y, int64_t y_stride, const int32_t* query_start,
              const int32_t* lengths, const int32_t* table, int64_t table_stride, int64_t sequences, int64_t heads,
              int64_t kv_heads, int64_t size, int64_t block, int64_t block_bytes, int64_t head_bytes, int64_t window,
              float scale, float softcap, const float* slopes, const float* sinks, int dtype, int threads) {
  if (size % 16 || size > MAX_SIZE || block % GROUP || heads % kv_heads) return 1;
  const Shape shape{size, scale, softcap};
  auto run = dtype == BF16 ? attend<BF16> : dtype == FP16 ? attend<FP16> : attend<FP32>;
  run(q, q_stride, cache, y, y_stride, query_start, lengths, table, table_stride, sequences, heads, kv_heads, block,
      block_bytes, head_bytes, window, slopes, sinks, shape, threads);
  return 0;
}
}
