// Runs requests through the caching allocator of an installed PyTorch (libc10_cuda.so), and prints what it holds.
//
// One request a line of standard input: "a NUMBER BYTES STREAM" allocates, "f NUMBER" frees, "e" empties the
// cache. One line of output for each: reserved bytes.
#include <c10/cuda/CUDACachingAllocator.h>

#include <iostream>
#include <unordered_map>

int main() {
  namespace caching = c10::cuda::CUDACachingAllocator;
  caching::init(1);
  auto* allocator = caching::get();
  std::unordered_map<long, void*> held;
  char what;
  long number, bytes, stream;
  while (std::cin >> what) {
    if (what == 'a') {
      std::cin >> number >> bytes >> stream;
      held[number] = allocator->raw_alloc_with_stream(bytes, reinterpret_cast<cudaStream_t>(stream));
    } else if (what == 'f') {
      std::cin >> number;
      allocator->raw_delete(held[number]);
    } else {
      allocator->emptyCache();
    }
    std::cout << allocator->getDeviceStats(0).reserved_bytes[0].current << '\n';
  }
}
