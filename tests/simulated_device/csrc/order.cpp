#include "order.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace sim {

namespace {

constexpr int64_t kMostPieces = 1 << 20;  // beyond them two layouts are taken to overlap
constexpr const char* kEventWait = "waited for an event";
constexpr size_t kManyAccesses = 32;

thread_local int here = -2;  // -2: to be found when asked for

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double bytes_of(const Span& span) { return static_cast<double>(span.end - span.begin); }

// Contiguous pieces of memory, ascending; empty where there are too many.
std::vector<std::pair<uintptr_t, uintptr_t>> pieces(const Span& span) {
  if (!span.layout) return {{span.begin, span.end}};
  const Layout& layout = *span.layout;
  int64_t count = 1;
  for (int64_t size : layout.sizes) count *= size;
  if (count > kMostPieces) return {};
  std::vector<std::pair<uintptr_t, uintptr_t>> found;
  found.reserve(count);
  std::vector<int64_t> index(layout.sizes.size(), 0);
  for (int64_t i = 0; i < count; ++i) {
    uintptr_t at = span.begin;
    for (size_t d = 0; d < index.size(); ++d) at += index[d] * layout.strides[d];
    found.emplace_back(at, at + layout.element_bytes);
    for (int d = static_cast<int>(index.size()) - 1; d >= 0; --d) {
      if (++index[d] < layout.sizes[d]) break;
      index[d] = 0;
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

// The accesses to a part of some memory, cut to it.
static std::vector<Access> within_of(const std::vector<Access>& all, uintptr_t begin, uintptr_t end) {
  std::vector<Access> found;
  for (const Access& access : all) {
    if (access.span.end <= begin || access.span.begin >= end) continue;
    found.push_back(access);
    Span& span = found.back().span;
    if (span.begin >= begin && span.end <= end) continue;
    span.layout = nullptr;  // what is cut counts as a whole
    span.begin = std::max(span.begin, begin);
    span.end = std::min(span.end, end);
  }
  return found;
}

Order& order() {
  static Order* only = new Order();  // never destroyed: memory is freed until the very end
  return *only;
}

bool overlap(const Span& one, const Span& other) {
  if (one.end <= other.begin || other.end <= one.begin) return false;
  if (!one.layout && !other.layout) return true;
  auto first = pieces(one), second = pieces(other);
  if (first.empty() || second.empty()) return true;
  size_t i = 0, j = 0;
  while (i < first.size() && j < second.size()) {
    if (first[i].second <= second[j].first) ++i;
    else if (second[j].second <= first[i].first) ++j;
    else return true;
  }
  return false;
}

void Order::join(Clock& into, const Clock& from) {
  for (int i = 0; i < kAgents; ++i) into[i] = std::max(into[i], from[i]);
}

Order::Here::Here() : before_(here) {
  if (here == -2) here = order().stack();
}

Order::Here::~Here() { here = before_; }

int Order::place() const { return here == -2 ? stack() : here; }

// ---- work of streams

std::shared_ptr<const Operation> Order::queued(
    int agent, std::string name, const std::vector<Span>& spans, Over over) {
  // Before the lock: finding it takes the interpreter's, which whoever holds that one waits for.
  const int at = checking_ ? place() : -1;
  Lock lock(mutex);
  perturb();
  Clock& mine = clock(agent);
  join(mine, host_clock());
  const uint32_t time = ++mine[agent];
  if (costs_) {
    double bytes = 0;
    for (const Span& span : spans)
      bytes = over == Over::kMemory ? bytes + bytes_of(span) : std::max(bytes, bytes_of(span));
    const Costs& c = *costs_;
    const double rate = over == Over::kMemory ? c.memory_rate
                        : over == Over::kLinkIn ? c.in_rate
                                                : c.out_rate;
    times_[agent] = begin(agent) + (over == Over::kMemory ? c.kernel_s : c.copy_s) + bytes / rate;
  }
  auto operation = std::make_shared<const Operation>(
      Operation{std::move(name), checking_ ? within() : "", agent, time, at});
  if (checking_) {
    for (const Span& span : spans) check_access(operation, span, mine);
    for (const Span& span : spans) note_access(operation, span);
  }
  return operation;
}

void Order::wrote(
    const std::shared_ptr<const Operation>& operation, const std::vector<Span>& spans) {
  Lock lock(mutex);
  if (costs_)
    for (const Span& span : spans) times_[operation->agent] += bytes_of(span) / costs_->memory_rate;
  if (!checking_) return;
  for (const Span& span : spans) {
    check_access(operation, span, clock(operation->agent));
    note_access(operation, span);
  }
}

void Order::run(int agent, std::function<void()> work) {
  {
    Lock lock(mutex);
    if (deferred()) {
      queues_[agent].push_back({std::move(work), nullptr, nullptr});
      return;
    }
  }
  work();
}

void Order::defer(bool random, uint64_t seed) {
  Lock lock(mutex);
  if (deferred()) throw std::runtime_error("work is being deferred already");
  if (costs_) throw std::runtime_error("virtual time is kept, by which work cannot be deferred");
  mode_ = Mode::kDeferred;
  random_ = random;
  random_engine_.seed(seed);
}

void Order::end_deferring() {
  Lock lock(mutex);
  for (int agent = 1; agent < kAgents; ++agent) drain(agent);
  mode_ = Mode::kEager;
  random_ = false;
}

void Order::drain(int agent) {
  Lock lock(mutex);
  while (!queues_[agent].empty()) step(agent);
}

// Runs the first task of a queue, after what it waits for.
void Order::step(int agent) {
  Task task = std::move(queues_[agent].front());
  queues_[agent].pop_front();
  if (task.waits_for) run_until(task.waits_for);
  if (task.marks) {
    task.marks->ran = true;
    task.marks->seconds = now_s();
  }
  if (task.work) task.work();
}

void Order::run_until(const std::shared_ptr<Mark>& mark) {
  // A stream can wait only for what was recorded before, so that this ends.
  while (!mark->ran && !queues_[mark->agent].empty()) step(mark->agent);
}

void Order::complete(const std::shared_ptr<Mark>& mark) {
  run_until(mark);
  join(clock(kHost), mark->clock);
  if (costs_) reach(kHost, mark->virtual_s);
}

// Where the order is random, runs some of the work that may run now.
void Order::perturb() {
  if (!random_) return;
  for (int left = static_cast<int>(random_engine_() % 4); left > 0; --left) {
    std::vector<int> ready;
    for (int agent = 1; agent < kAgents; ++agent) {
      if (queues_[agent].empty()) continue;
      const auto& waits_for = queues_[agent].front().waits_for;
      if (!waits_for || waits_for->ran) ready.push_back(agent);
    }
    if (ready.empty()) return;
    step(ready[random_engine_() % ready.size()]);
  }
}

// ---- events and waits

void Order::record(Event& event, int agent, bool timed) {
  Lock lock(mutex);
  perturb();
  Clock& mine = clock(agent);
  join(mine, host_clock());
  const uint32_t time = ++mine[agent];
  event.mark = std::make_shared<Mark>(Mark{agent, time, mine, timed});
  event.queries = 0;
  if (deferred()) {
    queues_[agent].push_back({nullptr, nullptr, event.mark});
  } else {
    event.mark->ran = true;
    event.mark->seconds = now_s();
    if (costs_) event.mark->virtual_s = times_[agent] = begin(agent);
  }
}

void Order::wait(const Event& event, int agent) {
  Lock lock(mutex);
  if (!event.mark) return;
  perturb();
  join(clock(agent), event.mark->clock);
  if (costs_) reach(agent, event.mark->virtual_s);
  if (deferred()) queues_[agent].push_back({nullptr, event.mark, nullptr});
}

bool Order::query(Event& event) {
  Lock lock(mutex);
  if (!event.mark || known(*event.mark)) return true;
  perturb();
  const bool over = costs_ && event.mark->virtual_s <= times_[kHost];
  const bool lucky = over || (random_ && event.mark->ran && random_engine_() % 2);
  // Whoever asks for ever is answered in the end, as a device does go on by itself.
  if (!lucky && ++event.queries < patience) return false;
  complete(event.mark);
  return true;
}

void Order::synchronize(Event& event) {
  if (!event.mark || known(*event.mark)) return;
  block(kEventWait, event.mark->agent);
  Lock lock(mutex);
  perturb();
  complete(event.mark);
}

void Order::synchronize_stream(int agent) {
  block("waited for a stream", agent);
  settle(agent);
}

void Order::synchronize_device(int device) {
  block("waited for the device", agent_of(device, 0));
  Lock lock(mutex);
  perturb();
  for (int stream = 0; stream < kStreams; ++stream) {
    drain(agent_of(device, stream));
    join(clock(kHost), clock(agent_of(device, stream)));
    reach(kHost, times_[agent_of(device, stream)]);
  }
}

bool Order::query_stream(int agent) {
  Lock lock(mutex);
  return host_clock()[agent] >= clock(agent)[agent];
}

double Order::elapsed_ms(const Event& first, const Event& last) const {
  if (!first.mark || !last.mark)
    throw std::runtime_error("Both events must be recorded before calculating elapsed time.");
  if (!first.mark->timed || !last.mark->timed)
    throw std::runtime_error("Both events must be created with argument 'enable_timing=True'.");
  if (!known(*first.mark) || !known(*last.mark))
    throw std::runtime_error("Both events must be completed before calculating elapsed time.");
  if (costs_) return (last.mark->virtual_s - first.mark->virtual_s) * 1e3;
  return (last.mark->seconds - first.mark->seconds) * 1e3;
}

void Order::settle(int agent) {
  Lock lock(mutex);
  perturb();
  drain(agent);
  join(clock(kHost), clock(agent));
  reach(kHost, times_[agent]);
}

void Order::block(const std::string& what, int agent) {
  const int at = place();
  Lock lock(mutex);
  blocks.push_back({what, agent, at});
  if (forbid_blocks && what != kEventWait)
    throw std::runtime_error("called a synchronizing SIM operation: the host " + what);
}

// ---- virtual time

void Order::keep_time(std::optional<Costs> costs) {
  Lock lock(mutex);
  if (deferred()) throw std::runtime_error("work is deferred, of which no virtual time is kept");
  costs_ = costs;
  times_.fill(0);
}

// When what is queued now can begin at the earliest.
double Order::begin(int agent) { return std::max(times_[agent], times_[kHost]); }

// ---- memory

void Order::allocated(uintptr_t begin, uintptr_t end, int agent) {
  if (!checking_) return;
  const int at = place();
  Lock lock(mutex);
  std::vector<Access> former;
  auto it = memories_.upper_bound(begin);
  if (it != memories_.begin()) --it;
  while (it != memories_.end() && it->first < end) {
    if (it->second.end <= begin) {
      ++it;
      continue;
    }
    const uintptr_t old_begin = it->first;
    Memory old = std::move(it->second);
    it = memories_.erase(it);
    forget_known(old);
    if (old_begin < begin)
      memories_[old_begin] = {begin, old.life, within_of(old.accesses, old_begin, begin)};
    if (old.end > end)
      it = memories_.emplace(end, Memory{old.end, old.life, within_of(old.accesses, end, old.end)})
               .first;
    for (Access& access : within_of(old.accesses, begin, end)) former.push_back(std::move(access));
  }
  memories_[begin] = {end, std::make_shared<Life>(Life{agent, at}), std::move(former)};
}

void Order::freed(uintptr_t begin) {
  if (!checking_) return;
  const int at = place();
  Lock lock(mutex);
  auto it = memories_.find(begin);
  if (it != memories_.end()) it->second.life->freed_at = at;
}

void Order::returned(uintptr_t begin, uintptr_t end) {
  Lock lock(mutex);
  memories_.erase(memories_.lower_bound(begin), memories_.lower_bound(end));
}

void Order::touched_by_host(const std::string& name, const std::vector<Span>& spans) {
  if (!checking_) return;
  const int at = place();
  Lock lock(mutex);
  perturb();
  auto operation = std::make_shared<const Operation>(Operation{name, within(), kHost, 0, at});
  // What the host does needs no note: whatever is queued later is ordered after it.
  for (const Span& span : spans) check_access(operation, span, host_clock());
}

void Order::check(bool on) {
  Lock lock(mutex);
  checking_ = on;
  memories_.clear();
  races.clear();
  races_seen = 0;
}

Order::Memory& Order::memory_at(const Span& span) {
  auto it = memories_.upper_bound(span.begin);
  if (it != memories_.begin()) {
    --it;
    if (it->second.end > span.begin) return it->second;
    ++it;
  }
  // Allocated before checking began: known from here on, up to its known neighbour.
  uintptr_t end = span.end;
  if (it != memories_.end()) end = std::min(end, it->first);
  return memories_[span.begin] = {end, std::make_shared<Life>(Life{-1, -1}), {}};
}

void Order::check_access(
    const std::shared_ptr<const Operation>& operation, const Span& span, const Clock& now) {
  if (span.begin >= span.end) return;
  Memory& memory = memory_at(span);
  for (const Access& other : memory.accesses) {
    const Operation& before = *other.operation;
    if (before.agent == operation->agent || now[before.agent] >= before.time) continue;
    if (!(span.write || other.span.write) || !overlap(span, other.span)) continue;
    ++races_seen;
    const bool seen = std::any_of(races.begin(), races.end(), [&](const Race& race) {
      return race.first->stack == before.stack && race.second->stack == operation->stack &&
             race.first->name == before.name && race.second->name == operation->name;
    });
    if (seen) continue;
    const size_t bytes =
        std::min(span.end, other.span.end) - std::max(span.begin, other.span.begin);
    races.push_back({other.operation, operation, other.span.write, span.write, bytes, other.life,
                     memory.life});
  }
}

void Order::note_access(
    const std::shared_ptr<const Operation>& operation, const Span& span) {
  if (span.begin >= span.end) return;
  Memory& memory = memory_at(span);
  auto& accesses = memory.accesses;
  if (accesses.size() > kManyAccesses) forget_known(memory);
  // A write stands for all before it that it covers; a read for earlier ones of its stream.
  if (!span.layout) {
    for (Access& other : accesses) {
      Span& old = other.span;
      const bool stands = span.write || (!old.write && other.operation->agent == operation->agent);
      if (!stands || old.layout || old.end <= span.begin || span.end <= old.begin) continue;
      if (span.begin <= old.begin) old.begin = std::min(span.end, old.end);
      else if (span.end >= old.end) old.end = span.begin;
    }
    accesses.erase(
        std::remove_if(accesses.begin(), accesses.end(),
                       [&](const Access& other) {
                         const Span& old = other.span;
                         const bool covered = span.begin <= old.begin && old.end <= span.end;
                         return old.begin >= old.end || (covered && old.layout && span.write);
                       }),
        accesses.end());
  }
  accesses.push_back({span, operation, memory.life});
}

// Drops what the host knows to have ended: whatever is queued from now on is ordered after it.
void Order::forget_known(Memory& memory) {
  const Clock& host = host_clock();
  auto& accesses = memory.accesses;
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(),
                                [&](const Access& access) {
                                  return host[access.operation->agent] >= access.operation->time;
                                }),
                 accesses.end());
}

}  // namespace sim
