// Large allocations: zeroed, aligned to cache lines, on huge pages where the kernel grants them.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) (static_cast<void>(address), static_cast<void>(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) (static_cast<void>(address), static_cast<void>(bytes))
#endif

namespace paceline {

// An anonymous mapping. Pages are zero, and take memory only once they are written.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
    data_ = static_cast<uint8_t*>(p);
  }
  Mapping(Mapping&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (!data_) return;
    ASAN_UNPOISON_MEMORY_REGION(data_, bytes_);
    munmap(data_, bytes_);
  }

  // Takes the memory of the pages in [begin, begin + size) now; their content stays, whoever else reads or writes it
  // meanwhile. Throws bad_alloc if there is none left (where the kernel does not kill the process for it).
  void populate(size_t begin, size_t size) const {
    size = std::min(size, bytes_ - std::min(begin, bytes_));
#ifdef MADV_POPULATE_WRITE
    if (madvise(data_ + begin, size, MADV_POPULATE_WRITE) == 0) return;
    if (errno == ENOMEM) throw std::bad_alloc();
#endif
    constexpr size_t kPage = 4096;
    for (size_t i = 0; i < size; i += kPage) __atomic_fetch_or(data_ + begin + i, 0, __ATOMIC_RELAXED);
  }

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// Hands out pieces of large mappings, so that many small matrices share huge pages. Freed as a whole. In a build with the
// address sanitizer (make test-sanitize) all but the pieces is poisoned, and a gap lies between them.
class Arena {
 public:
  uint8_t* allocate(size_t wanted) {
    const size_t bytes = (wanted + 63) / 64 * 64 + kGap;
    if (mappings_.empty() || used_ + bytes > mappings_.back().bytes()) {
      mappings_.emplace_back(bytes > kChunk ? bytes : kChunk);
      ASAN_POISON_MEMORY_REGION(mappings_.back().data(), mappings_.back().bytes());
      used_ = 0;
    }
    uint8_t* p = mappings_.back().data() + used_;
    ASAN_UNPOISON_MEMORY_REGION(p, wanted);
    used_ += bytes;
    allocated_ += bytes;
    return p;
  }
  size_t allocated() const { return allocated_; }

 private:
  static constexpr size_t kChunk = size_t{64} << 20;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kGap = 1024;
#else
  static constexpr size_t kGap = 0;
#endif
  std::vector<Mapping> mappings_;
  size_t used_ = 0;
  size_t allocated_ = 0;
};

}  // namespace paceline
