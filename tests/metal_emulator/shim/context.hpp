// Switching between fibres: a dozen instructions on x86-64, ucontext elsewhere (it makes system calls, hence the split).
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace emu {

typedef void (*Entry)();

#if defined(__x86_64__)

struct Context {
  void* stack = nullptr;
};

extern "C" void emu_switch_stacks(void** save, void* load);
asm(R"(
.text
.p2align 4
.hidden emu_switch_stacks
.globl emu_switch_stacks
emu_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

inline void prepare(Context& context, char* stack, size_t bytes, Entry entry) {
  uintptr_t top = (uintptr_t(stack) + bytes) & ~uintptr_t(15);
  void** frame = reinterpret_cast<void**>(top) - 8;  // six saved registers, the entry address, one word to keep the call aligned
  for (int i = 0; i < 6; ++i) frame[i] = nullptr;
  frame[6] = reinterpret_cast<void*>(entry);
  frame[7] = nullptr;
  context.stack = frame;
}

inline void switch_context(Context& from, Context& to) { emu_switch_stacks(&from.stack, to.stack); }

#else

}  // namespace emu
#include <ucontext.h>
namespace emu {

struct Context {
  ucontext_t state;
};

inline void prepare(Context& context, char* stack, size_t bytes, Entry entry) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = bytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

inline void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

#endif

}  // namespace emu
