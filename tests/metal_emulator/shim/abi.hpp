// What the compiled kernel and the runtime share. No standard header may declare ::exp or ::abs here: kernels say `using namespace metal`.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace emu {

constexpr int kSimdWidth = 32;
constexpr int kSlotBytes = 64;  // one lane's payload in a simd exchange: up to a vector of four 16-byte values

enum Scope : int { kQuad = 0, kSimd = 1, kGroup = 2 };

struct Index3 {
  uint32_t x, y, z;
};

// Where a thread sits; filled by the runtime before the kernel is entered.
struct Place {
  Index3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  Index3 threads_per_grid, threadgroups_per_grid, threads_per_threadgroup, dispatch_threads_per_threadgroup;
  uint32_t thread_index_in_threadgroup;
};

// One bound buffer as the kernel sees it.
struct Bound {
  void* data;
  uint32_t element;  // bytes of one element as the caller declared it
  uint32_t index;
  uint64_t bytes;
};

}  // namespace emu

extern "C" {
// Block until every thread of the scope is here with the same operation and line; memory flags order memory at a barrier.
void emu_meet(int scope, const char* what, int line, unsigned flags);
// Deposit a payload, meet, and return the scope's payloads (kSlotBytes apart); lanes is how many of them exist.
const char* emu_exchange(int scope, const void* payload, size_t bytes, const char* what, int line, int* lane, int* lanes);
void* emu_threadgroup(const void* key, size_t bytes, uint32_t element, const char* name);
void emu_atomic(const void* address, size_t bytes, int writes, int polls);
void emu_fail(const char* message);
int emu_lane();
void emu_check_element(const emu::Bound* bound, uint32_t element);
}
