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
//
// Requests up to small_bytes do not get chunks of their own: they are pieces of shared ones, by best
// fit, that of the chunk shared first among equals. A stream has shared chunks to itself, so that
// what it frees it may have again at once (rule 1); what another stream has used comes back when
// that use has run (rule 2). A shared chunk that is wholly free is freed as any other range.
#include "chunked_allocator.hpp"

#include <algorithm>
#include <iterator>
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

constexpr std::uint64_t ALIGNMENT = 512;  // torch's, and more than any instruction asks for

Address address_of(void* pointer) { return reinterpret_cast<Address>(pointer); }

}  // namespace

Allocator::Allocator(std::unique_ptr<Backend> backend, std::uint64_t chunk_bytes,
                     std::uint64_t small_bytes, std::uint64_t limit_bytes)
    : backend_(std::move(backend)) {
  const Inside inside(*backend_);
  const std::uint64_t granularity = backend_->granularity();
  if (chunk_bytes == 0 || chunk_bytes > std::numeric_limits<std::int64_t>::max()) {
    throw InvalidArgument("chunk_bytes is " + std::to_string(chunk_bytes) +
                          ": give bytes above 0; they are rounded up to " +
                          std::to_string(granularity));
  }
  chunk_bytes = (chunk_bytes + granularity - 1) / granularity * granularity;
  if (small_bytes > chunk_bytes) {
    throw InvalidArgument("small_bytes is " + std::to_string(small_bytes) +
                          ", which is more than one chunk of " + std::to_string(chunk_bytes) +
                          ": give less, or larger chunks");
  }
  if (limit_bytes != 0 && limit_bytes < chunk_bytes) {
    throw InvalidArgument("limit_bytes is " + std::to_string(limit_bytes) +
                          ", which is less than one chunk of " + std::to_string(chunk_bytes) +
                          ": give a larger limit, or smaller chunks");
  }
  counters_.chunk_bytes = chunk_bytes;
  counters_.small_bytes = small_bytes;
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
    settle();
    Block block = bytes <= counters_.small_bytes
                      ? acquire_small(bytes, stream)
                      : acquire((bytes - 1) / counters_.chunk_bytes + 1, bytes, stream);
    const Address address = block.range.address;
    live_.emplace(address, std::move(block));
    ++counters_.mallocs;
    counters_.requested_bytes += bytes;
    note_peaks();
    return reinterpret_cast<void*>(address);
  } catch (...) {
    ++counters_.failures;
    throw;
  }
}

void Allocator::note_peaks() {
  Counters& c = counters_;
  c.peak_requested_bytes = std::max(c.peak_requested_bytes, c.requested_bytes);
  c.peak_allocated_bytes = std::max(c.peak_allocated_bytes, c.allocated_bytes);
  c.peak_internal_fragmentation_bytes =
      std::max(c.peak_internal_fragmentation_bytes, c.allocated_bytes - c.requested_bytes);
}

Allocator::Block Allocator::acquire(std::size_t count, std::uint64_t bytes, Stream stream) {
  while (count > limit_chunks_ - live_chunks_) {
    if (!wait_for_small()) out_of_memory(bytes, "the limit is reached");
  }
  Block block;
  bool reused = reuse(caches_[stream], count, false, block.range);
  for (auto& [other, cache] : caches_) {
    if (reused) break;
    if (other != stream) reused = reuse(cache, count, true, block.range);
  }
  if (!reused) {
    std::vector<FreeChunk> chunks = collect(count, stream);
    if (chunks.size() < count) {
      give_back(chunks, stream);
      out_of_memory(bytes, "the device has no more");
    }
    try {
      settle();  // undoes what mappings it can of the ranges that they were taken from
      block.range = map(chunks);
    } catch (...) {
      give_back(chunks, stream);
      throw;
    }
  }
  block.bytes = bytes;
  block.stream = stream;
  live_chunks_ += count;
  counters_.allocated_bytes += count * counters_.chunk_bytes;
  return block;
}

Allocator::Block Allocator::acquire_small(std::uint64_t bytes, Stream stream) {
  Heap& heap = heaps_[stream];
  const std::uint64_t size = (bytes - 1) / ALIGNMENT * ALIGNMENT + ALIGNMENT;
  const auto seek = [&] { return heap.free.lower_bound({size, 0, 0}); };
  auto best = seek();
  while (best == heap.free.end() && live_chunks_ == limit_chunks_ && wait_for_small()) best = seek();
  if (best == heap.free.end()) {
    Block block = acquire(1, bytes, stream);
    best = seek();  // where that had to wait, a piece may have come back
    if (best != heap.free.end()) {
      release(block, last_uses(block, stream));
    } else {
      SharedChunk shared{std::move(block), shared_ever_++, {}};
      const std::uint64_t whole = counters_.chunk_bytes / ALIGNMENT * ALIGNMENT;
      shared.pieces[0] = {whole, true};
      best = heap.free.insert({whole, shared.number, 0}).first;
      heap.chunks.emplace(shared.number, std::move(shared));
    }
  }
  const auto [available, number, at] = *best;
  heap.free.erase(best);
  SharedChunk& shared = heap.chunks.at(number);
  shared.pieces[at] = {size, false};
  if (available > size) {
    shared.pieces[at + size] = {available - size, true};
    heap.free.insert({available - size, number, at + size});
  }
  return {{shared.block.range.address + at, {}}, number, at, bytes, stream, {}};
}

void Allocator::free(void* pointer, Stream stream) {
  if (!pointer) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    const Inside inside(*backend_);
    free_block(address_of(pointer), stream);
    note_peaks();  // a free piece of a shared chunk adds to what is lost
  } catch (...) {
    ++counters_.failures;
    throw;
  }
}

void Allocator::free_block(Address address, Stream stream) {
  const auto entry = live_.find(address);
  if (entry == live_.end()) {
    throw InvalidArgument("free: " + std::to_string(address) +
                          " is not the address of a live block: it was freed before, or never "
                          "handed out by this allocator");
  }
  Block& block = entry->second;
  if (block.range.chunks.empty()) {
    release_small(block, stream);
  } else {
    release(block, last_uses(block, stream));
  }
  ++counters_.frees;
  counters_.requested_bytes -= block.bytes;
  live_.erase(entry);
}

// All of a free that may fail: until it has returned, nothing has changed.
Allocator::FreedRange Allocator::last_uses(const Block& block, Stream stream) {
  FreedRange freed{{}, use(stream), {}};
  std::set<Stream> others = block.others;
  // The stream that it was asked for on may have yet to run what used its chunks before.
  others.insert(block.stream);
  others.erase(stream);
  for (Stream other : others) freed.others.push_back(use(other));
  return freed;
}

void Allocator::release(Block& block, FreedRange freed) {
  freed.range = std::move(block.range);
  counters_.allocated_bytes -= freed.range.chunks.size() * counters_.chunk_bytes;
  live_chunks_ -= freed.range.chunks.size();
  if (freed.others.empty()) {
    put(std::move(freed));
  } else {
    waiting_.push_back(std::move(freed));
  }
}

void Allocator::release_small(Block& block, Stream stream) {
  block.others.insert(stream);
  block.others.erase(block.stream);
  FreedSmall freed{block, {}};
  for (Stream other : block.others) freed.others.push_back(use(other));
  if (freed.others.empty()) {
    join(freed.block);
  } else {
    small_waiting_.push_back(std::move(freed));
  }
}

// Makes a piece free, one with its free neighbours.
void Allocator::join(const Block& block) {
  Heap& heap = heaps_[block.stream];
  SharedChunk& shared = heap.chunks.at(block.number);
  auto piece = shared.pieces.find(block.at);
  const auto after = std::next(piece);
  const bool with_after = after != shared.pieces.end() && after->second.free;
  const bool with_before = piece != shared.pieces.begin() && std::prev(piece)->second.free;
  const bool whole = shared.pieces.size() == 1u + with_after + with_before;
  FreedRange freed;
  if (whole) freed = last_uses(shared.block, block.stream);
  const auto absorb = [&](auto into, auto from) {
    into->second.size += from->second.size;
    shared.pieces.erase(from);
  };
  if (with_after) {
    heap.free.erase({after->second.size, block.number, after->first});
    absorb(piece, after);
  }
  if (with_before) {
    const auto before = std::prev(piece);
    heap.free.erase({before->second.size, block.number, before->first});
    absorb(before, piece);
    piece = before;
  }
  piece->second.free = true;
  if (whole) {
    release(shared.block, std::move(freed));
    heap.chunks.erase(block.number);
  } else {
    heap.free.insert({piece->second.size, block.number, piece->first});
  }
}

void Allocator::record_stream(void* pointer, Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = live_.find(address_of(pointer));
  if (entry == live_.end()) {
    throw InvalidArgument("record_stream: " + std::to_string(address_of(pointer)) +
                          " is not the address of a live block");
  }
  entry->second.others.insert(stream);
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
  for (const auto& [stream, heap] : heaps_) result.shared_chunks += heap.chunks.size();
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
  std::vector<FreeChunk> chunks;
  try {
    do {
      take(caches_[stream], count, false, chunks);
      for (auto& [other, cache] : caches_) {
        if (other != stream) take(cache, count, true, chunks);
      }
      create(count, chunks);
    } while (chunks.size() < count && wait_for_oldest(stream));
  } catch (...) {
    give_back(chunks, stream);
    throw;
  }
  return chunks;
}

void Allocator::take(Cache& cache, std::size_t count, bool only_complete,
                     std::vector<FreeChunk>& chunks) {
  while (chunks.size() < count) {
    // Chunks that were retired last have the latest uses: the first are the likeliest to be ready.
    auto chunk = cache.chunks.end();
    if (!only_complete && !cache.chunks.empty()) {
      --chunk;
    } else if (only_complete) {
      chunk = std::find_if(cache.chunks.begin(), cache.chunks.end(),
                           [](FreeChunk& c) { return !c.use || c.use->complete(); });
    }
    if (chunk != cache.chunks.end()) {
      chunks.push_back(std::move(*chunk));
      cache.chunks.erase(chunk);
    } else if (!cache.ranges.empty() &&
               (!only_complete || cache.ranges.begin()->second.use->complete())) {
      retire(cache, cache.ranges.begin()->first);
    } else {
      return;
    }
  }
}

void Allocator::create(std::size_t count, std::vector<FreeChunk>& chunks) {
  while (chunks.size() < count && chunks_reserved() < limit_chunks_) {
    try {
      chunks.push_back({backend_->create_chunk(counters_.chunk_bytes), nullptr});
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

// Waits for the oldest use that keeps a small block's piece; false where there is none.
bool Allocator::wait_for_small() {
  if (small_waiting_.empty()) return false;
  const auto oldest = std::min_element(
      small_waiting_.begin(), small_waiting_.end(), [](const FreedSmall& a, const FreedSmall& b) {
        return a.others.back()->number < b.others.back()->number;
      });
  ++counters_.event_waits;
  for (const LastUse& other : oldest->others) other->wait();
  settle();
  return true;
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
  for (const FreedSmall& freed : small_waiting_) {
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

void Allocator::put(FreedRange freed) {
  const std::uint64_t number = freed.use->number;
  Cache& cache = caches_[freed.use->stream];
  cache.by_size[freed.range.chunks.size()].insert(number);
  cache.ranges.emplace(number, std::move(freed));
}

Allocator::FreedRange Allocator::pull(Cache& cache, std::uint64_t number) {
  const auto entry = cache.ranges.find(number);
  FreedRange freed = std::move(entry->second);
  cache.ranges.erase(entry);
  cache.by_size[freed.range.chunks.size()].erase(number);
  return freed;
}

// Frees the chunks of a range; settle undoes its mapping.
void Allocator::retire(Cache& cache, std::uint64_t number) {
  FreedRange freed = pull(cache, number);
  for (Chunk chunk : freed.range.chunks) cache.chunks.push_back({chunk, freed.use});
  retired_.push_back(std::move(freed));
}

// Does what had to wait for events that have completed since. Where the driver fails, what has not
// been done stays to be done.
void Allocator::settle() {
  const auto all_complete = [](const std::vector<LastUse>& uses) {
    return std::all_of(uses.begin(), uses.end(), [](const LastUse& u) { return u->complete(); });
  };
  const auto finish = [&all_complete](auto& waiting, auto act) {
    for (std::size_t i = 0; i < waiting.size();) {
      if (all_complete(waiting[i].others)) {
        act(waiting[i]);
        waiting[i] = std::move(waiting.back());
        waiting.pop_back();
      } else {
        ++i;
      }
    }
  };
  finish(small_waiting_, [this](FreedSmall& freed) { join(freed.block); });
  finish(waiting_, [this](FreedRange& freed) { put(std::move(freed)); });
  std::set<Stream> behind;  // an event that has not completed speaks for the later ones
  for (auto freed = retired_.begin(); freed != retired_.end();) {
    const Stream stream = freed->use->stream;
    if (behind.count(stream) || !freed->use->complete()) {
      behind.insert(stream);
      ++freed;
      continue;
    }
    const Address address = freed->range.address;
    const std::uint64_t count = freed->range.chunks.size();
    backend_->unmap(address, count * counters_.chunk_bytes);
    counters_.unmaps += count;
    freed = retired_.erase(freed);
    backend_->unreserve(address, count * counters_.chunk_bytes);
  }
}

void Allocator::release_all() {
  for (FreedSmall& freed : small_waiting_) {
    for (LastUse& other : freed.others) other->wait();
  }
  settle();
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
