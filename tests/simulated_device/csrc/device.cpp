// The device that torch sees: PrivateUse1 over host memory. Its memory, streams, events and random
// numbers; kernels.cpp has its kernels, and operators.cpp those that are no kernel of the CPU's.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstring>

#include "tensors.hpp"

namespace sim {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;

bool present = false;
thread_local DeviceIndex device_now = 0;
thread_local int64_t streams_now[kDevices] = {};
thread_local int kernel_device = -1;
thread_local int kernels_deep = 0;

// ---- memory

void free_device(void* pointer) {
  for (int i = 0; i < kDevices; ++i)
    if (device_memory(i).owns(pointer)) return device_memory(i).free(pointer);
}

c10::DataPtr take_memory(size_t nbytes, int device, Device label) {
  TORCH_CHECK(present, "No simulated device is present: ask for the fixture that makes it so.");
  try {
    void* made = device_memory(device).allocate(nbytes, current_agent(device));
    return {made, made, &free_device, label};
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  }
}

void record_use(const c10::DataPtr& pointer, c10::Stream stream) {
  device_memory(stream.device_index())
      .record_stream(pointer.get(), agent_of(stream.device_index(), stream.id()));
}

void resize_storage(const Storage& storage, size_t nbytes) {
  const int device = storage.device().index();
  const c10::OptionalDeviceGuard guard(sim_device(device));
  c10::DataPtr memory = nbytes ? take_memory(nbytes, device, sim_device(device))
                               : c10::DataPtr(nullptr, sim_device(device));
  if (const size_t kept = std::min(nbytes, storage.nbytes()); kept && storage.data()) {
    const int agent = current_agent(device);
    const auto from = reinterpret_cast<uintptr_t>(storage.data());
    const auto to = reinterpret_cast<uintptr_t>(memory.get());
    order().queued(agent, "resize_",
                   {{from, from + kept, false, nullptr}, {to, to + kept, true, nullptr}});
    order().run(agent, [=] {
      std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), kept);
    });
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(nbytes);
}

namespace {

void free_pinned(void* pointer) { pinned_memory().free(pointer); }

c10::CachingAllocator::Stat stat_of(const Count& count) {
  return {count.current, count.peak, count.total_added, count.total_taken};
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    return take_memory(nbytes, device_now, sim_device(device_now));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int i = 0; i < kDevices; ++i) device_memory(i).empty_cache();
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_use(pointer, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const Statistics& from = device_memory(device).statistics;
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocation[0] = stat_of(from.allocations);
    stats.segment[0] = stat_of(from.segments);
    stats.allocated_bytes[0] = stat_of(from.allocated_bytes);
    stats.reserved_bytes[0] = stat_of(from.reserved_bytes);
    stats.active_bytes[0] = stat_of(from.active_bytes);
    stats.requested_bytes[0] = stat_of(from.requested_bytes);
    stats.num_alloc_retries = from.retries;
    stats.num_ooms = from.refusals;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    each_count(device, [](Count& count) { count.total_added = count.total_taken = 0; });
  }
  void resetPeakStats(DeviceIndex device) override {
    each_count(device, [](Count& count) { count.peak = count.current; });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    const DeviceMemory& memory = device_memory(device);
    return {memory.total_bytes - memory.statistics.reserved_bytes.current, memory.total_bytes};
  }
  static void each_count(int device, const std::function<void(Count&)>& call) {
    Statistics& all = device_memory(device).statistics;
    for (Count* count : {&all.allocations, &all.segments, &all.allocated_bytes,
                         &all.reserved_bytes, &all.active_bytes, &all.requested_bytes})
      call(*count);
  }
};
Allocator device_allocator;
REGISTER_ALLOCATOR(kSim, &device_allocator)

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    TORCH_CHECK(present, "Cannot access accelerator device when none is available.");
    void* made = pinned_memory().allocate(nbytes);
    return {made, made, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    pinned_memory().record_stream(pointer, agent_of(stream.device_index(), stream.id()));
    return true;
  }
  void empty_cache() override { pinned_memory().empty_cache(); }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator pinned_allocator;
REGISTER_HOST_ALLOCATOR(kSim, &pinned_allocator)

// The CPU's allocator, but for kernels of the device.
struct KernelAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (kernel_device < 0 || nbytes == 0) return cpu->allocate(nbytes);
    return take_memory(nbytes, kernel_device, Device(c10::kCPU));
  }
  // Of memory from either: whoever asks for it does not say which.
  static void free_any(void* pointer) {
    for (int i = 0; i < kDevices; ++i)
      if (device_memory(i).owns(pointer)) return device_memory(i).free(pointer);
    cpu->raw_deleter()(pointer);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
  bool is_simple_data_ptr(const c10::DataPtr& pointer) const override {
    return cpu->is_simple_data_ptr(pointer);
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
  static inline c10::Allocator* cpu = nullptr;
};
const bool kernel_allocator_set = [] {
  KernelAllocator::cpu = c10::GetCPUAllocator();
  c10::SetCPUAllocator(new KernelAllocator(), 1);
  return true;
}();

// ---- streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return sim_device(device_now); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "invalid device ordinal ", int(device.index()),
                ": the simulated devices are 0 to ", kDevices - 1);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index() && device.index() < kDevices) device_now = device.index();
  }
  static c10::Stream stream(Device device, int64_t id) {
    const auto index = device.has_index() ? device.index() : device_now;
    return c10::Stream(c10::Stream::UNSAFE, sim_device(index), id);
  }
  c10::Stream getStream(Device device) const override {
    const auto index = device.has_index() ? device.index() : device_now;
    return stream(device, streams_now[index]);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(Device device, int) const override {
    static std::atomic<uint32_t> next[kDevices];
    const auto index = device.has_index() ? device.index() : device_now;
    TORCH_CHECK(index < kDevices, "invalid device ordinal ", int(index));
    return stream(device, 1 + next[index]++ % kPooled);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const c10::Stream before = getStream(to.device());
    streams_now[to.device_index()] = to.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(agent(stream)));
  }
  // Always all of them: the autograd engine makes its threads at the first backward pass.
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static int agent(const c10::Stream& stream) {
    return agent_of(stream.device_index(), stream.id());
  }
  static Event* event(void* handle) { return static_cast<Event*>(handle); }

  void record(void** handle, const c10::Stream& stream, const DeviceIndex device,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(device < 0 || device == stream.device_index(), "Event device ", int(device),
                " does not match recording stream's device ", int(stream.device_index()), ".");
    if (!*handle) *handle = new Event();
    order().record(*event(*handle), agent(stream), flag == c10::EventFlag::BACKEND_DEFAULT);
  }
  void block(void* handle, const c10::Stream& stream) const override {
    if (handle) order().wait(*event(handle), agent(stream));
  }
  bool queryEvent(void* handle) const override { return !handle || order().query(*event(handle)); }
  void destroyEvent(void* handle, const DeviceIndex) const noexcept override {
    delete event(handle);
  }
  void synchronizeEvent(void* handle) const override {
    if (handle) order().synchronize(*event(handle));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    order().synchronize_stream(agent(stream));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    order().synchronize_device(device < 0 ? device_now : device);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return order().query_stream(agent(stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    if (pointer.get()) record_use(pointer, stream);
  }
  double elapsedTime(void* first, void* last, const DeviceIndex) const override {
    TORCH_CHECK(first && last, "Both events must be recorded before calculating elapsed time.");
    return order().elapsed_ms(*event(first), *event(last));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- random numbers

// Seed and offset, as CUDA's: each operation that draws gets a generator of its own, whatever the
// order in which they run.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index)
      : GeneratorImpl(Device(kSim, index), DispatchKeySet(DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t value) override {
    seed_ = value;
    offset_ = 0;
  }
  void set_offset(uint64_t value) override { offset_ = value; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "RNG state is wrong size");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  at::Generator next() {  // splitmix64 of seed and offset
    uint64_t z = seed_ + 0x9e3779b97f4a7c15ULL * ++offset_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return at::detail::createCPUGenerator(z ^ (z >> 31));
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

Generator& impl_of(const at::Generator& generator) {
  return *static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
}

}  // namespace

const at::Generator& default_generator(DeviceIndex index) {
  static const std::array<at::Generator, kDevices>* all = [] {
    auto* made = new std::array<at::Generator, kDevices>();
    for (int i = 0; i < kDevices; ++i) (*made)[i] = at::make_generator<Generator>(i);
    return made;
  }();
  return all->at(index < 0 ? device_now : index);
}

at::Generator next_generator(const at::Generator& generator) { return impl_of(generator).next(); }

c10::Allocator* allocator() { return &device_allocator; }

// ---- what torch asks of an accelerator

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return present; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return present ? kDevices : 0; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(sim_device(index)); }
  DeviceIndex getCurrentDevice() const override { return device_now; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const DeviceIndex before = device_now;
    if (index >= 0) setCurrentDevice(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* pointer) const override { return pinned_memory().owns(pointer); }
  Device getDeviceFromPtr(void* pointer) const override {
    for (int i = 0; i < kDevices; ++i)
      if (device_memory(i).owns(pointer)) return sim_device(i);
    TORCH_CHECK(false, "The specified pointer resides on host memory.");
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? device_now : index);
  }
  void init() const override {}
  void resizePrivateUse1Bytes(const Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};
Hooks hooks;
const bool hooks_registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

}  // namespace

int current_device() { return device_now; }
int current_agent(int device) { return agent_of(device, streams_now[device]); }

std::pair<uint64_t, uint64_t> generator_state(int device) {
  const Generator& from = impl_of(default_generator(static_cast<DeviceIndex>(device)));
  return {from.current_seed(), from.get_offset()};
}

void set_generator_state(int device, uint64_t seed, uint64_t offset) {
  Generator& into = impl_of(default_generator(static_cast<DeviceIndex>(device)));
  into.set_current_seed(seed);
  into.set_offset(offset);
}

bool in_kernel() { return kernels_deep > 0; }

}  // namespace sim
