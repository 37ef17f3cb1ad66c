#include "thread_pool.hpp"

#include <stdexcept>

#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {

namespace {

// A pause takes about 50 ns on recent Intel cores: 20 us within a step, 100 us between steps.
constexpr int kPhaseSpins = 400;
constexpr int kJobSpins = 2000;

constexpr uint32_t kOpen = 1u << 31;

// Rounding and subnormals as IEEE has them, whatever mode the calling thread is in (a library built with -ffast-math
// changes it for the thread that loads it): all members must compute the same bits.
class StandardFloats {
 public:
#if defined(__x86_64__)
  StandardFloats() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~StandardFloats() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#elif defined(__aarch64__)
  StandardFloats() : before_(__builtin_aarch64_get_fpcr64()) { __builtin_aarch64_set_fpcr64(0); }
  ~StandardFloats() { __builtin_aarch64_set_fpcr64(before_); }

 private:
  const uint64_t before_;
#else
  StandardFloats() {}
#endif
};

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `value` differs from `old`: spins first, since the wait is usually shorter than a trip through the
// kernel, then parks, so that a busy machine gets its core back.
template <typename T>
void wait_change(const std::atomic<T>& value, T old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  value.wait(old, std::memory_order_acquire);
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
  stopping_.store(true, std::memory_order_relaxed);
  job_number_.fetch_add(1, std::memory_order_release);
  job_number_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(int)>& job) {
  if (getpid() != process_) throw std::runtime_error("the process was forked after the model was loaded: load it again");
  const StandardFloats mode;
  job_ = &job;
  first_phase_ = phase_ = phase_of(ticket_.load(std::memory_order_relaxed));
  door_.store(kOpen, std::memory_order_release);
  job_number_.fetch_add(1, std::memory_order_release);
  job_number_.notify_all();
  job(0);
  // What the job refers to may go as soon as this returns: nobody enters any more, and who is in must come out.
  uint32_t inside = door_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  for (; inside > 0; inside = door_.load(std::memory_order_acquire)) wait_change(door_, inside, kPhaseSpins);
}

void ThreadPool::serve(int member) {
  const StandardFloats mode;
  for (uint32_t number = 0;;) {
    wait_change(job_number_, number, kJobSpins);
    number = job_number_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (!enter()) continue;
    number = job_number_.load(std::memory_order_acquire);  // the door may be a later job's
    phase_ = first_phase_;
    (*job_)(member);
    leave();
  }
}

bool ThreadPool::enter() {
  uint32_t door = door_.load(std::memory_order_relaxed);
  while (door & kOpen)
    if (door_.compare_exchange_weak(door, door + 1, std::memory_order_acquire, std::memory_order_relaxed)) return true;
  return false;
}

void ThreadPool::leave() {
  if (door_.fetch_sub(1, std::memory_order_release) == 1) door_.notify_all();
}

void ThreadPool::finish(int units, int done) {
  const uint32_t phase = phase_++;
  if (done > 0 && finished_.fetch_add(done, std::memory_order_acq_rel) + done == units) {
    finished_.store(0, std::memory_order_relaxed);
    ticket_.store(ticket_of(phase_, 0), std::memory_order_release);
    ticket_.notify_all();
  } else {
    wait_change(ticket_, ticket_of(phase, units), kPhaseSpins);
  }
}

}  // namespace paceline
