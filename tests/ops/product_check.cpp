// kernels/cpu/product.h against double arithmetic, for sizes around those of its panels, tasks and depths. Built by
// test_instruction_sets.py for each instruction set.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "product.h"

using namespace hydra;

inline void from_float(float x, int8_t& out) { out = int8_t(std::lround(x * 127)); }

// Rows T, weights Q; those of 8 bits have a scale for each column.
template <class T, class Q = T>
bool close(const char* name, double tolerance) {
  using hydra::from_float, ::from_float;
  for (int64_t M : {0, 1, 15, 17, 24, 25, 49, 100})
    for (int64_t N : {1, 7, 16, 53, 300})
      for (int64_t K : {1, 2, 33, 96, 131, 1030, 1031, 1056}) {
        if (M * N * K > 4000000 && (M != 100 || N != 53)) continue;
        const int64_t stride = K + M % 3;
        // exact sizes on the heap: a read past an end is seen by AddressSanitizer
        const int64_t x_size = M ? (M - 1) * stride + K : 0;
        std::unique_ptr<T[]> x(new T[x_size]), bias(new T[N]), out(new T[M * N]), before(new T[M * N]);
        std::unique_ptr<Q[]> w(new Q[N * K]);
        std::unique_ptr<float[]> scales(new float[N]);
        for (int64_t n = 0; n < N; ++n) scales[n] = 1.0f / (100 + n);
        const auto fill = [](auto* p, int64_t n) {
          for (int64_t i = 0; i < n; ++i) from_float(float(std::rand() % 2001 - 1000) / 1000, p[i]);
        };
        fill(x.get(), x_size), fill(w.get(), N * K), fill(bias.get(), N), fill(before.get(), M * N);
        std::copy_n(before.get(), M * N, out.get());
        const bool biased = N % 2, accumulate = K % 2;
        const float* s = sizeof(Q) == 1 ? scales.get() : nullptr;
        const T* b = biased ? bias.get() : nullptr;
        multiply_many(ProductArgs<T, Q>{x.get(), w.get(), s, b, out.get(), M, N, K, stride, accumulate});
        for (int64_t m = 0; m < M; ++m)
          for (int64_t n = 0; n < N; ++n) {
            double want = (biased ? to_float(bias[n]) : 0.0) + (accumulate ? to_float(before[m * N + n]) : 0.0);
            double sizes = 1 + std::abs(want);
            for (int64_t k = 0; k < K; ++k) {
              const double term = double(to_float(x[m * stride + k])) * to_float(w[n * K + k]) * (s ? s[n] : 1.0f);
              want += term, sizes += std::abs(term);
            }
            const double got = to_float(out[m * N + n]);
            if (!(std::abs(got - want) <= tolerance * (1 + std::abs(want)) + 1e-6 * sizes)) {
              std::printf("%s M=%ld N=%ld K=%ld [%ld, %ld]: %g, not %g\n", name, long(M), long(N), long(K), long(m),
                          long(n), got, want);
              return false;
            }
          }
      }
  return true;
}

// A row comes out the same to the bit, whatever is multiplied with it.
template <class T>
bool alone() {
  const int64_t M = 90, N = 40, K = 700;
  std::vector<T> x(M * K), w(N * K), all(M * N), one(N);
  for (T& v : x) from_float(float(std::rand() % 2001 - 1000) / 1000, v);
  for (T& v : w) from_float(float(std::rand() % 2001 - 1000) / 1000, v);
  multiply_many(ProductArgs<T>{x.data(), w.data(), nullptr, nullptr, all.data(), M, N, K, K, false});
  for (int64_t m = 0; m < M; ++m) {
    multiply_many(ProductArgs<T>{x.data() + m * K, w.data(), nullptr, nullptr, one.data(), 1, N, K, K, false});
    if (std::memcmp(one.data(), all.data() + m * N, N * sizeof(T))) return std::printf("row %ld alone\n", long(m)), false;
  }
  return true;
}

int main() {
  return close<float>("float32", 1e-6) && close<bf16>("bfloat16", 1e-2) && close<f16>("float16", 2e-3) &&
                 close<float, int8_t>("int8, float32", 1e-6) && close<bf16, int8_t>("int8, bfloat16", 1e-2) &&
                 alone<float>() && alone<bf16>()
             ? 0
             : 1;
}
