// Vectors of float through GCC's vector extension: AVX-512, AVX2 or whatever the compiler is told the machine has.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
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
  hvec h;
  std::memcpy(&h, p, sizeof h);
  uvec u = __builtin_convertvector(h, uvec) << 16;
  vec v;
  std::memcpy(&v, &u, sizeof v);
  return v;
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
inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }
template <class T>
inline void store(T* p, vec v) {
  for (int i = 0; i < W; ++i) from_float(v[i], p[i]);
}

// Keeps the compiler from loading a value again at each use, which would make the loads the bottleneck.
inline void in_register(vec& v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
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

// exp, relative error below 2e-7 (Cephes' polynomial); arguments are clamped to float's range.
inline vec exp(vec x) {
  const vec low = splat(-87.3f), high = splat(88.3f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  ivec n = __builtin_convertvector(x * 1.44269504f + (x > 0 ? splat(0.5f) : splat(-0.5f)), ivec);
  vec k = __builtin_convertvector(n, vec);
  vec r = x - k * 0.693359375f + k * 2.12194440e-4f;
  vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  ivec bits = (n + 127) << 23;
  vec scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

}  // namespace hydra
