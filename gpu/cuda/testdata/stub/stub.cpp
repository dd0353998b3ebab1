// A libcuda.so.1 without a GPU, for tests. Device memory is memory of the process (memfds where it can be exported), streams
// are lazy: nothing runs until something observes it, so that missing synchronisation shows as wrong bytes. Ranges are
// checked when work is queued and again when it runs. Calls can be made to fail, and everything alive is counted.
//
// It cannot show timing, the memory model, races between blocks, or quirks of a driver.
#include <fcntl.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "simt.hpp"

typedef unsigned long long u64;
typedef unsigned int u32;
typedef u64 Ptr;

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, BAD_DEVICE = 101, BAD_CONTEXT = 201, BAD_PTX = 218,
       BAD_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_SUPPORTED = 801 };

#define API extern "C" __attribute__((visibility("default")))

namespace {

struct Stream;
struct Event {
  Stream *stream = nullptr;
  u64 at = 0;
};
struct Op {
  std::function<int()> run; // OK, NOT_READY or an error
};
struct Stream {
  std::deque<Op> queue;
  u64 queued = 0, done = 0;
  bool running = false;
};
struct Range {
  u64 size = 0;
  bool usable = true, readable_only = false;
  char kind = 'a'; // a: cuMemAlloc, r: registered, v: mapped, i: opened by a handle of another allocation
  int fd = -1;     // of cuMemAlloc
};
struct Handle {
  int fd;
  u64 size;
  bool mapped = false, released = false;
  int maps = 0;
};
struct Module {
  std::string text;
};
struct Function {
  std::string name;
};

std::recursive_mutex lock_;
std::map<std::string, long> settings{{"devices", 1}, {"version", 12080}, {"memory", 1l << 30}, {"batch", 1}, {"vmm", 1}, {"fd", 1}, {"eager", 0}};
struct Fault {
  std::string call;
  long countdown;
  int code;
};
std::vector<Fault> faults;
std::map<std::string, long> calls;
bool initialized;
int sticky;
std::string last_failure;
std::map<Ptr, Range> ranges;
std::map<Ptr, u64> reserved;
std::set<Handle *> handles;
std::map<Ptr, Handle *> mappings;
std::set<Stream *> streams;
std::set<Event *> events;
std::set<Module *> modules;
long contexts, used;
thread_local void *current_context;
char the_context;

// begin is the start of every call: what it must fail with, or OK. need: 1 initialized, 2 and a context, 3 and no sticky
// error.
int begin(const char *name, int need) {
  calls[name]++;
  for (auto &f : faults)
    if (f.call == name && f.countdown > 0 && --f.countdown == 0) {
      if (f.code == ILLEGAL_ADDRESS) sticky = f.code;
      return f.code;
    }
  if (need >= 1 && !initialized) return NOT_INITIALIZED;
  if (need >= 2 && current_context != &the_context) return BAD_CONTEXT;
  if (need >= 3 && sticky) return sticky;
  return OK;
}

#define BEGIN(need)                                    \
  std::lock_guard<std::recursive_mutex> guard(lock_); \
  if (int e = begin(__func__, need)) return e;

// reach says whether n bytes at p lie in one or several adjacent live ranges, and may be written if write.
bool reach(Ptr p, u64 n, bool write) {
  while (n > 0) {
    auto i = ranges.upper_bound(p);
    if (i == ranges.begin()) return false;
    --i;
    u64 into = p - i->first;
    if (into >= i->second.size || !i->second.usable || (write && i->second.readable_only)) return false;
    u64 here = i->second.size - into;
    if (here >= n) return true;
    p += here, n -= here;
  }
  return true;
}

int illegal(const char *what) {
  sticky = ILLEGAL_ADDRESS;
  last_failure = what;
  return sticky;
}

void advance(Stream *s, u64 to) {
  if (s->running) return; // waits in a circle: no progress is right
  s->running = true;
  while (s->done < to && !sticky && !s->queue.empty()) {
    int e = s->queue.front().run();
    if (e == NOT_READY) break;
    s->queue.pop_front();
    s->done++;
  }
  s->running = false;
}

void advance_others(Stream *but) {
  for (auto s : streams)
    if (s != but) advance(s, s->queued);
}

int queue(Stream *s, std::function<int()> run) {
  if (!streams.count(s)) return BAD_HANDLE;
  s->queue.push_back({run});
  s->queued++;
  if (settings["eager"]) advance(s, s->queued);
  return OK;
}

int observe(Stream *s, u64 at) {
  advance(s, at);
  if (sticky) return sticky;
  return s->done >= at ? OK : NOT_READY;
}

u64 granularity = 2 << 20;

bool take(u64 n) {
  if (used + (long)n > settings["memory"]) return false;
  used += n;
  return true;
}


} // namespace

// Control, for the tests.

API void stub_set(const char *key, long value) {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  settings[key] = value;
}

API void stub_fail(const char *call, long nth, int code) {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  faults.push_back({call, nth, code});
}

API long stub_count(const char *what) {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  std::string w = what;
  if (w == "ranges") return (long)ranges.size();
  if (w == "reserved") return (long)reserved.size();
  if (w == "handles") return (long)handles.size();
  if (w == "streams") return (long)streams.size();
  if (w == "events") return (long)events.size();
  if (w == "modules") return (long)modules.size();
  if (w == "contexts") return contexts;
  if (w == "used") return used;
  return calls[w];
}

API const char *stub_failure() { return last_failure.c_str(); }

// stub_reset forgets settings, faults, counts and a lost device; what is alive stays.
API void stub_reset() {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  settings = {{"devices", 1}, {"version", 12080}, {"memory", 1l << 30}, {"batch", 1}, {"vmm", 1}, {"fd", 1}, {"eager", 0}};
  faults.clear();
  calls.clear();
  sticky = 0;
  last_failure.clear();
}

// Devices and contexts.

API int cuInit(u32) {
  BEGIN(0)
  if (settings["devices"] == 0) return NO_DEVICE;
  initialized = true;
  return OK;
}
API int cuDriverGetVersion(int *v) {
  BEGIN(0)
  *v = (int)settings["version"];
  return OK;
}
API int cuDeviceGetCount(int *n) {
  BEGIN(1)
  *n = (int)settings["devices"];
  return OK;
}
API int cuDeviceGet(int *d, int ordinal) {
  BEGIN(1)
  if (ordinal < 0 || ordinal >= settings["devices"]) return BAD_DEVICE;
  *d = ordinal;
  return OK;
}
API int cuDeviceGetName(char *name, int len, int d) {
  BEGIN(1)
  snprintf(name, (size_t)len, "Stub GPU %d", d);
  return OK;
}
API int cuDeviceGetUuid_v2(unsigned char *uuid, int d) {
  BEGIN(1)
  for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(0x40 + d + i);
  return OK;
}
API int cuDeviceTotalMem_v2(size_t *n, int) {
  BEGIN(1)
  *n = (size_t)settings["memory"];
  return OK;
}
API int cuDeviceGetAttribute(int *v, int attribute, int) {
  BEGIN(1)
  switch (attribute) {
  case 16: *v = 4; break;
  case 75: *v = 9; break;
  case 76: *v = 0; break;
  case 102: *v = (int)settings["vmm"]; break;
  case 103: *v = (int)settings["fd"]; break;
  default: *v = 0;
  }
  return OK;
}
API int cuDeviceCanAccessPeer(int *can, int a, int b) {
  BEGIN(1)
  *can = a != b;
  return OK;
}
API int cuDevicePrimaryCtxRetain(void **ctx, int) {
  BEGIN(1)
  contexts++;
  *ctx = &the_context;
  return OK;
}
API int cuDevicePrimaryCtxRelease_v2(int) {
  BEGIN(1)
  if (contexts == 0) return INVALID;
  contexts--;
  return OK;
}
API int cuCtxSetCurrent(void *ctx) {
  BEGIN(1)
  current_context = ctx;
  return OK;
}
API int cuGetErrorName(int code, const char **name) {
  static thread_local char text[32];
  snprintf(text, sizeof text, "STUB_ERROR_%d", code);
  *name = text;
  return OK;
}

// Memory.

API int cuMemAlloc_v2(Ptr *p, size_t n) {
  BEGIN(3)
  if (n == 0) return INVALID;
  if (!take(n)) return NO_MEMORY;
  int fd = memfd_create("stub", MFD_CLOEXEC); // shared, for handles of it
  if (fd < 0 || ftruncate(fd, (off_t)n)) return NO_MEMORY;
  void *m = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (m == MAP_FAILED) return NO_MEMORY;
  memset(m, 0xa5, n);
  ranges[(Ptr)m].size = n;
  ranges[(Ptr)m].fd = fd;
  *p = (Ptr)m;
  return OK;
}
API int cuMemFree_v2(Ptr p) {
  BEGIN(2)
  auto i = ranges.find(p);
  if (i == ranges.end() || i->second.kind != 'a') return INVALID;
  used -= (long)i->second.size;
  munmap((void *)p, i->second.size);
  close(i->second.fd);
  ranges.erase(i);
  return sticky;
}

struct IpcHandle {
  u64 pid, fd, size, rest[5];
};
API int cuIpcGetMemHandle(IpcHandle *out, Ptr p) {
  BEGIN(3)
  auto i = ranges.find(p);
  if (i == ranges.end() || i->second.kind != 'a') return INVALID;
  *out = IpcHandle{(u64)getpid(), (u64)i->second.fd, i->second.size, {1, 2, 3, 4, 5}};
  return OK;
}
API int cuIpcOpenMemHandle_v2(Ptr *p, IpcHandle h, u32 flags) {
  BEGIN(3)
  if (flags != 1 || h.rest[0] != 1 || h.rest[4] != 5) return INVALID; // came over in another shape
  char path[64];
  snprintf(path, sizeof path, "/proc/%llu/fd/%llu", (unsigned long long)h.pid, (unsigned long long)h.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return INVALID;
  void *m = mmap(nullptr, h.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (m == MAP_FAILED) return INVALID;
  ranges[(Ptr)m].size = h.size;
  ranges[(Ptr)m].kind = 'i';
  *p = (Ptr)m;
  return OK;
}
API int cuIpcCloseMemHandle(Ptr p) {
  BEGIN(2)
  auto i = ranges.find(p);
  if (i == ranges.end() || i->second.kind != 'i') return INVALID;
  munmap((void *)p, i->second.size);
  ranges.erase(i);
  return sticky;
}
API int cuMemHostRegister_v2(void *p, size_t n, u32) {
  BEGIN(3)
  if (n == 0) return INVALID;
  if (ranges.count((Ptr)p)) return ALREADY_REGISTERED;
  Range r;
  r.size = n;
  r.kind = 'r';
  ranges[(Ptr)p] = r;
  return OK;
}
API int cuMemHostUnregister(void *p) {
  BEGIN(2)
  auto i = ranges.find((Ptr)p);
  if (i == ranges.end() || i->second.kind != 'r') return INVALID;
  ranges.erase(i);
  return sticky;
}
API int cuMemHostGetDevicePointer_v2(Ptr *d, void *p, u32) {
  BEGIN(3)
  auto i = ranges.find((Ptr)p);
  if (i == ranges.end() || i->second.kind != 'r') return INVALID;
  *d = (Ptr)p;
  return OK;
}

struct Location {
  int type, id;
};
struct AllocProp {
  int type, handle_types;
  Location location;
  void *win32;
  unsigned char flags[8];
};
struct AccessDesc {
  Location location;
  int flags;
};
static_assert(sizeof(AllocProp) == 32 && sizeof(AccessDesc) == 12, "sizes of the driver API");

API int cuMemGetAllocationGranularity(size_t *g, const AllocProp *, int) {
  BEGIN(3)
  *g = granularity;
  return OK;
}
API int cuMemCreate(u64 *out, size_t n, const AllocProp *prop, u64 flags) {
  BEGIN(3)
  if (n == 0 || n % granularity || prop->type != 1 || prop->location.type != 1 || flags) return INVALID;
  if (prop->handle_types & ~1) return NOT_SUPPORTED;
  if (!take(n)) return NO_MEMORY;
  int fd = memfd_create("stub-device-memory", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)n)) return NO_MEMORY;
  void *m = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (m == MAP_FAILED) return NO_MEMORY;
  memset(m, 0xa5, n);
  munmap(m, n);
  auto h = new Handle{fd, n};
  handles.insert(h);
  *out = (u64)h;
  return OK;
}
static void drop(Handle *h) {
  if (!h->released || h->maps) return;
  used -= (long)h->size;
  close(h->fd);
  handles.erase(h);
  delete h;
}
API int cuMemRelease(u64 handle) {
  BEGIN(2)
  auto h = (Handle *)handle;
  if (!handles.count(h) || h->released) return INVALID;
  h->released = true;
  drop(h);
  return OK;
}
API int cuMemAddressReserve(Ptr *p, size_t n, size_t, Ptr, u64) {
  BEGIN(3)
  if (n == 0 || n % granularity) return INVALID;
  void *m = mmap(nullptr, n + granularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return NO_MEMORY;
  *p = ((Ptr)m + granularity - 1) / granularity * granularity;
  munmap(m, *p - (Ptr)m);
  munmap((void *)(*p + n), (Ptr)m + granularity - *p);
  reserved[*p] = n;
  return OK;
}
API int cuMemAddressFree(Ptr p, size_t n) {
  BEGIN(2)
  auto i = reserved.find(p);
  if (i == reserved.end() || i->second != n) return INVALID;
  for (auto &m : mappings)
    if (m.first >= p && m.first < p + n) return INVALID;
  munmap((void *)p, n);
  reserved.erase(i);
  return OK;
}
API int cuMemMap(Ptr p, size_t n, size_t offset, u64 handle, u64) {
  BEGIN(3)
  auto h = (Handle *)handle;
  auto i = reserved.upper_bound(p);
  if (!handles.count(h) || offset || n == 0 || n > h->size || i == reserved.begin()) return INVALID;
  --i;
  if (p + n > i->first + i->second || mappings.count(p)) return INVALID;
  if (mmap((void *)p, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, h->fd, 0) == MAP_FAILED) return NO_MEMORY;
  mappings[p] = h;
  h->maps++;
  Range r;
  r.size = n;
  r.usable = false;
  r.kind = 'v';
  ranges[p] = r;
  return OK;
}
API int cuMemUnmap(Ptr p, size_t n) {
  BEGIN(2)
  auto i = ranges.find(p);
  if (i == ranges.end() || i->second.kind != 'v' || i->second.size != n) return INVALID;
  mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  auto h = mappings[p];
  mappings.erase(p);
  ranges.erase(i);
  h->maps--;
  drop(h);
  return OK;
}
API int cuMemSetAccess(Ptr p, size_t n, const AccessDesc *desc, size_t count) {
  BEGIN(3)
  auto i = ranges.find(p);
  if (i == ranges.end() || i->second.size != n || count != 1 || desc->location.type != 1 || (desc->flags != 1 && desc->flags != 3)) return INVALID;
  i->second.usable = true;
  i->second.readable_only = desc->flags == 1;
  mprotect((void *)p, n, desc->flags == 1 ? PROT_READ : PROT_READ | PROT_WRITE);
  return OK;
}
API int cuMemExportToShareableHandle(void *out, u64 handle, int type, u64) {
  BEGIN(3)
  auto h = (Handle *)handle;
  if (!handles.count(h) || type != 1) return INVALID;
  int fd = dup(h->fd);
  if (fd < 0) return NOT_SUPPORTED;
  *(int *)out = fd;
  return OK;
}
API int cuMemImportFromShareableHandle(u64 *out, void *os, int type) {
  BEGIN(3)
  struct stat st;
  int from = (int)(intptr_t)os;
  if (type != 1 || fstat(from, &st)) return INVALID;
  int fd = dup(from);
  if (fd < 0) return INVALID;
  used += st.st_size; // counted once for each handle, as drop gives it back
  auto h = new Handle{fd, (u64)st.st_size};
  handles.insert(h);
  *out = (u64)h;
  return OK;
}

// Streams and events.

API int cuStreamCreate(Stream **s, u32 flags) {
  BEGIN(3)
  if (flags != 1) return INVALID; // the legacy stream's order would hide missing waits
  *s = new Stream;
  streams.insert(*s);
  return OK;
}
API int cuStreamDestroy_v2(Stream *s) {
  BEGIN(2)
  if (!streams.count(s)) return BAD_HANDLE;
  streams.erase(s);
  delete s;
  return OK;
}
API int cuStreamQuery(Stream *s) {
  BEGIN(3)
  if (!streams.count(s)) return BAD_HANDLE;
  return observe(s, s->queued);
}
API int cuEventCreate(Event **e, u32 flags) {
  BEGIN(3)
  if (flags != 2) return INVALID;
  *e = new Event;
  events.insert(*e);
  return OK;
}
API int cuEventDestroy_v2(Event *e) {
  BEGIN(2)
  if (!events.count(e)) return BAD_HANDLE;
  events.erase(e);
  delete e;
  return OK;
}
API int cuEventRecord(Event *e, Stream *s) {
  BEGIN(3)
  if (!events.count(e) || !streams.count(s)) return BAD_HANDLE;
  e->stream = s;
  e->at = s->queued;
  return OK;
}
API int cuEventQuery(Event *e) {
  BEGIN(3)
  if (!events.count(e)) return BAD_HANDLE;
  return !e->stream || !streams.count(e->stream) ? OK : observe(e->stream, e->at);
}
API int cuStreamWaitEvent(Stream *s, Event *e, u32) {
  BEGIN(3)
  if (!events.count(e)) return BAD_HANDLE;
  Stream *of = e->stream;
  u64 at = e->at;
  return queue(s, [of, at] { return !of || !streams.count(of) ? (int)OK : observe(of, at); });
}
API int cuStreamWriteValue64_v2(Stream *s, Ptr p, u64 v, u32 flags) {
  BEGIN(3)
  if (p % 8 || flags || !reach(p, 8, true)) return INVALID;
  return queue(s, [=] {
    if (!reach(p, 8, true)) return illegal("write value");
    __atomic_store_n((u64 *)p, v, __ATOMIC_SEQ_CST);
    return (int)OK;
  });
}
API int cuStreamWaitValue64_v2(Stream *s, Ptr p, u64 v, u32 flags) {
  BEGIN(3)
  if (p % 8 || flags || !reach(p, 8, false)) return INVALID;
  return queue(s, [=] {
    if (!reach(p, 8, false)) return illegal("wait value");
    if (__atomic_load_n((u64 *)p, __ATOMIC_SEQ_CST) < v) advance_others(s); // hardware would run them meanwhile
    return __atomic_load_n((u64 *)p, __ATOMIC_SEQ_CST) < v ? (int)NOT_READY : (int)OK;
  });
}

// Copies.

static int queue_copy(Stream *s, Ptr dst, Ptr src, size_t n) {
  if (!reach(dst, n, true) || !reach(src, n, false)) return INVALID;
  return queue(s, [=] {
    if (!reach(dst, n, true) || !reach(src, n, false)) return illegal("copy");
    memmove((void *)dst, (void *)src, n);
    return (int)OK;
  });
}
API int cuMemcpyAsync(Ptr dst, Ptr src, size_t n, Stream *s) {
  BEGIN(3)
  return queue_copy(s, dst, src, n);
}
struct CopyAttributes {
  int src_access_order;
  Location src_hint, dst_hint;
  u32 flags;
};
static_assert(sizeof(CopyAttributes) == 24, "size of the driver API");
API int cuMemcpyBatchAsync(Ptr *dsts, Ptr *srcs, size_t *sizes, size_t count, CopyAttributes *attrs, size_t *indices, size_t attr_count, size_t *fail, Stream *s) {
  BEGIN(3)
  *fail = SIZE_MAX;
  if (!s || !streams.count(s) || attr_count != 1 || indices[0] != 0 || attrs[0].src_access_order != 1) return INVALID;
  for (size_t i = 0; i < count; i++)
    if (!reach(dsts[i], sizes[i], true) || !reach(srcs[i], sizes[i], false)) return *fail = i, INVALID;
  for (size_t i = 0; i < count; i++)
    if (int e = queue_copy(s, dsts[i], srcs[i], sizes[i])) return e;
  return OK;
}
API int cuMemsetD8Async(Ptr p, unsigned char v, size_t n, Stream *s) {
  BEGIN(3)
  if (!reach(p, n, true)) return INVALID;
  return queue(s, [=] {
    if (!reach(p, n, true)) return illegal("memset");
    memset((void *)p, v, n);
    return (int)OK;
  });
}

// Kernels.

struct attention_args {
  const void *q;
  const unsigned char *pool;
  const int *table, *seqlens;
  float *part, *out;
  u64 page_stride, k_off, v_off, token_stride, head_stride;
  int max_pages, page_tokens, q_heads, kv_heads, splits, window, q_type;
  float scale, cap_in, cap_log2;
};
extern "C" {
void kv_copy_pages(const u64 *, const u64 *, u32, u32);
void kv_sum_chunks(const u64 *, u64, u64 *);
void kv_sum_pages(const u64 *, u32, u64, u32, u64 *);
void kv_decode_combine(const float *, float *, const int *, int, int, int);
#define D(name) void name(attention_args);
#include "decode_names.h"
#undef D
}
static const std::map<std::string, void (*)(attention_args)> decoders = {
#define D(name) {#name, name},
#include "decode_names.h"
#undef D
};

API int cuModuleLoadDataEx(Module **m, const void *image, u32, int *, void **) {
  BEGIN(3)
  if (!strstr((const char *)image, ".version 7.8")) return BAD_PTX;
  *m = new Module{(const char *)image};
  modules.insert(*m);
  return OK;
}
API int cuModuleUnload(Module *m) {
  BEGIN(2)
  if (!modules.count(m)) return BAD_HANDLE;
  modules.erase(m);
  delete m;
  return OK;
}
API int cuModuleGetFunction(Function **f, Module *m, const char *name) {
  BEGIN(3)
  if (!modules.count(m)) return BAD_HANDLE;
  if (m->text.find(".entry " + std::string(name) + "(") == std::string::npos) return NOT_FOUND;
  static std::map<std::string, Function *> all; // as long as the process, as handles of functions are
  if (!all[name]) all[name] = new Function{name};
  *f = all[name];
  return OK;
}

template <class T> static T param(void **params, int i) {
  T v;
  memcpy(&v, params[i], sizeof v);
  return v;
}

static bool reach_all(const u64 *list, size_t n, u64 bytes, bool write) {
  if (!reach((Ptr)list, n * 8, false)) return false;
  for (size_t i = 0; i < n; i++)
    if (list[i] % 16 || !reach(list[i], bytes, write)) return false;
  return true;
}

static bool reach_attention(const attention_args &a, u32 batch) {
  if (!reach((Ptr)a.seqlens, 4 * batch, false)) return false;
  for (u32 b = 0; b < batch; b++) {
    int from = a.window > 0 && a.window < a.seqlens[b] ? a.seqlens[b] - a.window : 0;
    for (int t = from; t < a.seqlens[b]; t++) {
      const int *entry = a.table + (u64)b * a.max_pages + t / a.page_tokens;
      if (!reach((Ptr)entry, 4, false)) return false;
      u64 row = (u64)a.pool + (u64)*entry * a.page_stride + (u64)(t % a.page_tokens) * a.token_stride;
      if (!reach(row + a.k_off, 128, false) || !reach(row + a.v_off + (u64)(a.kv_heads - 1) * a.head_stride, 128, false)) return false;
    }
  }
  return true;
}

API int cuLaunchKernel(Function *f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, Stream *s, void **params, void **extra) {
  BEGIN(3)
  if (!gx || !gy || !gz || by != 1 || bz != 1 || !bx || bx > 1024 || gy > 65535 || gz > 65535 || shared || extra) return INVALID;
  std::function<bool()> check;
  std::function<void()> body;
  if (f->name == "kv_copy_pages") {
    auto src = param<const u64 *>(params, 0), dst = param<const u64 *>(params, 1);
    auto n = param<u32>(params, 2), bytes = param<u32>(params, 3);
    check = [=] { return bytes % 16 == 0 && reach_all(src, n, bytes, false) && reach_all(dst, n, bytes, true); };
    body = [=] { kv_copy_pages(src, dst, n, bytes); };
  } else if (f->name == "kv_sum_chunks") {
    auto pages = param<const u64 *>(params, 0);
    auto bytes = param<u64>(params, 1);
    auto sums = param<u64 *>(params, 2);
    check = [=] { return reach_all(pages, gy, bytes, false) && reach((Ptr)sums, 8ull * gx * gy, true); };
    body = [=] { kv_sum_chunks(pages, bytes, sums); };
  } else if (f->name == "kv_sum_pages") {
    auto sums = param<const u64 *>(params, 0);
    auto chunks = param<u32>(params, 1);
    auto bytes = param<u64>(params, 2);
    auto n = param<u32>(params, 3);
    auto out = param<u64 *>(params, 4);
    check = [=] { return reach((Ptr)sums, 8ull * n * chunks, false) && reach((Ptr)out, 8ull * n, true); };
    body = [=] { kv_sum_pages(sums, chunks, bytes, n, out); };
  } else if (f->name == "kv_decode_combine") {
    auto part = param<const float *>(params, 0);
    auto out = param<float *>(params, 1);
    auto lens = param<const int *>(params, 2);
    auto splits = param<int>(params, 3), heads = param<int>(params, 4), dim = param<int>(params, 5);
    check = [=] { return reach((Ptr)part, 4ull * gy * heads * splits * (dim + 2), false) && reach((Ptr)out, 4ull * gy * heads * dim, true); };
    body = [=] { kv_decode_combine(part, out, lens, splits, heads, dim); };
  } else if (decoders.count(f->name)) {
    auto a = param<attention_args>(params, 0);
    auto run = decoders.at(f->name);
    check = [=] { return reach_attention(a, gz); };
    body = [=] { run(a); };
  } else {
    return BAD_HANDLE;
  }
  return queue(s, [=] {
    if (!check()) return illegal(f->name.c_str());
    const u32 grid[3] = {gx, gy, gz};
    std::string failure = simt_run(grid, bx, body);
    if (!failure.empty()) return illegal((f->name + ": " + failure).c_str());
    return (int)OK;
  });
}

// Entry points by plain name and version, as the driver gives them.
API int cuGetProcAddress_v2(const char *name, void **fn, int version, u64, int *status) {
  static const std::map<std::string, std::pair<void *, int>> all = {
#define E(plain, symbol, since) {#plain, {(void *)symbol, since}}
      E(cuDeviceGet, cuDeviceGet, 2000), E(cuDeviceGetCount, cuDeviceGetCount, 2000), E(cuDeviceGetName, cuDeviceGetName, 2000),
      E(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000), E(cuDeviceGetUuid, cuDeviceGetUuid_v2, 11040), E(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020),
      E(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, 4000), E(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000),
      E(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000), E(cuCtxSetCurrent, cuCtxSetCurrent, 4000), E(cuGetErrorName, cuGetErrorName, 6000),
      E(cuIpcGetMemHandle, cuIpcGetMemHandle, 4010), E(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, 11000), E(cuIpcCloseMemHandle, cuIpcCloseMemHandle, 4010),
      E(cuMemAlloc, cuMemAlloc_v2, 3020), E(cuMemFree, cuMemFree_v2, 3020), E(cuMemHostRegister, cuMemHostRegister_v2, 6050),
      E(cuMemHostUnregister, cuMemHostUnregister, 4000), E(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, 3020),
      E(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity, 10020), E(cuMemCreate, cuMemCreate, 10020), E(cuMemRelease, cuMemRelease, 10020),
      E(cuMemAddressReserve, cuMemAddressReserve, 10020), E(cuMemAddressFree, cuMemAddressFree, 10020), E(cuMemMap, cuMemMap, 10020),
      E(cuMemUnmap, cuMemUnmap, 10020), E(cuMemSetAccess, cuMemSetAccess, 10020), E(cuMemExportToShareableHandle, cuMemExportToShareableHandle, 10020),
      E(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, 10020), E(cuStreamCreate, cuStreamCreate, 2000),
      E(cuStreamDestroy, cuStreamDestroy_v2, 4000), E(cuStreamQuery, cuStreamQuery, 2000), E(cuStreamWaitEvent, cuStreamWaitEvent, 3020),
      E(cuEventCreate, cuEventCreate, 2000), E(cuEventDestroy, cuEventDestroy_v2, 4000), E(cuEventRecord, cuEventRecord, 2000), E(cuEventQuery, cuEventQuery, 2000),
      E(cuStreamWriteValue64, cuStreamWriteValue64_v2, 11070), E(cuStreamWaitValue64, cuStreamWaitValue64_v2, 11070), E(cuMemcpyAsync, cuMemcpyAsync, 4000),
      E(cuMemsetD8Async, cuMemsetD8Async, 3020), E(cuModuleLoadDataEx, cuModuleLoadDataEx, 2010), E(cuModuleUnload, cuModuleUnload, 2000),
      E(cuModuleGetFunction, cuModuleGetFunction, 2000), E(cuLaunchKernel, cuLaunchKernel, 4000), E(cuMemcpyBatchAsync, cuMemcpyBatchAsync, 12080),
#undef E
  };
  BEGIN(0)
  *fn = nullptr;
  auto i = all.find(name);
  if (i == all.end() || i->second.second > settings["version"] || (i->first == "cuMemcpyBatchAsync" && !settings["batch"])) return *status = 1, (int)OK;
  if (i->second.second > version) return *status = 2, (int)OK;
  *fn = i->second.first;
  return *status = 0, (int)OK;
}
