// Operators that are no kernel of the CPU's: memory, views, storages, and copies between host and
// devices, which do what those of CUDA do.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "tensors.hpp"

namespace sim {
namespace {

using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;

// ---- memory and views

c10::OptionalDeviceGuard on(std::optional<Device> device) {
  return c10::OptionalDeviceGuard(device && device->has_index() ? device : std::nullopt);
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin || !*pin, "Only dense CPU tensors can be pinned");
  const auto guard = on(device);
  return at::detail::empty_generic(size, allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin || !*pin, "Only dense CPU tensors can be pinned");
  const auto guard = on(device);
  return at::detail::empty_strided_generic(size, stride, allocator(),
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
      c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()), allocator(),
      true));
  return set_storage(self, std::move(none), 0, c10::fromIntArrayRefSlow({0}), {});
}

void record_stream(Tensor& self, at::Stream stream) {
  if (self.storage().data()) record_use(self.storage().data_ptr(), stream);
}

// ---- copies

Over over(const Tensor& from, const Tensor& to) {
  return from.is_cpu() ? Over::kLinkIn : to.is_cpu() ? Over::kLinkOut : Over::kMemory;
}

void launch_copy(int agent, const Tensor& from, const Tensor& to) {
  order().queued(agent, "aten::copy_", {span_of(from, false), span_of(to, true)}, over(from, to));
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
    order().queued(agent, "aten::copy_", {span_of(to, true)}, over(from, to));
    order().run(agent, [staged, to = on_cpu(to)] {
      Below below;
      to.copy_(staged);
    });
    return;
  }
  order().block(inwards ? "copied to the device" : "copied from the device", agent);
  if (pinned) launch_copy(agent, from, to);
  else {
    order().queued(agent, "aten::copy_", {span_of(there, inwards)}, over(from, to));
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
}

// The copy minds these bits itself; to resolve them first is a copy again.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace sim
