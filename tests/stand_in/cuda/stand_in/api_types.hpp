// Error codes, handles, enumerations and structs of the CUDA runtime's host interface that plait uses.
#pragma once

#include <cstddef>
#include <cstdint>

#include "keywords.hpp"

#define CUDART_VERSION 13000
#define CUDART_CB

#define STAND_IN_ERRORS(X)                                                                                  \
  X(cudaSuccess, 0, "no error")                                                                             \
  X(cudaErrorInvalidValue, 1, "invalid argument")                                                           \
  X(cudaErrorMemoryAllocation, 2, "out of memory")                                                          \
  X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                                     \
  X(cudaErrorDevicesUnavailable, 46, "CUDA-capable device(s) is/are busy or unavailable")                   \
  X(cudaErrorInvalidDeviceFunction, 98, "invalid device function")                                          \
  X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                                           \
  X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                                  \
  X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                                         \
  X(cudaErrorIllegalState, 401, "the operation cannot be performed in the present state")                   \
  X(cudaErrorNotReady, 600, "device not ready")                                                             \
  X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")                               \
  X(cudaErrorLaunchFailure, 719, "unspecified launch failure")                                              \
  X(cudaErrorNotPermitted, 800, "operation not permitted")                                                  \
  X(cudaErrorNotSupported, 801, "operation not supported")                                                  \
  X(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")             \
  X(cudaErrorStreamCaptureInvalidated, 901, "operation failed due to a previous error during capture")      \
  X(cudaErrorStreamCaptureMerge, 902, "operation would result in a merge of separate capture sequences")    \
  X(cudaErrorStreamCaptureUnmatched, 903, "capture was not ended in the same stream as it began")           \
  X(cudaErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work")                              \
  X(cudaErrorStreamCaptureIsolation, 905, "dependency created on uncaptured work in another stream")        \
  X(cudaErrorStreamCaptureImplicit, 906,                                                                    \
    "operation would make the legacy stream depend on a capturing blocking stream")                         \
  X(cudaErrorCapturedEvent, 907, "operation not permitted on an event last recorded in a capturing stream") \
  X(cudaErrorStreamCaptureWrongThread, 908,                                                                 \
    "attempt to terminate a thread-local capture sequence from another thread")                             \
  X(cudaErrorUnknown, 999, "unknown error")

enum cudaError {
#define STAND_IN_ERROR(name, value, text) name = value,
  STAND_IN_ERRORS(STAND_IN_ERROR)
#undef STAND_IN_ERROR
};
using cudaError_t = cudaError;

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
using cudaGraphNode_t = struct CUgraphNode_st*;
using cudaMemPool_t = struct CUmemPoolHandle_st*;
using cudaHostFn_t = void (*)(void*);

#define cudaStreamLegacy (reinterpret_cast<cudaStream_t>(std::uintptr_t{1}))
#define cudaStreamPerThread (reinterpret_cast<cudaStream_t>(std::uintptr_t{2}))

inline constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
inline constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2,
                          cudaEventInterprocess = 4;
inline constexpr unsigned cudaEventRecordDefault = 0, cudaEventWaitDefault = 0;
inline constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2,
                          cudaHostAllocWriteCombined = 4;
inline constexpr unsigned cudaHostRegisterDefault = 0, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2,
                          cudaHostRegisterReadOnly = 8;

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4
};

enum cudaMemoryType {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
  cudaMemoryTypeManaged = 3
};
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void* devicePointer;
  void* hostPointer;
};

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9
};

enum cudaLaunchAttributeID {
  cudaLaunchAttributeIgnore = 0,
  cudaLaunchAttributeCooperative = 2,
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
  cudaLaunchAttributePriority = 8
};
union cudaLaunchAttributeValue {
  int cooperative;
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
  int priority;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2
};

enum cudaMemAllocationType { cudaMemAllocationTypeInvalid = 0, cudaMemAllocationTypePinned = 1 };
enum cudaMemAllocationHandleType { cudaMemHandleTypeNone = 0 };
enum cudaMemLocationType { cudaMemLocationTypeInvalid = 0, cudaMemLocationTypeDevice = 1 };
struct cudaMemLocation {
  cudaMemLocationType type;
  int id;
};
enum cudaMemAccessFlags {
  cudaMemAccessFlagsProtNone = 0,
  cudaMemAccessFlagsProtRead = 1,
  cudaMemAccessFlagsProtReadWrite = 3
};
struct cudaMemAccessDesc {
  cudaMemLocation location;
  cudaMemAccessFlags flags;
};
struct cudaMemPoolProps {
  cudaMemAllocationType allocType;
  cudaMemAllocationHandleType handleTypes;
  cudaMemLocation location;
  void* win32SecurityAttributes;
  std::size_t maxSize;
  unsigned short usage;
  unsigned char reserved[54];
};
enum cudaMemPoolAttr {
  cudaMemPoolReuseFollowEventDependencies = 1,
  cudaMemPoolReuseAllowOpportunistic = 2,
  cudaMemPoolReuseAllowInternalDependencies = 3,
  cudaMemPoolAttrReleaseThreshold = 4,
  cudaMemPoolAttrReservedMemCurrent = 5,
  cudaMemPoolAttrReservedMemHigh = 6,
  cudaMemPoolAttrUsedMemCurrent = 7,
  cudaMemPoolAttrUsedMemHigh = 8
};

enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxGridDimX = 5,
  cudaDevAttrMaxGridDimY = 6,
  cudaDevAttrMaxGridDimZ = 7,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMaxRegistersPerBlock = 12,
  cudaDevAttrClockRate = 13,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrConcurrentKernels = 31,
  cudaDevAttrMemoryClockRate = 36,
  cudaDevAttrGlobalMemoryBusWidth = 37,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrAsyncEngineCount = 40,
  cudaDevAttrUnifiedAddressing = 41,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxRegistersPerMultiprocessor = 82,
  cudaDevAttrCooperativeLaunch = 95,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrReservedSharedMemoryPerBlock = 111,
  cudaDevAttrMemoryPoolsSupported = 115
};
struct cudaDeviceProp {
  char name[256];
  std::size_t totalGlobalMem, sharedMemPerBlock, totalConstMem, sharedMemPerMultiprocessor, sharedMemPerBlockOptin;
  int regsPerBlock, warpSize, maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], major, minor, multiProcessorCount,
      integrated, canMapHostMemory, concurrentKernels, pciBusID, pciDeviceID, pciDomainID, asyncEngineCount,
      unifiedAddressing, memoryBusWidth, l2CacheSize, maxThreadsPerMultiProcessor, regsPerMultiprocessor,
      cooperativeLaunch, memoryPoolsSupported, maxBlocksPerMultiProcessor;
};
