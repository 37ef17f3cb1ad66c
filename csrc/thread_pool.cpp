#include "thread_pool.hpp"

#include <stdexcept>

#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {

namespace {

// A pause takes about 50 ns on recent Intel cores: 10 us within a step, 100 us between steps.
constexpr int kBarrierSpins = 400;
constexpr int kJobSpins = 2000;

// Rounding and subnormals as IEEE has them, whatever mode the calling thread is in (a library built with -ffast-math
// changes it for the thread that loads it): all members must compute the same bits.
class StandardFloats {
 public:
#if defined(__x86_64__)
  StandardFloats() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~StandardFloats() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#endif
};

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) : size_(threads), process_(getpid()) {
  try {
    for (int member = 1; member < size_; ++member) threads_.emplace_back([this, member] { serve(member); });
  } catch (...) {  // the system grants no more threads
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stopping_ = true;
  job_number_.fetch_add(1, std::memory_order_release);
  job_number_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(int)>& job) {
  if (getpid() != process_) throw std::runtime_error("the process was forked after the model was loaded: load it again");
  const StandardFloats mode;
  job_ = &job;
  job_number_.fetch_add(1, std::memory_order_release);
  job_number_.notify_all();
  job(0);
  if (size_ > 1) barrier();
}

void ThreadPool::serve(int member) {
  const StandardFloats mode;
  for (uint32_t number = 0;;) {
    wait_change(job_number_, number, kJobSpins);
    ++number;
    if (stopping_) return;
    (*job_)(member);
    barrier();
  }
}

void ThreadPool::barrier() {
  const uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    next_unit_.store(0, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  } else {
    wait_change(generation_, generation, kBarrierSpins);
  }
}

void ThreadPool::wait_change(const std::atomic<uint32_t>& value, uint32_t old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace paceline
