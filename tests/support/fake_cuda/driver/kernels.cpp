// Modules and launches. Triton's kernels are executed by Python, torch's own are not.
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <unordered_map>

#include "card.h"

using namespace card;

namespace {

struct Module {
  std::string path, image;
};

struct Function {
  Module* module;
  std::string name;
};

// kernels.py: note a launch with the values of its parameters and return a token, later execute it.
typedef long (*Prepare)(
    const char* path, const char* image, long size, const char* name, void** parameters, unsigned x, unsigned y,
    unsigned z, unsigned threads, unsigned shared, void* stream, int device);
typedef void (*Execute)(long token);
Prepare prepare = nullptr;
Execute execute = nullptr;

std::unordered_map<const void*, const char*> native_kernels;
std::map<std::string, long> refused;

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

void push_token(cudaStream_t stream, long token) {
  push(stream, [=] { return execute(token), true; });
}

// A kernel of torch's: machine code that nothing here can execute.
cudaError_t launch_native(const void* kernel) {
  LOCK;
  ++counters[NATIVE_LAUNCHES];
  const auto found = native_kernels.find(kernel);
  const char* name = found == native_kernels.end() ? "?" : found->second;
  if (is_idle() || strstr(name, "spin_kernel")) return cudaSuccess;  // the latter is torch.cuda._sleep
  if (!refused[name]++) {
    fprintf(stderr, "fake CUDA: no %s here, of an operator that operators.py does not replace\n", name);
  }
  return fail(cudaErrorNotSupported);
}

// Length of an ELF file, which ends with its table of sections.
size_t length(const char* elf) {
  return *(const uint64_t*)(elf + 0x28) + *(const uint16_t*)(elf + 0x3a) * *(const uint16_t*)(elf + 0x3c);
}

}  // namespace

// ---- for kernels.py and operators.py

API void fake_callbacks(Prepare of_launch, Execute of_token) {
  prepare = of_launch;
  execute = of_token;
}

API void fake_push(void* stream, long token) {
  LOCK;
  push_token((cudaStream_t)stream, token);
}

// ---- modules

API CUresult cuModuleLoad(CUmodule* module, const char* path) {
  if (is_verbose()) fprintf(stderr, "fake CUDA: load %s\n", path);
  *module = (CUmodule) new Module{path, ""};
  return CUDA_SUCCESS;
}

API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const char* elf = (const char*)image;
  *module = (CUmodule) new Module{"", std::string(elf, length(elf))};
  return CUDA_SUCCESS;
}

API CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}

API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

API CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  *function = (CUfunction) new Function{(Module*)module, name};
  return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return CUDA_SUCCESS;
}

API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 4;
  return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 1;
  return CUDA_SUCCESS;
}

// ---- launches of Triton's kernels

API CUresult cuLaunchKernel(
    CUfunction handle, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
    unsigned threads_z, unsigned shared, CUstream stream, void** parameters, void**) {
  LOCK;
  const Function* function = (const Function*)handle;
  const Module* module = function->module;
  const unsigned threads = threads_x * threads_y * threads_z;
  ++counters[LAUNCHES];
  if (is_verbose()) {
    fprintf(stderr, "fake CUDA: launch %s, grid %u %u %u, %u threads, %u shared bytes, stream %p, device %d\n",
            function->name.c_str(), x, y, z, threads, shared, stream, current);
  }
  if (!x || !y || !z) return CUDA_ERROR_INVALID_VALUE;
  if (stream_of(stream).device != current) return CUDA_ERROR_INVALID_HANDLE;
  if (is_idle()) return CUDA_SUCCESS;
  if (!prepare) return CUDA_ERROR_NOT_INITIALIZED;
  push_token(stream, prepare(module->path.c_str(), module->image.data(), module->image.size(),
                             function->name.c_str(), parameters, x, y, z, threads, shared, stream, current));
  return CUDA_SUCCESS;
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig* given, CUfunction function, void** parameters, void** extra) {
  return cuLaunchKernel(function, given->gridDimX, given->gridDimY, given->gridDimZ, given->blockDimX,
                        given->blockDimY, given->blockDimZ, given->sharedMemBytes, given->hStream, parameters, extra);
}

// ---- torch's own kernels

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API void __cudaRegisterFunction(
    void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  native_kernels.emplace(host, name);
}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration popped = configurations.back();
  configurations.pop_back();
  *grid = popped.grid;
  *block = popped.block;
  *shared = popped.shared;
  *(void**)stream = popped.stream;
  return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch_native((const void*)kernel);
}

API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch_native(function);
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 4;
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 4;
  return cudaSuccess;
}
