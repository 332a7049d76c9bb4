// Chunks are extents of one memfd: the same extent can be mapped at several addresses, and what is
// written through one is read through the others, just as with the CUDA driver.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "backend.hpp"

namespace chunked {
namespace {

[[noreturn]] void fail(const char* call) {
  throw Error(std::string(call) + ": " + std::strerror(errno));
}

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

class Posix final : public PosixBackend {
 public:
  Posix() : file_(memfd_create("chunked_allocator", MFD_CLOEXEC)) {
    if (file_ < 0) fail("memfd_create");
  }
  ~Posix() override { close(file_); }

  std::uint64_t granularity() override { return static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)); }

  std::uint64_t physical_bytes() override {
    struct stat status;
    if (fstat(file_, &status) != 0) fail("fstat");
    return static_cast<std::uint64_t>(status.st_blocks) * 512;
  }

  Chunk create_chunk(std::uint64_t bytes) override {
    if (!released_.empty()) {
      const Chunk chunk = released_.back();
      released_.pop_back();
      return chunk;
    }
    if (ftruncate(file_, static_cast<off_t>(size_ + bytes)) != 0) fail("ftruncate");
    size_ += bytes;
    return size_ - bytes;
  }

  void release_chunk(Chunk chunk, std::uint64_t bytes) override {
    const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    if (fallocate(file_, mode, static_cast<off_t>(chunk), static_cast<off_t>(bytes)) != 0) {
      fail("fallocate");
    }
    released_.push_back(chunk);
  }

  Address reserve(std::uint64_t bytes) override { return map_nothing(nullptr, bytes, 0); }

  void unreserve(Address address, std::uint64_t bytes) override {
    if (munmap(pointer(address), bytes) != 0) fail("munmap");
  }

  void map(Address address, std::uint64_t bytes, Chunk chunk) override {
    void* at = mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_,
                    static_cast<off_t>(chunk));
    if (at == MAP_FAILED) fail("mmap");
  }

  void allow_access(Address address, std::uint64_t bytes) override {
    if (mprotect(pointer(address), bytes, PROT_READ | PROT_WRITE) != 0) fail("mprotect");
  }

  void unmap(Address address, std::uint64_t bytes) override {
    map_nothing(pointer(address), bytes, MAP_FIXED);
  }

  Event record(Stream stream) override {
    Timeline& timeline = timelines_[stream];
    ++timeline.recorded;
    if (!timeline.held) timeline.completed = timeline.recorded;
    return new Pretended{&timeline, timeline.recorded};
  }

  bool complete(Event event) override {
    const auto* pretended = static_cast<Pretended*>(event);
    return pretended->number <= pretended->timeline->completed;
  }

  // The device would get there by itself; here it does so because somebody waits.
  void wait(Event event) override {
    const auto* pretended = static_cast<Pretended*>(event);
    Timeline& timeline = *pretended->timeline;
    if (timeline.completed < pretended->number) timeline.completed = pretended->number;
  }

  void discard(Event event) noexcept override { delete static_cast<Pretended*>(event); }

  void set_complete(Stream stream, bool complete) override {
    Timeline& timeline = timelines_[stream];
    timeline.held = !complete;
    if (complete) timeline.completed = timeline.recorded;
  }

 private:
  struct Timeline {
    std::uint64_t recorded = 0, completed = 0;
    bool held = false;
  };
  struct Pretended {
    Timeline* timeline;  // of an unordered_map, whose nodes stay where they are
    std::uint64_t number;
  };

  // Addresses without memory behind them.
  static Address map_nothing(void* at, std::uint64_t bytes, int flags) {
    flags |= MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* mapping = mmap(at, bytes, PROT_NONE, flags, -1, 0);
    if (mapping == MAP_FAILED) fail("mmap");
    return reinterpret_cast<Address>(mapping);
  }

  int file_;
  std::uint64_t size_ = 0;
  std::vector<Chunk> released_;
  std::unordered_map<Stream, Timeline> timelines_;
};

}  // namespace

std::unique_ptr<PosixBackend> make_posix_backend() { return std::make_unique<Posix>(); }

}  // namespace chunked
