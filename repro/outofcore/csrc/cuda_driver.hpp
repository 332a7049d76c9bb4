// The part of the CUDA driver's interface that is used here, declared by hand, so that no toolkit is
// needed; names, numbers and layouts are those of cuda.h (CUDA 11 to 13, 64 bits).
#pragma once

#include <cstddef>

namespace chunked::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;

constexpr CUresult CUDA_SUCCESS = 0;
constexpr CUresult CUDA_ERROR_OUT_OF_MEMORY = 2;
constexpr CUresult CUDA_ERROR_NOT_READY = 600;

constexpr int CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102;
constexpr int CU_MEM_ALLOCATION_TYPE_PINNED = 1;
constexpr int CU_MEM_LOCATION_TYPE_DEVICE = 1;
constexpr int CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3;
constexpr int CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0;
constexpr unsigned int CU_EVENT_DISABLE_TIMING = 2;

struct CUmemLocation {
  int type;
  int id;
};

struct CUmemAllocationProp {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};
static_assert(sizeof(CUmemAllocationProp) == 32 && offsetof(CUmemAllocationProp, allocFlags) == 24);

struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};
static_assert(sizeof(CUmemAccessDesc) == 12 && offsetof(CUmemAccessDesc, flags) == 8);

// Each function: its name, the symbol that the library has it under, and its parameters. Streams
// are torch's, whose default is the legacy one: no symbols that end in _ptsz.
#define CUDA_DRIVER_FUNCTIONS(X)                                                             \
  X(cuInit, "cuInit", (unsigned int))                                                        \
  X(cuGetErrorString, "cuGetErrorString", (CUresult, const char**))                          \
  X(cuDeviceGet, "cuDeviceGet", (CUdevice*, int))                                            \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, CUdevice))                     \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice))            \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice))                   \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext*))                                        \
  X(cuCtxSetCurrent, "cuCtxSetCurrent", (CUcontext))                                         \
  X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",                          \
    (std::size_t*, const CUmemAllocationProp*, int))                                         \
  X(cuMemCreate, "cuMemCreate",                                                              \
    (CUmemGenericAllocationHandle*, std::size_t, const CUmemAllocationProp*,                 \
     unsigned long long))                                                                    \
  X(cuMemRelease, "cuMemRelease", (CUmemGenericAllocationHandle))                            \
  X(cuMemAddressReserve, "cuMemAddressReserve",                                              \
    (CUdeviceptr*, std::size_t, std::size_t, CUdeviceptr, unsigned long long))               \
  X(cuMemAddressFree, "cuMemAddressFree", (CUdeviceptr, std::size_t))                        \
  X(cuMemMap, "cuMemMap",                                                                    \
    (CUdeviceptr, std::size_t, std::size_t, CUmemGenericAllocationHandle,                    \
     unsigned long long))                                                                    \
  X(cuMemUnmap, "cuMemUnmap", (CUdeviceptr, std::size_t))                                    \
  X(cuMemSetAccess, "cuMemSetAccess",                                                        \
    (CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t))                         \
  X(cuEventCreate, "cuEventCreate", (CUevent*, unsigned int))                                \
  X(cuEventDestroy, "cuEventDestroy_v2", (CUevent))                                          \
  X(cuEventRecord, "cuEventRecord", (CUevent, CUstream))                                     \
  X(cuEventQuery, "cuEventQuery", (CUevent))                                                 \
  X(cuEventSynchronize, "cuEventSynchronize", (CUevent))

}  // namespace chunked::cuda
