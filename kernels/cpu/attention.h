// Attention over a paged cache, for decodes (one query row per request; keys and values are read once, in their own
// precision) and for chunks of many rows.
#pragma once
#include <algorithm>
#include <vector>

#include "linear.h"
#include "prefill.h"
#include "simd.h"

namespace hydra {

constexpr int64_t AHEAD_BYTES = 16 << 10;  // of keys, or values, that are on their way while a block is computed

// The keys, or the values, of one layer: [blocks, block_tokens, kv_heads, dim], strides in elements.
template <class T>
struct Pages {
  const T* data;
  int64_t block_stride, token_stride, head_stride, dim;

  const T* at(int64_t block, int64_t offset, int64_t head) const {
    return data + block * block_stride + offset * token_stride + head * head_stride;
  }
};

template <class T>
struct PagedArgs {
  const T* q;  // [rows, heads, keys.dim], row stride q_stride; decodes come first
  Pages<T> keys, values;
  T* out;  // [rows, heads, values.dim], contiguous
  const int32_t* tables;  // [requests, table_stride]
  const int32_t* lengths;  // [requests]
  const int32_t* ends;  // [rows], or null; see Queries
  const float* sinks;  // [heads], or null; see Queries
  int64_t q_stride, table_stride, heads, kv_heads, block_tokens, window;  // see Queries
  float scale, cap;
};

// The products of a query, in the layout of Rows<T>, with W keys `stride` apart, of which only the first `n` are read.
template <class T>
inline vec dots(const typename Rows<T>::X* q, const T* keys, int64_t stride, int64_t n, int64_t D) {
  constexpr int PART = Rows<T>::PART, SPAN = Rows<T>::SPAN;
  const T* key[W];
  for (int t = 0; t < W; ++t) key[t] = keys + (t < n ? t : n - 1) * stride;
  vec acc[W] = {};
  int64_t d = 0;
  for (; d + SPAN <= D; d += SPAN)
    for (int i = 0; i < SPAN; i += PART) {
      vec x = Rows<T>::values(q + d + i);
      in_register(x);
#pragma GCC unroll 16
      for (int t = 0; t < W; ++t) acc[t] = Rows<T>::fma(x, Rows<T>::weights(key[t] + d + i, i / PART), acc[t]);
    }
  float out[W];
  sums(acc, out);
  for (; d < D; ++d)
    for (int t = 0; t < W; ++t) out[t] += to_float(q[d]) * to_float(key[t][d]);
  return load(out);
}

// Turns the first L of the scores [padded] into probabilities, and the rest into zeros. `sink`, unless null: one more
// score, whose probability is dropped.
inline void softmax(float* s, int64_t L, int64_t padded, const float* sink) {
  const float most = *std::max_element(s, s + L), top = sink ? std::max(most, *sink) : most;
  vec total{};
  for (int64_t t = 0; t < padded; t += W) {
    vec e = exp(load(s + t) - top);
    if (t + W > L)
      for (int i = 0; i < W; ++i) e[i] = t + i < L ? e[i] : 0.0f;
    total += e;
    store(s + t, e);
  }
  const float inverse = 1.0f / (sum(total) + (sink ? std::exp(*sink - top) : 0.0f));
  for (int64_t t = 0; t < padded; t += W) store(s + t, load(s + t) * inverse);
}

// acc[D] += sum over n tokens of s[t] * v[t].
template <class T>
inline void weigh(float* acc, const float* s, const T* v, int64_t n, int64_t stride, int64_t D) {
  int64_t d = 0;
  for (; d + 4 * W <= D; d += 4 * W) {  // four accumulators hide latency
    vec a0 = load(acc + d), a1 = load(acc + d + W), a2 = load(acc + d + 2 * W), a3 = load(acc + d + 3 * W);
    for (int64_t t = 0; t < n; ++t) {
      const T* row = v + t * stride + d;
      const vec w = splat(s[t]);
      a0 += w * load(row), a1 += w * load(row + W), a2 += w * load(row + 2 * W), a3 += w * load(row + 3 * W);
    }
    store(acc + d, a0), store(acc + d + W, a1), store(acc + d + 2 * W, a2), store(acc + d + 3 * W, a3);
  }
  for (; d + W <= D; d += W) {
    vec a0 = load(acc + d);
    for (int64_t t = 0; t < n; ++t) a0 += s[t] * load(v + t * stride + d);
    store(acc + d, a0);
  }
  for (; d < D; ++d)
    for (int64_t t = 0; t < n; ++t) acc[d] += s[t] * to_float(v[t * stride + d]);
}

// Attention of request r for KV heads h0 .. h1 - 1; G = heads / kv_heads queries share every key and value. The heads
// of a token lie side by side, so computing them together streams through a block. A later block is prefetched meanwhile.
// `scratch` belongs to the thread.
template <class T>
inline void decode_one(const PagedArgs<T>& a, int64_t r, int64_t h0, int64_t h1, std::vector<float>& scratch) {
  const int64_t G = a.heads / a.kv_heads, D = a.keys.dim, V = a.values.dim, end = a.lengths[r], bt = a.block_tokens;
  const int64_t first = a.window ? std::max<int64_t>(0, end - a.window) : 0;
  const int64_t L = end - first, padded = (L + W - 1) / W * W;
  const int64_t n_heads = (h1 - h0) * G, blocks = (end + bt - 1) / bt;
  const int64_t line = 64 / sizeof(T), row = padded + W;  // the scores of a head; W of them are written together
  float* const acc = aligned_room(scratch, n_heads * (row + D + V));  // [heads, V]
  float *scores = acc + n_heads * V, *laid = scores + n_heads * row;  // [heads, row], [heads, D]
  auto* q = reinterpret_cast<typename Rows<T>::X*>(laid);
  const int64_t ahead = std::max<int64_t>(1, AHEAD_BYTES / (bt * (h1 - h0) * D * int64_t(sizeof(T))));
  const T* from = a.q + r * a.q_stride + h0 * G * D;
  for (int64_t i = 0; i < n_heads; ++i) lay_row<T>(from + i * D, q + i * D, D);
  std::fill(acc, acc + n_heads * V, 0.0f);
  const int32_t* table = a.tables + r * a.table_stride;
  const auto page = [&](const Pages<T>& of, int64_t b) {
    return of.at(table[b], std::max<int64_t>(0, first - b * bt), h0);
  };

  for (int64_t b = first / bt; b < blocks; ++b) {
    const T *k = page(a.keys, b), *next = page(a.keys, std::min(b + ahead, blocks - 1));
    const int64_t t0 = std::max(b * bt, first) - first, n = std::min((b + 1) * bt, end) - first - t0;
    for (int64_t i = 0; i < n_heads; ++i) {
      for (int64_t t = i; t < n; t += n_heads)
        for (int64_t d = 0; d < (h1 - h0) * D; d += line) __builtin_prefetch(next + t * a.keys.token_stride + d, 0, 2);
      const T* keys = k + i / G * a.keys.head_stride;
      for (int64_t t = 0; t < n; t += W, keys += W * a.keys.token_stride)
        store(scores + i * row + t0 + t, dots(q + i * D, keys, a.keys.token_stride, n - t, D) * a.scale);
    }
  }
  for (int64_t i = 0; i < n_heads; ++i) {
    std::fill(scores + i * row + L, scores + i * row + padded, 0.0f);
    for (int64_t t = 0; a.cap && t < L; t += W) store(scores + i * row + t, capped(load(scores + i * row + t), a.cap));
    softmax(scores + i * row, L, padded, a.sinks ? a.sinks + h0 * G + i : nullptr);
  }
  for (int64_t b = first / bt; b < blocks; ++b) {
    const T *v = page(a.values, b), *next = page(a.values, std::min(b + ahead, blocks - 1));
    const int64_t t0 = std::max(b * bt, first) - first, n = std::min((b + 1) * bt, end) - first - t0;
    for (int64_t i = 0; i < n_heads; ++i) {
      for (int64_t t = i; t < n; t += n_heads)
        for (int64_t d = 0; d < (h1 - h0) * V; d += line) __builtin_prefetch(next + t * a.values.token_stride + d, 0, 2);
      weigh(acc + i * V, scores + i * row + t0, v + i / G * a.values.head_stride, n, a.values.token_stride, V);
    }
  }
  T* to = a.out + (r * a.heads + h0 * G) * V;
  for (int64_t i = 0; i < n_heads * V; ++i) from_float(acc[i], to[i]);
}

// The number of parts that the KV heads of each of `n` decodes are cut into for `decode_one`, so that every thread has
// work.
inline int64_t decode_parts(int64_t n, int64_t kv_heads, int64_t threads) {
  return n >= 2 * threads ? 1 : std::min<int64_t>(kv_heads, 4);
}

// Attention of rows row … end - 1 of KV head `head` of request r, whose first token is row `start` of the batch.
template <class T>
inline void attend_pages(const PagedArgs<T>& a, int64_t r, int64_t head, int64_t start, int64_t tokens, int64_t row,
                         int64_t end, std::vector<float>& scratch) {
  const int64_t G = a.heads / a.kv_heads, D = a.keys.dim, V = a.values.dim, L = a.lengths[r];
  const Queries<T> queries{a.q + start * a.q_stride + head * G * D, a.out + (start * a.heads + head * G) * V,
                           a.q_stride, D, a.heads * V, G, D, V, L, L - tokens, a.window, a.scale,
                           a.ends ? a.ends + start : nullptr, a.sinks ? a.sinks + head * G : nullptr, a.cap};
  const int32_t* table = a.tables + r * a.table_stride;
  attend(queries, row, end, [&](int64_t t, int64_t n, const T** k, const T** v) {
    int64_t block = t / a.block_tokens, offset = t % a.block_tokens;
    for (int64_t j = 0; j < n; ++block, offset = 0) {
      const T *key = a.keys.at(table[block], offset, head), *value = a.values.at(table[block], offset, head);
      for (; j < n && offset < a.block_tokens; ++j, ++offset, key += a.keys.token_stride, value += a.values.token_stride)
        k[j] = key, v[j] = value;
    }
  }, scratch);
}

}  // namespace hydra
