// The card: memory, queues and counters. See tests/support/fake_cuda/__init__.py.
//
// Note [The fake driver]
// ----------------------
// Device memory is the host's. A stream is a queue of operations, each of which is a function that returns whether it
// is done. A queue is emptied when somebody waits for it, which is as late as CUDA allows, so that a missing wait is
// seen. COLLAGE_FX_FAKE_CUDA_EAGER=1 empties it at once instead.
//
// Every entry point takes one lock, and only one thread of the host is expected to use the card at a time.
//
//   memory.cpp    allocations, copies, checked accesses of kernels
//   streams.cpp   streams, events, captures, graphs
//   kernels.cpp   modules and launches
//   devices.cpp   properties, errors, entry points
#pragma once

#include <cuda.h>
#include <driver_types.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
#define LOCK std::lock_guard<std::recursive_mutex> lock_(card::mutex)

namespace card {

extern std::recursive_mutex mutex;
extern thread_local int current;  // device

// ---- settings, from the environment

bool is_eager();
bool is_idle();     // kernels do nothing: a step costs its host what it does on a card
bool is_verbose();  // each copy and launch to stderr
int devices();

// ---- counters

enum Counter {
  LAUNCHES,
  NATIVE_LAUNCHES,  // of torch's own kernels
  UPLOADS,
  DOWNLOADS,  // copies to the host
  DEVICE_COPIES,
  MEMSETS,
  EVENT_WAITS,
  STREAM_WAITS,
  DEVICE_WAITS,
  ALLOCATIONS,
  PINNED_ALLOCATIONS,
  PROHIBITED,  // calls that a capture does not allow
  COUNTERS
};
extern long counters[COUNTERS];

// ---- errors

cudaError_t fail(cudaError_t error);        // also kept for cudaGetLastError
cudaError_t fail_in_capture();              // 900
cudaError_t waited();                       // of a wait: what a kernel has done wrong since the last wait
extern cudaError_t fault;                   // of a kernel

// ---- memory

struct Range {
  size_t size;
  int device;
  bool pinned;
};
Range* range_of(const void* address, uintptr_t* base = nullptr);

// ---- streams

using Operation = std::function<bool()>;  // returns whether it is done; asked again if not

struct Graph {
  std::vector<Operation> operations;
};

struct Stream {
  int device = 0;
  std::deque<Operation> queue;
  bool capturing = false;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  Graph* graph = nullptr;
  unsigned long long capture = 0;
};

Stream& stream_of(cudaStream_t stream);
void push(cudaStream_t stream, Operation operation);
void drain(Stream& stream);
void drain_all();
bool is_running();     // an operation: called from within, as by Python's garbage collection, nothing is waited for
bool is_prohibited();  // by a capture of any stream, unless this thread has relaxed its mode

}  // namespace card
