// Antialiased resizing of 8-bit RGB, bit-identical to Pillow's: one axis after the other, rounded to 8 bits in between,
// with weights of 22 fractional bits. The symbols are plain C, so that a process without torch can load the library.
#include <cstdint>
#include <cstring>

#if !defined(__AVX2__)
#error "needs AVX2: elsewhere Pillow itself is faster"
#endif
#include <immintrin.h>

namespace {

constexpr int FRACTION_BITS = 22;
constexpr int CHUNK = 32;  // bytes of a row computed at once, down the columns

typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef int32_t i32x8 __attribute__((vector_size(32)));

inline i32x8 widened(const uint8_t* at) {
  return (i32x8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at));
}

// four sums rounded to four bytes
inline uint32_t rounded(i32x4 sum) {
  sum = (sum + (1 << (FRACTION_BITS - 1))) >> FRACTION_BITS;
  const __m128i words = _mm_packs_epi32((__m128i)sum, (__m128i)sum);
  return _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
}

// Computes `R` rows, which share each load of weights. A vector holds two taps of four channels.
template <int R>
void along(const uint8_t* in, int64_t in_bytes, const int32_t* first, const int32_t* weights, int64_t taps,
           int64_t width, uint8_t* out, int64_t out_bytes) {
  for (int64_t x = 0; x < width; ++x, weights += 4 * taps) {
    const uint8_t* at = in + 4 * first[x];
    i32x8 sum[R] = {};
    for (int64_t t = 0; t < taps; t += 2) {
      i32x8 weight;
      std::memcpy(&weight, weights + 4 * t, sizeof weight);
      for (int r = 0; r < R; ++r) sum[r] += widened(at + r * in_bytes + 4 * t) * weight;
    }
    for (int r = 0; r < R; ++r) {
      i32x4 half[2];
      std::memcpy(half, &sum[r], sizeof half);
      const uint32_t pixel = rounded(half[0] + half[1]);
      std::memcpy(out + r * out_bytes + 3 * x, &pixel, 4);  // the next pixel overwrites the fourth byte
    }
  }
}

// Computes `n` bytes, at most CHUNK, of one row.
void down(const uint8_t* in, int64_t in_bytes, const int32_t* weights, int64_t taps, int64_t n, uint8_t* out) {
  i32x8 sum[CHUNK / 8] = {};
  uint8_t part[CHUNK] = {};
  for (int64_t t = 0; t < taps; ++t, in += in_bytes) {
    const uint8_t* row = in;
    if (n < CHUNK) row = static_cast<const uint8_t*>(std::memcpy(part, in, n));
    for (int i = 0; i < CHUNK / 8; ++i) sum[i] += widened(row + 8 * i) * weights[t];
  }
  i32x4 quarters[CHUNK / 4];
  std::memcpy(quarters, sum, sizeof sum);
  uint32_t made[CHUNK / 4];
  for (int i = 0; i < CHUNK / 4; ++i) made[i] = rounded(quarters[i]);
  std::memcpy(out, made, n);
}

}  // namespace

extern "C" {

// Resizes rows of four-byte pixels, `in_bytes` apart, to rows of `width` three-byte pixels, `out_bytes` (more than 3 *
// width) apart. Pixel x is the sum of `taps` pixels (an even number) from first[x] on, times weights [width, taps, 4],
// in which each weight is repeated four times.
void hydra_resample_along(const uint8_t* in, int64_t in_bytes, int64_t rows, const int32_t* first,
                          const int32_t* weights, int64_t taps, int64_t width, uint8_t* out, int64_t out_bytes) {
  int64_t y = 0;
  for (; y + 4 <= rows; y += 4)
    along<4>(in + y * in_bytes, in_bytes, first, weights, taps, width, out + y * out_bytes, out_bytes);
  for (; y < rows; ++y)
    along<1>(in + y * in_bytes, in_bytes, first, weights, taps, width, out + y * out_bytes, out_bytes);
}

// Computes `height` rows of `row_bytes`: row y is the sum of `taps` rows from first[y] on, times weights [height,
// taps].
void hydra_resample_down(const uint8_t* in, int64_t in_bytes, int64_t row_bytes, const int32_t* first,
                         const int32_t* weights, int64_t taps, int64_t height, uint8_t* out, int64_t out_bytes) {
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < row_bytes; x += CHUNK)
      down(in + first[y] * in_bytes + x, in_bytes, weights + y * taps, taps,
           row_bytes - x < CHUNK ? row_bytes - x : CHUNK, out + y * out_bytes + x);
}

}  // extern "C"
