// Memory whose neighbours may not be touched: reads past an end fault, where guard bytes would only notice writes. And memory that
// is mostly not there, for elements far apart. POSIX.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace keel_test {

/// `count` elements that end at (or begin after) a page without access.
template <class T> class fenced {
  public:
    fenced(int64_t count, bool at_end) : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
        std::size_t const bytes = static_cast<std::size_t>(count) * sizeof(T), body = (bytes + page_ - 1) / page_ * page_;
        size_ = body + 2 * page_;
        void* const map = mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (map == MAP_FAILED) throw std::bad_alloc();
        map_ = static_cast<unsigned char*>(map);
        if (body > 0 && mprotect(map_ + page_, body, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
        data_ = reinterpret_cast<T*>(map_ + page_ + (at_end ? body - bytes : 0));
    }
    fenced(std::vector<T> const& values, bool at_end) : fenced(static_cast<int64_t>(values.size()), at_end) {
        if (!values.empty()) std::memcpy(data_, values.data(), values.size() * sizeof(T));
    }
    fenced(fenced const&) = delete;
    ~fenced() { munmap(map_, size_); }
    T* data() const { return data_; }

  private:
    std::size_t page_, size_;
    unsigned char* map_;
    T* data_;
};

/// Address space for `count` zero elements of which only those pages exist that are written. data() is null where the system
/// refuses it.
template <class T> class sparse {
  public:
    explicit sparse(int64_t count) : size_(static_cast<std::size_t>(count) * sizeof(T)) {
        void* const map = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        data_ = map == MAP_FAILED ? nullptr : static_cast<T*>(map);
    }
    sparse(sparse const&) = delete;
    ~sparse() {
        if (data_ != nullptr) munmap(data_, size_);
    }
    T* data() const { return data_; }

  private:
    std::size_t size_;
    T* data_;
};

/// Elements between rows that no 32-bit index reaches.
inline constexpr int64_t far_stride = (int64_t{1} << 32) + 9;

} // namespace keel_test
