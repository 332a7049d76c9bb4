// What the parts of the device share: its memory and tensors, and how its kernels run.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>
#include <vector>

#include "backend.hpp"
#include "memory.hpp"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

extern thread_local c10::DeviceIndex device_now;
extern thread_local int64_t streams_now[kDevices];
extern thread_local int kernel_device;  // whose memory a kernel on this thread allocates; or -1
extern thread_local int kernels_deep;

inline c10::Device sim_device(int index) {
  return c10::Device(kSim, static_cast<c10::DeviceIndex>(index));
}

// ---- memory

c10::Allocator* allocator();
void free_device(void* pointer);
// Memory of a device, labelled as of another where a kernel of the CPU asks for it.
c10::DataPtr take_memory(size_t nbytes, int device, c10::Device label);
void record_use(const c10::DataPtr& pointer, c10::Stream stream);
void resize_storage(const c10::Storage& storage, size_t nbytes);

// ---- random numbers

const at::Generator& default_generator(c10::DeviceIndex index);
// A generator of the CPU for one operation.
at::Generator next_generator(const at::Generator& generator);

// ---- tensors

// Shares memory without owning it. Tensors of one storage become tensors of one storage.
struct Aliases {
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages;
  at::Tensor of(const at::Tensor& tensor);
};
at::Tensor on_cpu(const at::Tensor& tensor);
// What an operation reads or writes of a tensor.
Span span_of(const at::Tensor& tensor, bool write);

// ---- kernels

// Below autograd, autocast and whatever Python has put around operators.
struct Below {
  Below()
      : excluded(c10::DispatchKeySet({c10::DispatchKey::Python,
                                      c10::DispatchKey::PythonTLSSnapshot}) |
                 c10::autocast_dispatch_keyset) {
    ++kernels_deep;
  }
  ~Below() { --kernels_deep; }
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard excluded;
};

}  // namespace sim
