// metal_atomic with relaxed order. Threads switch only at rendezvous and atomic loads, so plain operations are atomic here.
#pragma once
#include "simd.hpp"

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  T value;  // read and written below only; a plain access does not compile, as in Metal
  atomic() = default;
  atomic(const atomic&) = delete;
  atomic& operator=(const atomic&) = delete;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;

}  // namespace metal

template <class T> struct emu::element_of<metal::atomic<T>, void> { using type = T; };

namespace emu {

// The value itself moves outside the instrumentation: emu_atomic has made the checks, which differ from those of plain accesses.
#define EMU_BARE __attribute__((noinline, no_sanitize("thread")))
template <class T> EMU_BARE T peek(const T* p) { return *(const volatile T*)p; }
template <class T> EMU_BARE void poke(T* p, T v) { *(volatile T*)p = v; }
template <> EMU_BARE inline bfloat peek(const bfloat* p) { return bfloat::from_bits(*(const volatile uint16_t*)p); }
template <> EMU_BARE inline void poke(bfloat* p, bfloat v) { *(volatile uint16_t*)p = v.bits; }
#undef EMU_BARE

template <class T, class F>
T update(const metal::atomic<T>* a, F change) {
  T* p = const_cast<T*>(&a->value);
  emu_atomic(p, sizeof(T), 1, 0);
  const T old = peek(p);
  poke(p, T(change(old)));
  return old;
}

}  // namespace emu

namespace metal {

template <class T> T atomic_load_explicit(const volatile atomic<T>* a, memory_order) {
  const T* p = const_cast<const T*>(&a->value);
  emu_atomic(p, sizeof(T), 0, 1);
  return emu::peek(p);
}
template <class T, class V> void atomic_store_explicit(volatile atomic<T>* a, V v, memory_order) {
  T* p = const_cast<T*>(&a->value);
  emu_atomic(p, sizeof(T), 1, 0);
  emu::poke(p, T(v));
}
#define EMU_ATOMIC(name, expression)                                                           \
  template <class T, class V> T atomic_##name##_explicit(volatile atomic<T>* a, V given, memory_order) {  \
    const T v = T(given);                                                                      \
    return emu::update(const_cast<const atomic<T>*>(a), [v](T old) { return expression; });    \
  }
EMU_ATOMIC(exchange, v)
EMU_ATOMIC(fetch_add, old + v)
EMU_ATOMIC(fetch_sub, old - v)
EMU_ATOMIC(fetch_max, metal::max(old, v))
EMU_ATOMIC(fetch_min, metal::min(old, v))
EMU_ATOMIC(fetch_and, old & v)
EMU_ATOMIC(fetch_or, old | v)
EMU_ATOMIC(fetch_xor, old ^ v)
#undef EMU_ATOMIC

template <class T, class V>
bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* a, T* expected, V desired, memory_order, memory_order) {
  T* p = const_cast<T*>(&a->value);
  emu_atomic(p, sizeof(T), 1, 1);
  const T old = emu::peek(p);
  if (__builtin_memcmp(&old, expected, sizeof(T)) == 0) {
    emu::poke(p, T(desired));
    return true;
  }
  *expected = old;
  return false;
}
inline void atomic_thread_fence(mem_flags, memory_order = memory_order_relaxed) {}

}  // namespace metal
