// kernels/cpu/linear.h against double arithmetic, for every number of rows up to two groups and awkward sizes. Built by
// test_instruction_sets.py for each instruction set, so that a machine tests what other machines run.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "linear.h"

using namespace hydra;

inline void from_float(float x, int8_t& out) { out = int8_t(std::lround(x * 127)); }

// Weights T, rows and results O; weights of 8 bits have a scale for each column.
template <class T, class O = T>
bool close(const char* name, double tolerance) {
  using hydra::from_float, ::from_float;
  for (int64_t M = 0; M <= 17; ++M)
    for (int64_t N : {1, 7, 24, 53})
      for (int64_t K : {1, 15, 64, 67, 131}) {
        // exact sizes on the heap: a read past an end is seen by AddressSanitizer
        std::unique_ptr<O[]> x(new O[M * K]), bias(new O[N]), out(new O[M * N]), before(new O[M * N]);
        std::unique_ptr<T[]> w(new T[N * K]);
        std::unique_ptr<float[]> scales(new float[N]);
        for (int64_t n = 0; n < N; ++n) scales[n] = 1.0f / (100 + n);
        const bool scaled = sizeof(T) == 1;
        const auto fill = [](auto* p, int64_t n) {
          for (int64_t i = 0; i < n; ++i) from_float(float(std::rand() % 2001 - 1000) / 1000, p[i]);
        };
        fill(x.get(), M * K), fill(w.get(), N * K), fill(bias.get(), N), fill(before.get(), M * N);
        std::copy_n(before.get(), M * N, out.get());
        std::unique_ptr<typename Rows<T>::X[]> laid(new typename Rows<T>::X[M * K]);
        const typename Rows<T>::X* rows = laid.get();
        if constexpr (Rows<T>::as_is && std::is_same_v<T, O>)
          rows = x.get();
        else
          for (int64_t m = 0; m < M; ++m) Rows<T>::lay(x.get() + m * K, laid.get() + m * K, K);
        const bool biased = N % 2, accumulate = K % 2;
        const float* s = scaled ? scales.get() : nullptr;
        const O* b = biased ? bias.get() : nullptr;
        columns(LinearArgs<T, O>{rows, w.get(), s, b, out.get(), M, N, K, N, accumulate}, 0, N);
        for (int64_t m = 0; m < M; ++m)
          for (int64_t n = 0; n < N; ++n) {
            double want = (biased ? to_float(bias[n]) : 0.0) + (accumulate ? to_float(before[m * N + n]) : 0.0);
            for (int64_t k = 0; k < K; ++k)
              want += double(to_float(x[m * K + k])) * to_float(w[n * K + k]) * (scaled ? scales[n] : 1.0f);
            const double got = to_float(out[m * N + n]);
            if (!(std::abs(got - want) <= tolerance * (1 + std::abs(want)))) {
              std::printf("%s M=%ld N=%ld K=%ld [%ld, %ld]: %g, not %g\n", name, long(M), long(N), long(K), long(m),
                          long(n), got, want);
              return false;
            }
          }
      }
  return true;
}

int main() {
  return close<float>("float32", 1e-5) && close<bf16>("bfloat16", 1e-2) && close<f16>("float16", 2e-3) &&
                 close<int8_t, float>("int8, float32", 1e-5) && close<int8_t, bf16>("int8, bfloat16", 1e-2)
             ? 0
             : 1;
}
