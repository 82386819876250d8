// Rotary embedding of queries and keys, and keys and values into the paged cache, in one pass over them.
#pragma once
#include "numbers.cuh"

namespace hydra {

// `qk` [rows, heads + kv_heads, dim] and `fresh`, the values [rows, kv_heads, dim], `qk_stride` and `fresh_stride` numbers
// from row to row; `cos`, `sin` [rows, dim / 2]: of each row, so any positions will do, of one dimension or three. Row r
// goes to `keys` and `values` + block * block_stride, [block_tokens, kv_heads, dim], at block, offset = divmod(slots[r],
// block_tokens). dim / 2 is a multiple of a pack.
template <class T>
struct RopeArgs {
  T *qk, *fresh;
  const float *cos, *sin;
  T *keys, *values;
  const int64_t* slots;
  int64_t rows, qk_stride, fresh_stride, block_stride;
  int heads, kv_heads, dim, block_tokens;
};

// A thread turns one pack of the first half of a head with its pack of the second.
template <class T>
__global__ void rope_write(RopeArgs<T> a) {
  constexpr int N = Pack<T>::N;
  const int half = a.dim / 2, packs = half / N, all = a.heads + 2 * a.kv_heads;
  const int64_t t = this_thread(), item = t / packs;
  const int64_t row = item / all;
  if (row >= a.rows) return;
  const int head = static_cast<int>(item % all), at = static_cast<int>(t % packs) * N;
  const int turned = a.heads + a.kv_heads;
  T* here = head < turned ? a.qk + row * a.qk_stride + int64_t(head) * a.dim + at
                          : a.fresh + row * a.fresh_stride + int64_t(head - turned) * a.dim + at;
  Pack<T> first = load(here), second = load(here + half);
  if (head < turned) {
    const float *cos = a.cos + row * half + at, *sin = a.sin + row * half + at;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const Pack<float> c = load(cos + i), s = load(sin + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = wide(first.x[i + j]), y = wide(second.x[i + j]);
        narrow(first.x[i + j], x * c.x[j] - y * s.x[j]);
        narrow(second.x[i + j], y * c.x[j] + x * s.x[j]);
      }
    }
    store(here, first);
    store(here + half, second);
  }
  if (head < a.heads) return;
  const int kv_head = (head - a.heads) % a.kv_heads;
  const int64_t slot = a.slots[row], block = slot / a.block_tokens, offset = slot % a.block_tokens;
  const int64_t place = (offset * a.kv_heads + kv_head) * a.dim + at;
  T* there = (head < turned ? a.keys : a.values) + block * a.block_stride + place;
  store(there, first);
  store(there + half, second);
}

template <class T, class Stream>
void run_rope_write(const RopeArgs<T>& a, Stream stream) {
  const int64_t threads = a.rows * (a.heads + 2 * a.kv_heads) * (a.dim / 2 / Pack<T>::N);
  if (threads) HYDRA_LAUNCH(rope_write<T>, blocks_for(threads), THREADS, stream, a);
}

}  // namespace hydra
