// vec<T, N>: constructors, element-wise operators, packed forms. Swizzles beyond .x to .w are not provided.
#pragma once
#include "traits.hpp"

namespace metal {

template <class T, int N> struct vec;

#define EMU_VECTOR_COMMON(N)                                                                                     \
  using value_type = T;                                                                                          \
  vec() = default;                                                                                               \
  template <class S, std::enable_if_t<emu::is_scalar<S>, int> = 0>                                               \
  constexpr vec(S s) { for (int i = 0; i < N; ++i) (*this)[i] = T(s); }                                          \
  template <class U>                                                                                             \
  explicit constexpr vec(vec<U, N> other) { for (int i = 0; i < N; ++i) (*this)[i] = T(other[i]); }              \
  constexpr T& operator[](int i) { return (&x)[i]; }                                                             \
  constexpr const T& operator[](int i) const { return (&x)[i]; }

template <class T> struct vec<T, 1> {
  T x;
  EMU_VECTOR_COMMON(1)
};
template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  EMU_VECTOR_COMMON(2)
  constexpr vec(T a, T b) : x(a), y(b) {}
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  EMU_VECTOR_COMMON(3)
  constexpr vec(T a, T b, T c) : x(a), y(b), z(c) {}
  constexpr vec(vec<T, 2> a, T b) : x(a.x), y(a.y), z(b) {}
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  EMU_VECTOR_COMMON(4)
  constexpr vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  constexpr vec(vec<T, 2> a, vec<T, 2> b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
  constexpr vec(vec<T, 3> a, T b) : x(a.x), y(a.y), z(a.z), w(b) {}
};
#undef EMU_VECTOR_COMMON

// Packed vectors have the alignment of their scalar; arithmetic goes through the plain form.
template <class T, int N> struct packed_vec {
  T lanes[N];
  packed_vec() = default;
  packed_vec(vec<T, N> v) { for (int i = 0; i < N; ++i) lanes[i] = v[i]; }
  operator vec<T, N>() const { vec<T, N> v; for (int i = 0; i < N; ++i) v[i] = lanes[i]; return v; }
  T& operator[](int i) { return lanes[i]; }
  T operator[](int i) const { return lanes[i]; }
};

#define EMU_VECTOR_BINARY(op)                                                                                              \
  template <class T, int N> constexpr vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {                                    \
    vec<T, N> r{}; for (int i = 0; i < N; ++i) r[i] = T(a[i] op b[i]); return r; }                                         \
  template <class T, int N, class S, std::enable_if_t<emu::is_scalar<S>, int> = 0>                                         \
  constexpr vec<T, N> operator op(vec<T, N> a, S b) { return a op vec<T, N>(b); }                                          \
  template <class T, int N, class S, std::enable_if_t<emu::is_scalar<S>, int> = 0>                                         \
  constexpr vec<T, N> operator op(S a, vec<T, N> b) { return vec<T, N>(a) op b; }                                          \
  template <class T, int N, class S> constexpr vec<T, N>& operator op##=(vec<T, N>& a, S b) { return a = a op b; }
EMU_VECTOR_BINARY(+)
EMU_VECTOR_BINARY(-)
EMU_VECTOR_BINARY(*)
EMU_VECTOR_BINARY(/)
EMU_VECTOR_BINARY(%)
EMU_VECTOR_BINARY(&)
EMU_VECTOR_BINARY(|)
EMU_VECTOR_BINARY(^)
EMU_VECTOR_BINARY(<<)
EMU_VECTOR_BINARY(>>)
#undef EMU_VECTOR_BINARY

#define EMU_VECTOR_COMPARE(op)                                                                                             \
  template <class T, int N> constexpr vec<bool, N> operator op(vec<T, N> a, vec<T, N> b) {                                 \
    vec<bool, N> r{}; for (int i = 0; i < N; ++i) r[i] = a[i] op b[i]; return r; }                                         \
  template <class T, int N, class S, std::enable_if_t<emu::is_scalar<S>, int> = 0>                                         \
  constexpr vec<bool, N> operator op(vec<T, N> a, S b) { return a op vec<T, N>(b); }
EMU_VECTOR_COMPARE(==)
EMU_VECTOR_COMPARE(!=)
EMU_VECTOR_COMPARE(<)
EMU_VECTOR_COMPARE(>)
EMU_VECTOR_COMPARE(<=)
EMU_VECTOR_COMPARE(>=)
#undef EMU_VECTOR_COMPARE

template <class T, int N> constexpr vec<T, N> operator-(vec<T, N> a) { for (int i = 0; i < N; ++i) a[i] = -a[i]; return a; }
template <class T, int N> constexpr vec<T, N> operator~(vec<T, N> a) { for (int i = 0; i < N; ++i) a[i] = ~a[i]; return a; }
template <int N> constexpr vec<bool, N> operator!(vec<bool, N> a) { for (int i = 0; i < N; ++i) a[i] = !a[i]; return a; }
template <int N> constexpr bool any(vec<bool, N> a) { for (int i = 0; i < N; ++i) if (a[i]) return true; return false; }
template <int N> constexpr bool all(vec<bool, N> a) { for (int i = 0; i < N; ++i) if (!a[i]) return false; return true; }
template <class T, int N> constexpr T dot(vec<T, N> a, vec<T, N> b) {
  T sum = T(a[0] * b[0]);
  for (int i = 1; i < N; ++i) sum = T(sum + a[i] * b[i]);
  return sum;
}

}  // namespace metal

template <class T, int N> struct emu::element_of<metal::vec<T, N>, void> { using type = T; };
template <class T, int N> struct emu::element_of<metal::packed_vec<T, N>, void> { using type = T; };

#define EMU_VECTOR_NAMES(name, type)    \
  typedef metal::vec<type, 2> name##2;  \
  typedef metal::vec<type, 3> name##3;  \
  typedef metal::vec<type, 4> name##4;
EMU_VECTOR_NAMES(bool, bool)
EMU_VECTOR_NAMES(char, char)
EMU_VECTOR_NAMES(uchar, uchar)
EMU_VECTOR_NAMES(short, short)
EMU_VECTOR_NAMES(ushort, ushort)
EMU_VECTOR_NAMES(int, int)
EMU_VECTOR_NAMES(uint, uint)
EMU_VECTOR_NAMES(long, long)
EMU_VECTOR_NAMES(ulong, ulong)
EMU_VECTOR_NAMES(half, half)
EMU_VECTOR_NAMES(bfloat, bfloat)
EMU_VECTOR_NAMES(float, float)
#undef EMU_VECTOR_NAMES
typedef metal::packed_vec<float, 2> packed_float2;
typedef metal::packed_vec<float, 3> packed_float3;
typedef metal::packed_vec<float, 4> packed_float4;
typedef metal::packed_vec<half, 2> packed_half2;
typedef metal::packed_vec<half, 3> packed_half3;
typedef metal::packed_vec<half, 4> packed_half4;
