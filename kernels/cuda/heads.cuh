// What queries, keys and values go through before attention, in one pass over them: norm of heads, rotary embedding, and
// the write of keys and values into the paged cache. Each step may be left out.
#pragma once
#include "numbers.cuh"

namespace hydra {

// `from` [rows, heads + kv_heads, dim], queries and keys, becomes `to` of the same shape; they may be the same memory
// if there is no norm. `fresh`: the values [rows, kv_heads, dim]. `..._stride`: numbers from row to row. `q_norm`, `k_norm`
// [dim]: weights, or null. `cos`, `sin` [rows, half]: of each row, so any positions will do, of one dimension or three;
// the first 2 * half numbers of a head are rotated. Row r goes to `keys` and `values` + block * block_stride,
// [block_tokens, kv_heads, dim], at block, offset = divmod(slots[r], block_tokens), or nowhere if slots[r] is -1. Without
// a cache (`keys` is null) there are no values either.
template <class T, class W>
struct HeadArgs {
  const T *from, *fresh;
  T* to;
  const W *q_norm, *k_norm;
  const float *cos, *sin;
  T *keys, *values;
  const int64_t* slots;
  int64_t rows, from_stride, fresh_stride, to_stride, block_stride;
  int heads, kv_heads, dim, half, block_tokens;
  float eps;
};

// A thread has two packs of a head: one of each half of what is rotated, or two beside each other of the rest. `half` and
// dim / 2 are multiples of a pack of `BYTES` bytes, or of 4 numbers if these are more.
template <class T, class W, int BYTES>
__global__ void write_heads(HeadArgs<T, W> a) {
  constexpr int N = Pack<T, BYTES>::N;
  const int packs = a.dim / 2 / N, turned = a.heads + a.kv_heads, all = turned + (a.keys ? a.kv_heads : 0);
  const int64_t t = this_thread(), item = t / packs, row = item / all;
  if (row >= a.rows) return;
  const int head = static_cast<int>(item % all), pair = static_cast<int>(t % packs) * N;
  const bool turns = pair < a.half;
  const int at = turns ? pair : 2 * pair, other = at + (turns ? a.half : N);
  const T* whole = head < turned ? a.from + row * a.from_stride + int64_t(head) * a.dim
                                 : a.fresh + row * a.fresh_stride + int64_t(head - turned) * a.dim;
  Pack<T, BYTES> first = load<BYTES>(whole + at), second = load<BYTES>(whole + other);
  if (head < turned) {
    float x[N], y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = wide(first.x[i]), y[i] = wide(second.x[i]);
    const W* norm = head < a.heads ? a.q_norm : a.k_norm;
    if (norm) {  // each thread sums up the whole head, which is near: no thread waits for another
      float sum = 0;
      for (int i = 0; i < a.dim; i += N) {
        const Pack<T, BYTES> part = load<BYTES>(whole + i);
#pragma unroll
        for (int j = 0; j < N; ++j) sum += wide(part.x[j]) * wide(part.x[j]);
      }
      const float scale = rsqrtf(sum / a.dim + a.eps);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] *= scale * wide(norm[at + i]), y[i] *= scale * wide(norm[other + i]);
    }
    if (turns) {
      const float *cos = a.cos + row * a.half + at, *sin = a.sin + row * a.half + at;
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const Pack<float> c = load(cos + i), s = load(sin + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float was = x[i + j];
          x[i + j] = was * c.x[j] - y[i + j] * s.x[j];
          y[i + j] = y[i + j] * c.x[j] + was * s.x[j];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) narrow(first.x[i], x[i]), narrow(second.x[i], y[i]);
    T* there = a.to + row * a.to_stride + int64_t(head) * a.dim;
    store(there + at, first);
    store(there + other, second);
  }
  if (head < a.heads || !a.keys) return;
  const int64_t slot = a.slots[row];
  if (slot < 0) return;
  const int kv_head = (head - a.heads) % a.kv_heads;
  const int64_t block = slot / a.block_tokens, offset = slot % a.block_tokens;
  T* there = (head < turned ? a.keys : a.values) + block * a.block_stride + (offset * a.kv_heads + kv_head) * a.dim;
  store(there + at, first);
  store(there + other, second);
}

template <int BYTES, class T, class W, class Stream>
void run_write_heads(const HeadArgs<T, W>& a, Stream stream) {
  const int64_t all = a.heads + a.kv_heads + (a.keys ? a.kv_heads : 0);
  const int64_t threads = a.rows * all * (a.dim / 2 / Pack<T, BYTES>::N);
  if (threads) HYDRA_LAUNCH((write_heads<T, W, BYTES>), blocks_for(threads), THREADS, stream, a);
}

// `rope` alone, in place. Some heads, of 72 numbers of 16 bits, have halves of 8 bytes' multiples only.
template <class T, class Stream>
void run_rope(const HeadArgs<T, T>& a, Stream stream) {
  constexpr bool can = sizeof(T) < 4;
  if (!can || (a.half * sizeof(T) % 16 == 0 && a.dim / 2 * sizeof(T) % 16 == 0)) {
    run_write_heads<16>(a, stream);
  } else {
    run_write_heads<can ? 8 : 16>(a, stream);
  }
}

}  // namespace hydra
