// Runs one of our CUDA kernels on what it reads, and writes what became of it: counts and numbers as int64, then buffers,
// each with its size before it. Buffers are exactly as large as they say, for the sanitizers' sake.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "blocks.cuh"
#include "elementwise.cuh"
#include "rope.cuh"

using namespace hydra;

static int64_t number() {
  int64_t n;
  if (fread(&n, 8, 1, stdin) != 1) exit(3);
  return n;
}

struct Buffer {
  char* bytes;
  int64_t size;
};
static std::vector<int64_t> n;
static std::vector<Buffer> buffers;

template <class T>
T* at(int i) {
  return reinterpret_cast<T*>(buffers[i].bytes);
}

template <class T>
void run(const std::string& what) {
  if (what == "rope") {
    T *values = at<T>(0) + (n[3] + n[4]) * n[5], *kept = at<T>(3) + n[6] * n[4] * n[5];
    run_rope_write(RopeArgs<T>{at<T>(0), values, at<float>(1), at<float>(2), at<T>(3), kept, at<int64_t>(4), n[0], n[1],
                               n[1], n[2], int(n[3]), int(n[4]), int(n[5]), int(n[6])},
                   0);
  } else if (what == "silu") {
    run_silu_and_mul(at<const T>(0), at<T>(1), n[0], n[1], 0);
  } else {
    run_copy_blocks(at<void>(0), at<const void>(1), at<int64_t>(2), at<int64_t>(3), n[0], n[1], 0);
  }
}

int main(int, char** args) {
  const std::string what = args[1], type = args[2];
  n.resize(number());
  for (int64_t& each : n) each = number();
  buffers.resize(number());
  for (Buffer& b : buffers) {
    b.size = number();
    b.bytes = static_cast<char*>(malloc(b.size));
    if (fread(b.bytes, 1, b.size, stdin) != size_t(b.size)) return 3;
  }
  type == "float32" ? run<float>(what) : type == "bfloat16" ? run<bf16>(what) : run<f16>(what);
  for (const Buffer& b : buffers) {
    fwrite(b.bytes, 1, b.size, stdout);
    free(b.bytes);
  }
}
