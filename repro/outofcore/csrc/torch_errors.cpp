// The one unit that needs torch's headers.
#include "torch_errors.hpp"

#include <c10/util/Exception.h>

namespace chunked {

void throw_torch_out_of_memory(const std::string& message) {
  throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, message);
}

}  // namespace chunked
