// Threads for the kernels of one calling thread. OpenMP's either sleep between two kernels of a decode step, and are
// woken ~70 times a step, or spin without bound, and starve the server. These stay awake for a bounded time, and nobody
// ever waits for one that is not there: a kernel's items are taken one by one, so the caller does what is left alone.
//
//   gate:  epoch (48 bits) | open (1 bit) | workers inside (15 bits)
//
// A worker enters an epoch once, while the gate is open. The caller closes it when no item is left and waits for those
// inside. Only then does it write the next job.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace hydra {

constexpr auto LINGER = std::chrono::microseconds(1000);  // longer than from one kernel of a step to the next

class Pool {
 public:
  ~Pool() {
    {
      std::lock_guard<std::mutex> held(mutex_);
      quit_ = true;
    }
    wake_.notify_all();
    for (auto& t : workers_) t.join();
  }

  // call(f, i) for every i < items, by the caller and up to `helpers` others. `linger`: the next job comes soon.
  void run(int64_t items, int helpers, bool linger, void (*call)(void*, int64_t), void* f) {
    while (int(workers_.size()) < helpers) workers_.emplace_back([this] { work(); });
    call_ = call, f_ = f, items_ = items, helpers_ = helpers;
    linger_.store(linger, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (gate_.load(std::memory_order_relaxed) & EPOCH) + EPOCH_1;
    gate_.store(epoch | OPEN);
    if (asleep_.load() > 0) {
      std::lock_guard<std::mutex> held(mutex_);
      wake_.notify_all();
    }
    take();
    gate_.fetch_and(~OPEN);
    for (int i = 0; gate_.load(std::memory_order_acquire) & INSIDE; ++i) i < 1 << 10 ? relax() : std::this_thread::yield();
  }

 private:
  static constexpr uint64_t INSIDE = (1 << 15) - 1, OPEN = 1 << 15, EPOCH_1 = 1 << 16, EPOCH = ~(EPOCH_1 - 1);

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
  }

  void take() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) call_(f_, i);
  }

  // Whether there was a job to enter; it is done then.
  bool enter(uint64_t& last) {
    uint64_t seen = gate_.load(std::memory_order_acquire);
    while ((seen & OPEN) && (seen & EPOCH) != last) {
      if (int(seen & INSIDE) >= helpers_.load(std::memory_order_relaxed)) return false;
      if (gate_.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire)) {
        last = seen & EPOCH;
        take();
        gate_.fetch_sub(1, std::memory_order_release);
        return true;
      }
    }
    return false;
  }

  void work() {
    using clock = std::chrono::steady_clock;
    uint64_t last = 0;
    auto until = clock::now() + LINGER;
    while (true) {
      bool awake = true;
      for (int i = 0; awake && i < 64; ++i) {
        if (enter(last)) {
          awake = linger_.load(std::memory_order_relaxed);
          until = clock::now() + LINGER;
        } else {
          relax();
        }
      }
      std::this_thread::yield();  // to others with work: who spins in their way waits later, with work of its own
      if (awake && clock::now() < until) continue;
      std::unique_lock<std::mutex> held(mutex_);
      asleep_.fetch_add(1);
      const uint64_t seen = gate_.load();
      if (!quit_ && !((seen & OPEN) && (seen & EPOCH) != last)) wake_.wait(held);
      asleep_.fetch_sub(1);
      if (quit_) return;
      until = clock::now() + LINGER;
    }
  }

  void (*call_)(void*, int64_t) = nullptr;
  void* f_ = nullptr;
  int64_t items_ = 0;
  std::atomic<int> helpers_{0};
  std::atomic<bool> linger_{false};
  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool quit_ = false;
  std::vector<std::thread> workers_;
};

// The pool of a calling thread; it ends with the thread. A forked process has the memory of its parent's pool, but none
// of the threads: it leaves that one alone and makes its own.
struct Own {
  Pool* pool = nullptr;
  pid_t process = 0;
  ~Own() {
    if (process == getpid()) delete pool;
  }
};

inline Pool& own_pool() {
  static thread_local Own own;
  if (own.process != getpid()) own.pool = new Pool, own.process = getpid();
  return *own.pool;
}

// f(i) for every i < items, on as many threads.
template <class F>
inline void parallel(int64_t items, int threads, bool linger, F&& f) {
  if (items <= 1 || threads <= 1) {
    for (int64_t i = 0; i < items; ++i) f(i);
    return;
  }
  const int helpers = int(std::min<int64_t>(items, threads)) - 1;
  const auto call = [](void* g, int64_t i) { (*static_cast<std::remove_reference_t<F>*>(g))(i); };
  own_pool().run(items, helpers, linger, call, &f);
}

}  // namespace hydra
