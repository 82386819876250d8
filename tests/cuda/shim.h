// The words of CUDA that our kernels use, for a C++ compiler: one thread after the other. It shows wrong indices and
// arithmetic, not races.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__

struct Index {
  unsigned x = 0;
};
inline thread_local Index threadIdx, blockIdx;

#define HYDRA_LAUNCH(kernel, blocks, threads, stream, ...)                    \
  do {                                                                        \
    (void)stream;                                                             \
    for (blockIdx.x = 0; blockIdx.x < (blocks); ++blockIdx.x)                 \
      for (threadIdx.x = 0; threadIdx.x < unsigned(threads); ++threadIdx.x) { \
        kernel(__VA_ARGS__);                                                  \
      }                                                                       \
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
