// The chunked allocator of Hayakawa and Narihira, section 4, over a backend; see the .cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "backend.hpp"

namespace chunked {

// What happened, and what is the case; all 64 bits, read from Python by this order.
struct Counters {
  std::uint64_t chunk_bytes, small_bytes, limit_bytes;
  std::uint64_t requested_bytes, allocated_bytes, reserved_bytes, physical_bytes;
  std::uint64_t peak_requested_bytes, peak_allocated_bytes, peak_reserved_bytes;
  std::uint64_t peak_internal_fragmentation_bytes;
  std::uint64_t live_blocks, shared_chunks, cached_ranges, retired_ranges;
  std::uint64_t mallocs, frees, ranges_reused, chunks_created, chunks_released;
  std::uint64_t maps, unmaps, event_waits, failures;
};

// The last use of a freed range, or of a chunk of it, on one stream.
class Use {
 public:
  Use(Backend& backend, Stream on, std::uint64_t nth)
      : stream(on), number(nth), backend_(backend), event_(backend.record(on)) {}
  ~Use() { backend_.discard(event_); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  bool complete() { return complete_ = complete_ || backend_.complete(event_); }
  void wait() {
    backend_.wait(event_);
    complete_ = true;
  }

  const Stream stream;
  const std::uint64_t number;  // ascending in time

 private:
  Backend& backend_;
  Event event_;
  bool complete_ = false;
};
using LastUse = std::shared_ptr<Use>;

class Allocator {
 public:
  // Requests up to small_bytes share chunks. A limit of 0 is none.
  Allocator(std::unique_ptr<Backend>, std::uint64_t chunk_bytes, std::uint64_t small_bytes,
            std::uint64_t limit_bytes);
  ~Allocator();

  void* malloc(std::uint64_t bytes, Stream);
  // The caller's last use is on this stream, or on one that record_stream named before.
  void free(void*, Stream);
  void record_stream(void*, Stream);
  bool owns(void*);
  // Waits for all uses of what was freed, unmaps it, and releases its chunks.
  void trim();
  Counters counters();

  template <class Function>
  void with_backend(Function function) {
    const std::lock_guard<std::mutex> lock(mutex_);
    function(*backend_);
  }

 private:
  struct Range {
    Address address = 0;
    std::vector<Chunk> chunks;
  };
  struct Block {
    Range range;  // without chunks where it is a piece of a shared one:
    std::uint64_t number = 0, at = 0;  // of that chunk in its stream's heap, and where it begins
    std::uint64_t bytes = 0;
    Stream stream = 0;  // that it was asked for on
    std::set<Stream> others;
  };
  struct FreedRange {
    Range range;
    LastUse use;
    std::vector<LastUse> others;
  };
  struct FreeChunk {
    Chunk chunk;
    LastUse use;  // null where it was never used
  };
  // A chunk that small requests of one stream share: its pieces, in order, by where they begin.
  struct Piece {
    std::uint64_t size;
    bool free;
  };
  struct SharedChunk {
    Block block;
    std::uint64_t number;  // ascending in time
    std::map<std::uint64_t, Piece> pieces;
  };
  // The free pieces of a stream's shared chunks: size, number of the chunk, place in it.
  struct Heap {
    std::set<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>> free;
    std::map<std::uint64_t, SharedChunk> chunks;  // by number
  };
  struct FreedSmall {
    Block block;
    std::vector<LastUse> others;
  };
  // What was freed on one stream.
  struct Cache {
    std::map<std::uint64_t, FreedRange> ranges;  // by number of the last use: oldest first
    std::unordered_map<std::size_t, std::set<std::uint64_t>> by_size;
    std::vector<FreeChunk> chunks;  // of retired ranges
  };

  void note_peaks();
  Block acquire(std::size_t count, std::uint64_t bytes, Stream);
  FreedRange last_uses(const Block&, Stream);
  void release(Block&, FreedRange);
  Block acquire_small(std::uint64_t bytes, Stream);
  void release_small(Block&, Stream);
  void join(const Block&);
  bool reuse(Cache&, std::size_t count, bool only_complete, Range&);
  std::vector<FreeChunk> collect(std::size_t count, Stream);
  void take(Cache&, std::size_t count, bool only_complete, std::vector<FreeChunk>&);
  void create(std::size_t count, std::vector<FreeChunk>&);
  void give_back(std::vector<FreeChunk>&, Stream);
  bool wait_for_small();
  bool wait_for_oldest(Stream);
  Range map(const std::vector<FreeChunk>&);
  void put(FreedRange);
  FreedRange pull(Cache&, std::uint64_t number);
  void retire(Cache&, std::uint64_t number);
  void settle();
  void release_all();
  LastUse use(Stream stream) { return std::make_shared<Use>(*backend_, stream, uses_++); }
  void free_block(Address, Stream);
  [[noreturn]] void out_of_memory(std::uint64_t bytes, const std::string& why);
  std::size_t chunks_reserved() const { return counters_.reserved_bytes / counters_.chunk_bytes; }

  std::unique_ptr<Backend> backend_;
  std::mutex mutex_;
  Counters counters_{};
  std::uint64_t limit_chunks_ = 0, live_chunks_ = 0, uses_ = 0;
  std::unordered_map<Address, Block> live_;
  std::map<Stream, Cache> caches_;
  std::map<Stream, Heap> heaps_;
  std::vector<FreedSmall> small_waiting_;  // for streams other than their own
  std::uint64_t shared_ever_ = 0;
  std::vector<FreedRange> waiting_;  // for streams other than their own
  std::list<FreedRange> retired_;  // their chunks are free, their mapping awaits its last use
};

}  // namespace chunked
