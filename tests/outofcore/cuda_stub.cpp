// The functions of the CUDA driver that csrc/cuda_driver.hpp lists, on host memory, for tests.
//
// It keeps the driver's rules and refuses, with CUDA_ERROR_INVALID_VALUE, whoever does not; refusals
// are counted. Any call can be made to fail. What is put on a stream runs at once, or, where the
// stream is held, when somebody waits for it or it is let go: stub_fill stands for a kernel.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <string>

#include "cuda_driver.hpp"

using u64 = unsigned long long;

namespace chunked::cuda {

struct CUctx_st {
  int retained = 0;
};
struct Work {
  u64 ticket, address, bytes;
  int value;
};
struct CUstream_st {
  std::deque<Work> queued;
  u64 last = 0, done = 0;  // tickets
  bool held = false;
};
struct CUevent_st {
  CUcontext context;
  CUstream_st* stream = nullptr;
  u64 ticket = 0;
};

}  // namespace chunked::cuda

using namespace chunked::cuda;

#define F extern "C" __attribute__((visibility("default"))) int

namespace {

constexpr u64 GRANULARITY = 2 << 20;
constexpr CUresult INVALID_VALUE = 1, INVALID_DEVICE = 101;

struct Chunk {
  u64 bytes, at;
  int device;
};
struct Mapping {
  u64 bytes, handle;
  bool accessible;
};

CUctx_st contexts[2];
thread_local CUcontext current;
int file = memfd_create("driver", 0);
u64 next_byte, used[2], limit = 64 * GRANULARITY;
std::map<u64, Chunk> chunks;       // by handle
std::map<u64, u64> ranges;         // address: bytes
std::map<u64, Mapping> mapped;     // by address
std::map<CUstream, CUstream_st> streams;
std::set<CUevent> events;
u64 calls;
long countdown = -1;
CUresult injected;
std::string failed, first_refusal;

// What a call begins with: whether it is the one that fails.
CUresult begin(const char* call) {
  ++calls;
  if (countdown < 0 || countdown-- != 0) return CUDA_SUCCESS;
  failed = call;
  return injected;
}
#define BEGIN \
  if (const CUresult result = begin(__func__)) return result;

CUresult refuse(const std::string& rule) {
  if (first_refusal.empty()) first_refusal = rule;
  return INVALID_VALUE;
}
#define RULE(holds) \
  if (!(holds)) return refuse(std::string(__func__) + ": " #holds);

bool inside() { return current && current->retained > 0; }

// Bytes from an address on that belong to whole mappings, up to `bytes`; -1 where one is cut.
bool whole(u64 address, u64 bytes) {
  u64 at = address;
  while (at < address + bytes && mapped.count(at)) at += mapped[at].bytes;
  return at == address + bytes;
}

void run(const Work& work) {
  auto at = mapped.upper_bound(work.address);
  if (at != mapped.begin()) --at;
  for (u64 upto = work.address; upto < work.address + work.bytes; ++at) {
    if (at == mapped.end() || at->first > upto || at->first + at->second.bytes <= upto ||
        !at->second.accessible) {
      refuse("a kernel reached memory that is not mapped");
      return;
    }
    upto = at->first + at->second.bytes;
  }
  std::memset(reinterpret_cast<void*>(work.address), work.value, work.bytes);
}

void run_to(CUstream_st& stream, u64 upto) {
  while (!stream.queued.empty() && stream.queued.front().ticket <= upto) {
    const Work work = stream.queued.front();
    stream.queued.pop_front();
    run(work);
  }
  if (stream.done < upto) stream.done = upto;
}

u64 put(CUstream_st& stream) {
  const u64 ticket = ++stream.last;
  if (!stream.held) run_to(stream, ticket);
  return ticket;
}

bool right(const CUmemAllocationProp* p) {
  return p->type == CU_MEM_ALLOCATION_TYPE_PINNED && !p->requestedHandleTypes &&
         p->location.type == CU_MEM_LOCATION_TYPE_DEVICE && p->location.id >= 0 &&
         p->location.id < 2 && current == contexts + p->location.id && !p->win32HandleMetaData;
}

}  // namespace

F cuInit(unsigned flags) {
  BEGIN RULE(flags == 0) return CUDA_SUCCESS;
}
F cuGetErrorString(CUresult result, const char** text) {
  *text = result == CUDA_ERROR_OUT_OF_MEMORY ? "FULL" : "WRONG";
  return CUDA_SUCCESS;
}
F cuDeviceGet(CUdevice* device, int ordinal) {
  BEGIN
  if (ordinal < 0 || ordinal > 1) return INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
F cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
  BEGIN
  *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
  return CUDA_SUCCESS;
}
F cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  BEGIN
  ++contexts[device].retained;
  *context = contexts + device;
  return CUDA_SUCCESS;
}
F cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  BEGIN RULE(contexts[device].retained > 0)
  --contexts[device].retained;
  return CUDA_SUCCESS;
}
F cuCtxGetCurrent(CUcontext* context) {
  BEGIN
  *context = current;
  return CUDA_SUCCESS;
}
F cuCtxSetCurrent(CUcontext context) {
  BEGIN
  current = context;
  return CUDA_SUCCESS;
}

F cuMemGetAllocationGranularity(std::size_t* bytes, const CUmemAllocationProp* property, int) {
  BEGIN RULE(right(property))
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}
F cuMemCreate(u64* handle, std::size_t bytes, const CUmemAllocationProp* property, u64 flags) {
  BEGIN RULE(right(property)) RULE(bytes % GRANULARITY == 0 && flags == 0)
  u64& of_device = used[property->location.id];
  if (of_device + bytes > limit) return CUDA_ERROR_OUT_OF_MEMORY;
  if (ftruncate(file, static_cast<off_t>(next_byte + bytes))) return 999;
  of_device += bytes;
  *handle = next_byte + 1;
  chunks[*handle] = {bytes, next_byte, property->location.id};
  next_byte += bytes;
  return CUDA_SUCCESS;
}
F cuMemRelease(u64 handle) {
  BEGIN RULE(inside()) RULE(chunks.count(handle))
  // The driver would keep what is mapped; whoever releases it is lost track of it.
  for (const auto& [address, mapping] : mapped) RULE(mapping.handle != handle)
  used[chunks[handle].device] -= chunks[handle].bytes;
  chunks.erase(handle);
  return CUDA_SUCCESS;
}
F cuMemAddressReserve(u64* address, std::size_t bytes, std::size_t alignment, u64 hint, u64 flags) {
  BEGIN RULE(inside()) RULE(!alignment && !hint && !flags && bytes % GRANULARITY == 0)
  const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  *address = reinterpret_cast<u64>(mmap(nullptr, bytes, PROT_NONE, how, -1, 0));
  ranges[*address] = bytes;
  return CUDA_SUCCESS;
}
F cuMemAddressFree(u64 address, std::size_t bytes) {
  const auto range = ranges.find(address);
  const auto mapping = mapped.lower_bound(address);
  BEGIN RULE(inside()) RULE(range != ranges.end() && range->second == bytes)
  RULE(mapping == mapped.end() || mapping->first >= address + bytes)
  ranges.erase(range);
  return munmap(reinterpret_cast<void*>(address), bytes);
}
F cuMemMap(u64 address, std::size_t bytes, std::size_t offset, u64 handle, u64 flags) {
  BEGIN RULE(inside()) RULE(!offset && !flags)
  RULE(chunks.count(handle) && chunks[handle].bytes == bytes)
  auto range = ranges.upper_bound(address);
  RULE(range != ranges.begin())
  --range;
  RULE(address + bytes <= range->first + range->second)
  RULE(!mapped.count(address))
  mapped[address] = {bytes, handle, false};
  void* at = reinterpret_cast<void*>(address);
  const auto at_byte = static_cast<off_t>(chunks[handle].at);
  return mmap(at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, at_byte) == at ? 0 : 999;
}
F cuMemSetAccess(u64 address, std::size_t bytes, const CUmemAccessDesc* access, std::size_t count) {
  BEGIN RULE(inside()) RULE(count == 1 && access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
  RULE(access->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
  RULE(current == contexts + access->location.id) RULE(whole(address, bytes))
  for (u64 at = address; at < address + bytes; at += mapped[at].bytes) mapped[at].accessible = true;
  return mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE);
}
F cuMemUnmap(u64 address, std::size_t bytes) {
  BEGIN RULE(inside()) RULE(whole(address, bytes))
  for (u64 at = address; at < address + bytes;) {
    const u64 size = mapped[at].bytes;
    mapped.erase(at);
    at += size;
  }
  void* at = reinterpret_cast<void*>(address);
  const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(at, bytes, PROT_NONE, how, -1, 0) == at ? 0 : 999;
}

F cuEventCreate(CUevent* event, unsigned flags) {
  BEGIN RULE(inside()) RULE(flags == CU_EVENT_DISABLE_TIMING)
  *event = new CUevent_st{current};
  events.insert(*event);
  return CUDA_SUCCESS;
}
F cuEventDestroy_v2(CUevent event) {
  BEGIN RULE(inside()) RULE(events.erase(event))
  delete event;
  return CUDA_SUCCESS;
}
F cuEventRecord(CUevent event, CUstream stream) {
  BEGIN RULE(inside()) RULE(events.count(event)) RULE(event->context == current)
  event->stream = &streams[stream];
  event->ticket = put(*event->stream);
  return CUDA_SUCCESS;
}
F cuEventQuery(CUevent event) {
  BEGIN RULE(inside()) RULE(events.count(event)) RULE(event->stream)
  return event->ticket <= event->stream->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
F cuEventSynchronize(CUevent event) {
  BEGIN RULE(inside()) RULE(events.count(event)) RULE(event->stream)
  run_to(*event->stream, event->ticket);
  return CUDA_SUCCESS;
}

// For tests.

// Hold a stream back from now on, or let it run what it has.
F stub_hold(u64 stream, int held) {
  CUstream_st& timeline = streams[reinterpret_cast<CUstream>(stream)];
  timeline.held = held;
  if (!held) run_to(timeline, timeline.last);
  return 0;
}
// Put a kernel on a stream that writes bytes.
F stub_fill(u64 stream, u64 address, u64 bytes, int value) {
  CUstream_st& timeline = streams[reinterpret_cast<CUstream>(stream)];
  timeline.queued.push_back({timeline.last + 1, address, bytes, value});
  put(timeline);
  return 0;
}
// Let the driver's call of this number from now on fail; a negative one for none.
F stub_fail(long number, CUresult result) {
  countdown = number;
  injected = result;
  failed.clear();
  return 0;
}
extern "C" __attribute__((visibility("default"))) const char* stub_failed() {
  return failed.c_str();
}
extern "C" __attribute__((visibility("default"))) const char* stub_refusal() {
  return first_refusal.c_str();
}
F stub_forgive() {
  first_refusal.clear();
  return 0;
}
F stub_limit(u64 bytes) {
  limit = bytes;
  return 0;
}
F stub_calls() { return static_cast<int>(calls); }
// How much is held of what: contexts, chunks, ranges, mappings, events.
F stub_left(int* counts) {
  counts[0] = contexts[0].retained + contexts[1].retained;
  counts[1] = static_cast<int>(chunks.size());
  counts[2] = static_cast<int>(ranges.size());
  counts[3] = static_cast<int>(mapped.size());
  counts[4] = static_cast<int>(events.size());
  return 0;
}
// Forget what was lost.
F stub_start_again() {
  contexts[0].retained = contexts[1].retained = 0;
  chunks.clear(), ranges.clear(), mapped.clear(), events.clear(), streams.clear();
  used[0] = used[1] = 0;
  current = nullptr;
  return 0;
}
// Which device's context is current on this thread; -1 for none.
F stub_current() { return current ? static_cast<int>(current - contexts) : -1; }
