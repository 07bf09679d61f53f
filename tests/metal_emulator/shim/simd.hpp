// Barriers, simdgroup and quadgroup functions. Each is a rendezvous: a lane that stays away is reported, not waited for.
#pragma once
#include "maths.hpp"

namespace metal {

enum class mem_flags : unsigned { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_device_and_threadgroup = 3, mem_texture = 4,
                                  mem_threadgroup_imageblock = 8 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(unsigned(a) | unsigned(b)); }

inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emu_meet(emu::kGroup, "threadgroup_barrier", line, unsigned(flags));
}
inline void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emu_meet(emu::kSimd, "simdgroup_barrier", line, unsigned(flags));
}

}  // namespace metal

namespace emu {

// The payloads of all lanes of one exchange, kept while this lane combines them.
template <class T>
struct Lanes {
  T values[kSimdWidth];
  int lane, count;

  Lanes(int scope, T mine, const char* what, int line) {
    static_assert(sizeof(T) <= kSlotBytes, "payload of a simd exchange");
    const char* slots = emu_exchange(scope, &mine, sizeof(T), what, line, &lane, &count);
    for (int i = 0; i < count; ++i) __builtin_memcpy((void*)&values[i], slots + i * kSlotBytes, sizeof(T));
  }
  // A lane that does not exist gives no defined value: all bits set, which is NaN for every float type.
  T at(int i) const {
    if (i >= 0 && i < count) return values[i];
    T poison;
    __builtin_memset((void*)&poison, 0xFF, sizeof(T));
    return poison;
  }
};

// bfloat reductions accumulate in float, as MLX's own definitions do.
template <class T> struct accumulator { using type = T; };
template <> struct accumulator<bfloat> { using type = float; };

// Pairwise over the lanes, the same for every lane; the order on hardware is not documented.
template <class T, class F>
T reduce(int scope, T mine, F combine, const char* what, int line) {
  using A = typename accumulator<T>::type;
  Lanes<T> lanes(scope, mine, what, line);
  A tree[kSimdWidth];
  for (int i = 0; i < lanes.count; ++i) tree[i] = A(lanes.values[i]);
  for (int n = lanes.count; n > 1; n = (n + 1) / 2) {
    for (int i = 0; i < n / 2; ++i) tree[i] = A(combine(tree[2 * i], tree[2 * i + 1]));
    if (n % 2) tree[n / 2] = tree[n - 1];
  }
  return T(tree[0]);
}

template <class T, class F>
T scan(int scope, T mine, F combine, T start, bool inclusive, const char* what, int line) {
  using A = typename accumulator<T>::type;
  Lanes<T> lanes(scope, mine, what, line);
  A sum = A(start);
  for (int i = 0; i < lanes.lane + (inclusive ? 1 : 0); ++i) sum = A(combine(sum, A(lanes.values[i])));
  return T(sum);
}

}  // namespace emu

namespace metal {

struct simd_vote {
  typedef ulong vote_t;
  vote_t bits = 0;
  explicit simd_vote(vote_t b) : bits(b) {}
  explicit operator vote_t() const { return bits; }
  bool all() const { return bits == 0xFFFFFFFFul; }
  bool any() const { return bits != 0; }
};

#define EMU_LINE int line = __builtin_LINE()
#define EMU_REDUCTION(name, expression)                                                                                      \
  template <class T> T simd_##name(T v, EMU_LINE) {                                                                          \
    return emu::reduce(emu::kSimd, v, [](auto a, auto b) { return expression; }, "simd_" #name, line); }                     \
  template <class T> T quad_##name(T v, EMU_LINE) {                                                                          \
    return emu::reduce(emu::kQuad, v, [](auto a, auto b) { return expression; }, "quad_" #name, line); }
EMU_REDUCTION(sum, a + b)
EMU_REDUCTION(product, a * b)
EMU_REDUCTION(max, metal::max(a, b))
EMU_REDUCTION(min, metal::min(a, b))
EMU_REDUCTION(and, a & b)
EMU_REDUCTION(or, a | b)
EMU_REDUCTION(xor, a ^ b)
#undef EMU_REDUCTION

#define EMU_GROUP_FUNCTIONS(p, scope, width)                                                                                  \
  template <class T> T p##_prefix_inclusive_sum(T v, EMU_LINE) {                                                              \
    return emu::scan(scope, v, [](auto a, auto b) { return a + b; }, T(0), true, #p "_prefix_inclusive_sum", line); }         \
  template <class T> T p##_prefix_exclusive_sum(T v, EMU_LINE) {                                                              \
    return emu::scan(scope, v, [](auto a, auto b) { return a + b; }, T(0), false, #p "_prefix_exclusive_sum", line); }        \
  template <class T> T p##_prefix_inclusive_product(T v, EMU_LINE) {                                                          \
    return emu::scan(scope, v, [](auto a, auto b) { return a * b; }, T(1), true, #p "_prefix_inclusive_product", line); }     \
  template <class T> T p##_prefix_exclusive_product(T v, EMU_LINE) {                                                          \
    return emu::scan(scope, v, [](auto a, auto b) { return a * b; }, T(1), false, #p "_prefix_exclusive_product", line); }    \
  template <class T> T p##_shuffle(T v, ushort from, EMU_LINE) {                                                              \
    return emu::Lanes<T>(scope, v, #p "_shuffle", line).at(from); }                                                           \
  template <class T> T p##_broadcast(T v, ushort from, EMU_LINE) {                                                            \
    return emu::Lanes<T>(scope, v, #p "_broadcast", line).at(from); }                                                         \
  template <class T> T p##_broadcast_first(T v, EMU_LINE) {                                                                   \
    return emu::Lanes<T>(scope, v, #p "_broadcast_first", line).at(0); }                                                      \
  template <class T> T p##_shuffle_xor(T v, ushort mask, EMU_LINE) {                                                          \
    emu::Lanes<T> l(scope, v, #p "_shuffle_xor", line); return l.at(l.lane ^ mask); }                                         \
  template <class T> T p##_shuffle_down(T v, ushort by, EMU_LINE) {                                                           \
    emu::Lanes<T> l(scope, v, #p "_shuffle_down", line); return l.lane + by < width ? l.at(l.lane + by) : v; }                \
  template <class T> T p##_shuffle_up(T v, ushort by, EMU_LINE) {                                                             \
    emu::Lanes<T> l(scope, v, #p "_shuffle_up", line); return l.lane >= by ? l.at(l.lane - by) : v; }                         \
  template <class T> T p##_shuffle_rotate_down(T v, ushort by, EMU_LINE) {                                                    \
    emu::Lanes<T> l(scope, v, #p "_shuffle_rotate_down", line); return l.at((l.lane + by) % width); }                         \
  template <class T> T p##_shuffle_rotate_up(T v, ushort by, EMU_LINE) {                                                      \
    emu::Lanes<T> l(scope, v, #p "_shuffle_rotate_up", line); return l.at((l.lane + width - by % width) % width); }           \
  template <class T> T p##_shuffle_and_fill_down(T v, T fill, ushort by, EMU_LINE) {                                          \
    emu::Lanes<T> l(scope, v, #p "_shuffle_and_fill_down", line);                                                             \
    emu::Lanes<T> f(scope, fill, #p "_shuffle_and_fill_down", line);                                                          \
    return l.lane + by < width ? l.at(l.lane + by) : f.at(l.lane + by - width); }                                             \
  template <class T> T p##_shuffle_and_fill_up(T v, T fill, ushort by, EMU_LINE) {                                            \
    emu::Lanes<T> l(scope, v, #p "_shuffle_and_fill_up", line);                                                               \
    emu::Lanes<T> f(scope, fill, #p "_shuffle_and_fill_up", line);                                                            \
    return l.lane >= by ? l.at(l.lane - by) : f.at(l.lane + width - by); }                                                    \
  inline simd_vote p##_ballot(bool v, EMU_LINE) {                                                                             \
    emu::Lanes<bool> l(scope, v, #p "_ballot", line);                                                                         \
    ulong bits = 0;                                                                                                           \
    for (int i = 0; i < l.count; ++i) bits |= ulong(l.values[i]) << i;                                                        \
    return simd_vote(bits); }                                                                                                 \
  inline bool p##_all(bool v, EMU_LINE) {                                                                                     \
    emu::Lanes<bool> l(scope, v, #p "_all", line);                                                                            \
    for (int i = 0; i < l.count; ++i) if (!l.values[i]) return false;                                                         \
    return true; }                                                                                                            \
  inline bool p##_any(bool v, EMU_LINE) {                                                                                     \
    emu::Lanes<bool> l(scope, v, #p "_any", line);                                                                            \
    for (int i = 0; i < l.count; ++i) if (l.values[i]) return true;                                                           \
    return false; }                                                                                                           \
  inline bool p##_is_first(EMU_LINE) { return emu::Lanes<bool>(scope, true, #p "_is_first", line).lane == 0; }
EMU_GROUP_FUNCTIONS(simd, emu::kSimd, 32)
EMU_GROUP_FUNCTIONS(quad, emu::kQuad, 4)
#undef EMU_GROUP_FUNCTIONS
#undef EMU_LINE

}  // namespace metal
