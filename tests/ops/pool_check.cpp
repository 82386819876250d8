// kernels/cpu/pool.h: every item is done exactly once, by any number of callers with any number of threads, whether the
// helpers are awake, asleep, or on their way; callers come and go.
#include "pool.h"

#include <cstdio>
#include <cstdlib>
#include <sys/wait.h>

using namespace hydra;

bool many(int seed) {
  std::vector<int> done(97);
  for (int round = 0; round < 400; ++round) {
    const int items = (round * 7 + seed) % 97, threads = 1 + (round + seed) % 4;
    std::fill(done.begin(), done.end(), 0);
    parallel(items, threads, round % 3 != 0, [&](int64_t i) { done[i] += 1; });  // a race is seen by ThreadSanitizer
    for (int i = 0; i < 97; ++i)
      if (done[i] != (i < items)) return std::printf("item %d of %d: done %d times\n", i, items, done[i]), false;
    if (round % 100 == 50) std::this_thread::sleep_for(2 * LINGER);
  }
  return true;
}

int main() {
  bool right = many(0);
  std::vector<std::thread> callers;
  std::atomic<bool> all{true};
  for (int t = 1; t <= 3; ++t) callers.emplace_back([&all, t] { many(t) ? void() : all.store(false); });
  for (auto& t : callers) t.join();
#if !defined(__SANITIZE_THREAD__)
  if (fork() == 0) std::exit(many(5) ? 0 : 1);
  int status = 1;
  wait(&status);
  right = right && status == 0;
#endif
  return right && all ? 0 : 1;
}
