// Allocations, copies, and the accesses of kernels.
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "card.h"

using namespace card;

namespace {

constexpr size_t PAGE = 4096;
constexpr size_t LARGEST_FILLED = 64u << 20;
constexpr int UNWRITTEN = 0xA5;

std::map<uintptr_t, Range> ranges;
std::vector<void*> freed_within;  // an operation, whose followers may still need the memory

size_t pages(size_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

// Memory with a page behind it that belongs to nobody.
cudaError_t allocate(void** address, size_t size, bool pinned) {
  LOCK;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = mmap(nullptr, pages(size) + PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  if (!pinned && size <= LARGEST_FILLED) memset(memory, UNWRITTEN, size);
  ranges[(uintptr_t)memory] = {size ? size : 1, current, pinned};
  ++counters[pinned ? PINNED_ALLOCATIONS : ALLOCATIONS];
  *address = memory;
  return cudaSuccess;
}

bool is_on_device(const Range* range) { return range && !range->pinned; }

const char* place(const Range* range) {
  return !range ? "pageable" : range->pinned ? "pinned" : "device";
}

enum Fault { NONE = 0, OUTSIDE = 1, MISALIGNED = 2 };

Fault check(uintptr_t address, int bytes) {
  if (address % bytes) return MISALIGNED;
  uintptr_t base;
  const Range* range = range_of((void*)address, &base);
  return range && address + bytes <= base + range->size ? NONE : OUTSIDE;
}

}  // namespace

Range* card::range_of(const void* address, uintptr_t* base) {
  auto found = ranges.upper_bound((uintptr_t)address);
  if (found == ranges.begin()) return nullptr;
  --found;
  if ((uintptr_t)address >= found->first + found->second.size) return nullptr;
  if (base) *base = found->first;
  return &found->second;
}

// ---- allocations

API cudaError_t cudaMalloc(void** address, size_t size) { return allocate(address, size, false); }
API cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) { return allocate(address, size, true); }

// The pages are given back, the addresses are not: nothing else is ever there, so each later access is a fault.
API cudaError_t cudaFree(void* address) {
  LOCK;
  freed_within.push_back(address);
  if (is_running()) return cudaSuccess;
  drain_all();
  for (void* each : freed_within) {
    auto found = ranges.find((uintptr_t)each);
    if (found == ranges.end()) continue;
    madvise(each, pages(found->second.size), MADV_DONTNEED);
    ranges.erase(found);
  }
  freed_within.clear();
  return cudaSuccess;
}

API cudaError_t cudaFreeHost(void* address) { return cudaFree(address); }

API cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  LOCK;
  ranges[(uintptr_t)address] = {size, current, true};
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* address) {
  LOCK;
  ranges.erase((uintptr_t)address);
  return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = 70ull << 30;
  *total = 80ull << 30;
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  LOCK;
  memset(attributes, 0, sizeof *attributes);
  const Range* range = range_of(address);
  attributes->type = !range          ? cudaMemoryTypeUnregistered
                     : range->pinned ? cudaMemoryTypeHost
                                     : cudaMemoryTypeDevice;
  attributes->device = range ? range->device : -2;
  attributes->devicePointer = range ? (void*)address : nullptr;
  attributes->hostPointer = is_on_device(range) ? nullptr : (void*)address;
  return cudaSuccess;
}

API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr address) {
  LOCK;
  const Range* range = range_of((void*)address);
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *(CUdeviceptr*)out = address;
      break;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *(CUcontext*)out = (CUcontext)(uintptr_t)(0x100 + range->device);
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *(int*)out = range->device;
      break;
    default:
      *(int*)out = range->pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  }
  return CUDA_SUCCESS;
}

// ---- copies

// From pageable memory a copy is staged before this returns; to pageable memory it is waited for.
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  LOCK;
  const Range *target = range_of(to), *source = range_of(from);
  const bool to_device = is_on_device(target), from_device = is_on_device(source);
  ++counters[!from_device ? UPLOADS : to_device ? DEVICE_COPIES : DOWNLOADS];
  if (kind == cudaMemcpyHostToDevice && !to_device) fprintf(stderr, "fake CUDA: an upload to no device memory\n");
  if (is_verbose()) {
    fprintf(stderr, "fake CUDA: copy %zu bytes, %s to %s, stream %p\n", size, place(source), place(target), stream);
  }
  const bool is_staged = !source && to_device, is_waited_for = !target && from_device;
  if ((is_staged || is_waited_for) && stream_of(stream).capturing) return fail(cudaErrorStreamCaptureUnsupported);
  if (is_staged) {
    auto staged = std::make_shared<std::string>((const char*)from, size);
    push(stream, [=] { return memcpy(to, staged->data(), size), true; });
    return cudaSuccess;
  }
  push(stream, [=] { return memmove(to, from, size), true; });
  if (is_waited_for) drain(stream_of(stream));
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  LOCK;
  ++counters[DEVICE_WAITS];
  drain_all();
  memmove(to, from, size);
  return waited();
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  LOCK;
  ++counters[DEVICE_COPIES];
  push(stream, [=] { return memmove(to, from, size), true; });
  return cudaSuccess;
}

API cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  LOCK;
  ++counters[MEMSETS];
  push(stream, [=] { return memset(to, value, size), true; });
  return cudaSuccess;
}

API cudaError_t cudaMemset(void* to, int value, size_t size) {
  LOCK;
  drain_all();
  memset(to, value, size);
  return cudaSuccess;
}

API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) {
  return (CUresult)cudaMemcpy(to, (void*)from, size, cudaMemcpyDeviceToHost);
}

// ---- for memory.py: the accesses of threads. Returns -1, or the first thread that may not, and why.

API long fake_load(const uint64_t* addresses, long threads, int bytes, char* out, long* why) {
  LOCK;
  for (long i = 0; i < threads; ++i) {
    if ((*why = check(addresses[i], bytes))) return i;
    memcpy(out + i * bytes, (void*)addresses[i], bytes);
  }
  return -1;
}

API long fake_store(const uint64_t* addresses, long threads, int bytes, const char* in, long* why) {
  LOCK;
  for (long i = 0; i < threads; ++i) {
    if ((*why = check(addresses[i], bytes))) return i;
    memcpy((void*)addresses[i], in + i * bytes, bytes);
  }
  return -1;
}
