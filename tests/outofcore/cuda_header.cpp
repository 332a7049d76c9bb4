// Does not compile where csrc/cuda_driver.hpp is not what the real cuda.h says.
#include "cuda_driver.hpp"

#include <cuda.h>

#include "declared.hpp"

namespace ours = chunked::cuda;

#define NAME(symbol) #symbol
#define SYMBOL(name) NAME(name)  // what cuda.h makes of a name
#define FUNCTION(name, symbol, parameters)                                                 \
  static_assert(std::string_view(SYMBOL(name)) == symbol, "the symbol of " symbol);        \
  static_assert(declared::same<decltype(&::name), ours::CUresult (*) parameters>::value, \
                "the parameters of " symbol);
// In their namespace, where the parameters' types are found.
namespace chunked::cuda {
CUDA_DRIVER_FUNCTIONS(FUNCTION)
}

#define VALUE(name) static_assert(ours::name == static_cast<long long>(::name), #name)
VALUE(CUDA_SUCCESS);
VALUE(CUDA_ERROR_OUT_OF_MEMORY);
VALUE(CUDA_ERROR_NOT_READY);
VALUE(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
VALUE(CU_MEM_ALLOCATION_TYPE_PINNED);
VALUE(CU_MEM_LOCATION_TYPE_DEVICE);
VALUE(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
VALUE(CU_MEM_ALLOC_GRANULARITY_MINIMUM);
VALUE(CU_EVENT_DISABLE_TIMING);

#define TYPE(name) static_assert(declared::alike<ours::name, ::name>(), #name)
TYPE(CUresult);
TYPE(CUdevice);
TYPE(CUdeviceptr);
TYPE(CUmemGenericAllocationHandle);
TYPE(CUcontext);
TYPE(CUstream);
TYPE(CUevent);
TYPE(CUmemLocation);
TYPE(CUmemAllocationProp);
TYPE(CUmemAccessDesc);

#define FIELD(type, field)                                                                   \
  static_assert(offsetof(ours::type, field) == offsetof(::type, field), #type "." #field);   \
  static_assert(sizeof(ours::type::field) == sizeof(::type::field), #type "." #field " size")
FIELD(CUmemLocation, type);
FIELD(CUmemLocation, id);
FIELD(CUmemAllocationProp, type);
FIELD(CUmemAllocationProp, requestedHandleTypes);
FIELD(CUmemAllocationProp, location);
FIELD(CUmemAllocationProp, win32HandleMetaData);
FIELD(CUmemAllocationProp, allocFlags);
FIELD(CUmemAccessDesc, location);
FIELD(CUmemAccessDesc, flags);
