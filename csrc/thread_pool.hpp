// A fixed team of threads that runs one job at a time; the calling thread is member 0.
//
// A job is a sequence of phases, for_each calls, that every member goes through in the same order. A phase is over when
// its units are finished, not when all members have come to it: one that the system has taken off its core holds up the
// others only while it holds a unit, and one that comes late finds the phase over and goes on to the next. So members are
// not together between phases, and only what happens within a phase is ordered before what happens in the next.
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

  // Runs job(member), which must not throw, on the calling thread and on every member that is there before it ends.
  // Returns when all phases are over and no member is in the job any more. One caller at a time.
  // Throws std::runtime_error in a forked child, where the threads are gone.
  void run(const std::function<void(int)>& job);

  // A phase of a job: hands out units 0 .. units-1, each to whoever is free, and returns when all are finished. A member
  // calls prepare() before its first unit, if it gets one.
  template <typename Prepare, typename Work>
  void for_each(int units, Prepare&& prepare, Work&& work) {
    if (units == 0) return;
    if (size_ == 1) {
      prepare();
      for (int i = 0; i < units; ++i) work(i);
      return;
    }
    int done = 0;
    for (int i; (i = take(units)) >= 0; ++done) {
      if (done == 0) prepare();
      work(i);
    }
    finish(units, done);
  }
  template <typename Work>
  void for_each(int units, Work&& work) {
    for_each(units, [] {}, work);
  }

 private:
  // The next unit of this member's phase, or -1 when none is left.
  int take(int units) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (phase_of(ticket) == phase_ && static_cast<uint32_t>(ticket) < static_cast<uint32_t>(units))
      if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acquire))
        return static_cast<int>(static_cast<uint32_t>(ticket));
    return -1;
  }
  static uint32_t phase_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
  static uint64_t ticket_of(uint32_t phase, int unit) { return uint64_t{phase} << 32 | static_cast<uint32_t>(unit); }

  void finish(int units, int done);
  bool enter();
  void leave();
  void serve(int member);
  void stop();

  const int size_;
  const pid_t process_;
  std::vector<std::thread> threads_;
  // Of the job that is open; read by members that have entered it.
  const std::function<void(int)>* job_ = nullptr;
  uint32_t first_phase_ = 0;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> job_number_{0};
  alignas(64) std::atomic<uint32_t> door_{0};    // members in the job, and kOpen while more may enter
  alignas(64) std::atomic<uint64_t> ticket_{0};  // the phase, and its next unit
  alignas(64) std::atomic<int> finished_{0};     // units of the phase
  static inline thread_local uint32_t phase_ = 0;  // that this thread, as a member, has come to
};

}  // namespace paceline
