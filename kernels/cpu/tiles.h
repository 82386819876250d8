// Products of bf16 by the processor's matrix tiles (AMX): eight registers of 16 rows of 64 bytes. One instruction adds
// the product of 16 x 32 and 32 x 16 numbers, that is of 16 rows of 16 *units* and 16 units of 16 lanes, to 16 x 16
// sums. A unit is 32 bits, here a pair of bf16 (see Units in prefill.h).
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "simd.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HYDRA_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hydra {

constexpr int64_t TILE = 16;  // rows, and units, of a tile

inline int64_t whole_tiles(int64_t n) { return (n + TILE - 1) / TILE * TILE; }

#if defined(HYDRA_TILES)

template <class T>
constexpr bool TILED = std::is_same_v<T, bf16>;

// Whether this process may use tiles. Linux grants that on request, once per process.
inline bool tiles_allowed() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return allowed;
}

// While an object that is `wanted` lives, its thread can multiply by tiles. Do not nest these objects, and do not call
// oneDNN meanwhile: both would replace or end the configuration.
struct TileRegisters {
  const bool wanted;
  explicit TileRegisters(bool wanted) : wanted(wanted) {
    if (!wanted) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    std::fill_n(shape.row_bytes, 8, 64), std::fill_n(shape.rows, 8, TILE);
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  ~TileRegisters() {
    if (wanted) asm volatile("tilerelease");
  }
  TileRegisters(const TileRegisters&) = delete;
};

template <int R>
inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(R)); }
template <int R>
inline void tile_load(const float* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride * 4), "i"(R) : "memory");
}
template <int R>
inline void tile_store(float* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride * 4), "i"(R) : "memory");
}
template <int SUM, int A, int B>
inline void tile_fma() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B)); }

template <class F, int... I>
inline void each_of(std::integer_sequence<int, I...>, F&& f) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
inline void each(F&& f) { each_of(std::make_integer_sequence<int, N>{}, f); }

// M x N tiles of sums, which stay in registers: M * N <= 6.
template <int M, int N>
inline void multiply_block(int64_t K, const float* a, int64_t stride, const float* b, float* out, bool add) {
  constexpr int64_t LANES = N * TILE;
  constexpr int A = 6, LAST = 7;  // 0 … M * N - 1 are sums, 6 is of a; of b: 7 alone or, for N = 2, 7 and 4
  const auto sum_at = [&](auto i) { return out + i / N * TILE * LANES + i % N * TILE; };
  each<M * N>([&](auto i) { add ? tile_load<i>(sum_at(i), LANES) : tile_zero<i>(); });
  for (int64_t k = 0; k < K; k += TILE, b += TILE * LANES) {
    each<M>([&](auto m) {
      tile_load<A>(a + m * TILE * stride + k, stride);
      each<N>([&](auto i) {
        constexpr int n = m % 2 ? N - 1 - i : i;  // odd rows begin with the tile of b that is loaded
        constexpr int B = N < 3 ? LAST - 3 * n : LAST;
        if constexpr (m == 0 || (N == 3 && i > 0)) tile_load<B>(b + n * TILE, LANES);
        tile_fma<m * N + n, A, B>();
      });
    });
  }
  each<M * N>([&](auto i) { tile_store<i>(sum_at(i), LANES); });
}

// out [rows, lanes] (+)= a [rows, K] x b [K, lanes] of N * TILE lanes; rows (of `a`, `stride` apart) and K, in units, are
// whole tiles.
template <int N>
[[gnu::noinline]] void multiply_tiles(int64_t rows, int64_t K, const float* a, int64_t stride, const float* b, float* out,
                                      bool add) {
  int64_t m = 0;
  for (; m + 2 * TILE <= rows; m += 2 * TILE) multiply_block<2, N>(K, a + m * stride, stride, b, out + m * N * TILE, add);
  if (m < rows) multiply_block<1, N>(K, a + m * stride, stride, b, out + m * N * TILE, add);
}

#else

template <class T>
constexpr bool TILED = false;
inline bool tiles_allowed() { return false; }
struct TileRegisters {
  explicit TileRegisters(bool) {}
};
template <int N>
void multiply_tiles(int64_t, int64_t, const float*, int64_t, const float*, float*, bool) {}

#endif

}  // namespace hydra
