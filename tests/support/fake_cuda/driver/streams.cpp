// Streams, events, captures and graphs.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <utility>

#include "card.h"

using namespace card;

namespace {

struct Event {
  long recorded = 0, done = 0;
};

// The default stream is one of each device, the others belong to the device that they are made on.
std::map<std::pair<int, cudaStream_t>, Stream> streams;
unsigned long long captures = 0;
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

bool is_running_operation = false;

// Run the next operation of a stream; return whether it is done.
bool advance(Stream& stream) {
  if (stream.queue.empty()) return false;
  is_running_operation = true;
  const bool is_done = stream.queue.front()();
  is_running_operation = false;
  if (is_done) stream.queue.pop_front();
  return is_done;
}

// Advance each stream by one operation; return whether any has been done.
bool advance() {
  bool any = false;
  for (auto& [key, stream] : streams) any |= advance(stream);
  return any;
}

[[noreturn]] void deadlock() {
  fprintf(stderr, "fake CUDA: deadlock: streams wait for each other\n");
  abort();
}

Event* event_of(cudaEvent_t event) { return (Event*)event; }

}  // namespace

Stream& card::stream_of(cudaStream_t stream) {
  if (stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) stream = nullptr;
  const auto [found, is_new] = streams.try_emplace({stream ? -1 : current, stream});
  if (is_new) found->second.device = current;
  return found->second;
}

void card::push(cudaStream_t stream, Operation operation) {
  Stream& queued = stream_of(stream);
  if (queued.capturing) {
    queued.graph->operations.push_back(std::move(operation));
    return;
  }
  queued.queue.push_back(std::move(operation));
  if (is_eager()) drain(queued);
}

bool card::is_running() { return is_running_operation; }

void card::drain(Stream& stream) {
  while (!is_running_operation && !stream.queue.empty()) {
    if (!advance(stream) && !advance()) deadlock();
  }
}

void card::drain_all() {
  for (auto& [key, stream] : streams) drain(stream);
}

bool card::is_prohibited() {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return false;
  for (auto& [key, stream] : streams) {
    if (stream.capturing && stream.mode == cudaStreamCaptureModeGlobal) return true;
  }
  return false;
}

// ---- for card.py

API void fake_drain() {
  LOCK;
  drain_all();
}

API long fake_pending() {
  LOCK;
  long count = 0;
  for (auto& [key, stream] : streams) count += stream.queue.size();
  return count;
}

// ---- streams

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  LOCK;
  static uintptr_t handle = 0x1000;
  *stream = (cudaStream_t)(handle += 16);
  stream_of(*stream);
  return cudaSuccess;
}

API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  LOCK;
  drain(stream_of(stream));
  return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  LOCK;
  if (stream_of(stream).capturing || is_prohibited()) return fail_in_capture();
  ++counters[STREAM_WAITS];
  drain(stream_of(stream));
  return waited();
}

API cudaError_t cudaDeviceSynchronize() {
  LOCK;
  if (is_prohibited()) return fail_in_capture();
  ++counters[DEVICE_WAITS];
  drain_all();
  return waited();
}

API CUresult cuCtxSynchronize() { return (CUresult)cudaDeviceSynchronize(); }

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  LOCK;
  if (is_prohibited()) return fail_in_capture();
  return stream_of(stream).queue.empty() ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  LOCK;
  push(stream, [=] { return function(data), true; });
  return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(
    cudaStream_t stream, void (*function)(cudaStream_t, cudaError_t, void*), void* data, unsigned) {
  LOCK;
  push(stream, [=] { return function(stream, cudaSuccess, data), true; });
  return cudaSuccess;
}

// ---- events

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t) new Event;  // never deleted: operations refer to it
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
  LOCK;
  if (stream_of(stream).capturing) return cudaSuccess;
  Event* event = event_of(handle);
  const long record = ++event->recorded;
  push(stream, [=] { return event->done = record, true; });
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  LOCK;
  if (is_prohibited()) return fail_in_capture();
  const Event* event = event_of(handle);
  return event->done >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  LOCK;
  if (is_prohibited()) return fail_in_capture();
  ++counters[EVENT_WAITS];
  const Event* event = event_of(handle);
  while (event->done < event->recorded) {
    if (!advance()) deadlock();
  }
  return cudaSuccess;
}

// So long that Inductor and Triton, which time configurations, repeat little.
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 50;
  return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  LOCK;
  if (stream_of(stream).capturing) return cudaSuccess;
  const Event* event = event_of(handle);
  const long record = event->recorded;
  push(stream, [=] { return event->done >= record; });
  return cudaSuccess;
}

// ---- captures and graphs

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  LOCK;
  *status = stream_of(stream).capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  LOCK;
  Stream& captured = stream_of(stream);
  captured.capturing = true;
  captured.mode = mode;
  captured.graph = new Graph;
  captured.capture = ++captures;
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  LOCK;
  Stream& captured = stream_of(stream);
  captured.capturing = false;
  *graph = (cudaGraph_t)captured.graph;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* capture, cudaGraph_t* graph,
    const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges, size_t* count) {
  LOCK;
  const Stream& captured = stream_of(stream);
  if (capture) *capture = captured.capture;
  if (graph) *graph = (cudaGraph_t)captured.graph;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = (cudaGraphExec_t) new Graph(*(Graph*)graph);
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  LOCK;
  for (const Operation& operation : ((Graph*)executable)->operations) push(stream, operation);
  return cudaSuccess;
}

API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = ((Graph*)graph)->operations.size();
  return cudaSuccess;
}
