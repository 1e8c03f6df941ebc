#pragma once

#include <climits>

// Names and values of NCCL 2.28 that plait uses; with PLAIT_STAND_IN_NCCL_MINOR=26 those of 2.26, whose communicators
// have no names and no windows.

#define NCCL_MAJOR 2
#ifdef PLAIT_STAND_IN_NCCL_MINOR
#define NCCL_MINOR PLAIT_STAND_IN_NCCL_MINOR
#else
#define NCCL_MINOR 28
#endif
#define NCCL_VERSION(x, y, z) (((x) <= 2 && (y) <= 8) ? (x)*1000 + (y)*100 + (z) : (x)*10000 + (y)*100 + (z))
#define NCCL_VERSION_CODE NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, 9)
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_SPLIT_NOCOLOR -1
#if NCCL_MINOR >= 27
#define NCCL_WIN_DEFAULT 0
#define NCCL_WIN_COLL_SYMMETRIC 1
#define NCCL_CONFIG_INITIALIZER \
  { NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, nullptr }
#else
#define NCCL_CONFIG_INITIALIZER \
  { NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT }
#endif

struct ncclComm;
using ncclComm_t = ncclComm*;
using ncclWindow_t = void*;

struct ncclUniqueId {
  char internal[128];
};

struct ncclConfig_t {
  int blocking, minCTAs, maxCTAs, splitShare;
#if NCCL_MINOR >= 27
  const char* commName;
#endif
};

enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7
};
enum ncclRedOp_t { ncclSum = 0, ncclMax = 2, ncclMin = 3 };
enum ncclDataType_t {
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclInt64 = 4,
  ncclFloat32 = 7,
  ncclFloat = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9
};
