// What Python sees of the device: counters, findings, switches.
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <unordered_set>

#include "backend.hpp"
#include "memory.hpp"

namespace py = pybind11;

namespace sim {
namespace {

// ---- where Python is

using Frame = std::pair<PyCodeObject*, int>;  // and the last instruction
constexpr size_t kDeepest = 64;

std::vector<std::vector<Frame>>& stacks() {
  static auto* all = new std::vector<std::vector<Frame>>();
  return *all;
}

std::vector<Frame> frames_of(PyThreadState* thread) {
  std::vector<Frame> found;
  PyFrameObject* frame = PyThreadState_GetFrame(thread);
  while (frame && found.size() < kDeepest) {
    found.emplace_back(PyFrame_GetCode(frame), PyFrame_GetLasti(frame));
    PyFrameObject* before = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = before;
  }
  Py_XDECREF(frame);
  return found;
}

bool runs_backward(const std::vector<Frame>& frames) {
  for (const Frame& frame : frames) {
    const char* name = PyUnicode_AsUTF8(frame.first->co_name);
    if (name && std::string(name) == "_engine_run_backward") return true;
  }
  return false;
}

void let_go(const std::vector<Frame>& frames) {
  for (const Frame& frame : frames) Py_DECREF(frame.first);
}

// The number of the present stack. A thread of the autograd engine has none: it is given that of
// the thread that started the backward pass and waits for it.
int capture() {
  if (!Py_IsInitialized()) return -1;
  py::gil_scoped_acquire gil;
  static auto* numbers = new std::map<std::vector<Frame>, int>();
  PyThreadState* mine = PyThreadState_Get();
  std::vector<Frame> frames = frames_of(mine);
  if (frames.empty()) {
    for (PyThreadState* other = PyInterpreterState_ThreadHead(PyThreadState_GetInterpreter(mine));
         other && frames.empty(); other = PyThreadState_Next(other)) {
      if (other == mine) continue;
      frames = frames_of(other);
      if (!runs_backward(frames)) {
        let_go(frames);
        frames.clear();
      }
    }
  }
  auto [it, made] = numbers->try_emplace(frames, static_cast<int>(stacks().size()));
  if (made) stacks().push_back(frames);  // and keeps its code objects
  else let_go(frames);
  return it->second;
}

py::list stack_of(int number) {
  py::list found;
  if (number < 0) return found;
  for (const auto& [code, instruction] : stacks().at(number)) {
    auto object = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(code));
    found.append(py::make_tuple(object.attr("co_filename"), PyCode_Addr2Line(code, instruction),
                                object.attr("co_qualname")));
  }
  return found;
}

// ---- what the host does

thread_local std::vector<std::string> nodes;  // of the backward pass, on this thread

Span span_of(const at::Tensor& tensor, bool write) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {0, 0, write, nullptr};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + (last + 1) * tensor.itemsize(), write, nullptr};
}

// Tells of operators of the CPU that read or write pinned memory.
std::unique_ptr<at::ObserverContext> host_operator(const at::RecordFunction& call) {
  if (in_kernel()) return nullptr;
  std::vector<std::pair<size_t, at::Tensor>> pinned;  // with the argument's number
  bool on_device = false;
  const auto see = [&](size_t argument, const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    on_device |= tensor.device().type() == c10::DeviceType::PrivateUse1;
    if (tensor.is_cpu() && pinned_memory().owns(tensor.const_data_ptr()))
      pinned.emplace_back(argument, tensor);
  };
  const auto inputs = call.inputs();
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].isTensor()) {
      see(i, inputs[i].toTensor());
    } else if (inputs[i].isTensorList()) {
      for (const at::Tensor& tensor : inputs[i].toTensorVector()) see(i, tensor);
    }
  }
  if (pinned.empty() || on_device) return nullptr;
  // They look at no element, or call others that do and are seen themselves.
  static const std::unordered_set<std::string> harmless = {
      "aten::is_pinned", "aten::set_",     "aten::reshape",   "aten::flatten",
      "aten::to",        "aten::_to_copy", "aten::contiguous"};
  const auto schema = call.operator_schema();
  if (!schema || harmless.count(schema->name())) return nullptr;
  const std::string& name = schema->name();
  if (name.ends_with("_like") || name.starts_with("aten::new_")) return nullptr;
  for (const auto& result : schema->returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return nullptr;  // a view
  std::vector<Span> spans;
  for (const auto& [argument, tensor] : pinned) {
    const auto* given = schema->arguments().at(argument).alias_info();
    spans.push_back(span_of(tensor, given && given->isWrite()));
  }
  order().touched_by_host(schema->name(), spans);
  return nullptr;
}

std::unique_ptr<at::ObserverContext> node_begins(const at::RecordFunction& call) {
  nodes.emplace_back(call.name());
  return nullptr;
}

void node_ends(const at::RecordFunction&, at::ObserverContext*) {
  if (!nodes.empty()) nodes.pop_back();
}

at::CallbackHandle host_handle = at::INVALID_CALLBACK_HANDLE;
at::CallbackHandle node_handle = at::INVALID_CALLBACK_HANDLE;

void check(bool on) {
  order().check(on);
  if (on == (host_handle != at::INVALID_CALLBACK_HANDLE)) return;
  if (!on) {
    at::removeCallback(host_handle);
    at::removeCallback(node_handle);
    host_handle = node_handle = at::INVALID_CALLBACK_HANDLE;
    return;
  }
  const auto note = [](uintptr_t begin, uintptr_t end, int agent) {
    order().allocated(begin, end, agent);
  };
  {
    py::gil_scoped_release release;  // noting takes it for the stack, under the memory's lock
    Order::Here here;
    for (int i = 0; i < kDevices; ++i) device_memory(i).each_live(note);
    pinned_memory().each_live(note);
  }
  host_handle = at::addGlobalCallback(at::RecordFunctionCallback(&host_operator)
                                          .needsInputs(true)
                                          .scopes({at::RecordScope::FUNCTION}));
  node_handle = at::addGlobalCallback(at::RecordFunctionCallback(&node_begins, &node_ends)
                                          .scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

// ---- for Python

py::dict describe(const Count& count) {
  py::dict found;
  found["current"] = count.current;
  found["peak"] = count.peak;
  found["allocated"] = count.total_added;
  found["freed"] = count.total_taken;
  return found;
}

py::dict describe(const Statistics& from) {
  py::dict found;
  found["allocation"] = describe(from.allocations);
  found["segment"] = describe(from.segments);
  found["allocated_bytes"] = describe(from.allocated_bytes);
  found["reserved_bytes"] = describe(from.reserved_bytes);
  found["active_bytes"] = describe(from.active_bytes);
  found["requested_bytes"] = describe(from.requested_bytes);
  found["num_alloc_retries"] = from.retries;
  found["num_ooms"] = from.refusals;
  return found;
}

py::object describe(const Operation& operation, bool writes) {
  py::dict found;
  found["name"] = operation.name;
  found["within"] = operation.within;
  found["agent"] = operation.agent;
  found["time"] = operation.time;
  found["stack"] = stack_of(operation.stack);
  found["writes"] = writes;
  return found;
}

py::object describe(const Life& life) {
  py::dict found;
  found["allocated_by"] = life.allocated_by;
  found["allocated_at"] = stack_of(life.allocated_at);
  found["freed_at"] = stack_of(life.freed_at);
  return found;
}

py::list races() {
  std::vector<Race> copy;
  {
    py::gil_scoped_release release;
    Lock lock(order().mutex);
    copy = order().races;
  }
  py::list found;
  for (const Race& race : copy) {
    py::dict one;
    one["first"] = describe(*race.first, race.first_writes);
    one["second"] = describe(*race.second, race.second_writes);
    one["bytes"] = race.bytes;
    one["reused"] = race.first_life != race.second_life;
    one["first_life"] = describe(*race.first_life);
    one["second_life"] = describe(*race.second_life);
    found.append(one);
  }
  return found;
}

py::list blocks(size_t from) {
  std::vector<Block> copy;
  {
    py::gil_scoped_release release;
    Lock lock(order().mutex);
    const auto& all = order().blocks;
    copy.assign(all.begin() + std::min(from, all.size()), all.end());
  }
  py::list found;
  for (const Block& block : copy)
    found.append(py::make_tuple(block.what, block.agent, stack_of(block.stack)));
  return found;
}

void reset_peaks(Statistics& all) {
  for (Count* count : {&all.allocations, &all.segments, &all.allocated_bytes, &all.reserved_bytes,
                       &all.active_bytes, &all.requested_bytes})
    count->peak = count->current;
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(simulated_device_native, m) {
  using namespace sim;
  order().stack = &capture;
  order().within = [] { return nodes.empty() ? std::string() : nodes.back(); };
  const auto free_gil = py::call_guard<py::gil_scoped_release>();

  m.attr("DEVICES") = kDevices;
  m.attr("STREAMS") = kStreams;
  m.def("set_present", [](bool on) { present = on; });
  m.def("is_present", [] { return present; });
  m.def("current_device", &current_device);

  m.def("check", &check);
  m.def("races", &races);
  m.def("races_seen", [] { return order().races_seen; });
  m.def("touched_by_host", [](uintptr_t begin, size_t nbytes, bool write, const std::string& name) {
    if (pinned_memory().owns(reinterpret_cast<void*>(begin)))
      order().touched_by_host(name, {{begin, begin + nbytes, write, nullptr}});
  }, free_gil);
  m.def("defer", [](bool random, uint64_t seed) { order().defer(random, seed); }, free_gil);
  m.def("end_deferring", [] { order().end_deferring(); }, free_gil);
  m.def("is_deferred", [] { return order().deferred(); });
  m.def("keep_time", [](double kernel_s, double memory_rate, double copy_s, double in_rate,
                        double out_rate) {
    order().keep_time(Costs{kernel_s, memory_rate, copy_s, in_rate, out_rate});
  });
  m.def("end_time", [] { order().keep_time(std::nullopt); });
  m.def("virtual_s", [](int device, int64_t stream) {
    return order().virtual_s(agent_of(device, stream));
  });
  m.def("blocks", &blocks);
  m.def("blocks_seen", [] { return order().blocks.size(); });
  m.def("forget_blocks", [] { order().blocks.clear(); });
  m.def("forbid_blocks", [](bool on) { order().forbid_blocks = on; });
  m.def("blocks_forbidden", [] { return order().forbid_blocks; });
  m.def("set_patience", [](int queries) { order().patience = queries; });

  m.def("memory_stats", [](int device) { return describe(device_memory(device).statistics); });
  m.def("reset_peak_memory_stats", [](int device) { reset_peaks(device_memory(device).statistics); });
  m.def("total_bytes", [](int device) { return device_memory(device).total_bytes; });
  m.def("limit_bytes", [](int device) { return device_memory(device).limit_bytes; });
  m.def("set_total_bytes", [](int device, size_t n) { device_memory(device).total_bytes = n; });
  m.def("set_limit_bytes", [](int device, size_t n) { device_memory(device).limit_bytes = n; });
  m.def("empty_cache", [] {
    for (int i = 0; i < kDevices; ++i) device_memory(i).empty_cache();
  }, free_gil);
  m.def("pinned_memory_stats", [] { return describe(pinned_memory().statistics); });
  m.def("reset_peak_pinned_memory_stats", [] { reset_peaks(pinned_memory().statistics); });
  m.def("pinned_limit_bytes", [] { return pinned_memory().limit_bytes; });
  m.def("set_pinned_limit_bytes", [](size_t nbytes) { pinned_memory().limit_bytes = nbytes; });
  m.def("empty_pinned_cache", [] { pinned_memory().empty_cache(); }, free_gil);

  m.def("generator_state", &generator_state);
  m.def("set_generator_state", &set_generator_state);
}
