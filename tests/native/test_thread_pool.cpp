#include "thread_pool.hpp"

#include <atomic>
#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "testing.hpp"

namespace paceline::testing {

namespace {

// Members, jobs and phases in all proportions, with units that read what the phase before wrote. Under the thread
// sanitizer this is where an order that is not kept shows.
void test_phases() {
  for (const int members : {1, 2, 3, 8}) {
    ThreadPool pool(members);
    for (int job = 0; job < 200; ++job) {
      constexpr int kUnits = 7;
      const int phases = job % 30;
      std::vector<int> value(kUnits, 1), next(kUnits);
      pool.run([&](int) {
        for (int phase = 0; phase < phases; ++phase) {
          pool.for_each(kUnits, [&](int i) { next[i] = value[i] + value[(i + 1) % kUnits]; });
          pool.for_each(phase % 3, [&](int) {});  // fewer units than members, and none
          pool.for_each(kUnits, [&](int i) { value[i] = next[i] % 1000; });
        }
      });
      std::vector<int> expected(kUnits, 1), then(kUnits);
      for (int phase = 0; phase < phases; ++phase) {
        for (int i = 0; i < kUnits; ++i) then[i] = expected[i] + expected[(i + 1) % kUnits];
        for (int i = 0; i < kUnits; ++i) expected[i] = then[i] % 1000;
      }
      require(value == expected, std::to_string(members) + " members, " + std::to_string(phases) + " phases");
    }
  }
}
const Listed phases("a phase sees all of the phases before", test_phases);

void test_units() {
  ThreadPool pool(4);
  for (const int units : {0, 1, 3, 4, 1000}) {
    std::vector<std::atomic<int>> times(units);
    pool.run([&](int) { pool.for_each(units, [&](int i) { ++times[i]; }); });
    for (int i = 0; i < units; ++i) require(times[i] == 1, "unit " + std::to_string(i) + " of " + std::to_string(units));
  }
}
const Listed units("every unit is done once", test_units);

// What a member prepares for itself is there for its units, and made from what the phase before left.
void test_prepare() {
  for (const int members : {1, 2, 5}) {
    ThreadPool pool(members);
    int source = 0;
    std::vector<int> own(members);
    std::atomic<int> wrong{0}, prepared{0};
    pool.run([&](int member) {
      for (int phase = 1; phase <= 300; ++phase) {
        pool.for_each(1, [&](int) { source = phase; });
        const auto prepare = [&] {
          own[member] = source;
          ++prepared;
        };
        pool.for_each(6, prepare, [&](int) { wrong += own[member] != phase; });
      }
    });
    require(wrong == 0, "units that ran without their member's own copy: " + std::to_string(wrong));
    require(prepared >= 300 && prepared <= 300 * members, "prepared " + std::to_string(prepared) + " times");
  }
}
const Listed prepare("a member prepares before its first unit", test_prepare);

// A member that is held up outside of a unit holds up nobody: the job ends without the phases' help of it.
void test_late_member() {
  ThreadPool pool(2);
  std::atomic<bool> late{false}, over{false};
  int done = 0;
  pool.run([&](int member) {
    if (member == 1) {
      late = true;
      while (!over) std::this_thread::yield();
    } else {
      while (!late) std::this_thread::yield();
    }
    for (int phase = 0; phase < 50; ++phase) pool.for_each(1, [&](int) { done += 1; });
    over = true;
  });
  require(done == 50, "phases of the job: " + std::to_string(done));
}
const Listed late_member("a late member holds up nobody", test_late_member);

// Idle for long enough that members park; and pools that end while their members wait.
void test_parking() {
  ThreadPool pool(3);
  for (int job = 0; job < 20; ++job) {
    std::this_thread::sleep_for(std::chrono::milliseconds(job % 3));
    std::atomic<int> sum{0};
    pool.run([&](int) {
      pool.for_each(5, [&](int i) {
        if (i == 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        sum += i;
      });
    });
    require(sum == 10, "a job after a pause");
  }
  for (int i = 0; i < 50; ++i) {
    ThreadPool brief(4);
    if (i % 2) brief.run([&](int) {});
  }
}
const Listed parking("members that sleep wake up", test_parking);

// The calling thread, as a library that was built with -ffast-math leaves it: subnormal numbers are flushed.
class FlushingThread {
 public:
#if defined(__x86_64__)
  FlushingThread() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlush); }
  ~FlushingThread() { _mm_setcsr(before_); }
  bool flushes() const { return (_mm_getcsr() & kFlush) == kFlush; }

 private:
  static constexpr unsigned kFlush = 0x8040;  // FTZ and DAZ
  const unsigned before_;
#elif defined(__aarch64__)
  FlushingThread() : before_(__builtin_aarch64_get_fpcr64()) { __builtin_aarch64_set_fpcr64(before_ | kFlush); }
  ~FlushingThread() { __builtin_aarch64_set_fpcr64(before_); }
  bool flushes() const { return __builtin_aarch64_get_fpcr64() & kFlush; }

 private:
  static constexpr uint64_t kFlush = 1u << 24;  // FZ
  const uint64_t before_;
#endif
};

void test_float_mode() {
  constexpr int kUnits = 64;
  ThreadPool pool(2);
  std::vector<float> sums(kUnits);
  volatile float small = 0x1p-140f;
  bool flushes = false;
  {
    const FlushingThread thread;
    pool.run([&](int) { pool.for_each(kUnits, [&](int i) { sums[i] = small + small; }); });
    flushes = thread.flushes();
  }
  for (const float sum : sums) require(sum == 0x1p-139f, "a sum of subnormal numbers is flushed");
  require(flushes, "the caller's mode is not put back");
}
const Listed float_mode("all members compute in the same float mode", test_float_mode);

}  // namespace

}  // namespace paceline::testing
