// Attention of one query row per request over its paged cache. Keys and values are read once, in their own precision.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"

namespace hydra {

template <class T>
struct DecodeArgs {
  const T* q;  // [requests, heads, dim], row stride q_stride
  const T* cache;  // [blocks, 2, block_tokens, kv_heads, dim], strides below in elements
  T* out;  // [requests, heads, dim], contiguous
  const int32_t* tables;  // [requests, table_stride]
  const int32_t* lengths;  // [requests]
  int64_t q_stride, table_stride, block_stride, v_offset, token_stride, head_stride;
  int64_t heads, kv_heads, dim, block_tokens;
  float scale;
};

// Request r, KV head h: G = heads / kv_heads queries share every key and value. `scratch` is the thread's own.
template <class T>
inline void decode_one(const DecodeArgs<T>& a, int64_t r, int64_t h, std::vector<float>& scratch) {
  const int64_t G = a.heads / a.kv_heads, D = a.dim, L = a.lengths[r], padded = (L + W - 1) / W * W;
  scratch.resize(G * (padded + 2 * D));
  float* q = scratch.data();       // [G, D], scaled
  float* acc = q + G * D;          // [G, D]
  float* scores = acc + G * D;     // [G, padded]
  const int32_t* table = a.tables + r * a.table_stride;
  for (int64_t g = 0; g < G; ++g)
    for (int64_t d = 0; d < D; ++d) q[g * D + d] = to_float(a.q[r * a.q_stride + (h * G + g) * D + d]) * a.scale;

  for (int64_t t0 = 0; t0 < L; t0 += a.block_tokens) {
    const T* k = a.cache + table[t0 / a.block_tokens] * a.block_stride + h * a.head_stride;
    const int64_t n = std::min(a.block_tokens, L - t0);
    for (int64_t t = 0; t < n; ++t, k += a.token_stride)
      for (int64_t g = 0; g < G; ++g) {
        vec s0{}, s1{};
        int64_t d = 0;
        for (; d + 2 * W <= D; d += 2 * W) {
          s0 += load(q + g * D + d) * load(k + d);
          s1 += load(q + g * D + d + W) * load(k + d + W);
        }
        for (; d + W <= D; d += W) s0 += load(q + g * D + d) * load(k + d);
        float s = sum(s0 + s1);
        for (; d < D; ++d) s += q[g * D + d] * to_float(k[d]);
        scores[g * padded + t0 + t] = s;
      }
  }
  for (int64_t g = 0; g < G; ++g) {
    float* s = scores + g * padded;
    const float top = *std::max_element(s, s + L);
    for (int64_t t = L; t < padded; ++t) s[t] = -INFINITY;
    vec total{};
    for (int64_t t = 0; t < padded; t += W) {
      vec e = exp(load(s + t) - top);
      if (t + W > L)
        for (int i = 0; i < W; ++i) e[i] = t + i < L ? e[i] : 0.0f;
      total += e;
      store(s + t, e);
    }
    const float inverse = 1.0f / sum(total);
    for (int64_t t = 0; t < padded; t += W) store(s + t, load(s + t) * inverse);
  }
  std::fill(acc, acc + G * D, 0.0f);
  for (int64_t t0 = 0; t0 < L; t0 += a.block_tokens) {
    const T* v = a.cache + table[t0 / a.block_tokens] * a.block_stride + a.v_offset + h * a.head_stride;
    const int64_t n = std::min(a.block_tokens, L - t0);
    for (int64_t g = 0; g < G; ++g) {
      const float* s = scores + g * padded + t0;
      int64_t d = 0;
      for (; d + W <= D; d += W) {
        vec sum_d = load(acc + g * D + d);
        for (int64_t t = 0; t < n; ++t) sum_d += s[t] * load(v + t * a.token_stride + d);
        store(acc + g * D + d, sum_d);
      }
      for (; d < D; ++d)
        for (int64_t t = 0; t < n; ++t) acc[g * D + d] += s[t] * to_float(v[t * a.token_stride + d]);
    }
  }
  for (int64_t g = 0; g < G; ++g)
    for (int64_t d = 0; d < D; ++d) from_float(acc[g * D + d], a.out[(r * a.heads + h * G + g) * D + d]);
}

}  // namespace hydra
