// out[m, n] (+)= sum_k x[m, k] * w[n, k] (* scale[n]) (+ bias[n]) for many rows m, with weights in their stored layout.
//
// As in prefill.h, a row is a *lane*. x is transposed once, into panels [K, lanes], and weights are broadcast number by
// number, or multiplied by matrix tiles if the processor has them for T. So weights need no other layout, and the
// result of a row does not depend on the other rows.
#pragma once
#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "prefill.h"

namespace hydra {

constexpr int64_t DEPTH = 512;  // units of K that are multiplied at a time; with DEEP weights they fit the L1 cache
constexpr int64_t TILED_DEPTH = 128;  // likewise; with a panel of x they fit the L1 cache
constexpr int64_t COLUMNS = 128;  // the most of a task; DEPTH units of each fit the L2 cache, beside a panel of x
constexpr int64_t PANEL_LANES = PANEL * W, MOST_LANES = 16 * PANEL_LANES;  // that are transposed together, at most
constexpr int64_t LAID_FLOATS = 4 << 20;  // and the most floats that they take
constexpr int64_t TILED_FLOATS = 256 << 10;  // with tiles, which are so fast that the L2 cache has to hold them

// Rows are of type T, weights of type Q, which is T, or int8 with scales.
template <class T, class Q = T>
struct ProductArgs {
  const T* x;  // [M, K], rows `x_stride` apart
  const Q* w;  // [N, K], contiguous
  const float* scales;  // [N] or null
  const T* bias;  // [N] or null
  T* out;  // [M, N], contiguous
  int64_t M, N, K, x_stride;
  bool accumulate;
  const bool tiled = TILED<T> && tiles_allowed();

  int64_t units() const;  // of a row, rounded up to whole tiles, filled with zeros
};

template <class T>
constexpr int64_t units_of(int64_t K) { return (K + Units<T>::EACH - 1) / Units<T>::EACH; }

template <class T, class Q>
int64_t ProductArgs<T, Q>::units() const { return tiled ? whole_tiles(units_of<T>(K)) : units_of<T>(K); }

// Writes `n` numbers as units of T. An incomplete last unit is filled with a zero.
template <class T, class Q>
inline void lay_units(const Q* from, int64_t n, float* to) {
  if constexpr (Units<T>::EACH == 1) {
    Units<Q>::widen(from, to, n);
  } else {
    to[units_of<T>(n) - 1] = 0.0f;
    if constexpr (std::is_same_v<T, Q>) {
      std::memcpy(to, from, n * sizeof(T));
    } else {  // bf16 can represent every int8
      for (int64_t k = 0; k < n; k += W) {
        T some[W];
        const int64_t left = std::min<int64_t>(W, n - k);
        if (left == W)
          store(some, load(from + k));
        else
          for (int64_t i = 0; i < left; ++i) from_float(to_float(from[k + i]), some[i]);
        std::memcpy(reinterpret_cast<char*>(to) + k * sizeof(T), some, left * sizeof(T));
      }
    }
  }
}

// Transposes up to `vectors * W` rows of x [rows, K] → [units, lanes]. Lanes and units beyond them hold zeros.
template <class T>
inline void lay_panel(const T* x, int64_t x_stride, int64_t rows, int64_t K, int64_t vectors, int64_t units, float* to) {
  const int64_t whole = K / Units<T>::EACH / W * W, lanes = vectors * W;  // whole: units transposed by vectors
  const int64_t left = K - whole * Units<T>::EACH;
  std::fill(to + units_of<T>(K) * lanes, to + units * lanes, 0.0f);
  for (int64_t n = 0; n < vectors; ++n) {
    const int64_t some = std::min<int64_t>(W, rows - n * W);
    const T* from = x + n * W * x_stride;
    for (int64_t u = 0; u < whole; u += W) {
      vec v[W] = {};
      for (int64_t i = 0; i < some; ++i) lay_units<T>(from + i * x_stride + u * Units<T>::EACH, W * Units<T>::EACH, (float*)&v[i]);
      transpose(v);
      for (int i = 0; i < W; ++i) store(to + (u + i) * lanes + n * W, v[i]);
    }
    for (int64_t i = 0; left && i < W; ++i) {
      float units[W] = {};
      if (i < some) lay_units<T>(from + i * x_stride + whole * Units<T>::EACH, left, units);
      for (int64_t u = 0; u < units_of<T>(left); ++u) to[(whole + u) * lanes + n * W + i] = units[u];
    }
  }
}

#if defined(__AVX512BF16__)
// Writes W sums each of W lanes, `lanes` apart, to `rows` rows of out, `N` apart.
inline void put_rounded(const float* sums, int64_t lanes, const float* scales, const bf16* bias, bf16* out, int64_t N,
                        int64_t rows) {
  const auto sum_of = [&](int n) { return load(sums + n * lanes) * (scales ? scales[n] : 1.0f) + (bias ? to_float(bias[n]) : 0.0f); };
  vec v[W / 2];
#pragma GCC unroll 8
  for (int i = 0; i < W / 2; ++i) v[i] = Units<bf16>::paired(sum_of(2 * i), sum_of(2 * i + 1));
  transpose(v);  // row i in the first half of v[i], row i + W / 2 in the second
  for (int64_t i = 0; i < rows; ++i) {
    const __m512i both = (__m512i)v[i % (W / 2)];
    _mm256_storeu_si256((__m256i*)(out + i * N), i < W / 2 ? _mm512_castsi512_si256(both) : _mm512_extracti64x4_epi64(both, 1));
  }
}
#endif

// Writes the sums of a panel [columns, lanes] to rows m0 … of out, from column n0 on.
template <class T, class Q>
inline void put(const ProductArgs<T, Q>& a, const float* sums, int64_t m0, int64_t vectors, int64_t n0, int64_t columns) {
  const int64_t lanes = vectors * W;
  for (int64_t m = 0; m < vectors; ++m) {
    const int64_t first = m0 + m * W, some = std::min<int64_t>(W, a.M - first);
    T* to = a.out + first * a.N + n0;
    int64_t n = 0;
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>)
      for (; !a.accumulate && n + W <= columns; n += W)
        put_rounded(sums + n * lanes + m * W, lanes, a.scales ? a.scales + n0 + n : nullptr,
                    a.bias ? a.bias + n0 + n : nullptr, to + n, a.N, some);
#endif
    for (; n + W <= columns; n += W) {
      vec v[W];
      for (int i = 0; i < W; ++i) v[i] = load(sums + (n + i) * lanes + m * W);
      transpose(v);
      const vec scale = a.scales ? load(a.scales + n0 + n) : splat(1.0f), bias = a.bias ? load(a.bias + n0 + n) : vec{};
      for (int64_t i = 0; i < some; ++i) {
        const vec made = v[i] * scale + bias;
        store(to + i * a.N + n, a.accumulate ? load(to + i * a.N + n) + made : made);
      }
    }
    for (; n < columns; ++n)
      for (int64_t i = 0; i < some; ++i) {
        float made = sums[n * lanes + m * W + i];
        if (a.scales) made *= a.scales[n0 + n];
        if (a.bias) made += to_float(a.bias[n0 + n]);
        from_float(a.accumulate ? to_float(to[i * a.N + n]) + made : made, to[i * a.N + n]);
      }
  }
}

// sums [columns, lanes] (+)= `depth` units of `columns` weights (rounded up to DEEP or TILE) times those of a panel of
// N vectors.
template <class T, int N>
inline void multiply_panel(bool tiled, const float* w, int64_t stride, int64_t columns, int64_t depth, const float* x,
                           float* sums, bool add) {
  if (tiled) return multiply_tiles<N>(whole_tiles(columns), depth, w, stride, x, sums, add);
  vec ones[N];
  for (int n = 0; n < N; ++n) ones[n] = splat(1.0f);
  for (int64_t n = 0; n < columns; n += DEEP)
    multiply<T, DEEP, N>(depth, w + n * stride, stride, 1, x, sums + n * N * W, add ? ones : nullptr);
}

// Computes columns n0 … n0 + columns - 1 of `rows` rows from m0 on, which are in `laid`. `room` belongs to the thread.
template <class T, class Q>
void multiply_columns(const ProductArgs<T, Q>& a, const float* laid, int64_t m0, int64_t rows, int64_t n0, int64_t columns,
                      std::vector<float>& room) {
  constexpr int EACH = Units<T>::EACH;
  constexpr bool plain = std::is_same_v<T, Q> && (std::is_same_v<T, float> || EACH == 2);
  const int64_t units = a.units(), whole = a.tiled ? TILE : DEEP, most = a.tiled ? TILED_DEPTH : DEPTH;
  const int64_t as_is = plain && a.K == units * EACH ? columns / whole * whole : 0;
  const int64_t panels = (rows + PANEL_LANES - 1) / PANEL_LANES, left = columns - as_is;
  const int64_t kept = units > most ? panels : 1;  // panels with partial sums
  float* const copied = aligned_room(room, COLUMNS * (kept * PANEL_LANES + most));
  float* const sums = copied + COLUMNS * most;
  const Q* w = a.w + n0 * a.K;
  for (int64_t k = 0; k < units; k += most) {
    const int64_t depth = std::min(most, units - k), numbers = std::min(depth * EACH, a.K - k * EACH);
    for (int64_t n = 0; n < left; ++n) {
      lay_units<T>(w + (as_is + n) * a.K + k * EACH, numbers, copied + n * depth);
      std::fill(copied + n * depth + units_of<T>(numbers), copied + (n + 1) * depth, 0.0f);
    }
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t first = p * PANEL_LANES, vectors = std::min<int64_t>(PANEL, (rows - first + W - 1) / W);
      const float* x = laid + first * units + k * vectors * W;
      float* to = sums + p % kept * PANEL_LANES * COLUMNS;
      const auto both = [&](auto n) {
        multiply_panel<T, n>(a.tiled, reinterpret_cast<const float*>(w) + k, units, as_is, depth, x, to, k > 0);
        multiply_panel<T, n>(a.tiled, copied, depth, left, depth, x, to + as_is * n * W, k > 0);
      };
      if (vectors == 1) both(std::integral_constant<int, 1>{});
      if (vectors == 2) both(std::integral_constant<int, 2>{});
      if (vectors == 3) both(std::integral_constant<int, 3>{});
      if (k + depth == units) put(a, to, m0 + first, vectors, n0, columns);
    }
  }
}

template <class T, class Q>
void multiply_many(const ProductArgs<T, Q>& a) {
  static thread_local std::vector<float> kept;  // kept, because a new allocation per product would get fresh pages
  const int64_t units = a.units(), fit = (a.tiled ? TILED_FLOATS : LAID_FLOATS) / units;
  const int64_t most = std::max<int64_t>(1, std::min(MOST_LANES, fit) / PANEL_LANES);  // panels
  const int64_t panels = (a.M + PANEL_LANES - 1) / PANEL_LANES, turns = std::max<int64_t>(1, (panels + most - 1) / most);
  const int64_t at_once = std::min((panels + turns - 1) / turns * PANEL_LANES, (a.M + W - 1) / W * W);
  float* const laid = aligned_room(kept, at_once * units);
#pragma omp parallel if (a.M * a.N * a.K > 1 << 18)
  {
    static thread_local std::vector<float> room;
    const TileRegisters registers(a.tiled);
    const int64_t threads = omp_get_num_threads(), share = a.N / (4 * threads) / W * W;
    const int64_t columns = std::max<int64_t>(W, std::min(COLUMNS, share)), tasks = (a.N + columns - 1) / columns;
    // Threads work in different parts of out: a core fetches lines beside those that it writes, and would take them from
    // a core that writes there at the same time.
    const int64_t each = (tasks + threads - 1) / threads;
    for (int64_t m0 = 0; m0 < a.M; m0 += at_once) {
      const int64_t rows = std::min(at_once, a.M - m0);
#pragma omp for schedule(dynamic, 1)
      for (int64_t m = 0; m < rows; m += PANEL_LANES) {
        const int64_t some = std::min(PANEL_LANES, rows - m);
        lay_panel(a.x + (m0 + m) * a.x_stride, a.x_stride, some, a.K, (some + W - 1) / W, units,
                  laid + m * units);
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < each * threads; ++i) {
        const int64_t n0 = (i % threads * each + i / threads) * columns;
        if (n0 < a.N) multiply_columns(a, laid, m0, rows, n0, std::min(columns, a.N - n0), room);
      }
    }
  }
}

}  // namespace hydra
