// The SIMT shim: runs one block of a kernel at a time on the CPU, one fiber for each CUDA thread. A shuffle is a meeting
// of all lanes of a warp and a barrier one of all threads of the block: a meeting that some can no longer reach is an
// error, where hardware would hang or return garbage.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <functional>
#include <string>
#include <vector>

#include "simt.hpp"

namespace {

enum State { READY, SHUFFLE, BARRIER, DONE };

struct Fiber {
  void *sp = nullptr;
  char *stack = nullptr;
  State state = READY;
  float value = 0;
  unsigned lane_mask = 0;
};

const size_t STACK = 64 << 10;
std::vector<Fiber> fibers;
unsigned current, thread_count, block_at[3], grid_of[3];
void *scheduler_sp;
const std::function<void()> *body;
std::string failure;

// swap saves the callee-saved registers and continues on another stack.
extern "C" void simt_swap(void **save, void *load);
asm(R"(
.text
.globl simt_swap
simt_swap:
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

void enter() {
  (*body)();
  fibers[current].state = DONE;
  simt_swap(&fibers[current].sp, scheduler_sp);
  abort();
}

void start(Fiber &f) {
  if (!f.stack) {
    f.stack = (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (f.stack == MAP_FAILED) abort();
  }
  void **top = (void **)(f.stack + STACK - 64);
  *--top = nullptr; // where enter would return to; it also keeps the stack aligned as after a call
  *--top = (void *)enter;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  f.sp = top;
  f.state = READY;
}

void meet(State s) {
  Fiber &f = fibers[current];
  f.state = s;
  simt_swap(&f.sp, scheduler_sp);
}

void fail(const char *what) {
  if (failure.empty()) failure = what;
}

// shuffle lets warp w go on if all its lanes have met.
bool shuffle(unsigned w) {
  unsigned end = w + 32 < thread_count ? w + 32 : thread_count, at = 0, gone = 0;
  for (unsigned i = w; i < end; i++) at += fibers[i].state == SHUFFLE, gone += fibers[i].state == DONE || fibers[i].state == BARRIER;
  if (at == 0) return false;
  if (at + gone == end - w && gone) return fail("a shuffle that only part of a warp reached"), false;
  if (at != end - w) return false;
  float got[32];
  for (unsigned i = w; i < end; i++) {
    if (fibers[i].lane_mask != fibers[w].lane_mask) fail("lanes of a warp in different shuffles");
    got[i - w] = fibers[w + ((i - w) ^ fibers[i].lane_mask) % (end - w)].value;
  }
  for (unsigned i = w; i < end; i++) fibers[i].value = got[i - w], fibers[i].state = READY;
  return true;
}

bool barrier() {
  unsigned at = 0, gone = 0;
  for (unsigned i = 0; i < thread_count; i++) at += fibers[i].state == BARRIER, gone += fibers[i].state == DONE;
  if (at && at + gone == thread_count && gone) return fail("a barrier that a thread will never reach"), false;
  if (at != thread_count) return false;
  for (unsigned i = 0; i < thread_count; i++) fibers[i].state = READY;
  return true;
}

void run_block() {
  for (unsigned i = 0; i < thread_count; i++) start(fibers[i]);
  for (bool moved = true; moved && failure.empty();) {
    moved = false;
    for (current = 0; current < thread_count; current++)
      if (fibers[current].state == READY) moved = true, simt_swap(&scheduler_sp, fibers[current].sp);
    for (unsigned w = 0; w < thread_count; w += 32) moved |= shuffle(w);
    moved |= barrier();
  }
  for (unsigned i = 0; i < thread_count; i++)
    if (fibers[i].state != DONE) fail("threads that wait for each other");
}

} // namespace

unsigned simt_tid() { return current; }
unsigned simt_block(int axis) { return block_at[axis]; }
unsigned simt_grid(int axis) { return grid_of[axis]; }
unsigned simt_threads() { return thread_count; }
void simt_barrier() { meet(BARRIER); }
float simt_shfl_xor(float v, unsigned lane_mask) {
  fibers[current].value = v;
  fibers[current].lane_mask = lane_mask;
  meet(SHUFFLE);
  return fibers[current].value;
}

std::string simt_run(const unsigned grid[3], unsigned threads, const std::function<void()> &kernel) {
  failure.clear();
  body = &kernel;
  thread_count = threads;
  if (fibers.size() < threads) fibers.resize(threads);
  for (int i = 0; i < 3; i++) grid_of[i] = grid[i];
  for (block_at[2] = 0; block_at[2] < grid[2]; block_at[2]++)
    for (block_at[1] = 0; block_at[1] < grid[1]; block_at[1]++)
      for (block_at[0] = 0; block_at[0] < grid[0] && failure.empty(); block_at[0]++) run_block();
  return failure;
}
