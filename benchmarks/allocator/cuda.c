// As much of the CUDA runtime and driver as the allocator needs, without a GPU: memory is addresses, nothing more.
// allocator.py adds a function that returns 0 for every other symbol that libc10_cuda.so asks for.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

static const size_t TOTAL = (size_t)80 << 30, FREE = (size_t)1 << 46, PAGE = 2 << 20;
static unsigned long long next_segment = 0x7f0000000000ull, next_range = 0x400000000000ull, next_handle = 1;

static int properties(void *found) {  // cudaDeviceProp: name[256], uuid[16], luid[8], mask, totalGlobalMem at 288
  memset(found, 0, 512);
  memcpy((char *)found + 288, &TOTAL, sizeof TOTAL);
  return 0;
}
int cudaGetDeviceProperties(void *found, int device) { return properties(found); }
int cudaGetDeviceProperties_v2(void *found, int device) { return properties(found); }

int cudaMalloc(void **found, size_t bytes) {
  *found = (void *)next_segment;
  next_segment += (bytes + PAGE - 1) / PAGE * PAGE;
  return 0;
}
int cudaMemGetInfo(size_t *free, size_t *total) { *free = FREE, *total = TOTAL; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaDriverGetVersion(int *version) { *version = 12040; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
const char *cudaGetErrorString(int error) { return "none"; }

int cuMemAddressReserve(unsigned long long *found, size_t bytes, size_t alignment, unsigned long long address,
                        unsigned long long flags) {
  *found = next_range;
  next_range += bytes;
  return 0;
}
int cuMemCreate(unsigned long long *found, size_t bytes, const void *properties, unsigned long long flags) {
  *found = next_handle++;
  return 0;
}
int nothing(void) { return 0; }

static int entry(const char *name, void **found, int *status) {
  *found = dlsym(RTLD_DEFAULT, name);
  if (!*found) *found = (void *)nothing;
  if (status) *status = 0;
  return 0;
}
int cudaGetDriverEntryPoint(const char *name, void **found, unsigned long long flags, int *status) {
  return entry(name, found, status);
}
int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                     int *status) {
  return entry(name, found, status);
}
