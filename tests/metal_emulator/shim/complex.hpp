// complex64_t in place of MLX's own header, whose constructors differ only in address space.
#pragma once
#include "maths.hpp"

template <class T>
struct complex_t {
  using value_type = T;
  T real, imag;
  complex_t() = default;
  constexpr complex_t(T re, T im) : real(re), imag(im) {}
  template <class S, std::enable_if_t<emu::is_scalar<S>, int> = 0>
  constexpr complex_t(S re) : real(T(re)), imag(T(0)) {}
};
template <class T> static constexpr bool is_complex_v = false;
template <class T> static constexpr bool is_complex_v<complex_t<T>> = true;
template <class From, class To> static constexpr bool is_lane_convertible_v =
    std::is_convertible_v<From, To> || (std::is_same_v<To, bfloat> && std::is_convertible_v<From, float>);
typedef complex_t<float> complex64_t;

constexpr complex64_t operator-(complex64_t a) { return {-a.real, -a.imag}; }
constexpr complex64_t operator+(complex64_t a, complex64_t b) { return {a.real + b.real, a.imag + b.imag}; }
constexpr complex64_t operator-(complex64_t a, complex64_t b) { return {a.real - b.real, a.imag - b.imag}; }
constexpr complex64_t operator*(complex64_t a, complex64_t b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}
constexpr bool operator==(complex64_t a, complex64_t b) { return a.real == b.real && a.imag == b.imag; }
