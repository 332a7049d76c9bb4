#include "memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <optional>

namespace sim {

namespace {

constexpr size_t kSmallest = 512, kSmall = size_t{1} << 20, kSmallSegment = size_t{2} << 20;
constexpr size_t kMedium = size_t{10} << 20, kLargeSegment = size_t{20} << 20;
constexpr size_t kPoisoned = size_t{16} << 20;  // bytes of a segment that start as NaN, at most

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

std::string mib(size_t nbytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(nbytes) / (1 << 20));
  return text;
}

void* map(size_t nbytes) {
  void* made = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) throw OutOfMemory("the host has no memory for the simulated device");
  // Fresh memory holds anything: here NaN, so that reading it shows.
  std::memset(made, 0xff, std::min(nbytes, kPoisoned));
  return made;
}

}  // namespace

DeviceMemory& device_memory(int device) {
  static DeviceMemory* all[kDevices] = {};
  static std::once_flag once;
  std::call_once(once, [] {
    for (int i = 0; i < kDevices; ++i) all[i] = new DeviceMemory(i);
  });
  return *all[device];
}

PinnedMemory& pinned_memory() {
  static PinnedMemory* only = new PinnedMemory();
  return *only;
}

// ---- the device's

void* DeviceMemory::allocate(size_t nbytes, int agent) {
  if (nbytes == 0) return nullptr;
  const size_t size = std::max(kSmallest, round_up(nbytes, kSmallest));
  uintptr_t begin = 0;
  for (bool again : {false, true}) {
    std::optional<Order::Here> here;
    if (again) here.emplace();
    Lock lock(mutex);
    collect(again);
    if (again) {
      ++statistics.retries;
      give_back();
    }
    Block* block = take(size, agent);
    if (!block) block = grow(size, agent);
    if (!block && !again) continue;
    if (!block) {
      ++statistics.refusals;
      const auto reserved = static_cast<size_t>(statistics.reserved_bytes.current);
      throw OutOfMemory(
          "SIM out of memory. Tried to allocate " + mib(nbytes) + ". Device " +
          std::to_string(device_) + " has a total capacity of " + mib(total_bytes) + " of which " +
          mib(total_bytes - reserved) + " is free. " + mib(limit_bytes) +
          " allowed; Of the allocated memory " +
          mib(static_cast<size_t>(statistics.allocated_bytes.current)) +
          " is allocated by PyTorch, and " +
          mib(reserved - static_cast<size_t>(statistics.allocated_bytes.current)) +
          " is reserved by PyTorch but unallocated.");
    }
    block->requested = nbytes;
    block->used = true;
    live_[block->begin] = block;
    statistics.allocations.add(1);
    statistics.allocated_bytes.add(static_cast<int64_t>(block->size));
    statistics.active_bytes.add(static_cast<int64_t>(block->size));
    statistics.requested_bytes.add(static_cast<int64_t>(nbytes));
    begin = block->begin;
    break;
  }
  order().allocated(begin, begin + size, agent);
  return reinterpret_cast<void*>(begin);
}

DeviceMemory::Block* DeviceMemory::take(size_t size, int agent) {
  Pool& from = pool(size <= kSmall);
  Block wanted{};
  wanted.agent = agent;
  wanted.size = size;
  auto found = from.lower_bound(&wanted);
  if (found == from.end() || (*found)->agent != agent) return nullptr;
  Block* block = *found;
  from.erase(found);
  const size_t left = block->size - size;
  if (block->small ? left >= kSmallest : left > kSmall) {
    auto* rest = new Block{block->begin + size, left, 0, agent, block->small, false, false, nullptr, nullptr, {}, {}};
    rest->before = block;
    rest->after = block->after;
    if (rest->after) rest->after->before = rest;
    block->after = rest;
    block->size = size;
    from.insert(rest);
  }
  return block;
}

DeviceMemory::Block* DeviceMemory::grow(size_t size, int agent) {
  const size_t segment = size <= kSmall    ? kSmallSegment
                         : size < kMedium ? kLargeSegment
                                          : round_up(size, kSmallSegment);
  const size_t most = std::min(limit_bytes, total_bytes);
  if (static_cast<size_t>(statistics.reserved_bytes.current) + segment > most) return nullptr;
  auto* block = new Block{reinterpret_cast<uintptr_t>(map(segment)), segment, 0, agent,
                          size <= kSmall, false, false, nullptr, nullptr, {}, {}};
  statistics.reserved_bytes.add(static_cast<int64_t>(segment));
  statistics.segments.add(1);
  pool(block->small).insert(block);
  return take(size, agent);
}

void DeviceMemory::free(void* pointer) {
  if (!pointer) return;
  order().freed(reinterpret_cast<uintptr_t>(pointer));
  Lock lock(mutex);
  auto found = live_.find(reinterpret_cast<uintptr_t>(pointer));
  Block* block = found->second;
  live_.erase(found);
  statistics.allocations.add(-1);
  statistics.allocated_bytes.add(-static_cast<int64_t>(block->size));
  statistics.requested_bytes.add(-static_cast<int64_t>(block->requested));
  block->used = false;
  for (int agent : block->streams) {
    if (agent == block->agent) continue;
    block->pending.emplace_back();
    order().record(block->pending.back(), agent, false);
  }
  block->streams.clear();
  block->waiting = !block->pending.empty();
  if (block->waiting) pending_.push_back(block);
  else release(block);
}

void DeviceMemory::record_stream(const void* pointer, int agent) {
  Lock lock(mutex);
  auto found = live_.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (found == live_.begin()) return;
  Block* block = (--found)->second;
  if (reinterpret_cast<uintptr_t>(pointer) < block->begin + block->size)
    block->streams.insert(agent);
}

DeviceMemory::Block* DeviceMemory::merge(Block* block, Block* neighbour) {
  if (!neighbour || neighbour->used || neighbour->waiting) return block;
  pool(neighbour->small).erase(neighbour);
  Block* first = block->begin < neighbour->begin ? block : neighbour;
  Block* second = first == block ? neighbour : block;
  first->size += second->size;
  first->after = second->after;
  if (first->after) first->after->before = first;
  delete second;
  return first;
}

void DeviceMemory::release(Block* block) {
  statistics.active_bytes.add(-static_cast<int64_t>(block->size));
  block->waiting = false;
  block = merge(block, block->before);
  block = merge(block, block->after);
  pool(block->small).insert(block);
}

// Frees what streams have done with; returns whether there was any.
bool DeviceMemory::collect(bool wait) {
  std::vector<Block*> left, done;
  for (Block* block : pending_) {
    auto& events = block->pending;
    if (wait)
      for (Event& event : events) order().synchronize(event);
    events.erase(std::remove_if(events.begin(), events.end(),
                                [](Event& event) { return order().query(event); }),
                 events.end());
    (events.empty() ? done : left).push_back(block);
  }
  pending_ = std::move(left);
  for (Block* block : done) release(block);
  return !done.empty();
}

size_t DeviceMemory::give_back() {
  std::vector<Block*> whole;
  for (Pool& from : pools_)
    for (Block* block : from)
      if (!block->before && !block->after) whole.push_back(block);
  if (whole.empty()) return 0;
  // To unmap memory waits for the device, on CUDA too; queued work may still use it.
  order().synchronize_device(device_);
  size_t freed = 0;
  for (Block* block : whole) {
    pool(block->small).erase(block);
    order().returned(block->begin, block->begin + block->size);
    munmap(reinterpret_cast<void*>(block->begin), block->size);
    statistics.reserved_bytes.add(-static_cast<int64_t>(block->size));
    statistics.segments.add(-1);
    freed += block->size;
    delete block;
  }
  return freed;
}

void DeviceMemory::empty_cache() {
  Order::Here here;
  Lock lock(mutex);
  collect(true);
  give_back();
}

bool DeviceMemory::owns(const void* pointer) {
  Lock lock(mutex);
  auto found = live_.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (found == live_.begin()) return false;
  --found;
  return reinterpret_cast<uintptr_t>(pointer) < found->first + found->second->size;
}

void DeviceMemory::each_live(const std::function<void(uintptr_t, uintptr_t, int)>& call) {
  Lock lock(mutex);
  for (const auto& [begin, block] : live_) call(begin, begin + block->size, block->agent);
}

// ---- pinned

void* PinnedMemory::allocate(size_t nbytes) {
  if (nbytes == 0) return nullptr;
  const size_t size = std::max<size_t>(4096, std::bit_ceil(nbytes));
  uintptr_t begin = 0;
  {
    Lock lock(mutex);
    for (auto& [at, block] : blocks_) {
      if (block.used || block.size != size) continue;
      auto& events = block.pending;
      events.erase(std::remove_if(events.begin(), events.end(),
                                  [](Event& event) { return order().query(event); }),
                   events.end());
      if (!events.empty()) continue;
      begin = at;
      block.used = true;
      break;
    }
    if (!begin) {
      if (static_cast<size_t>(statistics.reserved_bytes.current) + size > limit_bytes) {
        ++statistics.refusals;
        throw std::runtime_error("SIM error: out of memory");  // as of cudaHostAlloc: it says no more
      }
      begin = reinterpret_cast<uintptr_t>(map(size));
      blocks_[begin] = {size, true, {}, {}};
      statistics.reserved_bytes.add(static_cast<int64_t>(size));
      statistics.segments.add(1);
    }
    statistics.allocations.add(1);
    statistics.allocated_bytes.add(static_cast<int64_t>(size));
    statistics.requested_bytes.add(static_cast<int64_t>(nbytes));
  }
  order().allocated(begin, begin + size, kHost);
  return reinterpret_cast<void*>(begin);
}

void PinnedMemory::free(void* pointer) {
  if (!pointer) return;
  order().freed(reinterpret_cast<uintptr_t>(pointer));
  Lock lock(mutex);
  Block& block = blocks_.at(reinterpret_cast<uintptr_t>(pointer));
  block.used = false;
  statistics.allocations.add(-1);
  statistics.allocated_bytes.add(-static_cast<int64_t>(block.size));
  for (int agent : block.streams) {
    block.pending.emplace_back();
    order().record(block.pending.back(), agent, false);
  }
  block.streams.clear();
}

std::map<uintptr_t, PinnedMemory::Block>::iterator PinnedMemory::find(const void* pointer) {
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  auto found = blocks_.upper_bound(at);
  if (found == blocks_.begin()) return blocks_.end();
  --found;
  return at < found->first + found->second.size && found->second.used ? found : blocks_.end();
}

void PinnedMemory::record_stream(const void* pointer, int agent) {
  Lock lock(mutex);
  auto found = find(pointer);
  if (found != blocks_.end()) found->second.streams.insert(agent);
}

bool PinnedMemory::owns(const void* pointer) {
  Lock lock(mutex);
  return find(pointer) != blocks_.end();
}

void PinnedMemory::empty_cache() {
  Order::Here here;
  Lock lock(mutex);
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    if (it->second.used) {
      ++it;
      continue;
    }
    for (Event& event : it->second.pending) order().synchronize(event);
    order().returned(it->first, it->first + it->second.size);
    munmap(reinterpret_cast<void*>(it->first), it->second.size);
    statistics.reserved_bytes.add(-static_cast<int64_t>(it->second.size));
    statistics.segments.add(-1);
    it = blocks_.erase(it);
  }
}

void PinnedMemory::each_live(const std::function<void(uintptr_t, uintptr_t, int)>& call) {
  Lock lock(mutex);
  for (const auto& [begin, block] : blocks_)
    if (block.used) call(begin, begin + block.size, kHost);
}

}  // namespace sim
