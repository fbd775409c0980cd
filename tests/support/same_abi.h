#pragma once

#include <cstddef>
#include <type_traits>

// Whether two functions are called alike.

// Handles are pointers and enums are ints on both sides; what has to agree is the class and the
// size of each argument.
template <typename T>
constexpr int kClass = std::is_pointer_v<T>                         ? 1
                       : std::is_enum_v<T> || std::is_integral_v<T> ? 2
                                                                    : 3;

template <typename A, typename B>
struct SameAbi : std::false_type {};

template <typename R, typename... A, typename S, typename... B>
struct SameAbi<R (*)(A...), S (*)(B...)> {
  template <size_t N = sizeof...(A)>
  static constexpr bool compare() {
    if constexpr (N != sizeof...(B)) {
      return false;
    } else {
      return ((sizeof(A) == sizeof(B) && kClass<A> == kClass<B>) && ...) && sizeof(R) == sizeof(S);
    }
  }
  static constexpr bool value = compare();
};
