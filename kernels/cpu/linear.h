// out[m, n] (+)= sum_k x[m, k] * w[n, k] (+ bias[n]) for few rows m: reads each weight from memory once.
#pragma once
#include "simd.h"

namespace hydra {

// One vector's width of the inner dimension.
template <int MR, int NR, class T>
inline void step(const float* x, int64_t ldx, const T* w, int64_t K, vec (&acc)[MR][NR]) {
  vec b[NR];
  for (int n = 0; n < NR; ++n) {
    b[n] = load(w + n * K);
    if (MR > 1) in_register(b[n]);
  }
  for (int m = 0; m < MR; ++m) {
    vec a = load(x + m * ldx);
    in_register(a);
    for (int n = 0; n < NR; ++n) acc[m][n] += a * b[n];
  }
}

// MR rows of x against NR rows of w, accumulators in registers (MR * NR <= 12).
template <int MR, int NR, class T>
inline void tile(const float* x, int64_t ldx, const T* w, int64_t K, float (&out)[MR][NR]) {
  vec acc[MR][NR] = {};
  int64_t k = 0;
  for (; k + 2 * W <= K; k += 2 * W) {
    for (int n = 0; n < NR; ++n) __builtin_prefetch(w + (NR + n) * K + k);  // the next panel, while this one computes
    step<MR, NR>(x + k, ldx, w + k, K, acc);
    step<MR, NR>(x + k + W, ldx, w + k + W, K, acc);
  }
  for (; k + W <= K; k += W) step<MR, NR>(x + k, ldx, w + k, K, acc);
  for (int m = 0; m < MR; ++m)
    for (int n = 0; n < NR; ++n) {
      float s = sum(acc[m][n]);
      for (int64_t t = k; t < K; ++t) s += x[m * ldx + t] * to_float(w[n * K + t]);
      out[m][n] = s;
    }
}

template <class T>
struct LinearArgs {
  const float* x;  // [M, K], contiguous
  const T* w;      // [N, K], contiguous
  const T* bias;   // [N] or null
  T* out;          // [M, ldo]
  int64_t M, N, K, ldo;
  bool accumulate;
};

template <int MR, int NR, class T>
inline void tile_out(const LinearArgs<T>& a, int64_t m0, int64_t n0) {
  float s[MR][NR];
  tile<MR, NR>(a.x + m0 * a.K, a.K, a.w + n0 * a.K, a.K, s);
  for (int m = 0; m < MR; ++m)
    for (int n = 0; n < NR; ++n) {
      T* o = a.out + (m0 + m) * a.ldo + n0 + n;
      float v = s[m][n];
      if (a.bias) v += to_float(a.bias[n0 + n]);
      if (a.accumulate) v += to_float(*o);
      from_float(v, *o);
    }
}

// Columns [n0, n1) for all rows; a panel of NR weight rows stays in L1 while every group of rows passes over it.
template <int MR, int NR, class T>
inline void panels(const LinearArgs<T>& a, int64_t n0, int64_t n1) {
  int64_t n = n0;
  for (; n + NR <= n1; n += NR) {
    int64_t m = 0;
    for (; m + MR <= a.M; m += MR) tile_out<MR, NR>(a, m, n);
    for (; m < a.M; ++m) tile_out<1, NR>(a, m, n);
  }
  for (; n < n1; ++n)
    for (int64_t m = 0; m < a.M; ++m) tile_out<1, 1>(a, m, n);
}

template <class T>
inline void columns(const LinearArgs<T>& a, int64_t n0, int64_t n1) {
  if (a.M == 1) return panels<1, 8>(a, n0, n1);
  if (a.M == 2) return panels<2, 6>(a, n0, n1);
  if (a.M % 4 == 0 || a.M > 6) return panels<4, 3>(a, n0, n1);
  if (a.M % 3 == 0 || a.M == 5) return panels<3, 4>(a, n0, n1);
  return panels<4, 3>(a, n0, n1);
}

}  // namespace hydra
