// The allocator for ctypes, and for torch.cuda.memory.CUDAPluggableAllocator.
#include <array>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "chunked_allocator.hpp"
#include "torch_errors.hpp"

#define API extern "C" __attribute__((visibility("default")))

namespace {

using namespace chunked;

enum Status { OK = 0, INVALID_ARGUMENT = 1, OUT_OF_MEMORY = 2, FAILED = 3 };

thread_local std::string last_error;

template <class Function>
int guarded(Function function) noexcept {
  try {
    function();
    return OK;
  } catch (const InvalidArgument& error) {
    last_error = error.what();
    return INVALID_ARGUMENT;
  } catch (const OutOfMemory& error) {
    last_error = error.what();
    return OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    last_error = error.what();
    return FAILED;
  }
}

// One allocator for each CUDA device. It is never destroyed: tensors may be freed after statics are.
struct Plugged {
  std::mutex mutex;
  bool configured = false;
  std::uint64_t chunk_bytes = 0, small_bytes = 0, limit_bytes = 0;
  std::array<std::unique_ptr<Allocator>, 64> allocators;

  static Plugged& get() {
    static Plugged* plugged = new Plugged;
    return *plugged;
  }

  Allocator& of(int device) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (device < 0 || device >= static_cast<int>(allocators.size())) {
      throw InvalidArgument("there is no device " + std::to_string(device));
    }
    if (!configured) throw InvalidArgument("ca_plug_configure comes before the first allocation");
    auto& allocator = allocators[device];
    if (!allocator) {
      allocator = std::make_unique<Allocator>(make_cuda_backend(device), chunk_bytes, small_bytes,
                                              limit_bytes);
    }
    return *allocator;
  }

  std::vector<Allocator*> all() {
    const std::lock_guard<std::mutex> lock(mutex);
    std::vector<Allocator*> made;
    for (auto& allocator : allocators) {
      if (allocator) made.push_back(allocator.get());
    }
    return made;
  }
};

Allocator& self(void* allocator) { return *static_cast<Allocator*>(allocator); }

}  // namespace

API const char* ca_last_error() { return last_error.c_str(); }

API int ca_create(const char* backend, std::uint64_t chunk_bytes, std::uint64_t small_bytes,
                  std::uint64_t limit_bytes, int device, void** allocator) {
  return guarded([&] {
    std::unique_ptr<Backend> made;
    if (std::strcmp(backend, "cuda") == 0) {
      made = make_cuda_backend(device);
    } else if (std::strcmp(backend, "posix") == 0) {
      made = make_posix_backend();
    } else {
      throw InvalidArgument(std::string("there is no backend \"") + backend +
                            "\": choose cuda or posix");
    }
    *allocator = new Allocator(std::move(made), chunk_bytes, small_bytes, limit_bytes);
  });
}

API void ca_destroy(void* allocator) { delete &self(allocator); }

API int ca_malloc(void* allocator, std::uint64_t bytes, std::uint64_t stream, void** pointer) {
  return guarded([&] { *pointer = self(allocator).malloc(bytes, stream); });
}

API int ca_free(void* allocator, void* pointer, std::uint64_t stream) {
  return guarded([&] { self(allocator).free(pointer, stream); });
}

API int ca_record_stream(void* allocator, void* pointer, std::uint64_t stream) {
  return guarded([&] { self(allocator).record_stream(pointer, stream); });
}

API int ca_trim(void* allocator) {
  return guarded([&] { self(allocator).trim(); });
}

API int ca_counters(void* allocator, Counters* counters) {
  return guarded([&] { *counters = self(allocator).counters(); });
}

// For tests: whether the events of a stream of a "posix" allocator complete.
API int ca_posix_set_complete(void* allocator, std::uint64_t stream, int complete) {
  return guarded([&] {
    self(allocator).with_backend([&](Backend& backend) {
      auto* posix = dynamic_cast<PosixBackend*>(&backend);
      if (!posix) throw InvalidArgument("only the backend \"posix\" has pretended streams");
      posix->set_complete(stream, complete != 0);
    });
  });
}

API int ca_plug_configure(std::uint64_t chunk_bytes, std::uint64_t small_bytes,
                          std::uint64_t limit_bytes) {
  return guarded([&] {
    Plugged& plugged = Plugged::get();
    const std::lock_guard<std::mutex> lock(plugged.mutex);
    if (plugged.configured) {
      throw InvalidArgument("the allocator is installed already, and stays for this process");
    }
    plugged.configured = true;
    plugged.chunk_bytes = chunk_bytes;
    plugged.small_bytes = small_bytes;
    plugged.limit_bytes = limit_bytes;
  });
}

API int ca_plug_counters(int device, Counters* counters) {
  return guarded([&] { *counters = Plugged::get().of(device).counters(); });
}

API int ca_plug_trim(int device) {
  return guarded([&] { Plugged::get().of(device).trim(); });
}

// torch takes what this returns for memory, null or not. It has to throw, then, where there is none:
// torch makes a RuntimeError of a std::exception.
API void* ca_plug_malloc(std::size_t bytes, int device, void* stream) {
  try {
    return Plugged::get().of(device).malloc(bytes, reinterpret_cast<Stream>(stream));
  } catch (const OutOfMemory& error) {
    throw_torch_out_of_memory(error.what());
  }
}

// Called from destructors, and as late as when the interpreter has gone: it does not throw. A block
// that cannot be freed stays live, and is counted as a failure.
API void ca_plug_free(void* pointer, std::size_t, int device, void* stream) {
  guarded([&] { Plugged::get().of(device).free(pointer, reinterpret_cast<Stream>(stream)); });
}

// torch does not say which device the memory is of.
API void ca_plug_record_stream(void* pointer, void* stream) {
  if (!pointer) return;
  for (Allocator* allocator : Plugged::get().all()) {
    if (allocator->owns(pointer)) {
      allocator->record_stream(pointer, reinterpret_cast<Stream>(stream));
      return;
    }
  }
}

// torch.cuda.empty_cache
API void ca_plug_empty_cache() {
  for (Allocator* allocator : Plugged::get().all()) allocator->trim();
}
