// The Metal Shading Language on the CPU: what <metal_stdlib> and its siblings declare, as far as the kernels here need it.
#pragma once
#include "abi.hpp"
#include "scalars.hpp"
#include "traits.hpp"
#include "vectors.hpp"
#include "maths.hpp"
#include "simd.hpp"
#include "atomics.hpp"
#include "matrix.hpp"
#include "complex.hpp"

typedef bfloat bfloat16_t;
inline uint16_t bfloat16_to_uint16(bfloat16_t x) { return x.bits; }
inline bfloat16_t uint16_to_bfloat16(uint16_t x) { return bfloat::from_bits(x); }

namespace emu {

// A variable in threadgroup memory: one per declaration and instantiation (the lambda's type tells them apart), shared by the group.
template <class V, class Tag>
inline V& threadgroup_variable(Tag, const char* name) {
  static char key;  // its address is the identity; not const, lest equal constants be merged
  // The fields of a structure may belong to different threads, so races in it are tracked by byte.
  using E = typename element_of<V>::type;
  return *reinterpret_cast<V*>(emu_threadgroup(&key, sizeof(V), is_scalar<E> ? sizeof(E) : 1, name));
}

// Kernel arguments: they take the type the kernel declares, and check that the caller's elements have its size.
template <class T> using scalar_of = typename element_of<std::remove_cv_t<T>>::type;
template <class T> constexpr uint32_t scalar_bytes = is_scalar<scalar_of<T>> ? sizeof(scalar_of<T>) : 0;  // 0: a structure

struct Pointer {
  const Bound& bound;
  template <class T> operator T*() const {
    emu_check_element(&bound, scalar_bytes<T>);
    return static_cast<T*>(bound.data);
  }
};
struct Reference {
  const Bound& bound;
  template <class T> operator T&() const {
    emu_check_element(&bound, scalar_bytes<T>);
    return *static_cast<T*>(bound.data);
  }
};

// Thread attributes: scalar, two- or three-component, in whatever integer type the kernel declares.
template <class T>
inline T attribute(Index3 v) {
  if constexpr (std::is_integral_v<T>) {
    return T(v.x);
  } else {
    T made;
    const uint32_t parts[3] = {v.x, v.y, v.z};
    for (int i = 0; i < int(sizeof(T) / sizeof(typename T::value_type)) && i < 3; ++i) made[i] = typename T::value_type(parts[i]);
    return made;
  }
}

}  // namespace emu
