/* Stands in for libcuda.so.1, with host memory: shows that arguments arrive as they should. */
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;
typedef struct { unsigned char bytes[64]; } handle_t;
enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, ALREADY_MAPPED = 208 };

static struct { u64 base; size_t size; u64 id; int open; } blocks[4096];
static int count, depth, opens, closes;

static int find(u64 address) {
    for (int i = 0; i < count; i++)
        if (blocks[i].base && address >= blocks[i].base && address < blocks[i].base + blocks[i].size)
            return i;
    return -1;
}

#define IN_CONTEXT if (depth <= 0) return INVALID_CONTEXT

int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (device != 43) return INVALID_VALUE;
    *context = (void *)0x7700000077ULL;
    return 0;
}
int cuCtxPushCurrent_v2(void *context) {
    if (context != (void *)0x7700000077ULL) return INVALID_CONTEXT;
    __sync_fetch_and_add(&depth, 1);
    return 0;
}
int cuCtxPopCurrent_v2(void **context) {
    *context = (void *)0x7700000077ULL;
    __sync_fetch_and_sub(&depth, 1);
    return 0;
}
int cuMemAlloc_v2(u64 *address, size_t size) {
    IN_CONTEXT;
    if (size > (1ULL << 40)) return 2;
    int mine = __sync_fetch_and_add(&count, 1); /* called from several threads, as the driver is */
    if (mine >= 4096) return 2;
    blocks[mine].size = size;
    blocks[mine].id = 1000 + mine;
    *address = blocks[mine].base = (u64)calloc(1, size);
    return 0;
}
int cuMemFree_v2(u64 address) {
    IN_CONTEXT;
    int i = find(address);
    if (i < 0 || blocks[i].base != address) return INVALID_VALUE;
    blocks[i].base = 0; /* kept: views of it may still be looked at */
    return 0;
}
int cuMemGetAddressRange_v2(u64 *base, size_t *size, u64 address) {
    IN_CONTEXT;
    int i = find(address);
    if (i < 0) return INVALID_VALUE;
    *base = blocks[i].base;
    *size = blocks[i].size;
    return 0;
}
int cuPointerGetAttribute(void *data, int attribute, u64 address) {
    IN_CONTEXT;
    int i = find(address);
    if (i < 0) return INVALID_VALUE;
    if (attribute == 7) *(u64 *)data = blocks[i].id;
    else if (attribute == 10) *(unsigned char *)data = blocks[i].size % (1 << 20) != 4242;
    else return INVALID_VALUE;
    return 0;
}
int cuIpcGetMemHandle(handle_t *handle, u64 address) {
    IN_CONTEXT;
    int i = find(address);
    if (i < 0 || blocks[i].base != address) return INVALID_VALUE;
    memset(handle, 0xC3, sizeof *handle);
    memcpy(handle->bytes, &address, 8);
    return 0;
}
int cuIpcOpenMemHandle_v2(u64 *address, handle_t handle, unsigned flags) {
    IN_CONTEXT;
    u64 base;
    memcpy(&base, handle.bytes, 8);
    int i = find(base);
    if (flags != 1 || handle.bytes[63] != 0xC3 || i < 0) return INVALID_VALUE;
    if (blocks[i].open++) return ALREADY_MAPPED;
    opens++;
    *address = base;
    return 0;
}
int cuIpcCloseMemHandle(u64 address) {
    IN_CONTEXT;
    int i = find(address);
    if (i < 0 || !blocks[i].open) return INVALID_VALUE;
    blocks[i].open = 0;
    closes++;
    return 0;
}
int cuGetErrorName(int error, const char **name) {
    *name = error == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : error == ALREADY_MAPPED ? "CUDA_ERROR_ALREADY_MAPPED"
          : error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}
int stub_depth(void) { return depth; }
int stub_opens(void) { return opens; }
int stub_closes(void) { return closes; }
