// Antialiased resizing of 8-bit RGB, bit-identical to torch's and so to torchvision's: rows first, then columns, rounded
// to 8 bits in between, with weights of 16 bits, of which `bits` are fractional. The symbols are plain C, so that a
// process without torch can load the library. Without AVX2 the plain loops do all the work.
#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

inline uint8_t rounded(int32_t sum, int bits) {
  return static_cast<uint8_t>(std::clamp((sum + (1 << (bits - 1))) >> bits, 0, 255));
}

// Pixel x of one row. A weight is repeated for four channels, beside that of the next tap.
void along_plain(const uint8_t* at, const int16_t* weights, int64_t taps, int bits, uint8_t* out) {
  for (int c = 0; c < 3; ++c) {
    int32_t sum = 0;
    for (int64_t t = 0; t < taps; ++t) sum += at[4 * t + c] * weights[8 * (t / 2) + 2 * c + t % 2];
    out[c] = rounded(sum, bits);
  }
}

void down_plain(const uint8_t* in, int64_t in_bytes, const int16_t* weights, int64_t taps, int bits, int64_t n,
                uint8_t* out) {
  for (int64_t x = 0; x < n; ++x) {
    int32_t sum = 0;
    for (int64_t t = 0; t < taps; ++t) sum += in[t * in_bytes + x] * weights[t];
    out[x] = rounded(sum, bits);
  }
}

#if defined(__AVX2__)

constexpr int CHUNK = 32;  // bytes of a row computed at once, down the columns

// eight sums each, `a` and `b` then `c` and `d` in each half, rounded to bytes
inline __m256i packed(__m256i a, __m256i b, __m256i c, __m256i d, __m256i half, __m128i bits) {
  const auto scaled = [&](__m256i sum) { return _mm256_sra_epi32(_mm256_add_epi32(sum, half), bits); };
  return _mm256_packus_epi16(_mm256_packs_epi32(scaled(a), scaled(b)), _mm256_packs_epi32(scaled(c), scaled(d)));
}

// Four rows, which share each load of weights. A vector holds four taps of four channels, the taps in pairs.
void along_four(const uint8_t* in, int64_t in_bytes, const int32_t* first, const int16_t* weights, int64_t taps,
                int bits, int64_t width, uint8_t* out, int64_t out_bytes) {
  const __m128i pairs = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  const __m256i half = _mm256_set1_epi32(1 << (bits - 1));
  const __m128i shift = _mm_cvtsi32_si128(bits);
  for (int64_t x = 0; x < width; ++x, weights += 4 * taps) {
    const uint8_t* at = in + 4 * first[x];
    __m256i sum[4] = {};
    for (int64_t t = 0; t < taps; t += 4) {
      const __m256i weight = _mm256_loadu_si256((const __m256i*)(weights + 4 * t));
      for (int r = 0; r < 4; ++r) {
        const __m128i pixels = _mm_loadu_si128((const __m128i*)(at + r * in_bytes + 4 * t));
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_shuffle_epi8(pixels, pairs));
        sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(wide, weight));
      }
    }
    __m256i two[2];  // rows 0 and 1, then 2 and 3
    for (int i = 0; i < 2; ++i)
      two[i] = _mm256_add_epi32(_mm256_permute2x128_si256(sum[2 * i], sum[2 * i + 1], 0x20),
                                _mm256_permute2x128_si256(sum[2 * i], sum[2 * i + 1], 0x31));
    const __m256i made = packed(two[0], two[1], two[0], two[1], half, shift);
    uint32_t pixels[8];  // rows 0, 2, 0, 2, 1, 3, 1, 3
    _mm256_storeu_si256((__m256i*)pixels, made);
    const int place[4] = {0, 4, 1, 5};
    for (int r = 0; r < 4; ++r)
      std::memcpy(out + r * out_bytes + 3 * x, pixels + place[r], 4);  // the next pixel overwrites the fourth byte
  }
}

// CHUNK bytes of one row. A vector of 16 bits holds two taps of eight columns.
void down_chunk(const uint8_t* in, int64_t in_bytes, const int16_t* weights, int64_t taps, int bits, uint8_t* out) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i sum[4] = {};
  for (int64_t t = 0; t < taps; t += 2, in += 2 * in_bytes) {
    int32_t pair;
    std::memcpy(&pair, weights + t, sizeof pair);
    const __m256i weight = _mm256_set1_epi32(pair);
    const __m256i a = _mm256_loadu_si256((const __m256i*)in);
    const __m256i b = _mm256_loadu_si256((const __m256i*)(in + in_bytes));
    const __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
    sum[0] = _mm256_add_epi32(sum[0], _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), weight));
    sum[1] = _mm256_add_epi32(sum[1], _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), weight));
    sum[2] = _mm256_add_epi32(sum[2], _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), weight));
    sum[3] = _mm256_add_epi32(sum[3], _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), weight));
  }
  const __m256i half = _mm256_set1_epi32(1 << (bits - 1));
  _mm256_storeu_si256((__m256i*)out, packed(sum[0], sum[1], sum[2], sum[3], half, _mm_cvtsi32_si128(bits)));
}

#endif

}  // namespace

extern "C" {

// Resizes rows of four-byte pixels, `in_bytes` apart, to rows of `width` three-byte pixels, `out_bytes` (more than 3 *
// width) apart. Pixel x is the sum of `taps` pixels (a multiple of four) from first[x] on, times weights [width, taps /
// 2, 4, 2]: pairs of weights, each repeated four times.
void hydra_resample16_along(const uint8_t* in, int64_t in_bytes, int64_t rows, const int32_t* first,
                            const int16_t* weights, int64_t taps, int64_t bits, int64_t width, uint8_t* out,
                            int64_t out_bytes) {
  int64_t y = 0;
#if defined(__AVX2__)
  for (; y + 4 <= rows; y += 4)
    along_four(in + y * in_bytes, in_bytes, first, weights, taps, bits, width, out + y * out_bytes, out_bytes);
#endif
  for (; y < rows; ++y)
    for (int64_t x = 0; x < width; ++x)
      along_plain(in + y * in_bytes + 4 * first[x], weights + 4 * x * taps, taps, bits, out + y * out_bytes + 3 * x);
}

// Computes `height` rows of `row_bytes`: row y is the sum of `taps` rows (an even number) from first[y] on, times
// weights [height, taps].
void hydra_resample16_down(const uint8_t* in, int64_t in_bytes, int64_t row_bytes, const int32_t* first,
                           const int16_t* weights, int64_t taps, int64_t bits, int64_t height, uint8_t* out,
                           int64_t out_bytes) {
  for (int64_t y = 0; y < height; ++y, weights += taps, out += out_bytes) {
    const uint8_t* rows = in + first[y] * in_bytes;
#if defined(__AVX2__)
    if (row_bytes >= CHUNK) {
      for (int64_t x = 0; x < row_bytes; x += CHUNK) {
        const int64_t at = std::min(x, row_bytes - CHUNK);  // the last chunk may overlap the one before
        down_chunk(rows + at, in_bytes, weights, taps, bits, out + at);
      }
      continue;
    }
#endif
    down_plain(rows, in_bytes, weights, taps, bits, row_bytes, out);
  }
}

}  // extern "C"
