// metal_math, metal_integer, metal_relational. The fast and precise forms give the same, correctly rounded to about one ulp.
#pragma once
#include "vectors.hpp"

namespace metal {

#include "float_maths.inc"

namespace fast {
#include "float_maths.inc"
}
namespace precise {
#include "float_maths.inc"
}

#define EMU_INTEGER(T)                                                              \
  inline T max(T a, T b) { return a < b ? b : a; }                                  \
  inline T min(T a, T b) { return b < a ? b : a; }                                  \
  inline T clamp(T v, T low, T high) { return min(max(v, low), high); }             \
  inline T abs(T v) { return v < T(0) ? T(-v) : v; }                                \
  inline T absdiff(T a, T b) { return a < b ? T(b - a) : T(a - b); }
EMU_INTEGER(char)
typedef signed char schar;
EMU_INTEGER(schar)
EMU_INTEGER(uchar)
EMU_INTEGER(short)
EMU_INTEGER(ushort)
EMU_INTEGER(int)
EMU_INTEGER(uint)
EMU_INTEGER(long)
EMU_INTEGER(ulong)
#undef EMU_INTEGER

template <class T> using unsigned_of = std::make_unsigned_t<T>;
template <class T> constexpr int bit_count = int(sizeof(T) * 8);

template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
inline T popcount(T v) { return T(__builtin_popcountll((unsigned long long)unsigned_of<T>(v))); }
template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
inline T clz(T v) { return v == 0 ? T(bit_count<T>) : T(__builtin_clzll((unsigned long long)unsigned_of<T>(v)) - (64 - bit_count<T>)); }
template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
inline T ctz(T v) { return v == 0 ? T(bit_count<T>) : T(__builtin_ctzll((unsigned long long)unsigned_of<T>(v))); }
template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
inline T reverse_bits(T v) {
  unsigned_of<T> from = unsigned_of<T>(v), to = 0;
  for (int i = 0; i < bit_count<T>; ++i) to = unsigned_of<T>((to << 1) | (from & 1)), from = unsigned_of<T>(from >> 1);
  return T(to);
}
template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
inline T rotate(T v, T by) {
  const int n = int(unsigned_of<T>(by) % bit_count<T>);
  const unsigned_of<T> u = unsigned_of<T>(v);
  return n == 0 ? v : T(unsigned_of<T>(u << n) | unsigned_of<T>(u >> (bit_count<T> - n)));
}
template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
inline T extract_bits(T v, uint offset, uint bits) {
  if (bits == 0) return T(0);
  return T(T(unsigned_of<T>(v) << (bit_count<T> - offset - bits)) >> (bit_count<T> - bits));
}
inline int mulhi(int a, int b) { return int((long(a) * long(b)) >> 32); }
inline uint mulhi(uint a, uint b) { return uint((ulong(a) * ulong(b)) >> 32); }
template <class T, int N> vec<T, N> popcount(vec<T, N> v) { for (int i = 0; i < N; ++i) v[i] = popcount(v[i]); return v; }

#define EMU_RELATION(name, expression)                                      \
  inline bool name(float x) { return expression; }                          \
  inline bool name(half h) { return name(float(h)); }                       \
  inline bool name(bfloat b) { return name(float(b)); }                     \
  template <class T, int N> vec<bool, N> name(vec<T, N> v) {                \
    vec<bool, N> r; for (int i = 0; i < N; ++i) r[i] = name(v[i]); return r; }
EMU_RELATION(isnan, __builtin_isnan(x))
EMU_RELATION(isinf, __builtin_isinf(x) != 0)
EMU_RELATION(isfinite, __builtin_isfinite(x))
EMU_RELATION(isnormal, __builtin_isnormal(x))
EMU_RELATION(signbit, __builtin_signbit(x) != 0)
#undef EMU_RELATION

template <class T> inline T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  for (int i = 0; i < N; ++i) if (c[i]) a[i] = b[i];
  return a;
}

}  // namespace metal
