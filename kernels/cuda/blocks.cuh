// Blocks of one store into blocks of another, all of a migration in one launch.
#pragma once
#include "numbers.cuh"

namespace hydra {

constexpr int PACKS_EACH = 4;  // of a thread: enough bytes in flight to fill the memory's pipe

// Block from_ids[i] of `from` into block to_ids[i] of `to`; `packs` of 16 bytes each.
__global__ void copy_blocks(
    Pack<int>* to, const Pack<int>* from, const int64_t* to_ids, const int64_t* from_ids, int64_t n, int64_t packs) {
  const int64_t tiles = (packs + THREADS * PACKS_EACH - 1) / (THREADS * PACKS_EACH), i = blockIdx.x / tiles;
  if (i >= n) return;
  const int64_t first = blockIdx.x % tiles * (THREADS * PACKS_EACH) + threadIdx.x;
  const Pack<int>* source = from + from_ids[i] * packs;
  Pack<int>* target = to + to_ids[i] * packs;
#pragma unroll
  for (int j = 0; j < PACKS_EACH; ++j) {
    const int64_t at = first + j * THREADS;
    if (at < packs) target[at] = source[at];
  }
}

template <class Stream>
void run_copy_blocks(
    void* to, const void* from, const int64_t* to_ids, const int64_t* from_ids, int64_t n, int64_t block_bytes,
    Stream stream) {
  const int64_t packs = block_bytes / 16, tiles = (packs + THREADS * PACKS_EACH - 1) / (THREADS * PACKS_EACH);
  if (n * tiles)
    HYDRA_LAUNCH(copy_blocks, static_cast<unsigned>(n * tiles), THREADS, stream, static_cast<Pack<int>*>(to),
                 static_cast<const Pack<int>*>(from), to_ids, from_ids, n, packs);
}

}  // namespace hydra
