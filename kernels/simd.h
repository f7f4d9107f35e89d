// Sixteen float lanes with one fixed meaning on every instruction set.
//
// Every arithmetic step is a single correctly rounded IEEE operation on its own lane, and reductions across
// lanes use one fixed tree, so AVX-512, AVX2 and plain scalar builds produce the same bits. The compiler must
// not contract or reorder: build with -ffp-contract=off and without -ffast-math.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#endif

enum Dtype : int { BF16 = 0, FP16 = 1, FP32 = 2 };

#if defined(__AVX512F__)
struct F16 {
  __m512 v;
};
static inline F16 zero16() { return {_mm512_setzero_ps()}; }
static inline F16 set16(float x) { return {_mm512_set1_ps(x)}; }
static inline F16 load16(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store16(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
static inline F16 fma16(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F16 mul16(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F16 add16(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F16 bf16_low16(const uint32_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
static inline F16 bf16_high16(const uint32_t* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000u)))};
}
static inline F16 widen_fp16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline F16 widen_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
struct F16 {
  __m256 lo, hi;
};
static inline F16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F16 set16(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F16 load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store16(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
static inline F16 fma16(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline F16 mul16(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline F16 add16(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline __m256 bf16_low8(const uint32_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
}
static inline __m256 bf16_high8(const uint32_t* p) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi32((int)0xffff0000u)));
}
static inline F16 bf16_low16(const uint32_t* p) { return {bf16_low8(p), bf16_low8(p + 8)}; }
static inline F16 bf16_high16(const uint32_t* p) { return {bf16_high8(p), bf16_high8(p + 8)}; }
static inline __m256 widen_bf16_8(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline F16 widen_bf16(const uint16_t* p) { return {widen_bf16_8(p), widen_bf16_8(p + 8)}; }
static inline F16 widen_fp16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
#else
struct F16 {
  float v[16];
};
#define EACH(expr)                \
  F16 r;                          \
  for (int i = 0; i < 16; i++) r.v[i] = expr; \
  return r
static inline float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline F16 zero16() { EACH(0.0f); }
static inline F16 set16(float x) { EACH(x); }
static inline F16 load16(const float* p) { EACH(p[i]); }
static inline void store16(float* p, F16 a) { memcpy(p, a.v, sizeof a.v); }
static inline F16 fma16(F16 a, F16 b, F16 c) { EACH(fmaf(a.v[i], b.v[i], c.v[i])); }
static inline F16 mul16(F16 a, F16 b) { EACH(a.v[i] * b.v[i]); }
static inline F16 add16(F16 a, F16 b) { EACH(a.v[i] + b.v[i]); }
static inline F16 bf16_low16(const uint32_t* p) { EACH(bits_to_float(p[i] << 16)); }
static inline F16 bf16_high16(const uint32_t* p) { EACH(bits_to_float(p[i] & 0xffff0000u)); }
static inline F16 widen_bf16(const uint16_t* p) { EACH(bits_to_float((uint32_t)p[i] << 16)); }
static inline F16 widen_fp16(const uint16_t* p) { EACH((float)((const _Float16*)p)[i]); }
#undef EACH
#endif

static inline float bf16_to_float(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// Round to nearest even, as torch does; NaN stays NaN.
static inline uint16_t float_to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
static inline __m512i bf16_words(F16 a) {
  const __m512i u = _mm512_castps_si512(a.v), one = _mm512_set1_epi32(1);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(u, 16), one);
  const __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), even), 16);
  return _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
}
#endif

// Sixteen at once; the bits are those of float_to_bf16.
static inline void store_bf16(uint16_t* p, F16 a) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(bf16_words(a)));
#else
  float x[16];
  store16(x, a);
  for (int i = 0; i < 16; i++) p[i] = float_to_bf16(x[i]);
#endif
}

static inline F16 round_bf16(F16 a) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bf16_words(a), 16))};
#else
  float x[16];
  store16(x, a);
  for (int i = 0; i < 16; i++) x[i] = bf16_to_float(float_to_bf16(x[i]));
  return load16(x);
#endif
}

static inline float load_as_float(const void* p, int64_t i, int dtype) {
  if (dtype == BF16) return bf16_to_float(((const uint16_t*)p)[i]);
  if (dtype == FP16) return (float)((const _Float16*)p)[i];
  return ((const float*)p)[i];
}

static inline void store_from_float(void* p, int64_t i, float x, int dtype) {
  if (dtype == BF16)
    ((uint16_t*)p)[i] = float_to_bf16(x);
  else if (dtype == FP16)
    ((_Float16*)p)[i] = (_Float16)x;
  else
    ((float*)p)[i] = x;
}

// One fixed reduction tree over the sixteen lanes: halves are added until one is left.
static inline float sum_lanes(const float* x) {
  float t[8];
  for (int i = 0; i < 8; i++) t[i] = x[i] + x[i + 8];
  for (int i = 0; i < 4; i++) t[i] = t[i] + t[i + 4];
  return (t[0] + t[2]) + (t[1] + t[3]);
}

// Sixteen values of one dtype at element i of p.
template <int DTYPE>
static inline F16 load_wide(const void* p, int64_t i) {
  if (DTYPE == BF16) return widen_bf16((const uint16_t*)p + i);
  if (DTYPE == FP16) return widen_fp16((const uint16_t*)p + i);
  return load16((const float*)p + i);
}

template <int DTYPE>
static inline void store_narrow(void* p, int64_t i, F16 a) {
  if (DTYPE == BF16) return store_bf16((uint16_t*)p + i, a);
  if (DTYPE == FP32) return store16((float*)p + i, a);
  float x[16];
  store16(x, a);
  for (int l = 0; l < 16; l++) ((_Float16*)p)[i + l] = (_Float16)x[l];
}

template <int DTYPE>
static inline F16 rounded_to(F16 a) {
  if (DTYPE == FP32) return a;
  if (DTYPE == BF16) return round_bf16(a);
  float x[16];
  store16(x, a);
  for (int l = 0; l < 16; l++) x[l] = (float)(_Float16)x[l];
  return load16(x);
}
