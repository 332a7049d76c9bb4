// What the chunked allocator needs of a device: physical chunks, address ranges, and events.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>

namespace chunked {

using Address = std::uint64_t;
using Stream = std::uint64_t;  // a CUstream, or on a CPU any number
using Chunk = std::uint64_t;   // a CUmemGenericAllocationHandle, or an offset into a file
using Event = void*;

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct InvalidArgument : Error {
  using Error::Error;
};
struct OutOfMemory : Error {
  using Error::Error;
};

// Calls come from one thread at a time, each between enter and leave. They throw Error;
// create_chunk throws OutOfMemory where the device has no more.
class Backend {
 public:
  virtual ~Backend() = default;

  // Makes the device current on this thread, and gives what leave needs to undo it.
  virtual void* enter() { return nullptr; }
  virtual void leave(void*) noexcept {}

  // Sizes of chunks are multiples of it.
  virtual std::uint64_t granularity() = 0;
  // Bytes of physical memory behind all chunks, as the system counts them.
  virtual std::uint64_t physical_bytes() = 0;

  virtual Chunk create_chunk(std::uint64_t bytes) = 0;
  virtual void release_chunk(Chunk, std::uint64_t bytes) = 0;

  virtual Address reserve(std::uint64_t bytes) = 0;
  virtual void unreserve(Address, std::uint64_t bytes) = 0;
  virtual void map(Address, std::uint64_t bytes, Chunk) = 0;
  virtual void allow_access(Address, std::uint64_t bytes) = 0;
  // Takes one or more whole chunks out of a range.
  virtual void unmap(Address, std::uint64_t bytes) = 0;

  // An event completes when all that was put on its stream before it has run.
  virtual Event record(Stream) = 0;
  virtual bool complete(Event) = 0;
  virtual void wait(Event) = 0;
  virtual void discard(Event) noexcept = 0;
};

// The CUDA driver's virtual memory management.
std::unique_ptr<Backend> make_cuda_backend(int device);

// Host memory, by mapping extents of a file that lies in memory; streams and events are pretended.
class PosixBackend : public Backend {
 public:
  // Holds a stream's events back from now on, or completes all that it has.
  virtual void set_complete(Stream, bool complete) = 0;
};
std::unique_ptr<PosixBackend> make_posix_backend();

}  // namespace chunked
