// The part of metal_type_traits and metal_limits that kernels use.
#pragma once
#include "scalars.hpp"

namespace metal {

using std::bool_constant;
using std::conditional;
using std::conditional_t;
using std::declval;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_convertible;
using std::is_convertible_v;
using std::is_empty;
using std::is_integral;
using std::is_integral_v;
using std::is_pointer_v;
using std::is_same;
using std::is_same_v;
using std::is_void;
using std::make_signed_t;
using std::make_unsigned_t;
using std::remove_const_t;
using std::remove_cv_t;
using std::remove_reference_t;
using std::true_type;
using std::void_t;

template <class T> constexpr bool is_floating_point_v = emu::is_floating<T>;
template <class T> struct is_floating_point : bool_constant<emu::is_floating<T>> {};
template <class T> constexpr bool is_arithmetic_v = emu::is_scalar<T>;
template <class T> struct is_arithmetic : bool_constant<emu::is_scalar<T>> {};
template <class T> constexpr bool is_unsigned_v = std::is_unsigned_v<T>;
template <class T> struct is_unsigned : std::is_unsigned<T> {};
template <class T> constexpr bool is_signed_v = std::is_signed_v<T> || emu::is_half_like<T>;
template <class T> using remove_addrspace_t = T;

// In place of MLX's steel/utils/type_traits.h, whose specialisations differ only in address space.
template <class T> struct is_static : bool_constant<std::is_empty_v<std::remove_cv_t<T>>> {};
template <class T> struct pointer_element {};
template <class T> struct pointer_element<T*> { using type = std::remove_cv_t<T>; };
template <class T> using pointer_element_t = typename pointer_element<std::remove_cv_t<T>>::type;

template <class T>
struct numeric_limits {
  static constexpr bool is_signed = std::is_signed_v<T>;
  static constexpr int digits = int(sizeof(T) * 8) - is_signed;
  static constexpr T max() { return T(~T(0)) < T(0) ? T(~(T(1) << (sizeof(T) * 8 - 1))) : T(~T(0)); }
  static constexpr T min() { return T(~T(0)) < T(0) ? T(T(1) << (sizeof(T) * 8 - 1)) : T(0); }
  static constexpr T lowest() { return min(); }
};
template <> struct numeric_limits<bool> {
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
};

#define EMU_LIMITS(type, largest, smallest, eps, bits_of_precision, inf, nan)  \
  template <> struct numeric_limits<type> {                                    \
    static constexpr bool is_signed = true;                                    \
    static constexpr int digits = bits_of_precision;                           \
    static constexpr type max() { return largest; }                            \
    static constexpr type min() { return smallest; }                           \
    static constexpr type lowest() { return -(largest); }                      \
    static constexpr type epsilon() { return eps; }                            \
    static constexpr type infinity() { return inf; }                           \
    static constexpr type quiet_NaN() { return nan; }                          \
  };
EMU_LIMITS(float, FLT_MAX, FLT_MIN, FLT_EPSILON, 24, INFINITY, NAN)
EMU_LIMITS(half, HALF_MAX, HALF_MIN, (half)0.0009765625f, 11, (half)INFINITY, (half)NAN)
EMU_LIMITS(bfloat, bfloat::from_bits(0x7F7F), bfloat::from_bits(0x0080), bfloat::from_bits(0x3C00), 8, bfloat::from_bits(0x7F80),
           bfloat::from_bits(0x7FC0))
#undef EMU_LIMITS

}  // namespace metal
