// Runs a compiled kernel: one fibre per thread, groups one after the other, every memory access checked.
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "abi.hpp"
#include "context.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace emu {

struct BufferIn {
  const char* name;
  void* data;
  uint64_t bytes;
  uint32_t element;
  int32_t writable;
  int32_t bound;
  int32_t index;
};

struct Launch {
  BufferIn* buffers;
  int32_t count;
  uint32_t grid[3];
  uint32_t group[3];
  int32_t order;  // 0 ascending, 1 descending, 2 shuffled by seed
  uint64_t seed;
  int32_t check_races;  // 0 off, 1 collectives order their lanes, 2 barriers alone order
  int32_t flush_denormals;
  int32_t seconds;  // of processor time, then the kernel counts as hung
  uint32_t threadgroup_limit;
  uint32_t thread_limit;
  // Results.
  char* message;
  uint64_t message_bytes;
  uint64_t fault_address;  // of the offending instruction, 0 when unknown
  uint64_t threadgroup_bytes;
  uint64_t unwritten[64];  // elements of each writable buffer that no thread wrote
  uint64_t first_unwritten[64];
};

constexpr int kSlots = 128;
constexpr size_t kStackBytes = 256 << 10;
constexpr int kMaxThreads = 1024;
constexpr uint64_t kPollLimit = 4000000;

// The history of one granule (an element), enough to decide exactly whether the next access is ordered after the earlier ones.
struct Shadow {
  uint32_t write_group = 0, write_epoch = 0, write_simd_epoch = 0;
  uint32_t read_group = 0, read_epoch = 0, read_simd_epoch = 0;
  uint32_t atomic_group = 0, atomic_epoch = 0;
  uint32_t read_simdgroups = 0;  // bit per simdgroup that read in read_epoch
  uint16_t writer = 0, reader = 0, other_reader = 0, atomic_thread = 0;
  bool written = false;
};

struct Region {
  const char* name = nullptr;
  uintptr_t begin = 0;
  size_t bytes = 0, mapped = 0;
  uint32_t element = 1;
  int index = -1;
  bool writable = false, group_memory = false, bound = true;
  std::vector<Shadow> shadow;
};

enum State : uint8_t { kReady, kWaiting, kDone };

struct Thread {
  Context context;
  Place place;
  State state = kDone;
  int scope = 0, line = 0;
  const char* what = nullptr;
  unsigned flags = 0;
  uint32_t exchanges[2] = {0, 0};  // how many quad and simd exchanges it has begun: its payload alternates between two slots
};

static uintptr_t arena = 0;
static size_t arena_bytes = 0;
static int slot_shift = 0;
static Region regions[kSlots];
static const void* group_keys[kSlots];
static int device_slots = 0, group_slots = 0;

static std::vector<Thread> threads(kMaxThreads);
static char* stacks = nullptr;
static Context home;
static int current = -1, group_size = 0;
static int arrived[3][kMaxThreads];  // per scope, per quad, simdgroup or group
alignas(64) static char payload[2][2][kMaxThreads][kSlotBytes];

static Launch* launch = nullptr;
static std::vector<Bound> bounds;
static uint32_t group_number = 0;                            // from 1
static uint32_t group_epoch[2];                              // memory kinds: 0 threadgroup, 1 device
static uint32_t simd_epoch[2][kMaxThreads / kSimdWidth];
static uint64_t polls = 0, group_bytes = 0;
static bool failed = false;
static void (*entry)(const Bound*, const Place&) = nullptr;  // the compiled kernel

static void leave() { switch_context(threads[current].context, home); }

static void fail(const void* pc, const char* format, ...) {
  if (!failed) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(launch->message, launch->message_bytes, format, arguments);
    va_end(arguments);
    if (current >= 0 && length > 0 && size_t(length) < launch->message_bytes) {
      const Place& p = threads[current].place;
      const Index3& g = p.threadgroup_position_in_grid;
      snprintf(launch->message + length, launch->message_bytes - length, " [thread %u of threadgroup (%u, %u, %u)]",
               p.thread_index_in_threadgroup, g.x, g.y, g.z);
    }
    // Python subtracts the library's address and asks addr2line; minus one lands inside the calling instruction.
    if (pc) launch->fault_address = uint64_t(pc) - 1;
    failed = true;
  }
  if (current >= 0) leave();
}

// ---------------------------------------------------------------- memory

static bool reserve_arena() {
  if (arena) return true;
  // Slots are far larger than buffers, so that a wild index still lands in its own buffer's slot and is named correctly.
  for (slot_shift = 33; slot_shift >= 26; --slot_shift) {
    arena_bytes = size_t(kSlots) << slot_shift;
    void* base = mmap(nullptr, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base != MAP_FAILED) {
      arena = uintptr_t(base);
      return true;
    }
  }
  return false;
}

static void map_pages(const Region& region, int protection) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  if (region.mapped) mmap((void*)region.begin, region.mapped, protection, flags, -1, 0);
}

static void open_region(int slot, const char* name, size_t bytes, uint32_t element, bool with_shadow) {
  Region& region = regions[slot];
  region = Region();
  region.name = name;
  region.begin = arena + (size_t(slot) << slot_shift) + (size_t(1) << (slot_shift - 1));
  region.bytes = bytes;
  region.element = element ? element : 1;
  region.mapped = (bytes + 65535) & ~size_t(65535);
  map_pages(region, PROT_READ | PROT_WRITE);
  if (with_shadow) region.shadow.resize((bytes + region.element - 1) / region.element);
}

static void close_region(int slot) {
  Region& region = regions[slot];
  map_pages(region, PROT_NONE);
  region = Region();
}

static void label(const Region& region, char* text, size_t bytes) {
  if (region.group_memory) {
    snprintf(text, bytes, "threadgroup array '%s'", region.name);
  } else {
    snprintf(text, bytes, "buffer %d '%s'", region.index, region.name);
  }
}

static void race(const Region& region, size_t granule, const char* mine, const char* theirs, int other, bool other_group, const void* pc) {
  char name[160];
  label(region, name, sizeof name);
  if (other_group) {
    fail(pc, "race: %s[%zu]: %s here, %s by another threadgroup; nothing orders threadgroups", name, granule, mine, theirs);
  } else {
    fail(pc, "race: %s[%zu]: %s here, %s by thread %d with no barrier between that orders it", name, granule, mine, theirs, other);
  }
}

// Ordered: the same thread, a threadgroup barrier in between, or a simdgroup barrier between lanes of one simdgroup.
static bool unordered(int kind, uint32_t epoch, uint32_t simd, int other) {
  if (other == current || epoch != group_epoch[kind]) return false;
  return other / kSimdWidth != current / kSimdWidth || simd == simd_epoch[kind][current / kSimdWidth];
}

static void check_races(Region& region, size_t granule, bool write, bool atomic, const void* pc) {
  Shadow& s = region.shadow[granule];
  const int kind = region.group_memory ? 0 : 1;
  const int simdgroup = current / kSimdWidth;
  const uint32_t epoch = group_epoch[kind], simd = simd_epoch[kind][simdgroup];
  const char* mine = atomic ? "an atomic access" : write ? "a write" : "a read";
  if (launch->check_races && s.write_group) {
    if (s.write_group != group_number) return race(region, granule, mine, "a write", 0, true, pc);
    if (unordered(kind, s.write_epoch, s.write_simd_epoch, s.writer)) return race(region, granule, mine, "a write", s.writer, false, pc);
  }
  if (launch->check_races && !atomic && s.atomic_group) {
    if (s.atomic_group != group_number) return race(region, granule, mine, "an atomic access", 0, true, pc);
    if (s.atomic_epoch == epoch && s.atomic_thread != current) {
      return race(region, granule, mine, "an atomic access", s.atomic_thread, false, pc);
    }
  }
  if (launch->check_races && write && s.read_group) {
    if (s.read_group != group_number) return race(region, granule, mine, "a read", 0, true, pc);
    if (s.read_epoch == epoch) {
      const uint32_t others = s.read_simdgroups & ~(1u << simdgroup);
      if (others) {
        const int other = s.reader / kSimdWidth != simdgroup ? s.reader : __builtin_ctz(others) * kSimdWidth;
        return race(region, granule, mine, "a read", other, false, pc);
      }
      if (unordered(kind, epoch, s.read_simd_epoch, s.reader)) return race(region, granule, mine, "a read", s.reader, false, pc);
      if (unordered(kind, epoch, s.read_simd_epoch, s.other_reader)) {
        return race(region, granule, mine, "a read", s.other_reader, false, pc);
      }
    }
  }
  if (atomic) {
    s.atomic_group = group_number, s.atomic_epoch = epoch, s.atomic_thread = uint16_t(current);
    s.written |= write;
  } else if (write) {
    s.write_group = group_number, s.write_epoch = epoch, s.write_simd_epoch = simd, s.writer = uint16_t(current);
    s.written = true;
  } else {
    const bool same_epoch = s.read_group == group_number && s.read_epoch == epoch;
    const bool same_lanes = same_epoch && s.read_simd_epoch == simd && s.reader / kSimdWidth == simdgroup;
    if (!same_epoch) s.read_simdgroups = 0;
    if (!same_lanes) s.other_reader = uint16_t(current);
    else if (s.reader != current) s.other_reader = s.reader;
    s.reader = uint16_t(current);
    s.read_simdgroups |= 1u << simdgroup;
    s.read_group = group_number, s.read_epoch = epoch, s.read_simd_epoch = simd;
  }
}

static void access(uintptr_t address, size_t bytes, bool write, bool atomic, const void* pc) {
  const uintptr_t offset = address - arena;
  if (__builtin_expect(offset >= arena_bytes, 1)) {
    if (address < 65536 && current >= 0) fail(pc, "%s through a null pointer", write ? "write" : "read");
    return;
  }
  if (current < 0) return;
  Region& region = regions[offset >> slot_shift];
  if (!region.name) return fail(pc, "%s outside every buffer", write ? "write" : "read");
  if (address < region.begin || address + bytes > region.begin + region.bytes) {
    char name[160];
    label(region, name, sizeof name);
    const long long index = (long long)(address - region.begin);
    const long long element = index >= 0 ? index / region.element : -((-index + region.element - 1) / region.element);
    if (!region.bound) return fail(pc, "%s of %s, which is not bound", write ? "write" : "read", name);
    return fail(pc, "out of bounds: %s of %zu bytes at %s[%lld], which has %zu elements", write ? "write" : "read", bytes, name,
                element, region.bytes / region.element);
  }
  if (write && !region.writable) {
    char name[160];
    label(region, name, sizeof name);
    return fail(pc, "write to read-only %s", name);
  }
  if (region.shadow.empty()) return;
  const size_t first = (address - region.begin) / region.element, last = (address - region.begin + bytes - 1) / region.element;
  for (size_t granule = first; granule <= last; ++granule) check_races(region, granule, write, atomic, pc);
}

// ---------------------------------------------------------------- scheduling

static int unit(int scope, int thread) { return scope == kQuad ? thread / 4 : scope == kSimd ? thread / kSimdWidth : 0; }
static int first_of(int scope, int thread) { return scope == kQuad ? thread & ~3 : scope == kSimd ? thread & ~31 : 0; }
static int members(int scope, int thread) {
  const int width = scope == kQuad ? 4 : scope == kSimd ? kSimdWidth : group_size;
  return std::min(width, group_size - first_of(scope, thread));
}
static const char* unit_name(int scope) { return scope == kQuad ? "quad" : scope == kSimd ? "simdgroup" : "threadgroup"; }

static void report_divergence(int thread) {
  const Thread& waiting = threads[thread];
  const int first = first_of(waiting.scope, thread), count = members(waiting.scope, thread);
  int together = 0;
  std::string others;
  int listed = 0;
  for (int i = first; i < first + count; ++i) {
    const Thread& t = threads[i];
    if (t.state == kWaiting && t.what == waiting.what && t.line == waiting.line && t.scope == waiting.scope) {
      ++together;
    } else if (listed++ < 3) {
      char text[160];
      if (t.state == kDone) snprintf(text, sizeof text, "; thread %d has returned", i);
      else if (t.state == kWaiting) snprintf(text, sizeof text, "; thread %d is at %s (line %d)", i, t.what, t.line);
      else snprintf(text, sizeof text, "; thread %d is running", i);
      others += text;
    }
  }
  current = -1;
  fail(nullptr, "divergence: %s (line %d) is reached by %d of %d threads of %s %d%s%s", waiting.what, waiting.line, together, count,
       unit_name(waiting.scope), unit(waiting.scope, thread), others.c_str(), listed > 3 ? "; ..." : "");
}

static void meet(int scope, const char* what, int line, unsigned flags) {
  Thread& me = threads[current];
  me.scope = scope, me.what = what, me.line = line, me.flags = flags, me.state = kWaiting;
  int& count = arrived[scope][unit(scope, current)];
  if (++count < members(scope, current)) {
    leave();
    return;
  }
  const int first = first_of(scope, current);
  for (int i = first; i < first + count; ++i) {
    if (threads[i].what != what || threads[i].line != line || threads[i].flags != flags) {
      const int self = current;
      report_divergence(i);
      current = self;
      leave();
    }
  }
  for (int i = first; i < first + count; ++i) threads[i].state = kReady;
  count = 0;
  for (int kind = 0; kind < 2; ++kind) {
    // With races = 'collectives' any simdgroup operation orders its lanes, which hardware in lockstep does and no text promises.
    const bool lockstep = scope == kSimd && launch->check_races == 1;
    if (!(flags & (kind == 0 ? 2u : 1u)) && !lockstep) continue;
    if (scope == kGroup) ++group_epoch[kind];
    if (scope == kSimd) ++simd_epoch[kind][current / kSimdWidth];
  }
}

static void fibre_main() {
  entry(bounds.data(), threads[current].place);
  threads[current].state = kDone;
  leave();
  abort();
}

static uint64_t next_random(uint64_t& state) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}

static void arrange(std::vector<uint32_t>& order, uint64_t& random) {
  for (size_t i = 0; i < order.size(); ++i) order[i] = uint32_t(launch->order == 1 ? order.size() - 1 - i : i);
  if (launch->order != 2) return;
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[next_random(random) % i]);
}

static void run_group(Index3 group, Index3 groups, uint64_t& random) {
  const uint32_t position[3] = {group.x, group.y, group.z};
  uint32_t size[3];
  for (int a = 0; a < 3; ++a) size[a] = std::min(launch->group[a], launch->grid[a] - position[a] * launch->group[a]);
  group_size = int(size[0] * size[1] * size[2]);
  ++group_number;
  for (int slot = device_slots; slot < device_slots + group_slots; ++slot) {
    memset((void*)regions[slot].begin, 0xFF, regions[slot].bytes);
    std::fill(regions[slot].shadow.begin(), regions[slot].shadow.end(), Shadow());
  }
  memset(arrived, 0, sizeof arrived);
  for (int kind = 0; kind < 2; ++kind) {
    group_epoch[kind] = 1;
    for (uint32_t& epoch : simd_epoch[kind]) epoch = 1;
  }
  for (int i = 0; i < group_size; ++i) {
    Thread& t = threads[i];
    const Index3 local = {uint32_t(i) % size[0], uint32_t(i) / size[0] % size[1], uint32_t(i) / (size[0] * size[1])};
    t.place.thread_position_in_threadgroup = local;
    t.place.thread_position_in_grid = {group.x * launch->group[0] + local.x, group.y * launch->group[1] + local.y,
                                       group.z * launch->group[2] + local.z};
    t.place.threadgroup_position_in_grid = group;
    t.place.threads_per_grid = {launch->grid[0], launch->grid[1], launch->grid[2]};
    t.place.threadgroups_per_grid = groups;
    t.place.threads_per_threadgroup = {size[0], size[1], size[2]};
    t.place.dispatch_threads_per_threadgroup = {launch->group[0], launch->group[1], launch->group[2]};
    t.place.thread_index_in_threadgroup = uint32_t(i);
    t.state = kReady;
    t.exchanges[0] = t.exchanges[1] = 0;
    prepare(t.context, stacks + size_t(i) * kStackBytes, kStackBytes, fibre_main);
  }
  std::vector<uint32_t> order(group_size);
  arrange(order, random);
  for (bool progress = true; progress && !failed;) {
    progress = false;
    for (uint32_t i : order) {
      if (threads[i].state != kReady) continue;
      progress = true;
      current = int(i);
      switch_context(home, threads[i].context);
      current = -1;
      if (failed) return;
    }
  }
  for (int i = 0; i < group_size; ++i) {
    if (threads[i].state == kWaiting) return report_divergence(i);
  }
}

// A wild pointer that lands outside the arena faults; the fibre is abandoned and the launch fails with a message.
static void on_fault(int, siginfo_t* info, void*) {
  if (current < 0 || !launch) _exit(139);
  fail(nullptr, "access to unmapped address %p (a wild or uninitialised pointer, or a thread stack above %zu KB)", info->si_addr,
       kStackBytes >> 10);
}

static void on_timer(int, siginfo_t*, void*) {
  if (current < 0 || !launch || failed) return;
  fail(nullptr, "no end after %d seconds of processor time", launch->seconds);
}

static void set_timer(int seconds) {
  struct itimerval timer = {};
  timer.it_value.tv_sec = seconds;
  timer.it_interval.tv_usec = seconds ? 50000 : 0;  // again, should the first signal come between two threads
  setitimer(ITIMER_VIRTUAL, &timer, nullptr);
}

static void write_back() {
  for (int i = 0; i < launch->count; ++i) {
    BufferIn& b = launch->buffers[i];
    Region& region = regions[i];
    if (!b.writable || !b.bound) continue;
    memcpy(b.data, (void*)region.begin, b.bytes);
    for (size_t g = region.shadow.size(); g-- > 0;) {
      if (!region.shadow[g].written) ++launch->unwritten[i], launch->first_unwritten[i] = g;
    }
  }
}

}  // namespace emu

using namespace emu;

extern "C" int emu_run(Launch* request, void (*kernel)(const Bound*, const Place&)) {
  launch = request;
  entry = kernel;
  failed = false;
  current = -1;
  group_number = 0, polls = 0, group_bytes = 0, group_slots = 0;
  device_slots = request->count;
  if (!reserve_arena()) return fail(nullptr, "cannot reserve address space for the buffers"), 1;
  if (request->count > 64) return fail(nullptr, "%d buffers; Metal binds at most 31", request->count), 1;
  const uint64_t total = uint64_t(request->group[0]) * request->group[1] * request->group[2];
  if (total == 0 || total > request->thread_limit) {
    return fail(nullptr, "%llu threads in a threadgroup; the limit is %u", (unsigned long long)total, request->thread_limit), 1;
  }
  if (!stacks) {
    void* base = mmap(nullptr, kStackBytes * kMaxThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return fail(nullptr, "cannot map the thread stacks"), 1;
    stacks = static_cast<char*>(base);
  }
  bounds.clear();
  for (int i = 0; i < request->count; ++i) {
    BufferIn& b = request->buffers[i];
    open_region(i, b.name, b.bound ? b.bytes : 0, b.element, b.writable && b.bound);
    regions[i].index = b.index, regions[i].writable = b.writable, regions[i].bound = b.bound;
    if (b.bound && b.bytes) memcpy((void*)regions[i].begin, b.data, b.bytes);
    bounds.push_back({(void*)regions[i].begin, b.element, uint32_t(i), b.bytes});
    request->unwritten[i] = request->first_unwritten[i] = 0;
  }

  // Faults arrive on a stack of their own, since the faulting one may be a full fibre stack.
  static char* signal_stack = static_cast<char*>(malloc(1 << 16));
  stack_t alternate = {}, old_alternate = {};
  alternate.ss_sp = signal_stack, alternate.ss_size = 1 << 16;
  sigaltstack(&alternate, &old_alternate);
  struct sigaction action = {}, old_segv = {}, old_bus = {}, old_timer = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  action.sa_sigaction = on_timer;
  sigaction(SIGVTALRM, &action, &old_timer);
  set_timer(request->seconds);
#if defined(__x86_64__)
  const unsigned rounding = _mm_getcsr();
  if (request->flush_denormals) _mm_setcsr(rounding | 0x8040);
#endif

  Index3 groups;
  groups.x = (request->grid[0] + request->group[0] - 1) / request->group[0];
  groups.y = (request->grid[1] + request->group[1] - 1) / request->group[1];
  groups.z = (request->grid[2] + request->group[2] - 1) / request->group[2];
  uint64_t random = request->seed * 0x9E3779B97F4A7C15ull + 0x1234567ull;
  std::vector<uint32_t> order(size_t(groups.x) * groups.y * groups.z);
  arrange(order, random);
  for (uint32_t g : order) {
    run_group({g % groups.x, g / groups.x % groups.y, g / (groups.x * groups.y)}, groups, random);
    if (failed) break;
  }

#if defined(__x86_64__)
  _mm_setcsr(rounding);
#endif
  current = -1;
  set_timer(0);
  sigaction(SIGVTALRM, &old_timer, nullptr);
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_alternate, nullptr);
  if (!failed) write_back();
  for (int slot = 0; slot < device_slots + group_slots; ++slot) close_region(slot);
  request->threadgroup_bytes = group_bytes;
  return failed ? 1 : 0;
}

extern "C" {

void emu_meet(int scope, const char* what, int line, unsigned flags) { meet(scope, what, line, flags); }

const char* emu_exchange(int scope, const void* data, size_t bytes, const char* what, int line, int* lane, int* lanes) {
  const int first = first_of(scope, current);
  // Two alternating slots are enough: nobody can begin exchange k + 2 before everybody has begun k + 1, having read k.
  const int parity = threads[current].exchanges[scope]++ & 1;
  memcpy(payload[scope][parity][current], data, bytes);
  *lane = current - first;
  *lanes = members(scope, current);
  meet(scope, what, line, 0);
  return payload[scope][parity][first];
}

int emu_lane() { return current % kSimdWidth; }

void* emu_threadgroup(const void* key, size_t bytes, uint32_t element, const char* name) {
  for (int i = 0; i < group_slots; ++i) {
    if (group_keys[i] == key) return (void*)regions[device_slots + i].begin;
  }
  group_bytes += (bytes + 15) & ~uint64_t(15);
  if (group_bytes > launch->threadgroup_limit) {
    fail(__builtin_return_address(0), "threadgroup memory: %llu bytes with array '%s' (%zu bytes); the limit is %u",
         (unsigned long long)group_bytes, name, bytes, launch->threadgroup_limit);
  }
  const int slot = device_slots + group_slots;
  if (slot >= kSlots) fail(nullptr, "more than %d threadgroup arrays", group_slots);
  group_keys[group_slots++] = key;
  open_region(slot, name, bytes, element, true);
  regions[slot].group_memory = regions[slot].writable = true;
  memset((void*)regions[slot].begin, 0xFF, bytes);
  return (void*)regions[slot].begin;
}

void emu_atomic(const void* address, size_t bytes, int writes, int poll) {
  access(uintptr_t(address), bytes, writes, true, __builtin_return_address(0));
  if (!poll) return;
  // A thread that spins on an atomic must let the others run; a value only another threadgroup can give never arrives.
  if (++polls > kPollLimit) {
    fail(__builtin_return_address(0), "no progress: %llu atomic loads (a spin on another threadgroup?)", (unsigned long long)polls);
  }
  leave();
}

void emu_fail(const char* message) { fail(__builtin_return_address(0), "%s", message); }

void emu_check_element(const Bound* bound, uint32_t element) {
  // A structure (element 0) is taken as bytes.
  if (element && bound->element != element && regions[bound->index].bound) {
    fail(nullptr, "buffer %d '%s' holds elements of %u bytes, the kernel takes elements of %u", regions[bound->index].index,
         regions[bound->index].name, bound->element, element);
  }
}

// What -fsanitize=thread calls before every access that may be seen by another thread.
#define EMU_HOOK(bytes)                                                                                                   \
  void __tsan_read##bytes(void* p) { access(uintptr_t(p), bytes, false, false, __builtin_return_address(0)); }            \
  void __tsan_write##bytes(void* p) { access(uintptr_t(p), bytes, true, false, __builtin_return_address(0)); }            \
  void __tsan_unaligned_read##bytes(void* p) { access(uintptr_t(p), bytes, false, false, __builtin_return_address(0)); }  \
  void __tsan_unaligned_write##bytes(void* p) { access(uintptr_t(p), bytes, true, false, __builtin_return_address(0)); }
EMU_HOOK(1)
EMU_HOOK(2)
EMU_HOOK(4)
EMU_HOOK(8)
EMU_HOOK(16)
void __tsan_read_range(void* p, size_t n) { if (n) access(uintptr_t(p), n, false, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t n) { if (n) access(uintptr_t(p), n, true, false, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  if (n) access(uintptr_t(from), n, false, false, __builtin_return_address(0));
  if (n) access(uintptr_t(to), n, true, false, __builtin_return_address(0));
  return memcpy(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  if (n) access(uintptr_t(to), n, true, false, __builtin_return_address(0));
  return memset(to, value, n);
}

// What -fsanitize=bounds,alignment,integer-divide-by-zero calls when the check in the code has failed.
struct SourcePlace {
  const char* file;
  uint32_t line, column;
};
void __ubsan_handle_out_of_bounds(SourcePlace* place, uintptr_t index) {
  fail(__builtin_return_address(0), "out of bounds: index %lld of an array of fixed size (line %u)", (long long)index, place->line);
}
void __ubsan_handle_type_mismatch_v1(SourcePlace* place, uintptr_t pointer) {
  fail(__builtin_return_address(0), "misaligned access at address ending in 0x%03x (line %u)", unsigned(pointer & 0xFFF), place->line);
}
void __ubsan_handle_divrem_overflow(SourcePlace* place, uintptr_t, uintptr_t) {
  fail(__builtin_return_address(0), "integer division by zero (line %u)", place->line);
}
}
