// A stand-in for libcuda.so.1: checks launches and tensor maps, and runs nothing.
// Triton's own driver, launchers and tensor map encoding work over it on a machine without a GPU.
// A call that CUDA would refuse is printed to stderr and returns an error.
#include "cuda.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef cuDeviceGetAttribute

typedef struct {
    char name[512];
    unsigned dynamic;  // bytes of shared memory that were allowed
} Function;

static CUresult refuse(const char *call, const char *why) {
    fprintf(stderr, "stand-in for libcuda: %s: %s\n", call, why);
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char **text) {
    static char buffer[64];
    snprintf(buffer, sizeof buffer, "error %d of the stand-in", code);
    *text = buffer;
    return CUDA_SUCCESS;
}
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }

// The limits of an H100.
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    default: *value = 1000;  // clocks and widths, which Triton reads and does not use here
    }
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)1;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 1 << 20; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = (CUmodule)image;
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    Function *made = calloc(1, sizeof(Function));
    strncpy(made->name, name, sizeof made->name - 1);
    *function = (CUfunction)made;
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    // Triton asks for others first, and goes on without those that a driver does not know.
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    ((Function *)function)->dynamic = value;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(uint64_t *)data = pointer;
    return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction function, const CUlaunchConfig *config) {
    *n = 1;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
    Function *function = (Function *)f;
    unsigned allowed = function->dynamic > 49152 ? function->dynamic : 49152;
    if (c->gridDimX > 2147483647u || c->gridDimY > 65535 || c->gridDimZ > 65535)
        return refuse(function->name, "the grid is too large");
    if (c->blockDimX > 1024) return refuse(function->name, "more than 1024 threads per block");
    if (c->sharedMemBytes > allowed) return refuse(function->name, "too much shared memory");
    return CUDA_SUCCESS;
}

// Bytes of an element, in the order of CUtensorMapDataType.
static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4, 1, 1, 1, 1};

CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *dim, const cuuint64_t *stride, const cuuint32_t *box,
    const cuuint32_t *element, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    const char *call = "cuTensorMapEncodeTiled";
    if (rank < 1 || rank > 5) return refuse(call, "the rank is not 1 to 5");
    if ((uintptr_t)address % 16) return refuse(call, "the address is no multiple of 16");
    for (unsigned i = 0; i < rank; i++) {
        if (dim[i] == 0 || dim[i] > (1ull << 32)) return refuse(call, "globalDim is out of range");
        if (box[i] == 0 || box[i] > 256) return refuse(call, "boxDim is not 1 to 256");
        if (element[i] < 1 || element[i] > 8) return refuse(call, "elementStrides is not 1 to 8");
        if (i + 1 < rank && (stride[i] % 16 || stride[i] >= (1ull << 40)))
            return refuse(call, "globalStrides is no multiple of 16, or too large");
    }
    int inner = box[0] * sizes[type];
    int span = swizzle == CU_TENSOR_MAP_SWIZZLE_32B    ? 32
               : swizzle == CU_TENSOR_MAP_SWIZZLE_64B  ? 64
               : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128
                                                       : 0;
    if (inner % 16) return refuse(call, "the inner box is no multiple of 16 bytes");
    if (span && inner > span) return refuse(call, "the inner box is wider than the swizzle");
    memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}
