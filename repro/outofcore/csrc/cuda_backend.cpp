// Chunks are the driver's physical allocations. That one may be mapped at two addresses at once is
// "virtual aliasing" in the CUDA programming guide: what a kernel or copy writes through one address
// is seen through another by those that start after it has ended, which stream order gives.
#include <dlfcn.h>

#include <string>
#include <vector>

#include "backend.hpp"
#include "cuda_driver.hpp"

namespace chunked {
namespace {

using namespace cuda;

struct Driver {
#define DECLARE(name, symbol, parameters) CUresult(*name) parameters = nullptr;
  CUDA_DRIVER_FUNCTIONS(DECLARE)
#undef DECLARE

  Driver() {
    // The library stays open for as long as the process lives, as torch's own does.
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
      throw Error(std::string("there is no CUDA driver (") + dlerror() +
                  "): install one, or use the backend \"posix\"");
    }
#define RESOLVE(name, symbol, parameters)                                                   \
  name = reinterpret_cast<CUresult(*) parameters>(dlsym(library, symbol));                  \
  if (!name) {                                                                              \
    throw Error("the CUDA driver has no " symbol ": virtual memory needs CUDA 11 or newer"); \
  }
    CUDA_DRIVER_FUNCTIONS(RESOLVE)
#undef RESOLVE
    check(cuInit(0), "cuInit");
  }

  void check(CUresult result, const char* call) const {
    if (result == CUDA_SUCCESS) return;
    const char* text = nullptr;
    cuGetErrorString(result, &text);
    const std::string message = std::string(call) + ": " + (text ? text : "unknown error") + " (" +
                                std::to_string(result) + ")";
    if (result == CUDA_ERROR_OUT_OF_MEMORY) throw OutOfMemory(message);
    throw Error(message);
  }

  static const Driver& get() {
    static const Driver driver;  // where this throws, the next call tries again
    return driver;
  }
};

class Cuda final : public Backend {
 public:
  explicit Cuda(int ordinal) : driver_(Driver::get()) {
    driver_.check(driver_.cuDeviceGet(&device_, ordinal), "cuDeviceGet");
    int supported = 0;
    driver_.check(
        driver_.cuDeviceGetAttribute(
            &supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device_),
        "cuDeviceGetAttribute");
    if (!supported) {
      throw Error("device " + std::to_string(ordinal) +
                  " has no virtual memory management: use torch's own allocator on it");
    }
    property_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    property_.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
    // torch and the CUDA runtime use the primary context, too.
    driver_.check(driver_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  }

  ~Cuda() override {
    void* before = nullptr;
    try {
      before = enter();
    } catch (const Error&) {
      return;  // the driver has shut down, and took everything with it
    }
    for (CUevent event : spare_) driver_.cuEventDestroy(event);
    leave(before);
    driver_.cuDevicePrimaryCtxRelease(device_);
  }

  void* enter() override {
    CUcontext before = nullptr;
    driver_.check(driver_.cuCtxGetCurrent(&before), "cuCtxGetCurrent");
    if (before != context_) driver_.check(driver_.cuCtxSetCurrent(context_), "cuCtxSetCurrent");
    return before;
  }

  void leave(void* before) noexcept override {
    if (before != context_) driver_.cuCtxSetCurrent(static_cast<CUcontext>(before));
  }

  std::uint64_t granularity() override {
    std::size_t bytes = 0;
    driver_.check(driver_.cuMemGetAllocationGranularity(&bytes, &property_,
                                                        CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                  "cuMemGetAllocationGranularity");
    return bytes;
  }

  std::uint64_t physical_bytes() override { return physical_; }

  Chunk create_chunk(std::uint64_t bytes) override {
    CUmemGenericAllocationHandle handle = 0;
    driver_.check(driver_.cuMemCreate(&handle, bytes, &property_, 0), "cuMemCreate");
    physical_ += bytes;
    return handle;
  }

  void release_chunk(Chunk chunk, std::uint64_t bytes) override {
    driver_.check(driver_.cuMemRelease(chunk), "cuMemRelease");
    physical_ -= bytes;
  }

  Address reserve(std::uint64_t bytes) override {
    CUdeviceptr address = 0;
    driver_.check(driver_.cuMemAddressReserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
    return address;
  }

  void unreserve(Address address, std::uint64_t bytes) override {
    driver_.check(driver_.cuMemAddressFree(address, bytes), "cuMemAddressFree");
  }

  void map(Address address, std::uint64_t bytes, Chunk chunk) override {
    driver_.check(driver_.cuMemMap(address, bytes, 0, chunk, 0), "cuMemMap");
  }

  void allow_access(Address address, std::uint64_t bytes) override {
    const CUmemAccessDesc access{property_.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    driver_.check(driver_.cuMemSetAccess(address, bytes, &access, 1), "cuMemSetAccess");
  }

  void unmap(Address address, std::uint64_t bytes) override {
    driver_.check(driver_.cuMemUnmap(address, bytes), "cuMemUnmap");
  }

  Event record(Stream stream) override {
    CUevent event = nullptr;
    if (spare_.empty()) {
      driver_.check(driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    } else {
      event = spare_.back();
      spare_.pop_back();
    }
    const CUresult result = driver_.cuEventRecord(event, reinterpret_cast<CUstream>(stream));
    if (result != CUDA_SUCCESS) discard(event);
    driver_.check(result, "cuEventRecord");
    return event;
  }

  bool complete(Event event) override {
    const CUresult result = driver_.cuEventQuery(static_cast<CUevent>(event));
    if (result == CUDA_ERROR_NOT_READY) return false;
    driver_.check(result, "cuEventQuery");
    return true;
  }

  void wait(Event event) override {
    driver_.check(driver_.cuEventSynchronize(static_cast<CUevent>(event)), "cuEventSynchronize");
  }

  void discard(Event event) noexcept override { spare_.push_back(static_cast<CUevent>(event)); }

 private:
  const Driver& driver_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUmemAllocationProp property_{};
  std::uint64_t physical_ = 0;
  std::vector<CUevent> spare_;
};

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(int device) { return std::make_unique<Cuda>(device); }

}  // namespace chunked
