// Errors that torch knows.
#pragma once

#include <string>

namespace chunked {

// Throws c10::OutOfMemoryError, which torch makes a torch.OutOfMemoryError of, and which it catches
// itself where it can do with less memory, as among cuDNN's algorithms.
[[noreturn]] void throw_torch_out_of_memory(const std::string& message);

}  // namespace chunked
