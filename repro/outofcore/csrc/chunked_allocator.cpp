// Physical chunks of one size, mapped into contiguous virtual ranges.
//
// Source: Hayakawa and Narihira, "Out-of-core training for extremely large-scale neural networks
// with adaptive window-based scheduling", section 4.
//
// A freed range stays mapped and is reused by a request for as many chunks on the same stream.
// Otherwise its chunks are mapped into a new range as well; the old mapping stays until the event
// that was recorded at its free has passed, for kernels that were given its address may still run.
// On one stream that is safe, for later work runs after them; chunks that another stream freed are
// taken only once its event has passed.
//
// Everything above `Memory` is the same on a GPU (driver API, found at run time) and on a CPU
// (one memfd, mapped piecewise), so that it is tested without a GPU.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using Address = std::uintptr_t;
using Handle = std::uint64_t;  // a chunk
using Event = std::uint64_t;
using Stream = void*;

class Memory {
 public:
  virtual ~Memory() = default;
  virtual std::size_t granularity() = 0;
  virtual Handle create(std::size_t bytes) = 0;  // throws where the device has no more
  virtual void release(Handle chunk, std::size_t bytes) = 0;
  virtual Address reserve(std::size_t bytes) = 0;
  virtual void map(Address at, std::size_t bytes, Handle chunk) = 0;
  virtual void allow(Address at, std::size_t bytes) = 0;  // reading and writing, once mapped
  virtual void unmap(Address at, std::size_t bytes) = 0;
  virtual void unreserve(Address at, std::size_t bytes) = 0;
  virtual Event record(Stream stream) = 0;
  virtual bool passed(Event event) = 0;
  virtual void wait(Event event) = 0;
  virtual void forget(Event event) = 0;
  virtual void hold(bool) {}
  virtual std::size_t resident() { return 0; }
};

// ---- CPU: chunks are pieces of one anonymous file; events pass at once unless they are held.

class PosixMemory : public Memory {
 public:
  PosixMemory() : file_(memfd_create("chunks", MFD_CLOEXEC)) {
    if (file_ < 0) fail("memfd_create");
  }
  ~PosixMemory() override { close(file_); }
  std::size_t granularity() override { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }
  Handle create(std::size_t bytes) override {
    if (!free_.empty()) {
      Handle chunk = free_.back();
      free_.pop_back();
      return chunk;
    }
    if (ftruncate(file_, static_cast<off_t>((count_ + 1) * bytes)) != 0) fail("ftruncate");
    return count_++;
  }
  void release(Handle chunk, std::size_t bytes) override {
    if (fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(chunk * bytes), static_cast<off_t>(bytes)) != 0)
      fail("fallocate");
    free_.push_back(chunk);
  }
  Address reserve(std::size_t bytes) override { return place(nullptr, bytes, PROT_NONE, 0, -1, 0); }
  void map(Address at, std::size_t bytes, Handle chunk) override {
    place(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE, MAP_FIXED, file_,
          chunk * bytes);
  }
  void allow(Address, std::size_t) override {}
  void unmap(Address at, std::size_t bytes) override {
    place(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_FIXED, -1, 0);
  }
  void unreserve(Address at, std::size_t bytes) override {
    munmap(reinterpret_cast<void*>(at), bytes);
  }
  Event record(Stream) override { return ++last_; }
  bool passed(Event event) override { return event <= passed_ || !held_; }
  void wait(Event event) override { passed_ = event > passed_ ? event : passed_; }
  void forget(Event) override {}
  void hold(bool held) override {
    held_ = held;
    passed_ = last_;
  }
  std::size_t resident() override {
    struct stat state;
    return fstat(file_, &state) == 0 ? static_cast<std::size_t>(state.st_blocks) * 512 : 0;
  }

 private:
  static Address place(void* at, std::size_t bytes, int access, int flags, int file, std::uint64_t offset) {
    flags |= file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    void* address = mmap(at, bytes, access, flags, file, static_cast<off_t>(offset));
    if (address == MAP_FAILED) fail("mmap");
    return reinterpret_cast<Address>(address);
  }
  [[noreturn]] static void fail(const char* what) {
    throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
  }
  int file_;
  Handle count_ = 0;
  std::vector<Handle> free_;
  Event last_ = 0, passed_ = 0;
  bool held_ = false;
};

// ---- GPU: the driver's virtual memory management. The types are those of cuda.h, by hand.

struct Location {
  int type, id;
};
struct AllocationProp {
  int type, handle_types;
  Location location;
  void* win32;
  struct {
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct AccessDesc {
  Location location;
  int flags;
};
constexpr int kPinned = 1, kDevice = 1, kReadWrite = 3, kNotReady = 600, kNoTiming = 2;

class Driver {
 public:
  static Driver& get() {
    static Driver driver;
    return driver;
  }
  int (*init)(unsigned);
  int (*deviceGet)(int*, int);
  int (*contextCurrent)(void**);
  int (*contextSet)(void*);
  int (*primaryRetain)(void**, int);
  int (*granularity)(std::size_t*, const AllocationProp*, int);
  int (*create)(std::uint64_t*, std::size_t, const AllocationProp*, unsigned long long);
  int (*release)(std::uint64_t);
  int (*reserve)(std::uint64_t*, std::size_t, std::size_t, std::uint64_t, unsigned long long);
  int (*unreserve)(std::uint64_t, std::size_t);
  int (*map)(std::uint64_t, std::size_t, std::size_t, std::uint64_t, unsigned long long);
  int (*unmap)(std::uint64_t, std::size_t);
  int (*access)(std::uint64_t, std::size_t, const AccessDesc*, std::size_t);
  int (*eventCreate)(void**, unsigned);
  int (*eventRecord)(void*, void*);
  int (*eventQuery)(void*);
  int (*eventWait)(void*);
  int (*eventDestroy)(void*);
  int (*errorText)(int, const char**);

  void check(int result, const char* what) {
    if (result == 0) return;
    const char* text = nullptr;
    errorText(result, &text);
    throw std::runtime_error(std::string(what) + ": " + (text ? text : std::to_string(result)));
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) throw std::runtime_error("there is no CUDA driver: libcuda.so.1 was not found");
    find(library, "cuInit", init);
    find(library, "cuDeviceGet", deviceGet);
    find(library, "cuCtxGetCurrent", contextCurrent);
    find(library, "cuCtxSetCurrent", contextSet);
    find(library, "cuDevicePrimaryCtxRetain", primaryRetain);
    find(library, "cuMemGetAllocationGranularity", granularity);
    find(library, "cuMemCreate", create);
    find(library, "cuMemRelease", release);
    find(library, "cuMemAddressReserve", reserve);
    find(library, "cuMemAddressFree", unreserve);
    find(library, "cuMemMap", map);
    find(library, "cuMemUnmap", unmap);
    find(library, "cuMemSetAccess", access);
    find(library, "cuEventCreate", eventCreate);
    find(library, "cuEventRecord", eventRecord);
    find(library, "cuEventQuery", eventQuery);
    find(library, "cuEventSynchronize", eventWait);
    find(library, "cuEventDestroy_v2", eventDestroy);
    find(library, "cuGetErrorString", errorText);
    check(init(0), "cuInit");
  }
  template <class Function>
  static void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  }
};

class CudaMemory : public Memory {
 public:
  explicit CudaMemory(int number) : driver_(Driver::get()) {
    driver_.check(driver_.deviceGet(&device_, number), "cuDeviceGet");
    prop_.type = kPinned;
    prop_.location = {kDevice, device_};
    enter();
  }
  ~CudaMemory() override {
    for (void* event : spare_) driver_.eventDestroy(event);
  }
  std::size_t granularity() override {
    std::size_t bytes = 0;
    driver_.check(driver_.granularity(&bytes, &prop_, 0), "cuMemGetAllocationGranularity");
    return bytes;
  }
  Handle create(std::size_t bytes) override {
    enter();
    Handle chunk = 0;
    driver_.check(driver_.create(&chunk, bytes, &prop_, 0), "cuMemCreate");
    return chunk;
  }
  void release(Handle chunk, std::size_t) override {
    driver_.check(driver_.release(chunk), "cuMemRelease");
  }
  Address reserve(std::size_t bytes) override {
    enter();
    std::uint64_t address = 0;
    driver_.check(driver_.reserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
    return static_cast<Address>(address);
  }
  void map(Address at, std::size_t bytes, Handle chunk) override {
    driver_.check(driver_.map(at, bytes, 0, chunk, 0), "cuMemMap");
  }
  void allow(Address at, std::size_t bytes) override {
    AccessDesc access{{kDevice, device_}, kReadWrite};
    driver_.check(driver_.access(at, bytes, &access, 1), "cuMemSetAccess");
  }
  void unmap(Address at, std::size_t bytes) override {
    driver_.check(driver_.unmap(at, bytes), "cuMemUnmap");
  }
  void unreserve(Address at, std::size_t bytes) override {
    driver_.check(driver_.unreserve(at, bytes), "cuMemAddressFree");
  }
  Event record(Stream stream) override {
    enter();
    void* event = nullptr;
    if (spare_.empty()) {
      driver_.check(driver_.eventCreate(&event, kNoTiming), "cuEventCreate");
    } else {
      event = spare_.back();
      spare_.pop_back();
    }
    driver_.check(driver_.eventRecord(event, stream), "cuEventRecord");
    return reinterpret_cast<Event>(event);
  }
  bool passed(Event event) override {
    int result = driver_.eventQuery(reinterpret_cast<void*>(event));
    if (result == kNotReady) return false;
    driver_.check(result, "cuEventQuery");
    return true;
  }
  void wait(Event event) override {
    driver_.check(driver_.eventWait(reinterpret_cast<void*>(event)), "cuEventSynchronize");
  }
  void forget(Event event) override { spare_.push_back(reinterpret_cast<void*>(event)); }

 private:
  // A thread that has used no CUDA yet, such as one of autograd's, has no context.
  void enter() {
    void* context = nullptr;
    driver_.check(driver_.contextCurrent(&context), "cuCtxGetCurrent");
    if (context) return;
    driver_.check(driver_.primaryRetain(&context, device_), "cuDevicePrimaryCtxRetain");
    driver_.check(driver_.contextSet(context), "cuCtxSetCurrent");
  }
  Driver& driver_;
  int device_ = 0;
  AllocationProp prop_{};
  std::vector<void*> spare_;
};

// ---- The allocator itself.

struct Counters {  // the same fields, in the same order, as `Counters` in native.py
  std::uint64_t requested_bytes, live_bytes, reserved_bytes, peak_requested_bytes, peak_live_bytes,
      peak_reserved_bytes, chunks_created, chunks_mapped, chunks_unmapped, ranges_reused,
      ranges_waiting, event_waits, failures;
};

struct Range {
  Address at;
  std::vector<Handle> chunks;
  Stream stream;
  Event event;
  std::size_t requested;
};

class OutOfMemory : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Allocator {
 public:
  Allocator(std::unique_ptr<Memory> memory, std::size_t chunk, std::size_t limit)
      : memory_(std::move(memory)), chunk_(chunk), limit_(limit) {}

  ~Allocator() {
    try {
      for (auto& entry : live_) discard(entry.second);
      live_.clear();
      trim();
    } catch (const std::exception&) {  // the process ends, and the driver may be gone already
    }
  }

  void* malloc(std::size_t bytes, Stream stream) {
    if (bytes == 0) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    unmap_passed();
    std::size_t count = (bytes + chunk_ - 1) / chunk_;
    Range range;
    auto same = by_size_.find({stream, count});
    if (same != by_size_.end() && !same->second.empty()) {
      auto latest = same->second.back();
      same->second.pop_back();
      range = std::move(*latest);
      freed_.erase(latest);
      memory_->forget(range.event);
      ++counters_.ranges_reused;
    } else {
      range.chunks = collect(count, stream, bytes);
      try {
        place(range);
      } catch (...) {
        spare_.insert(spare_.end(), range.chunks.begin(), range.chunks.end());
        throw;
      }
    }
    range.stream = stream;
    range.requested = bytes;
    Address at = range.at;
    counters_.requested_bytes += bytes;
    counters_.live_bytes += count * chunk_;
    live_.emplace(at, std::move(range));
    peak(counters_.peak_requested_bytes, counters_.requested_bytes);
    peak(counters_.peak_live_bytes, counters_.live_bytes);
    return reinterpret_cast<void*>(at);
  }

  void free(void* pointer, Stream stream) {
    if (!pointer) return;
    std::lock_guard<std::mutex> lock(mutex_);
    auto entry = live_.find(reinterpret_cast<Address>(pointer));
    if (entry == live_.end())
      throw std::runtime_error("the address was not handed out here, or was freed already");
    Range range = std::move(entry->second);
    live_.erase(entry);
    counters_.requested_bytes -= range.requested;
    counters_.live_bytes -= range.chunks.size() * chunk_;
    range.stream = stream;
    range.event = memory_->record(stream);
    std::size_t count = range.chunks.size();
    freed_.push_back(std::move(range));
    by_size_[{stream, count}].push_back(std::prev(freed_.end()));
  }

  // Unmap what is not in use and give its chunks back, waiting for what still runs.
  void trim() {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!freed_.empty()) {
      wait(freed_.front().event);
      spare(freed_.begin());
    }
    for (Range& range : waiting_) {
      wait(range.event);
      discard_mapping(range, range.requested);
    }
    waiting_.clear();
    for (Handle chunk : spare_) memory_->release(chunk, chunk_);
    counters_.reserved_bytes -= spare_.size() * chunk_;
    spare_.clear();
  }

  Counters counters() {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.ranges_waiting = waiting_.size();
    return counters_;
  }

  void hold(bool held) {
    std::lock_guard<std::mutex> lock(mutex_);
    memory_->hold(held);
  }

  std::size_t resident() {
    std::lock_guard<std::mutex> lock(mutex_);
    return memory_->resident();
  }

  void failed(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = text;
    ++counters_.failures;
  }

  const char* error() const { return error_.c_str(); }

 private:
  using Place = std::list<Range>::iterator;

  static void peak(std::uint64_t& most, std::uint64_t now) { most = now > most ? now : most; }

  // Return chunks for a range: spare ones, then those of freed ranges, oldest first, then new ones,
  // and last, what other streams freed and still use.
  std::vector<Handle> collect(std::size_t count, Stream stream, std::size_t bytes) {
    std::size_t in_use = counters_.live_bytes / chunk_;
    if (limit_ && (in_use + count) * chunk_ > limit_)  // before anything is taken for it
      throw does_not_fit(bytes, "the limit is " + std::to_string(limit_) + " bytes");
    for (Place range = freed_.begin(); spare_.size() < count && range != freed_.end();) {
      Place next = std::next(range);
      if (range->stream == stream || memory_->passed(range->event)) spare(range);
      range = next;
    }
    std::string reason;
    while (spare_.size() < count && reason.empty()) {
      if (limit_ && counters_.reserved_bytes + chunk_ > limit_) {
        reason = "the limit is " + std::to_string(limit_) + " bytes";
      } else {
        try {
          spare_.push_back(memory_->create(chunk_));
          ++counters_.chunks_created;
          counters_.reserved_bytes += chunk_;
          peak(counters_.peak_reserved_bytes, counters_.reserved_bytes);
        } catch (const std::exception& error) {
          reason = error.what();
        }
      }
    }
    while (spare_.size() < count && !freed_.empty()) {
      wait(freed_.front().event);
      spare(freed_.begin());
    }
    if (spare_.size() < count) throw does_not_fit(bytes, reason);
    std::vector<Handle> taken(spare_.end() - static_cast<std::ptrdiff_t>(count), spare_.end());
    spare_.resize(spare_.size() - count);
    return taken;
  }

  OutOfMemory does_not_fit(std::size_t bytes, const std::string& reason) const {
    return OutOfMemory(std::to_string(bytes) + " bytes do not fit: " +
                       std::to_string(counters_.live_bytes) + " bytes are in use in chunks of " +
                       std::to_string(chunk_) + ", and " + reason);
  }

  void place(Range& range) {
    std::size_t bytes = range.chunks.size() * chunk_, mapped = 0;
    range.at = memory_->reserve(bytes);
    try {
      for (Handle chunk : range.chunks) {
        memory_->map(range.at + mapped, chunk_, chunk);
        mapped += chunk_;
      }
      memory_->allow(range.at, bytes);
    } catch (...) {
      if (mapped) memory_->unmap(range.at, mapped);
      memory_->unreserve(range.at, bytes);
      throw;
    }
    counters_.chunks_mapped += range.chunks.size();
  }

  // Make the chunks of a freed range spare; its mapping goes now or, where its event has not
  // passed, later.
  void spare(Place place) {
    Range range = std::move(*place);
    auto& same = by_size_[{range.stream, range.chunks.size()}];
    for (auto it = same.begin(); it != same.end(); ++it)
      if (*it == place) {
        same.erase(it);
        break;
      }
    freed_.erase(place);
    range.requested = range.chunks.size();  // what is mapped; the chunks are others' from now on
    spare_.insert(spare_.end(), range.chunks.begin(), range.chunks.end());
    range.chunks.clear();
    if (memory_->passed(range.event)) {
      discard_mapping(range, range.requested);
    } else {
      waiting_.push_back(std::move(range));
    }
  }

  void unmap_passed() {
    for (Place range = waiting_.begin(); range != waiting_.end();) {
      if (memory_->passed(range->event)) {
        discard_mapping(*range, range->requested);
        range = waiting_.erase(range);
      } else {
        ++range;
      }
    }
  }

  void discard_mapping(Range& range, std::size_t count) {
    // Chunk by chunk, as they were mapped.
    for (std::size_t i = 0; i < count; ++i) memory_->unmap(range.at + i * chunk_, chunk_);
    memory_->unreserve(range.at, count * chunk_);
    memory_->forget(range.event);
    counters_.chunks_unmapped += count;
  }

  void discard(Range& range) {
    for (std::size_t i = 0; i < range.chunks.size(); ++i)
      memory_->unmap(range.at + i * chunk_, chunk_);
    memory_->unreserve(range.at, range.chunks.size() * chunk_);
    spare_.insert(spare_.end(), range.chunks.begin(), range.chunks.end());
  }

  void wait(Event event) {
    if (memory_->passed(event)) return;
    ++counters_.event_waits;
    memory_->wait(event);
  }

  std::unique_ptr<Memory> memory_;
  std::size_t chunk_, limit_;
  std::mutex mutex_;
  std::unordered_map<Address, Range> live_;
  std::list<Range> freed_;  // oldest first, still mapped
  std::list<Range> waiting_;  // their chunks are others', their mappings wait for their events
  std::map<std::pair<Stream, std::size_t>, std::vector<Place>> by_size_;
  std::vector<Handle> spare_;  // mapped nowhere that is not waiting
  Counters counters_{};
  std::string error_;
};

std::unique_ptr<Allocator> make(bool cuda, int device, std::size_t chunk, std::size_t limit) {
  std::unique_ptr<Memory> memory;
  if (cuda) {
    memory = std::make_unique<CudaMemory>(device);
  } else {
    memory = std::make_unique<PosixMemory>();
  }
  std::size_t unit = memory->granularity();
  chunk = (chunk + unit - 1) / unit * unit;
  return std::make_unique<Allocator>(std::move(memory), chunk, limit);
}

std::mutex torch_mutex;
std::size_t torch_chunk = 0, torch_limit = 0;
std::map<int, std::unique_ptr<Allocator>>& torch_allocators() {
  // Never destroyed: torch frees memory until the very end of the process.
  static auto* allocators = new std::map<int, std::unique_ptr<Allocator>>();
  return *allocators;
}

Allocator& torch_allocator(int device) {
  std::lock_guard<std::mutex> lock(torch_mutex);
  auto& allocator = torch_allocators()[device];
  if (!allocator) allocator = make(true, device, torch_chunk, torch_limit);
  return *allocator;
}

}  // namespace

extern "C" {

void* chunked_create(int cuda, int device, std::size_t chunk, std::size_t limit, char* error,
                     std::size_t length) {
  try {
    return make(cuda != 0, device, chunk, limit).release();
  } catch (const std::exception& caught) {
    std::strncpy(error, caught.what(), length - 1);
    error[length - 1] = '\0';
    return nullptr;
  }
}

void chunked_destroy(void* allocator) { delete static_cast<Allocator*>(allocator); }

void* chunked_malloc(void* allocator, std::size_t bytes, void* stream) {
  auto* self = static_cast<Allocator*>(allocator);
  try {
    return self->malloc(bytes, stream);
  } catch (const std::exception& caught) {
    self->failed(caught.what());
    return nullptr;
  }
}

int chunked_free(void* allocator, void* pointer, void* stream) {
  auto* self = static_cast<Allocator*>(allocator);
  try {
    self->free(pointer, stream);
    return 0;
  } catch (const std::exception& caught) {
    self->failed(caught.what());
    return 1;
  }
}

void chunked_trim(void* allocator) { static_cast<Allocator*>(allocator)->trim(); }
void chunked_hold(void* allocator, int held) { static_cast<Allocator*>(allocator)->hold(held != 0); }
const char* chunked_error(void* allocator) { return static_cast<Allocator*>(allocator)->error(); }
std::size_t chunked_resident(void* allocator) {
  return static_cast<Allocator*>(allocator)->resident();
}
void chunked_counters(void* allocator, Counters* counters) {
  *counters = static_cast<Allocator*>(allocator)->counters();
}

// What torch's CUDAPluggableAllocator calls.

void torch_configure(std::size_t chunk, std::size_t limit) {
  std::lock_guard<std::mutex> lock(torch_mutex);
  torch_chunk = chunk;
  torch_limit = limit;
}

void* torch_malloc(std::size_t bytes, int device, void* stream) {
  // Torch takes a null pointer for memory; an exception it turns into a RuntimeError.
  return torch_allocator(device).malloc(bytes, stream);
}

void torch_free(void* pointer, std::size_t, int device, void* stream) {
  try {
    torch_allocator(device).free(pointer, stream);
  } catch (const std::exception&) {  // a free cannot fail: at worst the range is never reused
  }
}

void torch_counters(int device, Counters* counters) { *counters = torch_allocator(device).counters(); }
}
