// The device that torch sees: PrivateUse1 over host memory. Every operator that torch does not
// compose of others runs by the CPU's kernel, on tensors of the CPU that share the memory; what the
// kernel allocates comes from the device's allocator. Who read and wrote what is told to `order()`.
#include "backend.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <unordered_map>

#include "memory.hpp"

namespace sim {

bool present = false;

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Storage;
using torch::jit::Stack;

constexpr auto kSim = c10::DeviceType::PrivateUse1;

thread_local DeviceIndex device_now = 0;
thread_local int64_t streams_now[kDevices] = {};
thread_local int kernel_device = -1;  // whose memory a kernel on this thread allocates
thread_local int kernels_deep = 0;

Device sim_device(int index) { return Device(kSim, static_cast<DeviceIndex>(index)); }

[[noreturn]] void refuse(const OutOfMemory& error) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
}

// ---- memory

void free_device(void* pointer) {
  for (int i = 0; i < kDevices; ++i)
    if (device_memory(i).owns(pointer)) return device_memory(i).free(pointer);
}

void free_pinned(void* pointer) { pinned_memory().free(pointer); }

c10::DataPtr take_memory(size_t nbytes, int device, Device label) {
  TORCH_CHECK(present, "No simulated device is present: ask for the fixture that makes it so.");
  try {
    void* made = device_memory(device).allocate(nbytes, current_agent(device));
    return {made, made, &free_device, label};
  } catch (const OutOfMemory& error) {
    refuse(error);
  }
}

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
    device_memory(stream.device_index())
        .record_stream(pointer.get(), agent_of(stream.device_index(), stream.id()));
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
Allocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator)

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
    if (pointer.get()) allocator.recordStream(pointer, stream);
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

const at::Generator& default_generator(DeviceIndex index) {
  static const std::array<at::Generator, kDevices>* all = [] {
    auto* made = new std::array<at::Generator, kDevices>();
    for (int i = 0; i < kDevices; ++i) (*made)[i] = at::make_generator<Generator>(i);
    return made;
  }();
  return all->at(index < 0 ? device_now : index);
}

Generator& impl_of(const at::Generator& generator) {
  return *static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
}

// ---- tensors of the CPU over the device's memory, and back

// Shares memory without owning it. Tensors of one storage become tensors of one storage.
struct Aliases {
  std::vector<std::pair<c10::StorageImpl*, Storage>> storages;

  Tensor of(const Tensor& tensor) {
    c10::StorageImpl* key = tensor.storage().unsafeGetStorageImpl();
    const Storage* storage = nullptr;
    for (const auto& [known, made] : storages)
      if (known == key) storage = &made;
    if (!storage) {
      storages.emplace_back(
          key, Storage(c10::make_intrusive<c10::StorageImpl>(
                   c10::StorageImpl::use_byte_size_t(), key->nbytes(),
                   c10::DataPtr(key->mutable_data(), Device(c10::kCPU)), c10::GetCPUAllocator(),
                   true)));
      storage = &storages.back().second;
    }
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        Storage(*storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    if (tensor.is_conj()) made._set_conj(true);
    if (tensor.is_neg()) made._set_neg(true);
    return made;
  }
};

Tensor on_cpu(const Tensor& tensor) { return Aliases().of(tensor); }

Tensor over(Storage storage, const Tensor& like) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(DispatchKey::PrivateUse1), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// The memory of a storage of the CPU, for the device.
c10::DataPtr steal(const Storage& from, int device) {
  c10::DataPtr given = from.set_data_ptr(c10::DataPtr(nullptr, Device(c10::kCPU)));
  void* pointer = given.get();
  if (!pointer) return {nullptr, sim_device(device)};
  if (given.get_deleter() == &free_device)
    return {pointer, given.release_context(), &free_device, sim_device(device)};
  c10::DataPtr made = take_memory(from.nbytes(), device, sim_device(device));
  std::memcpy(made.get(), pointer, from.nbytes());
  return made;
}

Span span_of(const Tensor& tensor, bool write) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (tensor.numel() == 0 || !begin) return {0, 0, write, nullptr};
  if (tensor.is_non_overlapping_and_dense()) return {begin, begin + tensor.nbytes(), write, nullptr};
  const auto item = static_cast<int64_t>(tensor.itemsize());
  Layout layout{{}, {}, item};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 1 || tensor.stride(d) == 0) continue;
    layout.sizes.push_back(tensor.size(d));
    layout.strides.push_back(tensor.stride(d) * item);
    last += (tensor.size(d) - 1) * tensor.stride(d) * item;
  }
  return {begin, begin + last + item, write, std::make_shared<const Layout>(std::move(layout))};
}

// ---- kernels

// Below autograd, autocast and whatever Python has put around operators.
struct Below {
  Below() : excluded(DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot}) |
                     c10::autocast_dispatch_keyset) {
    ++kernels_deep;
  }
  ~Below() { --kernels_deep; }
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard excluded;
};

struct AllocateOn {
  explicit AllocateOn(int device) : before(kernel_device) { kernel_device = device; }
  ~AllocateOn() { kernel_device = before; }
  int before;
};

// Lets operators without an argument for it draw from another generator than the CPU's own.
struct DrawFrom {
  explicit DrawFrom(const at::Generator& other) {
    if (!other.defined()) return;
    const at::Generator& own = at::detail::getDefaultCPUGenerator();
    saved = own.clone();
    copy(own, other);
  }
  ~DrawFrom() {
    if (saved.defined()) copy(at::detail::getDefaultCPUGenerator(), saved);
  }
  static void copy(const at::Generator& into, const at::Generator& from) {
    auto& target = *static_cast<at::CPUGeneratorImpl*>(into.unsafeGetGeneratorImpl());
    auto& source = *static_cast<at::CPUGeneratorImpl*>(from.unsafeGetGeneratorImpl());
    target.set_engine(source.engine());
    target.set_next_float_normal_sample(source.next_float_normal_sample());
    target.set_next_double_normal_sample(source.next_double_normal_sample());
  }
  at::Generator saved;
};

// What is known of an operator from its schema.
struct Known {
  std::string name;
  std::vector<bool> writes;
  std::vector<int> returned;    // for each result, the argument that it is; -1 for a new one
  bool view = false;            // makes tensors of storages that it was given
  bool blocks = false;          // its result's size, or a number, comes from values on the device
  bool fresh = false;           // makes tensors
  bool draws_unasked = false;   // random numbers, without an argument for the generator
  bool statistics = false;      // writes running statistics, which the schema does not say
  bool indexes = false;         // takes index tensors of the CPU, and masks
  int training = -1;            // position of that argument
};

const Known& known(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* all = new std::unordered_map<const c10::FunctionSchema*, Known>();
  const c10::FunctionSchema& schema = op.schema();
  std::lock_guard<std::mutex> guard(mutex);
  auto [it, made] = all->try_emplace(&schema);
  Known& info = it->second;
  if (!made) return info;
  info.name = schema.name();
  const std::string bare = info.name.substr(info.name.find("::") + 2);
  bool generator = false, writes_any = false, shares = false;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const bool write = argument.alias_info() && argument.alias_info()->isWrite();
    info.writes.push_back(write);
    writes_any |= write;
    generator |= argument.name() == "generator";
    if (argument.name() == "training" || argument.name() == "train")
      info.training = static_cast<int>(i);
  }
  for (const c10::Argument& result : schema.returns()) {
    int which = -1;
    if (const auto* alias_info = result.alias_info()) {
      shares |= !alias_info->isWrite();
      for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto* given = schema.arguments()[i].alias_info();
        if (given && alias_info->isWrite() && given->beforeSets() == alias_info->beforeSets())
          which = static_cast<int>(i);
      }
    }
    info.returned.push_back(which);
    info.fresh |= which < 0 && result.type()->kind() != c10::TypeKind::NoneType;
  }
  info.view = shares && !writes_any;
  info.draws_unasked = op.hasTag(at::Tag::nondeterministic_seeded) && !generator;
  info.statistics = bare == "native_batch_norm" || bare == "batch_norm_update_stats";
  info.indexes = bare == "index" || bare == "_unsafe_index" ||
                 bare.find("index_put") != std::string::npos;
  info.blocks = (op.hasTag(at::Tag::data_dependent_output) ||
                 op.hasTag(at::Tag::dynamic_output_shape)) &&
                !info.indexes;  // those only where they are given masks
  return info;
}

// One call of an operator: its arguments for the CPU's kernel, and what it reads and writes.
struct Call {
  const c10::OperatorHandle& op;
  const Known& info;
  int device = -1;
  Aliases aliases;
  std::vector<Tensor> given, replaced;  // tensors of the device, and those of the CPU over them
  std::vector<Span> spans;
  std::vector<bool> written;
  std::string host_copy;  // why the host waits, where an argument makes it
  Stack arguments;
  at::Generator drawn;

  Call(const c10::OperatorHandle& op, const Known& info) : op(op), info(info) {}

  void find_device(const Stack& stack) {
    const auto see = [&](const Tensor& tensor) {
      if (!tensor.defined() || tensor.device().type() != kSim) return;
      TORCH_CHECK(device < 0 || device == tensor.device().index(), info.name,
                  ": Expected all tensors to be on the same device, but found at least two "
                  "devices, sim:", device, " and sim:", int(tensor.device().index()), "!");
      device = tensor.device().index();
    };
    for (const IValue& value : stack) each_tensor(value, see);
    for (const IValue& value : stack)
      if (device < 0 && value.isDevice() && value.toDevice().type() == kSim)
        device = value.toDevice().has_index() ? value.toDevice().index() : device_now;
    if (device < 0) device = device_now;
  }

  static void each_tensor(const IValue& value, const std::function<void(const Tensor&)>& call) {
    if (value.isTensor()) {
      call(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) call(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector())
        if (tensor) call(*tensor);
    }
  }

  Tensor replace(const Tensor& tensor, bool write) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cpu()) {
      // A number may come from the host, which reads it now; all else has to be here already.
      if (tensor.dim() == 0 && !info.indexes) return order().deferred() ? tensor.clone() : tensor;
      TORCH_CHECK(info.indexes && !write, info.name,
                  ": Expected all tensors to be on the same device, but found at least two "
                  "devices, sim:", device, " and cpu!");
      host_copy = "copied from pageable memory";
      return order().deferred() ? tensor.clone() : tensor;
    }
    TORCH_CHECK(tensor.device().type() == kSim, info.name, ": a tensor of ", tensor.device(),
                " among those of a simulated device");
    if (info.indexes && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte) &&
        !given.empty())
      host_copy = "counted a mask";
    Tensor made = aliases.of(tensor);
    given.push_back(tensor);
    replaced.push_back(made);
    written.push_back(write);
    if (!info.view) spans.push_back(span_of(tensor, write));
    return made;
  }

  void convert(const Stack& stack) {
    find_device(stack);
    for (size_t i = 0; i < stack.size(); ++i) {
      const IValue& value = stack[i];
      bool write = info.writes[i];
      if (info.statistics && op.schema().arguments()[i].name().rfind("running_", 0) == 0)
        write = info.training < 0 || stack[info.training].toBool();
      if (value.isTensor()) {
        arguments.emplace_back(replace(value.toTensor(), write));
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector()) list.push_back(replace(tensor, write));
        arguments.emplace_back(std::move(list));
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const auto& tensor : value.toOptionalTensorVector())
          list.push_back(tensor ? std::optional<Tensor>(replace(*tensor, write)) : std::nullopt);
        arguments.emplace_back(std::move(list));
      } else if (value.isDevice()) {
        arguments.emplace_back(Device(c10::kCPU));
      } else if (op.schema().arguments()[i].name() == "generator") {
        arguments.emplace_back(draw(value));
      } else {
        arguments.push_back(value);
      }
    }
    if (info.draws_unasked) drawn = impl_of(default_generator(device)).next();
  }

  at::Generator draw(const IValue& value) const {
    const at::Generator from = value.isNone() ? default_generator(device) : value.toGenerator();
    TORCH_CHECK(from.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
                from.device().type(), "'");
    return impl_of(from).next();
  }

  // Runs the CPU's kernel.
  static Stack kernel(const c10::OperatorHandle& op, Stack arguments, const at::Generator& drawn) {
    Below below;
    DrawFrom draw(drawn);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &arguments);
    return arguments;
  }

  // ---- results

  std::vector<std::pair<c10::StorageImpl*, Storage>> adopted;
  std::vector<Span> made;

  // A tensor of the device for one that the CPU's kernel returned.
  Tensor adopt(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (size_t i = 0; i < given.size(); ++i)
      if (tensor.is_same(replaced[i])) return given[i];
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    for (size_t i = 0; i < given.size(); ++i)
      if (storage == replaced[i].storage().unsafeGetStorageImpl())
        return over(Storage(given[i].storage()), tensor);
    for (const auto& [known, mine] : adopted)
      if (known == storage) return over(Storage(mine), tensor);
    Storage mine(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage->nbytes(), steal(tensor.storage(), device),
        &allocator, true));
    adopted.emplace_back(storage, mine);
    Tensor result = over(mine, tensor);
    made.push_back(span_of(result, true));
    return result;
  }

  IValue adopt(const IValue& value) {
    if (value.isTensor()) return adopt(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(adopt(tensor));
      return list;
    }
    return value;
  }

  // Gives arguments that the kernel has resized, such as an empty `out`, their new size.
  void take_over_sizes() {
    for (size_t i = 0; i < given.size(); ++i) {
      if (!written[i]) continue;
      const Tensor& now = replaced[i];
      const Storage& mine = given[i].storage();
      if (now.storage().data() != mine.data()) {
        const size_t nbytes = now.storage().nbytes();
        c10::DataPtr memory = steal(now.storage(), device);
        mine.set_data_ptr_noswap(std::move(memory));
        mine.set_nbytes(nbytes);
        made.push_back(span_of(given[i], true));
      }
      if (now.sizes() != given[i].sizes() || now.strides() != given[i].strides())
        given[i].unsafeGetTensorImpl()->set_sizes_and_strides(now.sizes(), now.strides());
    }
  }

  Stack run_now() {
    const auto operation =
        info.view ? nullptr : order().queued(current_agent(device), info.name, spans);
    Stack results;
    {
      AllocateOn on(device);
      results = kernel(op, std::move(arguments), drawn);
      for (IValue& value : results) value = adopt(value);
      take_over_sizes();
    }
    if (operation) order().wrote(operation, made);
    return results;
  }

  // What the operator would return, from its kernel without values; nothing where it has none.
  std::optional<Stack> foretell(const Stack& stack) {
    const auto meta = [](const Tensor& tensor) {
      if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
      return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    };
    Stack values;
    metas.clear();
    const auto remember = [&](const Tensor& tensor) {
      Tensor made_meta = meta(tensor);
      if (tensor.defined() && tensor.device().type() == kSim) metas.push_back(made_meta);
      return made_meta;
    };
    try {
      Below below;
      for (const IValue& value : stack) {
        if (value.isTensor()) {
          values.emplace_back(remember(value.toTensor()));
        } else if (value.isTensorList()) {
          c10::List<Tensor> list;
          for (const Tensor& tensor : value.toTensorVector()) list.push_back(remember(tensor));
          values.emplace_back(std::move(list));
        } else if (value.isOptionalTensorList()) {
          c10::List<std::optional<Tensor>> list;
          for (const auto& tensor : value.toOptionalTensorVector())
            list.push_back(tensor ? std::optional<Tensor>(remember(*tensor)) : std::nullopt);
          values.emplace_back(std::move(list));
        } else if (value.isDevice()) {
          values.emplace_back(Device(c10::kMeta));
        } else if (value.isGenerator()) {
          values.emplace_back();
        } else {
          values.push_back(value);
        }
      }
      op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &values);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    return values;
  }
  std::vector<Tensor> metas;  // for each of `given`

  Tensor prepare(const Tensor& meta) {
    if (!meta.defined()) return meta;
    for (size_t i = 0; i < metas.size(); ++i)
      if (meta.is_same(metas[i])) {
        if (written[i] && meta.sizes() != given[i].sizes()) {
          at::native::resize_(given[i], meta.sizes(), std::nullopt);
          replaced[i] = on_cpu(given[i]);
          resized = true;
        }
        return given[i];
      }
    return at::empty_strided(meta.sizes(), meta.strides(),
                             meta.options().device(sim_device(device)));
  }
  bool resized = false;

  // Puts the operator into its stream's queue, with memory for its results.
  std::optional<Stack> run_later(const Stack& stack) {
    std::optional<Stack> results;
    if (info.fresh || info.name.find("_out") != std::string::npos || has_out()) {
      results = foretell(stack);
      if (!results) return std::nullopt;
      Below below;
      for (IValue& value : *results) {
        if (value.isTensor()) {
          value = prepare(value.toTensor());
        } else if (value.isTensorList()) {
          c10::List<Tensor> list;
          for (const Tensor& tensor : value.toTensorVector()) list.push_back(prepare(tensor));
          value = list;
        }
      }
      if (resized) return std::nullopt;
    } else {
      results.emplace();
      for (int which : info.returned) results->push_back(stack[which]);
    }
    std::vector<std::pair<size_t, Tensor>> targets;  // where new results go, by their number
    size_t number = 0;
    for (const IValue& value : *results)
      each_tensor(value, [&](const Tensor& tensor) {
        bool new_one = tensor.defined() && tensor.device().type() == kSim;
        for (const Tensor& old : given) new_one = new_one && !tensor.is_same(old);
        if (new_one) {
          targets.emplace_back(number, on_cpu(tensor));
          spans.push_back(span_of(tensor, true));
        }
        ++number;
      });
    const int agent = current_agent(device);
    order().queued(agent, info.name, spans);
    order().run(agent, [op = op, arguments = std::move(arguments), drawn = drawn,
                        targets = std::move(targets)]() mutable {
      Stack found = kernel(op, std::move(arguments), drawn);
      std::vector<Tensor> flat;
      for (const IValue& value : found)
        each_tensor(value, [&](const Tensor& tensor) { flat.push_back(tensor); });
      Below below;
      for (auto& [at, target] : targets) target.copy_(flat.at(at));
    });
    return results;
  }

  bool has_out() const {
    for (const c10::Argument& argument : op.schema().arguments())
      if (argument.is_out()) return true;
    return false;
  }
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const Known& info = known(op);
  const size_t count = op.schema().arguments().size();
  const Stack given(stack->end() - count, stack->end());
  Call call(op, info);
  call.convert(given);
  const c10::OptionalDeviceGuard guard(sim_device(call.device));
  const int agent = current_agent(call.device);
  if (info.blocks || !call.host_copy.empty()) {
    order().block(info.blocks ? "read the result of " + info.name : call.host_copy, agent);
    if (info.blocks || call.host_copy == "counted a mask") order().settle(agent);
  }
  std::optional<Stack> results;
  if (order().deferred() && !info.view && !info.blocks) results = call.run_later(given);
  if (!results) {
    // What has no foretold size runs now, as a stream that is ahead of the others may.
    if (order().deferred() && !info.view) order().drain(agent);
    if (call.resized) {
      Call again(op, info);
      again.convert(given);
      results = again.run_now();
    } else {
      results = call.run_now();
    }
  }
  torch::jit::drop(*stack, count);
  for (IValue& value : *results) stack->push_back(std::move(value));
}

// ---- operators of their own

c10::OptionalDeviceGuard on(std::optional<Device> device) {
  return c10::OptionalDeviceGuard(device && device->has_index() ? device : std::nullopt);
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin || !*pin, "Only dense CPU tensors can be pinned");
  const auto guard = on(device);
  return at::detail::empty_generic(size, &allocator, DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin || !*pin, "Only dense CPU tensors can be pinned");
  const auto guard = on(device);
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
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

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == sizes && !format) return self;
  const size_t needed = at::detail::computeStorageNbytesContiguous(
      sizes, self.itemsize(), self.storage_offset());
  if (self.storage().nbytes() < needed) resize_storage(self.storage(), needed);
  impl->set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  TORCH_CHECK(storage.device() == self.device(), "Attempted to set the storage of a tensor on device \"",
              self.device(), "\" to a storage on different device \"", storage.device(), "\"");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.empty() && !sizes.empty()) {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  }
  const size_t needed = self.numel() == 0 ? 0
                                          : at::detail::computeStorageNbytes(
                                                self.sizes(), self.strides(), self.itemsize(),
                                                self.storage_offset());
  if (self.storage().nbytes() < needed) resize_storage(self.storage(), needed);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}

Tensor& set_whole(Tensor& self, Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, c10::fromIntArrayRefSlow({count}), {});
}

Tensor& set_nothing(Tensor& self) {
  Storage none(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()), &allocator,
      true));
  return set_storage(self, std::move(none), 0, c10::fromIntArrayRefSlow({0}), {});
}

void record_stream(Tensor& self, at::Stream stream) {
  if (self.storage().data()) allocator.recordStream(self.storage().data_ptr(), stream);
}

// ---- copies

void launch_copy(int agent, const Tensor& from, const Tensor& to) {
  order().queued(agent, "aten::copy_", {span_of(from, false), span_of(to, true)});
  order().run(agent, [from = on_cpu(from), to = on_cpu(to)] {
    Below below;
    to.copy_(from);
  });
}

bool same_bytes(const Tensor& one, const Tensor& other) {
  if (one.scalar_type() != other.scalar_type() || !one.sizes().equals(other.sizes())) return false;
  if (one.is_conj() != other.is_conj() || one.is_neg() != other.is_neg()) return false;
  if (one.is_contiguous() && other.is_contiguous()) return true;
  return one.strides().equals(other.strides()) && one.is_non_overlapping_and_dense();
}

void copy_between_devices(const Tensor& from, const Tensor& to) {
  // On the source's stream, which waits for the target's and is waited for by it, as CUDA's.
  const int source = current_agent(from.device().index());
  const int target = current_agent(to.device().index());
  Event ready, done;
  order().record(ready, target, false);
  order().wait(ready, source);
  launch_copy(source, from, to);
  order().record(done, source, false);
  order().wait(done, target);
}

void copy_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool inwards = from.is_cpu();
  const Tensor& there = inwards ? to : from;
  const Tensor& here = inwards ? from : to;
  const int agent = current_agent(there.device().index());
  const bool pinned = pinned_memory().owns(here.const_data_ptr());
  if (pinned && non_blocking) {
    pinned_memory().record_stream(here.const_data_ptr(), agent);
    launch_copy(agent, from, to);
    return;
  }
  if (inwards && non_blocking) {
    // The host goes on once its memory is staged; that the copy has ended is not promised.
    order().block("copied from pageable memory", agent);
    const Tensor staged = order().deferred() ? from.clone() : from;
    order().queued(agent, "aten::copy_", {span_of(to, true)});
    order().run(agent, [staged, to = on_cpu(to)] {
      Below below;
      to.copy_(staged);
    });
    return;
  }
  order().block(inwards ? "copied to the device" : "copied from the device", agent);
  if (pinned) launch_copy(agent, from, to);
  else {
    order().queued(agent, "aten::copy_", {span_of(there, inwards)});
    order().run(agent, [from = on_cpu(from), to = on_cpu(to)] {
      Below below;
      to.copy_(from);
    });
  }
  order().settle(agent);
}

Tensor copy_from(const Tensor& given, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const c10::OptionalDeviceGuard guard(to.device().type() == kSim ? to.device() : given.device());
  const Tensor from = given.sizes().equals(to.sizes()) ? given : given.expand_as(to);
  if (from.device() == to.device()) {
    launch_copy(current_agent(to.device().index()), from, to);
    return to;
  }
  if (same_bytes(from, to)) {
    if (!from.is_cpu() && !to.is_cpu()) copy_between_devices(from, to);
    else copy_host(from, to, non_blocking);
    return to;
  }
  // As CUDA does: one side becomes contiguous and of the other's type first; on the device if the
  // copy is not to block, else on the host. What is made on the host is not pinned.
  const bool convert_source =
      (!from.is_cpu() && !to.is_cpu()) || from.is_cpu() == !non_blocking;
  Tensor source, target;
  if (convert_source) {
    target = to.is_contiguous() ? to : at::empty_like(to, at::MemoryFormat::Contiguous);
    source = from.to(to.scalar_type()).contiguous();
  } else {
    const bool fits = to.is_contiguous() && from.scalar_type() == to.scalar_type();
    target = fits ? to : at::empty_like(to, to.options().dtype(from.scalar_type()),
                                        at::MemoryFormat::Contiguous);
    source = from.contiguous();
  }
  target.copy_(source.resolve_conj().resolve_neg(), non_blocking);
  if (!target.is_same(to)) to.copy_(target, non_blocking);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

// ---- what torch asks of an accelerator

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

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  // Else torch would look for a convolution of the backend's own.
  for (const char* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // Else these would run as their variants with `out`, which some do not take well.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && op &&
        op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) &&
        op->hasKernelForDispatchKey(DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(DispatchKey::PrivateUse1))
      m.impl(c10::toString(name).c_str(),
             torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// The copy minds these bits itself; to resolve them first is a copy again.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

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
