// Consecutive decoder layers in one parallel region, for one token each of a few requests. The results are
// bit-identical to those of the single operators in ops.cpp.
#pragma once
#include <omp.h>

#include <memory>
#include <utility>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "rowwise.h"

namespace hydra {

// A weight [N, K], its scales [N] if it is int8, and a bias [N] or null.
template <class T, class Q>
struct Matrix {
  const Q* w;
  const float* scales;
  const T* bias;
  int64_t N, K;
};

// x += out(attention(qkv(norm(x)))), then x += down(silu(gate) * up) of gate_up(norm(x)). Rows are T, weights Q.
template <class T, class Q>
struct DecoderLayer {
  const T *input_norm, *mlp_norm;  // [hidden]
  const T *q_norm, *k_norm;  // [dim], for each head before RoPE, or null
  const float* sinks;  // [heads] or null
  Matrix<T, Q> qkv, out, gate_up, down;
};

// The rows of a call, one token each of several requests; if it `shares`, also successive tokens of one request, of which
// the later ones see the earlier ones. In `paged`, the fields of a layer are not set.
template <class T>
struct Decodes {
  T* x;  // [rows, hidden], contiguous
  const float *cos, *sin;  // [rows, half]
  const int64_t* slots;  // [rows], see write_kv
  int64_t rows, half;
  float eps;
  bool shares;
  PagedArgs<T> paged;
};

// Buffers that the threads share.
template <class T>
struct Between {
  std::unique_ptr<T[]> qkv, mixed, gate_up, hidden;  // `rows` rows each
};

// One of the threads that compute a call. Each thread runs through all steps of the call.
template <class T, class Q>
struct DecodeThread {
  using X = typename Rows<Q>::X;
  const Decodes<T>& d;
  const Between<T>& to;
  const int64_t me = omp_get_thread_num(), threads = omp_get_num_threads();
  std::vector<T> normed{};
  std::vector<X> laid{};
  std::vector<float> scratch{};

  const X* lay(const T* x, int64_t K) { return lay_rows<Q>(x, d.rows, K, laid); }

  const X* normalise(const T* weight, int64_t K) {
    normed.resize(d.rows * K);
    for (int64_t m = 0; m < d.rows; ++m) rms_norm_row(d.x + m * K, weight, normed.data() + m * K, K, d.eps);
    return lay(normed.data(), K);
  }

  void multiply(const Matrix<T, Q>& by, const X* x, T* out, bool accumulate, std::pair<int64_t, int64_t> part) const {
    const LinearArgs<Q, T> a{x, by.w, by.scales, by.bias, out, d.rows, by.N, by.K, by.N, accumulate};
    if (part.first < part.second) columns(a, part.first, part.second);
  }

  void multiply(const Matrix<T, Q>& by, const X* x, T* out, bool accumulate) const {
    multiply(by, x, out, accumulate, share(by.N, me, threads));
  }

  // Rotates KV heads h0 .. h1 - 1 of row r and their queries, and writes keys and values. No other thread reads or
  // writes the same data.
  void enter(const DecoderLayer<T, Q>& layer, const PagedArgs<T>& a, int64_t r, int64_t h0, int64_t h1) const {
    const int64_t G = a.heads / a.kv_heads, D = a.keys.dim, V = a.values.dim;
    const int64_t block = d.slots[r] / a.block_tokens, offset = d.slots[r] % a.block_tokens;
    T *q = to.qkv.get() + r * a.q_stride, *k = q + a.heads * D, *v = k + a.kv_heads * D;
    const auto turn = [&](T* head, const T* norm) {
      if (norm) rms_norm_row(head, norm, head, D, d.eps);
      rope_head(head, d.cos + r * d.half, d.sin + r * d.half, d.half);
    };
    for (int64_t h = h0 * G; h < h1 * G; ++h) turn(q + h * D, layer.q_norm);
    for (int64_t h = h0; h < h1; ++h) {
      turn(k + h * D, layer.k_norm);
      std::copy_n(k + h * D, D, const_cast<T*>(a.keys.at(block, offset, h)));
      std::copy_n(v + h * V, V, const_cast<T*>(a.values.at(block, offset, h)));
    }
  }

  void run(const DecoderLayer<T, Q>& layer, const Pages<T>& keys, const Pages<T>& values) {
    const Matrix<T, Q> &qkv = layer.qkv, &gate_up = layer.gate_up, &down = layer.down;
    PagedArgs<T> a = d.paged;
    a.q = to.qkv.get(), a.q_stride = qkv.N, a.out = to.mixed.get(), a.sinks = layer.sinks;
    a.keys = keys, a.values = values;
    multiply(qkv, normalise(layer.input_norm, qkv.K), to.qkv.get(), false);
#pragma omp barrier
    const int64_t parts = decode_parts(d.rows, a.kv_heads, threads);
    const auto heads_of = [&](int64_t part) {
      return std::pair{part * a.kv_heads / parts, (part + 1) * a.kv_heads / parts};
    };
    if (d.shares) {  // rows of one request in turn, so that their keys and values are still in a cache
#pragma omp for
      for (int64_t i = 0; i < d.rows * parts; ++i) {
        const auto [h0, h1] = heads_of(i / d.rows);
        enter(layer, a, i % d.rows, h0, h1);
      }
#pragma omp for schedule(static)
      for (int64_t i = 0; i < d.rows * parts; ++i) {
        const auto [h0, h1] = heads_of(i / d.rows);
        decode_one(a, i % d.rows, h0, h1, scratch);
      }
    } else {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < d.rows * parts; ++i) {
        const auto [h0, h1] = heads_of(i % parts);
        enter(layer, a, i / parts, h0, h1);
        decode_one(a, i / parts, h0, h1, scratch);
      }
    }
    multiply(layer.out, lay(to.mixed.get(), layer.out.K), d.x, true);
#pragma omp barrier
    const X* x = normalise(layer.mlp_norm, gate_up.K);
    const auto [i0, i1] = share(down.K, me, threads, W);  // whole vectors, except for the last
    multiply(gate_up, x, to.gate_up.get(), false, {i0, i1});
    multiply(gate_up, x, to.gate_up.get(), false, {down.K + i0, down.K + i1});
    for (int64_t m = 0; m < d.rows; ++m) {
      const T* gate = to.gate_up.get() + m * gate_up.N + i0;
      silu_and_mul_row(gate, gate + down.K, to.hidden.get() + m * down.K + i0, i1 - i0);
    }
#pragma omp barrier
    multiply(down, lay(to.hidden.get(), down.K), d.x, true);
#pragma omp barrier
  }
};

// Layers whose matrices have the same shapes. keys, values: the cache of each layer.
template <class T, class Q>
void decode_layers(const std::vector<DecoderLayer<T, Q>>& layers, const std::vector<std::pair<Pages<T>, Pages<T>>>& caches,
                   const Decodes<T>& d) {
  const DecoderLayer<T, Q>& one = layers.front();
  const auto rows = [&](int64_t width) { return std::unique_ptr<T[]>(new T[d.rows * width]); };
  const Between<T> to{rows(one.qkv.N), rows(one.out.K), rows(one.gate_up.N), rows(one.down.K)};
#pragma omp parallel if (one.gate_up.N * one.gate_up.K > 32768)
  {
    DecodeThread<T, Q> thread{d, to};
    for (size_t i = 0; i < layers.size(); ++i) thread.run(layers[i], caches[i].first, caches[i].second);
  }
}

}  // namespace hydra
