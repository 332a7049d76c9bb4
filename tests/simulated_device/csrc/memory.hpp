// The device's memory and pinned host memory: caching allocators that hand out again at once what
// was freed, as those of CUDA do, with their sizes, statistics and limits. Knows nothing of torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "order.hpp"

namespace sim {

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Count {
  int64_t current = 0, peak = 0, total_added = 0, total_taken = 0;
  void add(int64_t amount) {
    current += amount;
    if (current > peak) peak = current;
    (amount > 0 ? total_added : total_taken) += amount > 0 ? amount : -amount;
  }
};

struct Statistics {
  Count allocations, segments, allocated_bytes, reserved_bytes, active_bytes, requested_bytes;
  int64_t retries = 0, refusals = 0;
};

// Blocks of segments, best fit, one pool for each stream and of small and of large sizes. The
// sizes are those of c10/cuda/CUDACachingAllocator: multiples of 512 bytes; segments of 2 MiB for
// up to 1 MiB, of 20 MiB for up to 10 MiB, and above that of multiples of 2 MiB.
class DeviceMemory {
 public:
  explicit DeviceMemory(int device) : device_(device) {}

  // Raises OutOfMemory.
  void* allocate(size_t nbytes, int agent);
  void free(void* pointer);
  // The memory is not handed out again before what the agent has to do now has ended.
  void record_stream(const void* pointer, int agent);
  // Gives unused segments back; the host waits for the device, as it does on CUDA.
  void empty_cache();
  bool owns(const void* pointer);
  void each_live(const std::function<void(uintptr_t, uintptr_t, int)>& call);

  Statistics statistics;
  size_t total_bytes = size_t{8} << 30;  // of the pretended card
  size_t limit_bytes = size_t{8} << 30;  // for reserved bytes: this process's share of it
  std::recursive_mutex mutex;

 private:
  struct Block {
    uintptr_t begin;
    size_t size, requested = 0;
    int agent;
    bool small, used = false, waiting = false;  // for `pending`, once it is freed
    Block *before = nullptr, *after = nullptr;  // in its segment
    std::set<int> streams;                      // that use it beside its own
    std::vector<Event> pending;                 // before which it is not free
  };
  struct Fits {
    bool operator()(const Block* one, const Block* other) const {
      if (one->agent != other->agent) return one->agent < other->agent;
      if (one->size != other->size) return one->size < other->size;
      return one->begin < other->begin;
    }
  };
  using Pool = std::set<Block*, Fits>;

  Pool& pool(bool small) { return pools_[small ? 0 : 1]; }
  Block* take(size_t size, int agent);
  Block* grow(size_t size, int agent);
  void release(Block* block);
  Block* merge(Block* block, Block* neighbour);
  bool collect(bool wait);
  size_t give_back();

  int device_;
  Pool pools_[2];
  std::map<uintptr_t, Block*> live_;
  std::vector<Block*> pending_;
};

// Sizes are rounded up to powers of two, and blocks are kept for reuse, as CUDA's are.
class PinnedMemory {
 public:
  // Raises std::runtime_error beyond the limit.
  void* allocate(size_t nbytes);
  void free(void* pointer);
  void record_stream(const void* pointer, int agent);
  bool owns(const void* pointer);
  void empty_cache();
  void each_live(const std::function<void(uintptr_t, uintptr_t, int)>& call);

  Statistics statistics;
  size_t limit_bytes = SIZE_MAX;
  std::recursive_mutex mutex;

 private:
  struct Block {
    size_t size;
    bool used;
    std::set<int> streams;
    std::vector<Event> pending;
  };
  std::map<uintptr_t, Block>::iterator find(const void* pointer);

  std::map<uintptr_t, Block> blocks_;
};

DeviceMemory& device_memory(int device);
PinnedMemory& pinned_memory();

}  // namespace sim
