// Settings, counters, errors, and the facts about an H100.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "card.h"

using namespace card;

std::recursive_mutex card::mutex;
thread_local int card::current = 0;
long card::counters[COUNTERS];
cudaError_t card::fault = cudaSuccess;

namespace {

constexpr const char* NAMES[COUNTERS] = {
    "launches",    "native launches", "uploads",      "downloads",   "device copies",      "memsets",
    "event waits", "stream waits",    "device waits", "allocations", "pinned allocations", "prohibited"};

constexpr int VERSION = 13000;
constexpr int MULTIPROCESSORS = 132, SHARED_BYTES = 232448, USUAL_SHARED_BYTES = 49152;
constexpr int REGISTERS = 65536, THREADS = 2048;

thread_local cudaError_t last = cudaSuccess;

int setting(const char* name, int usual) {
  const char* value = getenv(name);
  return value ? atoi(value) : usual;
}

CUresult unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }

}  // namespace

bool card::is_eager() {
  static const bool value = setting("COLLAGE_FX_FAKE_CUDA_EAGER", 0);
  return value;
}

bool card::is_idle() {
  static const bool value = setting("COLLAGE_FX_FAKE_CUDA_IDLE", 0);
  return value;
}

bool card::is_verbose() {
  static const bool value = setting("COLLAGE_FX_FAKE_CUDA_VERBOSE", 0);
  return value;
}

int card::devices() {
  static const int value = setting("COLLAGE_FX_FAKE_CUDA_DEVICES", 1);
  return value;
}

// ---- counters and errors

API const char* fake_counter_name(int i) { return i < COUNTERS ? NAMES[i] : nullptr; }

API void fake_counters(long* out, int clear) {
  LOCK;
  memcpy(out, counters, sizeof counters);
  if (clear) memset(counters, 0, sizeof counters);
}

// A kernel has done what a card would not survive: the next wait returns it.
API void fake_fault() {
  LOCK;
  fault = cudaErrorIllegalAddress;
}

API void fake_forget_faults() {
  LOCK;
  fault = last = cudaSuccess;
}

cudaError_t card::fail(cudaError_t error) { return last = error; }

cudaError_t card::fail_in_capture() {
  ++counters[PROHIBITED];
  return fail(cudaErrorStreamCaptureUnsupported);
}

cudaError_t card::waited() {
  const cudaError_t error = std::exchange(fault, cudaSuccess);
  return error ? fail(error) : cudaSuccess;
}

API cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last; }

API const char* cudaGetErrorString(cudaError_t error) {
  static thread_local char text[64];
  snprintf(text, sizeof text, "error %d of the fake CUDA driver", (int)error);
  return text;
}

API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString((cudaError_t)error);
  return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }

// ---- devices and contexts

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = devices();
  return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return fail(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* it, int device) {
  memset(it, 0, sizeof *it);
  strcpy(it->name, "FAKE H100 80GB HBM3");
  it->uuid.bytes[0] = it->pciBusID = 1 + device;
  it->major = 9;
  it->multiProcessorCount = MULTIPROCESSORS;
  it->totalGlobalMem = 80ull << 30;
  it->l2CacheSize = 1 << 20;  // small: Inductor's timing overwrites all of it
  it->memoryBusWidth = 5120;
  it->totalConstMem = 65536;
  it->warpSize = 32;
  it->regsPerBlock = it->regsPerMultiprocessor = REGISTERS;
  it->sharedMemPerBlock = USUAL_SHARED_BYTES;
  it->sharedMemPerBlockOptin = SHARED_BYTES;
  it->sharedMemPerMultiprocessor = SHARED_BYTES + 1024;
  it->maxThreadsPerBlock = it->maxThreadsDim[0] = it->maxThreadsDim[1] = 1024;
  it->maxThreadsDim[2] = 64;
  it->maxThreadsPerMultiProcessor = THREADS;
  it->maxBlocksPerMultiProcessor = 32;
  it->maxGridSize[0] = 2147483647;
  it->maxGridSize[1] = it->maxGridSize[2] = 65535;
  it->unifiedAddressing = it->concurrentKernels = it->managedMemory = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = MULTIPROCESSORS;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = SHARED_BYTES;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = USUAL_SHARED_BYTES;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
      *value = REGISTERS;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = THREADS;
      break;
    default:
      *value = 1;
  }
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = VERSION;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) { return (CUresult)cudaDriverGetVersion(version); }
API CUresult cuDeviceGetCount(int* count) { return (CUresult)cudaGetDeviceCount(count); }

API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);
}

// A context is 0x100 + its device.

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = (CUcontext)(uintptr_t)(0x100 + device);
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext* context) { return cuDevicePrimaryCtxRetain(context, current); }

API CUresult cuCtxSetCurrent(CUcontext context) {
  current = (int)((uintptr_t)context - 0x100);
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 0;
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

// ---- entry points by name

API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  void* found = dlsym(RTLD_DEFAULT, name);
  if (is_verbose() && !found) fprintf(stderr, "fake CUDA: there is no %s\n", name);
  *function = found ? found : (void*)unsupported;
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
