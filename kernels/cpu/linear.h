// out[m, n] (+)= sum_k x[m, k] * w[n, k] (* scale[n]) (+ bias[n]) for few rows m. Each weight is read from memory once.
#pragma once
#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "simd.h"

namespace hydra {

constexpr int64_t NEAR_BYTES = 16 << 10;  // of a row and a panel of weights; below, the next panel fits the L1 cache, too

// The layout of a row of x in memory, and the way its vectors are multiplied with those of a weight, `PART` elements at
// a time.
//
// float, f16, int8: x as float, in its own order.
template <class T>
struct Rows {
  using X = float;
  static constexpr bool as_is = std::is_same_v<T, float>;
  static constexpr int PART = W, SPAN = W;  // SPAN: elements of w that are read together
  static vec weights(const T* w, int) { return load(w); }
  static vec values(const X* x) { return load(x); }
  static vec fma(vec a, vec b, vec c) { return hydra::fma(a, b, c); }
  template <class O>
  static void lay(const O* from, X* to, int64_t K) {
    for (int64_t k = 0; k < K; ++k) to[k] = to_float(from[k]);
  }
};

#if defined(__AVX512BF16__)
// bf16 with the dot product instruction: pairs are multiplied exactly and summed in float. x keeps its layout.
template <>
struct Rows<bf16> {
  using X = bf16;
  static constexpr bool as_is = true;
  static constexpr int PART = 2 * W, SPAN = 2 * W;
  static vec weights(const bf16* w, int) { return (vec)_mm512_loadu_si512(w); }
  static vec values(const X* x) { return (vec)_mm512_loadu_si512(x); }
  static vec fma(vec a, vec b, vec c) { return (vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b); }
  static void lay(const bf16*, X*, int64_t) {}
};
#else
// bf16 without that instruction: 2 W weights are read as W pairs. A shift makes the first of each pair a float, a mask
// the second, which is less work than widening them in order. x as float, with the even elements first in every 2 W,
// then the odd ones.
template <>
struct Rows<bf16> {
  using X = float;
  static constexpr bool as_is = false;
  static constexpr int PART = W, SPAN = 2 * W;
  static vec weights(const bf16* w, int part) {
    uvec pairs;
    std::memcpy(&pairs, w - part * W, sizeof pairs);  // both parts read the span's pairs
    pairs = part ? pairs & 0xffff0000u : pairs << 16;
    vec v;
    std::memcpy(&v, &pairs, sizeof v);
    return v;
  }
  static vec values(const X* x) { return load(x); }
  static vec fma(vec a, vec b, vec c) { return hydra::fma(a, b, c); }
  static void lay(const bf16* from, X* to, int64_t K) {
    int64_t k = 0;
    for (; k + 2 * W <= K; k += 2 * W)
      for (int i = 0; i < W; ++i) to[k + i] = to_float(from[k + 2 * i]), to[k + W + i] = to_float(from[k + 2 * i + 1]);
    for (; k < K; ++k) to[k] = to_float(from[k]);
  }
};
#endif

// The sums of lanes S apart of a, then those of b.
template <int S>
inline vec folded(vec a, vec b) {
  ivec lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
  const ivec low = lane + (lane & -S);
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + S);
}

// out[i] = sum(v[i]), with the same bits whatever N is. Writes whole vectors.
template <int N, int S = W / 2>
inline void sums(const vec (&v)[N], float* out) {
  if constexpr (S == 0) {
    std::memcpy(out, v, sizeof v);
  } else {
    vec half[(N + 1) / 2];
#pragma GCC unroll 16
    for (int i = 0; i < N; i += 2) half[i / 2] = folded<S>(v[i], v[i + 1 < N ? i + 1 : i]);
    sums<(N + 1) / 2, S / 2>(half, out);
  }
}

template <int MR, int NR, class T>
inline void step(const typename Rows<T>::X* x, int64_t ldx, const T* w, int64_t K, int part, vec (&acc)[MR * NR]) {
  vec b[NR];
  for (int n = 0; n < NR; ++n) {
    b[n] = Rows<T>::weights(w + n * K, part);
    if (MR > 1) in_register(b[n]);
  }
  for (int m = 0; m < MR; ++m) {
    vec a = Rows<T>::values(x + m * ldx);
    in_register(a);
    for (int n = 0; n < NR; ++n) acc[m * NR + n] = Rows<T>::fma(a, b[n], acc[m * NR + n]);
  }
}

// MR rows of x against a panel of NR rows of w, accumulators in registers: MR * NR <= 12, or 24 with AVX-512. Writes
// out[MR * NR], which has room for W floats more.
//
// The next panel is prefetched in the order of memory, because its rows are streams that are too short for the
// processor's own prefetcher. HINT: into the L1 cache (3) or the L2 cache (2).
template <int MR, int NR, int HINT, class T>
inline void tile(const typename Rows<T>::X* x, int64_t ldx, const T* w, int64_t K, float* out) {
  constexpr int PART = Rows<T>::PART, SPAN = Rows<T>::SPAN, LINE = 64 / sizeof(T);
  vec acc[MR * NR] = {};
  const T* next = w + NR * K;
  int64_t k = 0;
  for (; k + LINE <= K; k += LINE, next += NR * LINE) {
    for (int n = 0; n < NR; ++n) __builtin_prefetch(next + n * LINE, 0, HINT);
    for (int i = 0; i < LINE; i += PART) step<MR, NR>(x + k + i, ldx, w + k + i, K, i % SPAN / PART, acc);
  }
  for (; k + SPAN <= K; k += SPAN)
    for (int i = 0; i < SPAN; i += PART) step<MR, NR>(x + k + i, ldx, w + k + i, K, i / PART, acc);
  sums(acc, out);
  for (int m = 0; k < K && m < MR; ++m)
    for (int n = 0; n < NR; ++n)
      for (int64_t t = k; t < K; ++t)
        out[m * NR + n] = std::fma(to_float(x[m * ldx + t]), to_float(w[n * K + t]), out[m * NR + n]);
}

template <class T, class O = T>
struct LinearArgs {
  const typename Rows<T>::X* x;  // [M, K], in the layout of Rows<T>
  const T* w;  // [N, K], contiguous
  const float* scales;  // [N] or null
  const O* bias;  // [N] or null
  O* out;  // [M, ldo]
  int64_t M, N, K, ldo;
  bool accumulate;
};

// N <= W numbers, and zeros.
template <int N, class T>
inline vec first(const T* from) {
  T some[W] = {};
  std::memcpy(some, from, N * sizeof(T));
  return load(some);
}

template <int MR, int NR, class T, class O>
inline void tile_out(const LinearArgs<T, O>& a, int64_t m0, int64_t n0) {
  float s[MR * NR + W];
  const auto* x = a.x + m0 * a.K;
  const T* w = a.w + n0 * a.K;
  if (MR == 1 && (sizeof(*x) + NR * sizeof(*w)) * a.K < NEAR_BYTES)
    tile<MR, NR, 3>(x, a.K, w, a.K, s);
  else
    tile<MR, NR, 2>(x, a.K, w, a.K, s);
  for (int m = 0; m < MR; ++m) {
    O made[W], *to = a.out + (m0 + m) * a.ldo + n0;
    vec v = load(s + m * NR);
    if (a.scales) v *= first<NR>(a.scales + n0);
    if (a.bias) v += first<NR>(a.bias + n0);
    if (a.accumulate) v += first<NR>(to);
    store(made, v);
    std::memcpy(to, made, NR * sizeof(O));
  }
}

// Computes the `left` rows from m0 on, at most MR.
template <int MR, int NR, class T, class O>
inline void rest(const LinearArgs<T, O>& a, int64_t m0, int64_t n0, int64_t left) {
  if constexpr (MR > 0) {
    if (left == MR) return tile_out<MR, NR>(a, m0, n0);
    rest<MR - 1, NR>(a, m0, n0, left);
  }
}

// Computes columns [n0, n1) for all rows. A panel of NR weight rows stays in a cache while all groups of rows use it.
template <int MR, int NR, class T, class O>
inline void panels(const LinearArgs<T, O>& a, int64_t n0, int64_t n1) {
  int64_t n = n0;
  for (; n + NR <= n1; n += NR) {
    int64_t m = 0;
    for (; m + MR <= a.M; m += MR) tile_out<MR, NR>(a, m, n);
    rest<MR - 1, NR>(a, m, n, a.M - m);
  }
  for (; n < n1; ++n)
    for (int64_t m = 0; m < a.M; ++m) tile_out<1, 1>(a, m, n);
}

// Rows are multiplied in groups of up to four. While a group multiplies a panel that is in a cache already, the next
// panel arrives, so two groups of two rows are faster than one of four, unless each has to widen 8-bit weights.
//
// Never inlined, so that all callers get the same bits.
template <class T, class O>
[[gnu::noinline]] void columns(const LinearArgs<T, O>& a, int64_t n0, int64_t n1) {
  if (a.M == 0) return;
  const int64_t groups = a.M == 4 && sizeof(T) > 1 ? 2 : (a.M + 3) / 4, most = (a.M + groups - 1) / groups;
  if (most == 1) return panels<1, 4>(a, n0, n1);
#if defined(__AVX512F__)  // 32 registers
  if (most == 2) return panels<2, 8>(a, n0, n1);
  if (most == 3) return panels<3, 8>(a, n0, n1);
  return panels<4, 6>(a, n0, n1);
#else
  if (most == 2) return panels<2, 6>(a, n0, n1);
  if (most == 3) return panels<3, 4>(a, n0, n1);
  return panels<4, 3>(a, n0, n1);
#endif
}

// A copy of a row of x in the layout of Rows<T>.
template <class T, class O>
inline void lay_row(const O* from, typename Rows<T>::X* to, int64_t K) {
  if constexpr (Rows<T>::as_is && std::is_same_v<typename Rows<T>::X, O>)
    std::copy_n(from, K, to);
  else
    Rows<T>::lay(from, to, K);
}

// x [M, K] in the layout of Rows<T>: x itself, or a copy in `laid`.
template <class T, class O>
inline const typename Rows<T>::X* lay_rows(const O* x, int64_t M, int64_t K, std::vector<typename Rows<T>::X>& laid) {
  if constexpr (Rows<T>::as_is && std::is_same_v<typename Rows<T>::X, O>) {
    return x;
  } else {
    laid.resize(M * K);
    for (int64_t m = 0; m < M; ++m) Rows<T>::lay(x + m * K, laid.data() + m * K, K);
    return laid.data();
  }
}

// The share of `n` columns for thread `i` of `threads`, a multiple of `unit` unless it is the last.
inline std::pair<int64_t, int64_t> share(int64_t n, int64_t i, int64_t threads, int64_t unit = 24) {
  const int64_t each = ((n + threads - 1) / threads + unit - 1) / unit * unit;
  return {std::min(n, i * each), std::min(n, (i + 1) * each)};
}

}  // namespace hydra
