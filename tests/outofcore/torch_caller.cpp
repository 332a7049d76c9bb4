// Calls the allocator as torch does, and tells what it throws.
#include <c10/util/Exception.h>

#include <cstring>

extern "C" int call_malloc(void* (*plug)(std::size_t, int, void*), std::size_t bytes, char* message,
                           std::size_t room) {
  const auto tell = [&](const char* text) { std::strncpy(message, text, room - 1); };
  try {
    plug(bytes, 0, nullptr);
    return 0;
  } catch (const c10::OutOfMemoryError& error) {
    tell(error.what_without_backtrace());
    return 2;
  } catch (const std::exception& error) {
    tell(error.what());
    return 1;
  }
}
