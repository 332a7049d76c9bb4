// What ran before what: streams, events and the host as vector clocks, races between accesses to
// memory, and queues of work that wait until somebody needs their results. Knows nothing of torch.
//
// An agent is the host (0) or a stream. Work is ordered after other work of its stream, after
// events that its stream waited for, and after all that the host knew to be done when it was
// queued. Nothing else is promised, so nothing else counts: an event is complete for the host only
// once the host has waited for it, or for something that was itself ordered after it.
//
// All host threads are one agent: what one of them waited for, the others are taken to know.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace sim {

constexpr int kDevices = 2;
constexpr int kPooled = 32;  // streams of a device beside its default one, handed out in turns
constexpr int kStreams = 1 + kPooled;
constexpr int kHost = 0;
constexpr int kAgents = 1 + kDevices * kStreams;

inline int agent_of(int device, int64_t stream) {
  return 1 + device * kStreams + static_cast<int>(stream);
}
inline int device_of(int agent) { return (agent - 1) / kStreams; }
inline int64_t stream_of(int agent) { return (agent - 1) % kStreams; }

// For each agent, how many of its operations are known to have ended.
using Clock = std::array<uint32_t, kAgents>;

using Lock = std::lock_guard<std::recursive_mutex>;

struct Operation {
  std::string name;
  std::string within;  // the node of the backward pass, if any
  int agent;
  uint32_t time;
  int stack;
};

// Where the elements lie, for tensors that leave bytes out between them.
struct Layout {
  std::vector<int64_t> sizes, strides;  // strides in bytes
  int64_t element_bytes;
};

struct Span {
  uintptr_t begin, end;
  bool write;
  std::shared_ptr<const Layout> layout;  // none where every byte counts
};

// A life of a block of memory, from its allocation to its being freed.
struct Life {
  int allocated_by;  // agent, or kHost for pinned memory
  int allocated_at;  // stack
  int freed_at = -1;
};

struct Access {
  Span span;
  std::shared_ptr<const Operation> operation;
  std::shared_ptr<const Life> life;
};

struct Race {
  std::shared_ptr<const Operation> first, second;
  bool first_writes, second_writes;
  size_t bytes;
  std::shared_ptr<const Life> first_life, second_life;  // differ where memory was handed out anew
};

// A place where the host waits for the device.
struct Block {
  std::string what;
  int agent;
  int stack;
};

// One recording of an event.
struct Mark {
  int agent;
  uint32_t time;
  Clock clock;
  bool timed;
  bool ran = false;
  double seconds = 0;
  double virtual_s = 0;
};

struct Event {
  std::shared_ptr<Mark> mark;
  int queries = 0;
};

enum class Mode { kEager, kDeferred };

// Whether an operation is a kernel, or a copy between the host and the device.
enum class Over { kMemory, kLinkIn, kLinkOut };

// What operations take by the virtual clock: a kernel so much and its bytes at the memory's rate,
// a copy so much and its bytes at the rate of its direction. The host takes no time.
struct Costs {
  double kernel_s, memory_rate, copy_s, in_rate, out_rate;
};

class Order {
 public:
  // Set by the module: where Python is now, and the backward pass's present node.
  std::function<int()> stack = [] { return -1; };
  std::function<std::string()> within = [] { return std::string(); };

  std::recursive_mutex mutex;

  // Finds where Python is for all that this thread does while it lives. To be made before a lock
  // is taken under which the host may wait: finding it takes the interpreter's own lock.
  class Here {
   public:
    Here();
    ~Here();

   private:
    int before_;
  };

  // ---- work of streams

  // Says that an operation is queued; returns it for `wrote`. Its accesses are checked.
  std::shared_ptr<const Operation> queued(
      int agent, std::string name, const std::vector<Span>& spans, Over over = Over::kMemory);
  // Says what an operation that is queued writes besides, such as results made while it ran.
  void wrote(const std::shared_ptr<const Operation>& operation, const std::vector<Span>& spans);
  // Runs work at once, or puts it into the stream's queue.
  void run(int agent, std::function<void()> work);
  bool deferred() const { return mode_ == Mode::kDeferred; }

  // Starts to defer: work runs as late as the waits allow, or with a seed in some order that they
  // allow. Ends it by running what is left.
  void defer(bool random, uint64_t seed);
  void end_deferring();
  // Runs what a stream has queued, and what that waits for. Tells the host nothing.
  void drain(int agent);

  // ---- events and waits

  void record(Event& event, int agent, bool timed);
  void wait(const Event& event, int agent);
  bool query(Event& event);
  void synchronize(Event& event);
  void synchronize_stream(int agent);
  void synchronize_device(int device);
  bool query_stream(int agent);
  double elapsed_ms(const Event& first, const Event& last) const;
  bool known(const Mark& mark) const { return host_clock()[mark.agent] >= mark.time; }

  // Notes that the host is about to wait for a stream within an operation, such as a copy.
  // Raises std::runtime_error where that is forbidden.
  void block(const std::string& what, int agent);
  // Waits for a stream without a note.
  void settle(int agent);

  // ---- virtual time

  // Starts a virtual clock at 0, or ends it. Each agent has its own time: an operation begins once
  // its stream and the host have come so far, and moves its stream on by what it takes; waits move
  // whoever waits on to what is waited for.
  void keep_time(std::optional<Costs> costs);
  bool keeps_time() const { return costs_.has_value(); }
  double virtual_s(int agent) const { return times_[agent]; }

  // ---- memory

  void allocated(uintptr_t begin, uintptr_t end, int agent);
  void freed(uintptr_t begin);
  void returned(uintptr_t begin, uintptr_t end);  // to the system
  // The host reads or writes memory that streams may use.
  void touched_by_host(const std::string& name, const std::vector<Span>& spans);

  // ---- findings

  bool checking() const { return checking_; }
  void check(bool on);
  std::vector<Race> races;
  uint64_t races_seen = 0;  // `races` keeps one of each kind and pair of places
  std::vector<Block> blocks;
  bool forbid_blocks = false;  // but for waits for an event, as torch's sync debug mode
  int patience = 1000;  // queries after which an event completes all the same

 private:
  struct Task {
    std::function<void()> work;
    std::shared_ptr<Mark> waits_for, marks;
  };
  struct Memory {
    uintptr_t end;
    std::shared_ptr<Life> life;
    std::vector<Access> accesses;
  };

  Clock& clock(int agent) { return clocks_[agent]; }
  const Clock& host_clock() const { return clocks_[kHost]; }
  static void join(Clock& into, const Clock& from);
  int place() const;
  void step(int agent);
  double begin(int agent);
  void reach(int agent, double seconds) { times_[agent] = std::max(times_[agent], seconds); }
  void run_until(const std::shared_ptr<Mark>& mark);
  void complete(const std::shared_ptr<Mark>& mark);
  void perturb();
  Memory& memory_at(const Span& span);
  void check_access(const std::shared_ptr<const Operation>& operation, const Span& span,
                    const Clock& now);
  void note_access(const std::shared_ptr<const Operation>& operation, const Span& span);
  void forget_known(Memory& memory);

  Mode mode_ = Mode::kEager;
  bool random_ = false, checking_ = false;
  std::mt19937_64 random_engine_;
  std::array<Clock, kAgents> clocks_{};
  std::array<std::deque<Task>, kAgents> queues_;
  std::map<uintptr_t, Memory> memories_;
  std::optional<Costs> costs_;
  std::array<double, kAgents> times_{};  // all 0 where no virtual time is kept
};

Order& order();
bool overlap(const Span& one, const Span& other);

}  // namespace sim
