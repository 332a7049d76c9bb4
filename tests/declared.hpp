// Whether what is declared by hand is what a library's own header declares, up to names of types.
#pragma once

#include <string_view>
#include <type_traits>

namespace declared {

template <class T, class = void>
struct complete : std::false_type {};
template <class T>
struct complete<T, std::void_t<decltype(sizeof(T))>> : std::true_type {};

// Passed alike, and with the same meaning as far as types tell it.
template <class A, class B>
constexpr bool alike() {
  using Plain = std::remove_cv_t<A>;
  using Other = std::remove_cv_t<B>;
  if constexpr (std::is_pointer_v<Plain> && std::is_pointer_v<Other>) {
    using To = std::remove_cv_t<std::remove_pointer_t<Plain>>;
    using OtherTo = std::remove_cv_t<std::remove_pointer_t<Other>>;
    if constexpr (!complete<To>::value || !complete<OtherTo>::value) {
      return true;  // opaque, or void
    } else {
      return alike<To, OtherTo>();
    }
  } else if constexpr (std::is_pointer_v<Plain> || std::is_pointer_v<Other>) {
    return false;
  } else if constexpr (std::is_class_v<Plain> && std::is_class_v<Other>) {
    return sizeof(Plain) == sizeof(Other) && alignof(Plain) == alignof(Other);
  } else if constexpr (std::is_class_v<Plain> || std::is_class_v<Other>) {
    return false;
  } else {
    return sizeof(Plain) == sizeof(Other) &&
           std::is_floating_point_v<Plain> == std::is_floating_point_v<Other>;
  }
}

template <class A, class B>
struct same;
template <class R, class... P, class S, class... Q>
struct same<R (*)(P...), S (*)(Q...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(P) == sizeof...(Q)) {
      return alike<R, S>() && (alike<P, Q>() && ...);
    } else {
      return false;
    }
  }();
};

}  // namespace declared
