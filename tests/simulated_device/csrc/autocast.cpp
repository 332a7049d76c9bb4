// Automatic mixed precision: the operators, and what becomes of each, are torch's own lists.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <string>

#include "tensors.hpp"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

Tensor cast(at::ScalarType to, const Tensor& tensor) {
  return at::autocast::cached_cast(to, tensor, kSim);
}

void cast_all(at::ScalarType to, IValue& value) {
  if (value.isTensor()) {
    value = cast(to, value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(cast(to, tensor));
    value = list;
  }
}

enum class Policy { kLower, kFloat, kFloatUnlessSaid, kWidest };

template <Policy policy>
void convert(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  IValue* given = &(*stack)[stack->size() - arguments.size()];
  auto to = policy == Policy::kLower ? at::autocast::get_autocast_dtype(kSim) : at::kFloat;
  if (policy == Policy::kWidest) {
    to = at::autocast::get_autocast_dtype(kSim);
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (given[i].isTensor()) {
        to = at::autocast::prioritize(to, given[i].toTensor(), kSim);
      } else if (given[i].isTensorList()) {
        for (const Tensor& tensor : given[i].toTensorVector())
          to = at::autocast::prioritize(to, tensor, kSim);
      }
    }
  }
  if (policy == Policy::kFloatUnlessSaid) {
    // The result's type alone: the operator computes in it without a copy of its input.
    if (given[0].isTensor() && at::autocast::is_eligible(given[0].toTensor(), kSim))
      for (size_t i = 0; i < arguments.size(); ++i)
        if (arguments[i].name() == "dtype" && given[i].isNone())
          given[i] = static_cast<int64_t>(at::kFloat);
  } else {
    for (size_t i = 0; i < arguments.size(); ++i) cast_all(to, given[i]);
  }
  op.callBoxed(stack);
}

template <Policy policy>
void enter(torch::Library& library, const char* name, const char* overload = nullptr) {
  const std::string full = overload ? std::string(name) + "." + overload : std::string(name);
  library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&convert<policy>>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define NAMED(name, ...) #name __VA_OPT__(, #__VA_ARGS__)
#define LOWER(...) enter<Policy::kLower>(m, NAMED(__VA_ARGS__));
#define FLOAT(...) enter<Policy::kFloat>(m, NAMED(__VA_ARGS__));
#define FLOAT_UNLESS_SAID(...) enter<Policy::kFloatUnlessSaid>(m, NAMED(__VA_ARGS__));
#define WIDEST(...) enter<Policy::kWidest>(m, NAMED(__VA_ARGS__));
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT_UNLESS_SAID)
  AT_FORALL_PROMOTE(WIDEST)
  WIDEST(cat)
  WIDEST(stack)
}

}  // namespace
}  // namespace sim
