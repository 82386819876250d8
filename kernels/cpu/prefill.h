// Attention of many query rows over keys and values that are read in place (from the blocks of a cache, or rows of a
// batch): online softmax over tiles of keys, with both products in registers.
//
// A row of queries is a *lane*. A panel is up to PANEL vectors of lanes that share keys and values: the query heads of
// a group, for consecutive tokens. Everything is computed with lanes side by side:
//
//     scores [keys, lanes] = K [keys, dim] x Q [dim, lanes]        out [dim, lanes] += V^T [dim, keys] x P [keys, lanes]
//
// so the left factor is broadcast number by number from the cache, and softmax needs no sum across a vector. If the
// processor has matrix tiles for T, they multiply; then V^T is stored by rows, too.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"
#include "tiles.h"

namespace hydra {

#if defined(__AVX512F__)
constexpr int PANEL = 3, DEEP = 8;  // vectors of lanes and rows of a product that stay in registers
#else
constexpr int PANEL = 3, DEEP = 4;
#endif
constexpr float UNSEEN = -1e30f, LEAST = -1e20f;  // a masked score, and one below all others, to which it weighs nothing
constexpr int64_t KEYS = 96;  // of a tile; its scores and a panel's queries fit the L1 cache

// The layout of a tile in units, the 32 bits that one lane multiplies at a time. Here: floats, and narrower numbers
// widened.
template <class T>
struct Units {
  static constexpr int EACH = 1;  // numbers per unit
  static vec fma(vec sum, float a, vec b) { return hydra::fma(splat(a), b, sum); }
  static void keys(const T* from, float* to, int64_t dim) { widen(from, to, dim); }
  static void values(const T* from, const T*, float* to, int64_t dim) { widen(from, to, dim); }
  static void weights(float* to, vec p, vec) { store(to, p); }
  static void widen(const T* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load(from + i));
    for (; i < n; ++i) to[i] = to_float(from[i]);
  }
};

#if defined(__AVX512BF16__)
// bf16 with the dot product instruction: pairs along the head for keys, pairs of tokens for values.
template <>
struct Units<bf16> {
  static constexpr int EACH = 2;
  static vec fma(vec sum, float a, vec b) {
    int32_t pair;
    std::memcpy(&pair, &a, 4);
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
  }
  static void keys(const bf16* from, float* to, int64_t dim) { std::memcpy(to, from, dim * sizeof(bf16)); }
  static void values(const bf16* a, const bf16* b, float* to, int64_t dim) {  // `b` null: `a` is the last
    int64_t i = 0;
    for (; i + W <= dim; i += W) {
      const uvec low = bits(a + i), high = b ? bits(b + i) : uvec{};
      const uvec pairs = low | high << 16;
      std::memcpy(to + i, &pairs, sizeof pairs);
    }
    for (; i < dim; ++i) {
      const uint32_t pair = a[i].bits | (b ? uint32_t(b[i].bits) << 16 : 0);
      std::memcpy(to + i, &pair, 4);
    }
  }
  static void weights(float* to, vec p, vec next) { store(to, paired(p, next)); }
  static vec paired(vec a, vec b) {  // rounded: a[0], b[0], a[1], b[1], …
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    return (vec)_mm512_permutexvar_epi16(interleave(), both);
  }
  static uvec bits(const bf16* from) {
    hvec h;
    std::memcpy(&h, from, sizeof h);
    return __builtin_convertvector(h, uvec);
  }
  static __m512i interleave() {  // 0, 16, 1, 17, … of 16-bit numbers
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (__m512i)(lane | (lane + 16) << 16);
  }
};
#endif

// out[M, lanes] = the sum over k < K of a[m * down + k * right] * b[k, lanes], plus out * keep if there is a `keep` per
// lane; N vectors of lanes. Never inlined, because GCC would then keep the sums in memory.
template <class T, int M, int N>
[[gnu::noinline]] void multiply(int64_t K, const float* a, int64_t down, int64_t right, const float* b, float* out,
                     const vec* keep) {
  vec sum[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sum[m][n] = vec{};
  for (int64_t k = 0; k < K; ++k, a += right, b += N * W) {
    vec row[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) row[n] = load(b + n * W), in_register(row[n]);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sum[m][n] = Units<T>::fma(sum[m][n], a[m * down], row[n]);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      float* to = out + (m * N + n) * W;
      store(to, keep ? load(to) * keep[n] + sum[m][n] : sum[m][n]);
    }
}

// The query rows of one KV head of one request or segment. Row r is query head r % group of token r / group.
template <class T>
struct Queries {
  const T* q;
  T* out;
  int64_t token_stride, head_stride, out_token_stride;  // out's heads lie side by side
  int64_t group, dim, v_dim;
  int64_t keys;  // the number of keys
  int64_t context;  // token i sees no key after context + i; at least `keys` without a mask
  int64_t window;  // and only the `window` keys up to that one; 0: no limit
  float scale;
  const int32_t* ends = nullptr;  // the last key that each token sees, never decreasing; replaces `context`
  const float* sinks = nullptr;  // [group]: one more score per head, for a key without a value
  float cap = 0;  // scaled scores are held within it by tanh; 0: no cap

  int64_t first_key(int64_t row) const {
    return window ? std::max<int64_t>(0, context + row / group - window + 1) : 0;
  }
  int64_t last_key(int64_t row) const { return ends ? ends[row / group] : std::min(context + row / group, keys - 1); }
  const T* at(int64_t row) const { return q + row / group * token_stride + row % group * head_stride; }
  T* to(int64_t row) const { return out + row / group * out_token_stride + row % group * v_dim; }
};

// The present tile of keys and values in units, copied densely: in the KV cache the rows of a head lie a power of two
// apart, and would share a few sets of the L1 cache.
template <class T>
struct Tile {
  static constexpr int EACH = Units<T>::EACH;
  static constexpr int64_t V_UNITS = KEYS / EACH;  // whole tiles
  const T *k_rows[KEYS], *v_rows[KEYS];
  float *k, *v;  // [keys, k_stride], [keys / EACH, v_stride]
  float* turned;  // v by rows of the head, [v_dim, V_UNITS], for matrix tiles
  int64_t dim, v_dim, units, k_stride, v_stride;
  bool tiled;

  static int64_t stride(int64_t units) { return whole_tiles(units) + TILE; }
  static int64_t floats(const Queries<T>& a) {
    const int64_t turned = TILED<T> ? whole_tiles(a.v_dim) : 0;
    return KEYS * stride(a.dim / EACH) + V_UNITS * (stride(a.v_dim) + turned);
  }
  Tile(const Queries<T>& a, float* room)
      : k(room), dim(a.dim), v_dim(a.v_dim), units(dim / EACH), k_stride(stride(units)), v_stride(stride(v_dim)),
        tiled(TILED<T> && tiles_allowed()) {
    v = k + KEYS * k_stride, turned = v + V_UNITS * v_stride;
    if (!tiled) return;
    units = whole_tiles(units);
    std::fill(room, room + floats(a), 0.0f);  // a NaN that is left over would give NaN times zero
  }

  void lay(int64_t n) {
    for (int64_t i = 0; i < n; ++i) Units<T>::keys(k_rows[i], k + i * k_stride, dim);
    for (int64_t i = 0; i < n; i += EACH)
      Units<T>::values(v_rows[i], i + 1 < n ? v_rows[i + 1] : nullptr, v + i / EACH * v_stride, v_dim);
    if (tiled) turn(whole_tiles((n + EACH - 1) / EACH));
  }

  void turn(int64_t n) {
    for (int64_t d = 0; d < v_dim; d += W)
      for (int64_t i = 0; i < n; i += W) {
        vec some[W];
        for (int j = 0; j < W; ++j) some[j] = load(v + (i + j) * v_stride + d);
        transpose(some);
        for (int j = 0; j < W; ++j) store(turned + (d + j) * V_UNITS + i, some[j]);
      }
  }
};

// The state of a panel that is kept between tiles of keys; N vectors of lanes. `room`: memory for `floats(a)` floats.
template <class T, int N>
struct Panel {
  static constexpr int EACH = Units<T>::EACH, LANES = N * W;
  float *q, *out;  // [dim / EACH, lanes], [v_dim, lanes]
  vec top[N], total[N];
  ivec first[N], last[N];  // the keys that a lane sees
  int64_t row, rows;

  Panel(const Queries<T>& a, int64_t row, int64_t rows, float* room) : q(room), row(row), rows(rows) {
    const int64_t units = a.dim / EACH, dim = whole_tiles(a.v_dim);
    out = q + whole_tiles(units) * LANES;
    std::fill(q, out + dim * LANES, 0.0f);
    for (int n = 0; n < N; ++n) {
      top[n] = splat(LEAST), total[n] = vec{};
      for (int i = 0; i < W; ++i) {
        const int64_t at = std::min(row + n * W + i, row + rows - 1);
        first[n][i] = int32_t(a.first_key(at)), last[n][i] = int32_t(a.last_key(at));
        if (a.sinks) top[n][i] = a.sinks[at % a.group] / a.scale, total[n][i] = 1.0f;
      }
      take(a, n, units);
    }
  }

  static int64_t floats(const Queries<T>& a) { return (whole_tiles(a.dim / EACH) + whole_tiles(a.v_dim)) * LANES; }

  void take(const Queries<T>& a, int n, int64_t units) {  // the queries of a vector of lanes, transposed
    const int64_t lanes = std::min<int64_t>(W, rows - n * W);
    const auto number = [&](int64_t lane, int64_t u) {
      float x;
      if constexpr (EACH == 2)
        std::memcpy(&x, a.at(row + n * W + lane) + 2 * u, 4);
      else
        x = to_float(a.at(row + n * W + lane)[u]);
      return x;
    };
    int64_t u = 0;
    for (; u + W <= units; u += W) {
      vec v[W] = {};
      for (int64_t i = 0; i < lanes; ++i) {
        const T* from = a.at(row + n * W + i) + u * EACH;
        if constexpr (EACH == 2)
          std::memcpy(&v[i], from, sizeof(vec));
        else
          v[i] = load(from);
      }
      transpose(v);
      for (int i = 0; i < W; ++i) store(q + (u + i) * LANES + n * W, v[i]);
    }
    for (; u < units; ++u)
      for (int64_t i = 0; i < lanes; ++i) q[u * LANES + n * W + i] = number(i, u);
  }

  // Takes in keys t … t + n - 1, which are in `tile`. `scores` has room for KEYS rows.
  void add(const Queries<T>& a, int64_t t, int64_t n, const Tile<T>& tile, float* scores) {
    n = std::min<int64_t>(n, a.last_key(row + rows - 1) + 1 - t);
    if (n <= 0 || t + n <= a.first_key(row)) return;
    if (tile.tiled)
      multiply_tiles<N>(whole_tiles(n), tile.units, tile.k, tile.k_stride, q, scores, false);
    else
      for (int64_t i = 0; i < n; i += DEEP)  // the rows past n are never used
        multiply<T, DEEP, N>(tile.units, tile.k + i * tile.k_stride, tile.k_stride, 1, q, scores + i * LANES, nullptr);
    for (int64_t i = 0; a.cap && i < n * N; ++i)
      store(scores + i * W, capped(load(scores + i * W), a.cap / a.scale));
    vec keep[N];
    if (t + n - 1 > a.last_key(row) || t < a.first_key(row + rows - 1))
      soften<true>(scores, t, n, a.scale, keep);
    else
      soften<false>(scores, t, n, a.scale, keep);
    const int64_t units = (n + EACH - 1) / EACH, whole = whole_tiles(units);
    if (tile.tiled) {
      std::fill(scores + units * LANES, scores + whole * LANES, 0.0f);
      for (int64_t d = 0; d < a.v_dim; ++d)
        for (int i = 0; i < N; ++i) store(out + d * LANES + i * W, load(out + d * LANES + i * W) * keep[i]);
      multiply_tiles<N>(whole_tiles(a.v_dim), whole, tile.turned, tile.V_UNITS, scores, out, true);
    } else {
      for (int64_t d = 0; d < a.v_dim; d += DEEP)
        multiply<T, DEEP, N>(units, tile.v + d, 1, tile.v_stride, scores, out + d * LANES, keep);
    }
  }

  // Turns scores into weights, in units. `keep`: the factor for the earlier sums.
  template <bool masked>
  void soften(float* scores, int64_t t, int64_t n, float scale, vec* keep) {
    const float c = scale * 1.44269504f;  // exp(x) = exp2(x log2 e)
    for (int i = 0; i < N; ++i) {
      vec best = top[i];
      float* s = scores + i * W;
      for (int64_t j = 0; j < n; ++j) {
        vec x = load(s + j * LANES);
        if (masked) {
          const int32_t key = int32_t(t + j);
          x = last[i] >= key && first[i] <= key ? x : splat(UNSEEN);
          store(s + j * LANES, x);
        }
        best = max(best, x);
      }
      keep[i] = exp2((top[i] - best) * c), top[i] = best;
      vec sum = total[i] * keep[i];
      const auto weight = [&](int64_t j) { return exp2((load(s + j * LANES) - best) * c); };
      for (int64_t j = 0; j < n; j += EACH) {
        const vec p = weight(j), next = EACH == 2 && j + 1 < n ? weight(j + 1) : vec{};
        sum += p + next;
        Units<T>::weights(s + j / EACH * LANES, p, next);
      }
      total[i] = sum;
    }
  }

  void finish(const Queries<T>& a) const {
    for (int n = 0; n < N; ++n) {
      const int64_t lanes = std::min<int64_t>(W, rows - n * W);
      const vec share = 1.0f / total[n];
      int64_t d = 0;
      for (; d + W <= a.v_dim; d += W) {
        vec v[W];
        for (int i = 0; i < W; ++i) v[i] = load(out + (d + i) * LANES + n * W) * share;
        transpose(v);
        for (int64_t i = 0; i < lanes; ++i) store(a.to(row + n * W + i) + d, v[i]);
      }
      for (; d < a.v_dim; ++d)
        for (int64_t i = 0; i < lanes; ++i) from_float(out[d * LANES + n * W + i] * share[i], a.to(row + n * W + i)[d]);
    }
  }
};

template <class T, int N, class Locate>
inline void attend_panels(const Queries<T>& a, int64_t row, int64_t end, const Locate& locate,
                          std::vector<float>& scratch) {
  constexpr int64_t LANES = N * W;
  const int64_t panels = (end - row + LANES - 1) / LANES, each = Panel<T, N>::floats(a);
  float* const free = aligned_room(scratch, panels * each + KEYS * LANES + Tile<T>::floats(a));
  float *scores = free + panels * each, *room = scores + KEYS * LANES;
  std::vector<Panel<T, N>> some;
  for (int64_t i = 0; i < panels; ++i)
    some.emplace_back(a, row + i * LANES, std::min(LANES, end - row - i * LANES), free + i * each);
  const int64_t keys = a.last_key(end - 1) + 1;
  Tile<T> tile(a, room);
  for (int64_t t = a.first_key(row); t < keys; t += KEYS) {
    const int64_t n = std::min(KEYS, keys - t);
    locate(t, n, tile.k_rows, tile.v_rows);
    tile.lay(n);
    for (Panel<T, N>& panel : some) panel.add(a, t, n, tile, scores);
  }
  for (const Panel<T, N>& panel : some) panel.finish(a);
}

// Attention of rows row … end - 1. `locate(t, n, k, v)` finds keys and values t … t + n - 1. `scratch` belongs to the
// thread.
template <class T, class Locate>
inline void attend(const Queries<T>& a, int64_t row, int64_t end, const Locate& locate, std::vector<float>& scratch) {
  const TileRegisters registers(TILED<T> && tiles_allowed());
  const int64_t whole = row + (end - row) / (PANEL * W) * (PANEL * W), left = end - whole;
  if (whole > row) attend_panels<T, PANEL>(a, row, whole, locate, scratch);
  if (left > 2 * W) return attend_panels<T, 3>(a, whole, end, locate, scratch);
  if (left > W) return attend_panels<T, 2>(a, whole, end, locate, scratch);
  if (left > 0) attend_panels<T, 1>(a, whole, end, locate, scratch);
}

}  // namespace hydra
