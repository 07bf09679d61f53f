// Scalar types: half is the compiler's _Float16 (rounds after every operation), bfloat a struct, since g++ 12 has no __bf16.
#pragma once
#include <type_traits>

#include "abi.hpp"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX ((half)65504.0f)
#define HALF_MIN ((half)6.103515625e-05f)
#define M_PI_F 3.14159274101257f
#define M_E_F 2.71828174591064f
#define M_LOG2E_F 1.44269502162933f
#define M_LN2_F 0.693147182464600f
#define M_SQRT2_F 1.41421353816986f
#define M_1_PI_F 0.318309873342514f
#define MAXFLOAT FLT_MAX
#define METAL_FUNC inline
#define METAL_CONST static constexpr

struct bfloat {
  uint16_t bits;

  bfloat() = default;
  // A float needs an explicit cast, as in Metal; an integer does not.
  template <class S, std::enable_if_t<std::is_integral_v<S>, int> = 0>
  constexpr bfloat(S value) : bits(round(float(value))) {}
  constexpr explicit bfloat(float value) : bits(round(value)) {}
  constexpr explicit bfloat(half value) : bits(round(float(value))) {}

  static constexpr bfloat from_bits(uint16_t pattern) {
    bfloat made(0);
    made.bits = pattern;
    return made;
  }
  // Round to nearest even on the upper half of the float; a NaN stays one whatever its payload.
  static constexpr uint16_t round(float value) {
    const uint32_t pattern = __builtin_bit_cast(uint32_t, value);
    if ((pattern & 0x7FFFFFFFu) > 0x7F800000u) return uint16_t((pattern >> 16) | 0x40u);
    return uint16_t((pattern + 0x7FFFu + ((pattern >> 16) & 1u)) >> 16);
  }
  constexpr float widen() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }

  // Implicit to float only, so that `c ? b : 0.0f` and `c ? b : 0` have one meaning.
  template <class F, std::enable_if_t<std::is_same_v<F, float>, int> = 0>
  constexpr operator F() const { return widen(); }
  template <class S, std::enable_if_t<(std::is_integral_v<S> || std::is_same_v<S, half>), int> = 0>
  constexpr explicit operator S() const { return S(widen()); }

  constexpr bfloat operator-() const { return from_bits(uint16_t(bits ^ 0x8000u)); }
  constexpr bfloat operator+() const { return *this; }
  bfloat& operator++() { return *this = bfloat(widen() + 1.0f); }
};

namespace emu {

template <class T> constexpr bool is_half_like = std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T> constexpr bool is_floating = is_half_like<T> || std::is_same_v<T, float>;
template <class T> constexpr bool is_scalar = is_floating<T> || std::is_integral_v<T>;

// bfloat with bfloat or an integer is a bfloat; with a float it is a float.
template <class A, class B> using bfloat_result = std::conditional_t<std::is_same_v<A, float> || std::is_same_v<B, float>, float, bfloat>;
template <class A, class B> constexpr bool bfloat_pair =
    (std::is_same_v<A, bfloat> && (std::is_same_v<B, bfloat> || std::is_same_v<B, float> || std::is_integral_v<B>)) ||
    (std::is_same_v<B, bfloat> && (std::is_same_v<A, float> || std::is_integral_v<A>));

// The scalar inside a type: what one element of an array of it is for bounds, poison and races.
template <class T, class = void> struct element_of { using type = T; };
template <class T> struct element_of<T[], void> { using type = typename element_of<T>::type; };
template <class T, size_t N> struct element_of<T[N], void> { using type = typename element_of<T>::type; };

}  // namespace emu

#define EMU_BFLOAT_ARITHMETIC(op)                                                                          \
  template <class A, class B, std::enable_if_t<emu::bfloat_pair<A, B>, int> = 0>                           \
  constexpr emu::bfloat_result<A, B> operator op(A a, B b) {                                               \
    return emu::bfloat_result<A, B>(float(a) op float(b));                                                 \
  }                                                                                                        \
  template <class B, std::enable_if_t<std::is_same_v<B, bfloat> || std::is_integral_v<B>, int> = 0>        \
  constexpr bfloat& operator op##=(bfloat& a, B b) {                                                       \
    return a = bfloat(float(a) op float(b));                                                               \
  }                                                                                                        \
  template <class A, std::enable_if_t<std::is_same_v<A, float>, int> = 0>                                  \
  constexpr A& operator op##=(A& a, bfloat b) {                                                            \
    return a = a op float(b);                                                                              \
  }
EMU_BFLOAT_ARITHMETIC(+)
EMU_BFLOAT_ARITHMETIC(-)
EMU_BFLOAT_ARITHMETIC(*)
EMU_BFLOAT_ARITHMETIC(/)
#undef EMU_BFLOAT_ARITHMETIC

#define EMU_BFLOAT_COMPARISON(op)                                                 \
  template <class A, class B, std::enable_if_t<emu::bfloat_pair<A, B>, int> = 0>  \
  constexpr bool operator op(A a, B b) {                                          \
    return float(a) op float(b);                                                  \
  }
EMU_BFLOAT_COMPARISON(==)
EMU_BFLOAT_COMPARISON(!=)
EMU_BFLOAT_COMPARISON(<)
EMU_BFLOAT_COMPARISON(>)
EMU_BFLOAT_COMPARISON(<=)
EMU_BFLOAT_COMPARISON(>=)
#undef EMU_BFLOAT_COMPARISON

template <class To, class From>
inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, value);
}
