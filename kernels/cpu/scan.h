// One step of the gated delta rule in one pass, with a layer's other operations. The state of each head is read from
// memory once and written once.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace hydra {

// Computes N vectors of columns of a head's state, or one column if N is 0. See `delta_step`.
template <int N>
inline void delta_columns(
    const float* from, float* to, const float* q, const float* k, const float* v, float fall, float beta, float both,
    int64_t keys, int64_t dim, float* out) {
  if constexpr (N == 0) {
    float known = 0.0f, asked = 0.0f;
    for (int64_t i = 0; from && i < keys; ++i) known += from[i * dim] * k[i], asked += from[i * dim] * q[i];
    const float update = beta * (*v - fall * known);
    *out = fall * asked + both * update;
    for (int64_t i = 0; i < keys; ++i) to[i * dim] = (from ? from[i * dim] * fall : 0.0f) + update * k[i];
  } else {
    vec known[N] = {}, asked[N] = {}, update[N];
    for (int64_t i = 0; from && i < keys; ++i)
      for (int n = 0; n < N; ++n) {
        const vec s = load(from + i * dim + n * W);
        known[n] += s * k[i];
        asked[n] += s * q[i];
      }
    for (int n = 0; n < N; ++n) {
      update[n] = (load(v + n * W) - known[n] * fall) * beta;
      store(out + n * W, asked[n] * fall + update[n] * both);
    }
    for (int64_t i = 0; i < keys; ++i)
      for (int n = 0; n < N; ++n) {
        const vec before = from ? load(from + i * dim + n * W) * fall : vec{};
        store(to + i * dim + n * W, before + update[n] * k[i]);
      }
  }
}

// One head's step. from, to [keys, dim]; `from` may be null, for zeros, or `to`; q, k [keys]; v, out [dim].
//
//   known = fall * k S        u = beta (v - known)
//   S'    = fall * S + k u    out = q S' = fall * q S + (q . k) u
inline void delta_step(
    const float* from, float* to, const float* q, const float* k, const float* v, float fall, float beta, int64_t keys,
    int64_t dim, float* out) {
  float both = 0.0f;
  for (int64_t i = 0; i < keys; ++i) both += q[i] * k[i];
  int64_t d = 0;
  const auto step = [&](auto some, int64_t width) {
    delta_columns<decltype(some)::value>(
        from ? from + d : nullptr, to + d, q, k, v + d, fall, beta, both, keys, dim, out + d);
    d += width;
  };
  while (d + 4 * W <= dim) step(std::integral_constant<int, 4>{}, 4 * W);
  while (d + W <= dim) step(std::integral_constant<int, 1>{}, W);
  while (d < dim) step(std::integral_constant<int, 0>{}, 1);
}

// One layer of Qwen3-Next or Qwen3.5, without the matrices around it. Blocks hold a request's last `width - 1` inputs
// of the convolution [width - 1, channels] and its states [heads, keys, dim].
template <class T>
struct DeltaLayer {
  const T *conv, *norm;  // [channels, width], [dim]
  const float *rate, *bias;  // [heads]
  T* tails;
  float* states;
  int64_t tail_stride, state_stride, width, channels, key_heads, keys, heads, dim;
  float eps;
};

// A row's convolution, then silu, for channels [c0, c1): x [channels] → to [channels]. The tail is shifted by the row.
template <class T>
inline void convolve(const DeltaLayer<T>& a, const T* x, const T* from, T* tail, int64_t c0, int64_t c1, float* to) {
  const int64_t kept = a.width - 1;
  for (int64_t c = c0; c < c1; ++c) {
    const T* weight = a.conv + c * a.width;
    float sum = to_float(x[c]) * to_float(weight[kept]);
    for (int64_t j = 0; from && j < kept; ++j) sum += to_float(from[j * a.channels + c]) * to_float(weight[j]);
    to[c] = sum;
    for (int64_t j = 0; j + 1 < kept; ++j) tail[j * a.channels + c] = from ? from[(j + 1) * a.channels + c] : T{};
    tail[(kept - 1) * a.channels + c] = x[c];
  }
  int64_t c = c0;
  for (; c + W <= c1; c += W) store(to + c, swish(load(to + c), 1.0f));
  for (; c < c1; ++c) to[c] = to[c] / (1.0f + std::exp(-to[c]));
}

// Scales `from` [n] to length `scale`, except for a small term in the root.
inline void normalise(const float* from, int64_t n, float scale, float* to) {
  float squares = 1e-6f;
  for (int64_t i = 0; i < n; ++i) squares += from[i] * from[i];
  scale /= std::sqrt(squares);
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] * scale;
}

// One head of a row. mixed [channels]: the result of `convolve`; out [dim]: normalised and gated; work [2 * keys +
// dim].
template <class T>
inline void delta_head(
    const DeltaLayer<T>& a, int64_t head, const float* mixed, T beta, T step, const T* gate, int64_t source,
    int64_t target, float* work, T* out) {
  float *q = work, *k = q + a.keys, *o = k + a.keys;
  const int64_t key = head / (a.heads / a.key_heads) * a.keys, all_keys = a.key_heads * a.keys;
  normalise(mixed + key, a.keys, 1.0f / std::sqrt(float(a.keys)), q);
  normalise(mixed + all_keys + key, a.keys, 1.0f, k);
  const float s = to_float(step) + a.bias[head];
  const float fall = std::exp(-std::exp(a.rate[head]) * (s > 20.0f ? s : std::log1p(std::exp(s))));
  float* states = a.states + head * a.keys * a.dim;
  delta_step(
      source < 0 ? nullptr : states + source * a.state_stride, states + target * a.state_stride, q, k,
      mixed + 2 * all_keys + head * a.dim, fall, 1.0f / (1.0f + std::exp(-to_float(beta))), a.keys, a.dim, o);
  float squares = 0.0f;
  for (int64_t d = 0; d < a.dim; ++d) squares += o[d] * o[d];
  const float scale = 1.0f / std::sqrt(squares / a.dim + a.eps);
  for (int64_t d = 0; d < a.dim; ++d) {
    const float g = to_float(gate[d]);
    from_float(o[d] * scale * to_float(a.norm[d]) * g / (1.0f + std::exp(-g)), out[d]);
  }
}

}  // namespace hydra
