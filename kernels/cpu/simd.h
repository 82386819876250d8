// Float vectors through GCC's vector extension: AVX-512, AVX2 or whatever the compiler is told that the machine has.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__F16C__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace hydra {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float vec __attribute__((vector_size(W * 4)));
typedef int32_t ivec __attribute__((vector_size(W * 4)));
typedef uint32_t uvec __attribute__((vector_size(W * 4)));
typedef int32_t ivec4 __attribute__((vector_size(16)));
typedef uint16_t hvec __attribute__((vector_size(W * 2)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline vec splat(float x) { return x - vec{}; }

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline float to_float(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  _Float16 h;
  std::memcpy(&h, &x.bits, 2);
  return float(h);
#endif
}

inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) {  // round to nearest even; NaN stays NaN
  uint32_t u;
  std::memcpy(&u, &x, 4);
  out.bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline void from_float(float x, f16& out) {
#if defined(__F16C__)
  out.bits = _cvtss_sh(x, 0);
#else
  _Float16 h = _Float16(x);
  std::memcpy(&out.bits, &h, 2);
#endif
}

inline vec load(const float* p) {
  vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline vec load(const bf16* p) {
#if defined(__AVX512F__)  // GCC widens in halves
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  hvec h;
  std::memcpy(&h, p, sizeof h);
  uvec u = __builtin_convertvector(h, uvec) << 16;
  vec v;
  std::memcpy(&v, &u, sizeof v);
  return v;
#endif
}
inline vec load(const f16* p) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vec v;
  for (int i = 0; i < W; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}
inline vec load(const int8_t* p) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vec v;
  for (int i = 0; i < W; ++i) v[i] = p[i];
  return v;
#endif
}
inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16* p, vec v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  uvec u;
  std::memcpy(&u, &v, sizeof v);
  u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  u = v == v ? u : uvec{} + 0x7fc0;
  const hvec h = __builtin_convertvector(u, hvec);
  std::memcpy(p, &h, sizeof h);
#endif
}
inline void store(f16* p, vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0));
#else
  for (int i = 0; i < W; ++i) from_float(v[i], p[i]);
#endif
}

// `n` floats in `kept`, which grows if necessary. They start at a cache line, so that 64 bytes that are read together
// do not lie in two.
inline float* aligned_room(std::vector<float>& kept, int64_t n) {
  constexpr int64_t LINE = 64 / sizeof(float);
  if (kept.size() < size_t(n + LINE)) kept.resize(n + LINE);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(kept.data()) + 63) / 64 * 64);
}

// Keeps the compiler from reloading a value at each use, which would make the loads the bottleneck.
inline void in_register(vec& v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#endif
}

// a * b + c, rounded once. This is explicit because GCC, tuned for a Zen, uses two instructions in some loops and one
// in others, so that a row would have other bits alone than beside other rows.
inline vec fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline float sum(vec v) {
  typedef float quad __attribute__((vector_size(16)));
  quad q[W / 4];
  std::memcpy(q, &v, sizeof v);
  for (int n = W / 8; n; n /= 2)
    for (int i = 0; i < n; ++i) q[i] += q[i + n];
  quad s = q[0] + __builtin_shuffle(q[0], (ivec4){2, 3, 0, 1});
  return s[0] + s[1];
}

inline vec max(vec a, vec b) {
#if defined(__AVX512F__)
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline vec min(vec a, vec b) {
#if defined(__AVX512F__)
  return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// Transposes each block of R x R.
template <int R>
inline void transpose(vec (&v)[R]) {
  ivec lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
#pragma GCC unroll 4
  for (int s = 1; s < R; s *= 2) {
    const ivec low = (lane & s) != 0 ? lane - s + W : lane, high = (lane & s) != 0 ? lane + W : lane + s;
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
      if (!(i & s)) {
        const vec a = v[i], b = v[i + s];
        v[i] = __builtin_shuffle(a, b, low), v[i + s] = __builtin_shuffle(a, b, high);
      }
  }
}

#if defined(__AVX512F__)
inline vec nearest(vec x) { return (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x * 2^n for an integer n.
inline vec times_power(vec x, vec n) { return (vec)_mm512_scalef_ps((__m512)x, (__m512)n); }
#else
inline vec nearest(vec x) {
  const vec shifted = x + 12582912.0f;  // its low bits are the integer
  return shifted - 12582912.0f;
}
// x * 2^n for an integer n, if the product is a normal number.
inline vec times_power(vec x, vec n) {
  uvec bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits += (uvec)(__builtin_convertvector(n, ivec) << 23);
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
#endif

// 1 / x for x >= 1, relative error below 2e-7.
inline vec reciprocal(vec x) {
#if defined(__AVX512F__)  // a division takes as long as some ten multiplications
  const vec r = (vec)_mm512_rcp14_ps((__m512)x);
  return r * (2.0f - x * r);
#else
  return 1.0f / x;
#endif
}

// 2^x for x <= 126, relative error below 2e-7 beside that of x. Below -126 it is close to zero, or zero.
inline vec exp2(vec x) {
#if !defined(__AVX512F__)
  x = max(x, splat(-126.0f));
#endif
  const vec n = nearest(x), r = x - n;
  vec p = splat(1.32647e-3f);
  p = p * r + 9.67151e-3f;
  p = p * r + 5.550734e-2f;
  p = p * r + 2.4022242e-1f;
  p = p * r + 6.9314698e-1f;
  p = p * r + 1.0f;
  return times_power(p, n);
}

// exp, relative error below 2e-7 (Cephes' polynomial); arguments are clamped to float's range.
inline vec exp(vec x) {
  const vec low = splat(-87.3f), high = splat(88.3f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const vec k = nearest(x * 1.44269504f);
  vec r = x - k * 0.693359375f + k * 2.12194440e-4f;
  vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return times_power(p, k);
}

// `bound` tanh(x / bound), which is between -bound and bound.
inline vec capped(vec x, float bound) {
  return bound - 2.0f * bound / (exp(x * (2.0f / bound)) + 1.0f);
}

// x times the logistic function of `rate` x.
inline vec swish(vec x, float rate) {
  const vec power = max(min(x * (rate * -1.44269504f), splat(126.0f)), splat(-126.0f));
  return x * reciprocal(1.0f + exp2(power));
}

}  // namespace hydra
