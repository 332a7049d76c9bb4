// Physical chunks of one size, mapped into contiguous address ranges (Hayakawa and Narihira,
// "Out-of-core training for extremely large-scale neural networks with adaptive window-based
// scheduling", section 4). A request gets ceil(bytes / chunk) chunks; chunks combine in any order, so
// that the memory fails only where the chunks of all live blocks would exceed the limit.
//
// A device works behind the host: what is freed may still be in use by what its stream has yet to
// run. Three rules make that safe without waiting, each by the event recorded at the free:
//   1. the same stream may have the range, or its chunks mapped elsewhere, at once: whatever it runs
//      on them comes after all earlier uses;
//   2. another stream may have them only after the event has completed;
//   3. a mapping is undone only after the event has completed, as earlier uses go through it.
// The allocator waits for an event only where nothing else is left.
//
// The order of choice is that of ChunkedAllocator in allocator.py: a freed range of just the size,
// the latest first; unmapped chunks; chunks of freed ranges, the oldest first; new chunks.
#include "chunked_allocator.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace chunked {
namespace {

class Inside {
 public:
  explicit Inside(Backend& backend) : backend_(backend), before_(backend.enter()) {}
  ~Inside() { backend_.leave(before_); }

 private:
  Backend& backend_;
  void* before_;
};

Address address_of(void* pointer) { return reinterpret_cast<Address>(pointer); }

}  // namespace

Allocator::Allocator(std::unique_ptr<Backend> backend, std::uint64_t chunk_bytes,
                     std::uint64_t limit_bytes)
    : backend_(std::move(backend)) {
  const Inside inside(*backend_);
  const std::uint64_t granularity = backend_->granularity();
  if (chunk_bytes == 0 || chunk_bytes > std::numeric_limits<std::int64_t>::max()) {
    throw InvalidArgument("chunk_bytes is " + std::to_string(chunk_bytes) +
                          ": give bytes above 0; they are rounded up to " +
                          std::to_string(granularity));
  }
  chunk_bytes = (chunk_bytes + granularity - 1) / granularity * granularity;
  if (limit_bytes != 0 && limit_bytes < chunk_bytes) {
    throw InvalidArgument("limit_bytes is " + std::to_string(limit_bytes) +
                          ", which is less than one chunk of " + std::to_string(chunk_bytes) +
                          ": give a larger limit, or smaller chunks");
  }
  counters_.chunk_bytes = chunk_bytes;
  counters_.limit_bytes = limit_bytes;
  limit_chunks_ =
      (limit_bytes ? limit_bytes : std::numeric_limits<std::uint64_t>::max()) / chunk_bytes;
}

Allocator::~Allocator() {
  try {
    const Inside inside(*backend_);
    while (!live_.empty()) {
      const auto& [address, block] = *live_.begin();
      free_block(address, block.stream);
    }
    release_all();
  } catch (const Error&) {
    // The driver has shut down, and took everything with it.
  }
}

void* Allocator::malloc(std::uint64_t bytes, Stream stream) {
  if (bytes == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    const Inside inside(*backend_);
    const std::uint64_t count = (bytes - 1) / counters_.chunk_bytes + 1;
    settle();
    if (count > limit_chunks_ - live_chunks_) out_of_memory(bytes, "the limit is reached");
    Block block;
    bool found = reuse(caches_[stream], count, false, block.range);
    for (auto& [other, cache] : caches_) {
      if (found) break;
      if (other != stream) found = reuse(cache, count, true, block.range);
    }
    if (!found) {
      std::vector<FreeChunk> chunks = collect(count, stream);
      if (chunks.size() < count) {
        give_back(chunks, stream);
        out_of_memory(bytes, "the device has no more");
      }
      try {
        block.range = map(chunks);
      } catch (...) {
        give_back(chunks, stream);
        throw;
      }
      settle();
    }
    block.bytes = bytes;
    block.stream = stream;
    const Address address = block.range.address;
    live_.emplace(address, std::move(block));
    live_chunks_ += count;
    Counters& c = counters_;
    ++c.mallocs;
    c.requested_bytes += bytes;
    c.allocated_bytes += count * c.chunk_bytes;
    c.peak_requested_bytes = std::max(c.peak_requested_bytes, c.requested_bytes);
    c.peak_allocated_bytes = std::max(c.peak_allocated_bytes, c.allocated_bytes);
    c.peak_internal_fragmentation_bytes = std::max(c.peak_internal_fragmentation_bytes,
                                                   c.allocated_bytes - c.requested_bytes);
    return reinterpret_cast<void*>(address);
  } catch (...) {
    ++counters_.failures;
    throw;
  }
}

void Allocator::free(void* pointer, Stream stream) {
  if (!pointer) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    const Inside inside(*backend_);
    free_block(address_of(pointer), stream);
  } catch (...) {
    ++counters_.failures;
    throw;
  }
}

void Allocator::free_block(Address address, Stream stream) {
  const auto found = live_.find(address);
  if (found == live_.end()) {
    throw InvalidArgument("free: " + std::to_string(address) +
                          " is not the address of a live block: it was freed before, or never "
                          "handed out by this allocator");
  }
  Block& block = found->second;
  FreedRange freed{{}, use(stream), {}};
  // The stream that it was asked for on may have yet to run what used its chunks before.
  block.others.insert(block.stream);
  block.others.erase(stream);
  for (Stream other : block.others) freed.others.push_back(use(other));
  freed.range = std::move(block.range);
  ++counters_.frees;
  counters_.requested_bytes -= block.bytes;
  counters_.allocated_bytes -= freed.range.chunks.size() * counters_.chunk_bytes;
  live_chunks_ -= freed.range.chunks.size();
  live_.erase(found);
  if (freed.others.empty()) {
    put(std::move(freed));
  } else {
    waiting_.push_back(std::move(freed));
  }
}

void Allocator::record_stream(void* pointer, Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = live_.find(address_of(pointer));
  if (found == live_.end()) {
    throw InvalidArgument("record_stream: " + std::to_string(address_of(pointer)) +
                          " is not the address of a live block");
  }
  found->second.others.insert(stream);
}

bool Allocator::owns(void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return live_.count(address_of(pointer)) != 0;
}

void Allocator::trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Inside inside(*backend_);
  release_all();
}

Counters Allocator::counters() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Counters result = counters_;
  result.physical_bytes = backend_->physical_bytes();
  result.live_blocks = live_.size();
  result.cached_ranges = waiting_.size();
  for (const auto& [stream, cache] : caches_) result.cached_ranges += cache.ranges.size();
  result.retired_ranges = retired_.size();
  return result;
}

bool Allocator::reuse(Cache& cache, std::size_t count, bool only_complete, Range& range) {
  const auto same = cache.by_size.find(count);
  if (same == cache.by_size.end() || same->second.empty()) return false;
  // What has to be complete is best sought among the oldest.
  const std::uint64_t number = only_complete ? *same->second.begin() : *same->second.rbegin();
  if (only_complete && !cache.ranges.at(number).use->complete()) return false;
  range = pull(cache, number).range;
  ++counters_.ranges_reused;
  return true;
}

// Returns fewer where there are no more.
std::vector<Allocator::FreeChunk> Allocator::collect(std::size_t count, Stream stream) {
  std::vector<FreeChunk> found;
  try {
    do {
      take(caches_[stream], count, false, found);
      for (auto& [other, cache] : caches_) {
        if (other != stream) take(cache, count, true, found);
      }
      create(count, found);
    } while (found.size() < count && wait_for_oldest(stream));
  } catch (...) {
    give_back(found, stream);
    throw;
  }
  return found;
}

void Allocator::take(Cache& cache, std::size_t count, bool only_complete,
                     std::vector<FreeChunk>& found) {
  while (found.size() < count) {
    // Chunks that were retired last have the latest uses: the first are the likeliest to be ready.
    auto chunk = cache.chunks.end();
    if (!only_complete && !cache.chunks.empty()) {
      --chunk;
    } else if (only_complete) {
      chunk = std::find_if(cache.chunks.begin(), cache.chunks.end(),
                           [](FreeChunk& c) { return !c.use || c.use->complete(); });
    }
    if (chunk != cache.chunks.end()) {
      found.push_back(std::move(*chunk));
      cache.chunks.erase(chunk);
    } else if (!cache.ranges.empty() &&
               (!only_complete || cache.ranges.begin()->second.use->complete())) {
      retire(cache, cache.ranges.begin()->first);
    } else {
      return;
    }
  }
}

void Allocator::create(std::size_t count, std::vector<FreeChunk>& found) {
  while (found.size() < count && chunks_reserved() < limit_chunks_) {
    try {
      found.push_back({backend_->create_chunk(counters_.chunk_bytes), nullptr});
    } catch (const OutOfMemory&) {
      return;  // others use the device, too: make do with what was freed
    }
    ++counters_.chunks_created;
    counters_.reserved_bytes += counters_.chunk_bytes;
    counters_.peak_reserved_bytes =
        std::max(counters_.peak_reserved_bytes, counters_.reserved_bytes);
  }
}

void Allocator::give_back(std::vector<FreeChunk>& chunks, Stream stream) {
  for (FreeChunk& chunk : chunks) {
    const Stream last = chunk.use ? chunk.use->stream : stream;
    caches_[last].chunks.push_back(std::move(chunk));
  }
  chunks.clear();
}

// Waits for the oldest use that keeps memory from a stream; false where there is none.
bool Allocator::wait_for_oldest(Stream stream) {
  LastUse oldest;
  const auto consider = [&oldest](const LastUse& use) {
    if (use && !use->complete() && (!oldest || use->number < oldest->number)) oldest = use;
  };
  for (const FreedRange& freed : waiting_) {
    for (const LastUse& other : freed.others) consider(other);
  }
  for (auto& [other, cache] : caches_) {
    if (other == stream) continue;
    for (const FreeChunk& chunk : cache.chunks) consider(chunk.use);
    if (!cache.ranges.empty()) consider(cache.ranges.begin()->second.use);
  }
  if (!oldest) return false;
  ++counters_.event_waits;
  oldest->wait();
  settle();
  return true;
}

Allocator::Range Allocator::map(const std::vector<FreeChunk>& chunks) {
  const std::uint64_t size = counters_.chunk_bytes;
  Range range;
  range.address = backend_->reserve(chunks.size() * size);
  try {
    for (const FreeChunk& free : chunks) {
      backend_->map(range.address + range.chunks.size() * size, size, free.chunk);
      range.chunks.push_back(free.chunk);
    }
    backend_->allow_access(range.address, chunks.size() * size);
  } catch (...) {
    if (!range.chunks.empty()) backend_->unmap(range.address, range.chunks.size() * size);
    backend_->unreserve(range.address, chunks.size() * size);
    throw;
  }
  counters_.maps += chunks.size();
  return range;
}

void Allocator::unmap(const Range& range) {
  const std::uint64_t bytes = range.chunks.size() * counters_.chunk_bytes;
  backend_->unmap(range.address, bytes);
  backend_->unreserve(range.address, bytes);
  counters_.unmaps += range.chunks.size();
}

void Allocator::put(FreedRange freed) {
  const std::uint64_t number = freed.use->number;
  Cache& cache = caches_[freed.use->stream];
  cache.by_size[freed.range.chunks.size()].insert(number);
  cache.ranges.emplace(number, std::move(freed));
}

Allocator::FreedRange Allocator::pull(Cache& cache, std::uint64_t number) {
  const auto found = cache.ranges.find(number);
  FreedRange freed = std::move(found->second);
  cache.ranges.erase(found);
  cache.by_size[freed.range.chunks.size()].erase(number);
  return freed;
}

// Frees the chunks of a range; settle undoes its mapping.
void Allocator::retire(Cache& cache, std::uint64_t number) {
  FreedRange freed = pull(cache, number);
  for (Chunk chunk : freed.range.chunks) cache.chunks.push_back({chunk, freed.use});
  retired_.push_back(std::move(freed));
}

// Does what had to wait for events that have completed since.
void Allocator::settle() {
  for (std::size_t i = 0; i < waiting_.size();) {
    const auto& others = waiting_[i].others;
    if (std::all_of(others.begin(), others.end(), [](const LastUse& u) { return u->complete(); })) {
      put(std::move(waiting_[i]));
      waiting_[i] = std::move(waiting_.back());
      waiting_.pop_back();
    } else {
      ++i;
    }
  }
  std::set<Stream> behind;  // an event that has not completed speaks for the later ones
  std::vector<FreedRange> kept;
  for (FreedRange& freed : std::exchange(retired_, {})) {
    const Stream stream = freed.use->stream;
    if (behind.count(stream) || !freed.use->complete()) {
      behind.insert(stream);
      kept.push_back(std::move(freed));
    } else {
      unmap(freed.range);
    }
  }
  retired_ = std::move(kept);
}

void Allocator::release_all() {
  for (FreedRange& freed : waiting_) {
    for (LastUse& other : freed.others) other->wait();
  }
  for (FreedRange& freed : retired_) freed.use->wait();
  settle();
  for (auto& [stream, cache] : caches_) {
    while (!cache.ranges.empty()) {
      cache.ranges.begin()->second.use->wait();
      retire(cache, cache.ranges.begin()->first);
    }
  }
  settle();
  for (auto& [stream, cache] : caches_) {
    while (!cache.chunks.empty()) {
      backend_->release_chunk(cache.chunks.back().chunk, counters_.chunk_bytes);
      cache.chunks.pop_back();
      ++counters_.chunks_released;
      counters_.reserved_bytes -= counters_.chunk_bytes;
    }
  }
}

void Allocator::out_of_memory(std::uint64_t bytes, const std::string& why) {
  const Counters& c = counters_;
  throw OutOfMemory(
      "out of memory, " + why + ": " + std::to_string(bytes) + " bytes were asked for in chunks of " +
      std::to_string(c.chunk_bytes) + "; " + std::to_string(c.allocated_bytes) + " are live, " +
      std::to_string(c.reserved_bytes - c.allocated_bytes) + " cached, and the limit is " +
      (c.limit_bytes ? std::to_string(c.limit_bytes) : "none") +
      "; free something, or allow more as limit_bytes");
}

}  // namespace chunked
