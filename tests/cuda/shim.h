// The words of CUDA that our kernels use, for a C++ compiler: one thread after the other, or, where threads wait for each
// other, those of a block as threads of the system. It shows wrong indices and arithmetic, not every race.
#pragma once
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __shared__ static

struct Index {
  unsigned x = 0;
};
inline thread_local Index threadIdx, blockIdx;
inline std::barrier<>* of_block;  // kernels with a barrier run one block at a time

inline void __syncthreads() { of_block->arrive_and_wait(); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

#define HYDRA_LAUNCH(kernel, blocks, threads, stream, ...)                    \
  do {                                                                        \
    (void)stream;                                                             \
    for (blockIdx.x = 0; blockIdx.x < (blocks); ++blockIdx.x)                 \
      for (threadIdx.x = 0; threadIdx.x < unsigned(threads); ++threadIdx.x) { \
        kernel(__VA_ARGS__);                                                  \
      }                                                                       \
  } while (false)

#define HYDRA_LAUNCH_TOGETHER(kernel, blocks, threads, stream, ...)                       \
  do {                                                                                    \
    (void)stream;                                                                         \
    for (unsigned block = 0; block < unsigned(blocks); ++block) {                         \
      std::barrier<> barrier(threads);                                                    \
      of_block = &barrier;                                                                \
      std::vector<std::thread> running;                                                   \
      for (unsigned thread = 0; thread < unsigned(threads); ++thread) {                   \
        running.emplace_back([&, thread] {                                                \
          blockIdx.x = block, threadIdx.x = thread;                                       \
          kernel(__VA_ARGS__);                                                            \
          barrier.arrive_and_drop(); /* a thread that has returned holds up no other */   \
        });                                                                               \
      }                                                                                   \
      for (std::thread& each : running) each.join();                                      \
    }                                                                                     \
  } while (false)

namespace hydra {
struct bf16 {
  uint16_t bits;
};
using f16 = _Float16;

inline float wide(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}
inline void narrow(bf16& to, float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to.bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float wide(f16 x) { return x; }
inline void narrow(f16& to, float x) { to = f16(x); }
}  // namespace hydra
