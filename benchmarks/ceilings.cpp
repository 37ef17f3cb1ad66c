// What the machine can do at most: reading memory, and int8 dot products in registers, on a number of threads at once.
// Compiled and run by ceilings.py.
//
//   ceilings THREADS read BYTES    {"read_bytes_per_s"}, of a set of that size that is read again and again
//   ceilings THREADS multiply      {"multiply_adds_per_s", "instruction"}
//
// Both are the best of several windows of about 50 ms: a ceiling is what the machine does when it is left alone.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kWindows = 9;
constexpr double kWindowSeconds = 0.05;

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void fail(const char* why) {
  std::fprintf(stderr, "ceilings: %s\n", why);
  std::exit(2);
}

// Runs work(thread) `rounds` times on all threads, and returns the seconds it took them together.
template <typename Work>
double run(int threads, int rounds, const Work& work) {
  const auto start = Clock::now();
  std::vector<std::thread> others;
  const auto all = [&](int thread) {
    for (int i = 0; i < rounds; ++i) work(thread);
  };
  for (int t = 1; t < threads; ++t) others.emplace_back(all, t);
  all(0);
  for (auto& other : others) other.join();
  return seconds_since(start);
}

// Rounds of work per second, in the best window.
template <typename Work>
double best_rate(int threads, const Work& work) {
  const double once = run(threads, 2, work) / 2;
  const int rounds = std::max(1, static_cast<int>(kWindowSeconds / once));
  double best = 0;
  for (int i = 0; i < kWindows; ++i) best = std::max(best, rounds / run(threads, rounds, work));
  return best;
}

typedef uint64_t Vector __attribute__((vector_size(64), may_alias));
constexpr size_t kLine = 64;

// Streams read side by side. One alone does not keep enough lines in flight: 16 were 10 to 15 % faster on an Ice Lake
// Xeon, and more were not.
constexpr int kStreams = 16;
constexpr size_t kStep = 4 * kLine;

void read_all(const uint8_t* data, size_t bytes) {
  const size_t stream = bytes / kStreams;
  Vector sums[4]{};
  for (size_t i = 0; i + kStep <= stream; i += kStep)
    for (int s = 0; s < kStreams; ++s)
      for (int line = 0; line < 4; ++line)
        sums[line] += *reinterpret_cast<const Vector*>(data + s * stream + i + line * kLine);
  const Vector sum = sums[0] + sums[1] + sums[2] + sums[3];
  asm volatile("" : : "m"(sum));
}

double read_bytes_per_s(int threads, size_t bytes) {
  const size_t share = bytes / threads / (kStreams * kStep) * (kStreams * kStep);
  if (share == 0) fail("each thread must have 4 KiB to read at least");
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("no memory for the set to read");
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 1, bytes);
  const auto* data = static_cast<const uint8_t*>(memory);
  const double rate = best_rate(threads, [&](int t) { read_all(data + t * share, share); });
  munmap(memory, bytes);
  return rate * share * threads;
}

// Dot products on independent sums: enough of them to hide the latency of 5 cycles on two ports. Written in assembly, as
// the compiler would do the same product of all sums once, or copy registers.
constexpr int kSums = 12, kSteps = 65536;

#if defined(__AVX512VNNI__)
const char* const kInstruction = "vpdpbusd, 512 bits";
constexpr int kMultiplyAdds = 64;
typedef __m512i Register;
inline Register number() { return _mm512_set1_epi8(1); }
inline void dot(Register& sum, Register u, Register s) {
  asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(s));
}
#elif defined(__AVXVNNI__)
const char* const kInstruction = "vpdpbusd, 256 bits";
constexpr int kMultiplyAdds = 32;
typedef __m256i Register;
inline Register number() { return _mm256_set1_epi8(1); }
inline void dot(Register& sum, Register u, Register s) {
  asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u), "x"(s));
}
#elif defined(__AVX2__)
const char* const kInstruction = "vpmaddubsw, vpmaddwd, vpaddd, 256 bits";
constexpr int kMultiplyAdds = 32;
typedef __m256i Register;
inline Register number() { return _mm256_set1_epi8(1); }
inline void dot(Register& sum, Register u, Register s) {
  Register product;
  asm volatile(
      "vpmaddubsw %3, %2, %0\n\t"
      "vpmaddwd %2, %0, %0\n\t"
      "vpaddd %0, %1, %1"
      : "=&x"(product), "+x"(sum)
      : "x"(u), "x"(s));
}
#else
#define NO_DOT_PRODUCT
#endif

#ifndef NO_DOT_PRODUCT
void multiply_add(int) {
  Register sums[kSums];
  const Register u = number(), s = number();
  for (Register& sum : sums) sum = u;
  for (int i = 0; i < kSteps; ++i)
    for (Register& sum : sums) dot(sum, u, s);
}

double multiply_adds_per_s(int threads) {
  return best_rate(threads, multiply_add) * threads * kSteps * kSums * kMultiplyAdds;
}
#endif

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 2 ? std::atoi(argv[1]) : 0;
  const std::string what = argc > 2 ? argv[2] : "";
  if (threads >= 1 && what == "read" && argc == 4) {
    std::printf("{\"read_bytes_per_s\": %.4g}\n", read_bytes_per_s(threads, std::strtoull(argv[3], nullptr, 10)));
  } else if (threads >= 1 && what == "multiply" && argc == 3) {
#ifdef NO_DOT_PRODUCT
    fail("compiled without an int8 dot product that it knows: AVX-512-VNNI, AVX-VNNI or AVX2");
#else
    std::printf("{\"multiply_adds_per_s\": %.4g, \"instruction\": \"%s\"}\n", multiply_adds_per_s(threads), kInstruction);
#endif
  } else {
    fail("usage: ceilings THREADS read BYTES | ceilings THREADS multiply");
  }
}
