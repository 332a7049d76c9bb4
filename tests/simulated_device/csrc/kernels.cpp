// Operators by the CPU's kernels, on tensors of the CPU that share the device's memory. What a kernel
// allocates comes from the device's allocator; who read and wrote what is told to `order()`.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

#include "tensors.hpp"

namespace sim {

using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Storage;
using torch::jit::Stack;

// ---- tensors of the CPU over the device's memory, and back

Tensor Aliases::of(const Tensor& tensor) {
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

Tensor on_cpu(const Tensor& tensor) { return Aliases().of(tensor); }

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

namespace {

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

// ---- kernels

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
    if (info.draws_unasked) drawn = next_generator(default_generator(device));
  }

  at::Generator draw(const IValue& value) const {
    const at::Generator from = value.isNone() ? default_generator(device) : value.toGenerator();
    TORCH_CHECK(from.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
                from.device().type(), "'");
    return next_generator(from);
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
        allocator(), true));
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

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
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

}  // namespace
}  // namespace sim
