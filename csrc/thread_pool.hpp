// A fixed team of threads that runs one job at a time, all members together; the calling thread is member 0.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include <sys/types.h>

namespace paceline {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Runs job(member), which must not throw, on every member and returns when all are done. One caller at a time.
  // Throws std::runtime_error in a forked child, where the threads are gone.
  void run(const std::function<void(int)>& job);

  // Within a job, called by all members with the same arguments: hands out units 0 .. units-1, each to whoever is free,
  // and returns when all are finished.
  template <typename Work>
  void for_each(int units, Work&& work) {
    if (size_ == 1) {
      for (int i = 0; i < units; ++i) work(i);
      return;
    }
    for (int i; (i = next_unit_.fetch_add(1, std::memory_order_relaxed)) < units;) work(i);
    barrier();
  }

 private:
  void barrier();
  void serve(int member);
  void stop();
  // Waits until `value` differs from `old`: spins first, since the wait is usually shorter than a trip through the
  // kernel, then parks, so that a busy machine gets its core back.
  static void wait_change(const std::atomic<uint32_t>& value, uint32_t old, int spins);

  const int size_;
  const pid_t process_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* job_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<uint32_t> job_number_{0};
  alignas(64) std::atomic<int> next_unit_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
};

}  // namespace paceline
