// A CUDA device for a PyTorch that has none: what PyTorch's own code asks of a device below its operators.
//
// Nothing is computed and no memory is held: operators run on fake tensors. What is here is the rest, at the
// three places where a build for CUDA puts its own: the device guard (current device, streams, events), the
// CUDA hooks (devices, generators, cuDNN, pinned memory), and the kernels that operators choose inside of
// PyTorch (attention, recurrent layers). What streams and events go through is noted in order.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/RNN.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/api/include/torch/version.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <array>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

using namespace c10;

namespace {

constexpr int MOST_DEVICES = 120;  // as C10_COMPILE_TIME_MAX_GPUS

// What the process was told of its devices.
struct Told {
  int64_t count, major, minor, cudnn;
} told{};

// ---- the log -------------------------------------------------------------------------------------------------

// In the order of `device.driver.KINDS`.
enum Kind : int64_t { RECORD, WAIT, SYNC_STREAM, SYNC_EVENT, SYNC_DEVICE };

struct Entry {
  int64_t kind, stream, number;
};

std::mutex noting;  // guards the three below; who holds it never asks for Python's lock
std::vector<Entry> entries;
std::map<uintptr_t, size_t> pinned;  // real memory that a script has pinned: begin and size
bool is_noting = true;

void note(Kind kind, int64_t stream, int64_t number) {
  std::lock_guard<std::mutex> hold(noting);
  if (is_noting) entries.push_back({kind, stream, number});
}

// ---- the current device, streams and events ------------------------------------------------------------------

thread_local DeviceIndex current = 0;
thread_local std::array<StreamId, MOST_DEVICES> streams{};
std::atomic<int64_t> next_stream{1}, next_event{1};

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current; }

Stream stream_of(DeviceIndex device, StreamId id) {
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, device), id);
}

DeviceIndex exchange(DeviceIndex to) noexcept {
  auto before = current;
  if (to >= 0) current = to;
  return before;
}

DeviceIndex checked(DeviceIndex device) {
  TORCH_CHECK(device < told.count, "CUDA error: invalid device ordinal");
  return device;
}

// What has no `override` here came after the oldest PyTorch that is supported.
struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device to) const override { return {type(), exchange(checked(to.index()))}; }
  Device getDevice() const override { return {type(), current}; }
  void setDevice(Device to) const override { exchange(checked(to.index())); }
  void uncheckedSetDevice(Device to) const noexcept override { exchange(to.index()); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(told.count); }
  Stream getStream(Device of) const noexcept override { return stream_of(index_of(of), streams[index_of(of)]); }
  Stream getDefaultStream(Device of) const override { return stream_of(index_of(of), 0); }
  Stream getStreamFromGlobalPool(Device of, bool) const override { return getNewStream(of, 0); }
  Stream getNewStream(Device of, int) const override { return stream_of(index_of(of), next_stream++); }
  Stream exchangeStream(Stream to) const noexcept override {
    auto before = getStream(to.device());
    streams[index_of(to.device())] = to.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream of) const { return reinterpret_cast<void*>(of.id()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& on) const override { note(SYNC_STREAM, on.id(), 0); }
  void synchronizeDevice(const DeviceIndex) const override { note(SYNC_DEVICE, 0, 0); }

  void record(void** event, const Stream& on, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(next_event++);
    note(RECORD, on.id(), reinterpret_cast<int64_t>(*event));
  }
  void block(void* event, const Stream& on) const override {
    if (event) note(WAIT, on.id(), reinterpret_cast<int64_t>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event) note(SYNC_EVENT, streams[current], reinterpret_cast<int64_t>(event));
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }  // there is no clock
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
Guard guard;

// ---- addresses of storages -----------------------------------------------------------------------------------

constexpr int64_t BLOCK_BYTES = 512;  // kMinBlockSize in c10/cuda/CUDACachingAllocator.h
constexpr int64_t FIRST_ADDRESS = int64_t{1} << 40, FIRST_PAGED = int64_t{1} << 61, FIRST_PINNED = int64_t{1} << 62;
constexpr DeviceIndex PINNED = -1;
std::atomic<int64_t> next_address{FIRST_ADDRESS}, next_paged{FIRST_PAGED}, next_pinned{FIRST_PINNED};

struct Block {
  DeviceIndex device;  // -1: pinned memory of the host, -2: other memory of it
};

void end(void* context) { delete static_cast<Block*>(context); }

// Gives *storage* an address unless it has one; returns it, 0 for a storage of no bytes.
int64_t place(StorageImpl* storage, DeviceIndex device) {
  const auto& now = storage->data_ptr();
  const bool is_ours = now.get_deleter() == &end;
  const bool pins = device == PINNED && is_ours && static_cast<Block*>(now.get_context())->device < PINNED;
  if ((now || is_ours) && !pins) return reinterpret_cast<int64_t>(now.get());
  auto size = storage->sym_nbytes().maybe_as_int();
  if (!size) return 0;
  if (*size == 0) {  // its device is kept: it may grow
    storage->set_data_ptr_noswap({nullptr, new Block{device}, &end, storage->device()});
    return 0;
  }
  const int64_t bytes = (*size + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
  auto& next = device >= 0 ? next_address : device == PINNED ? next_pinned : next_paged;
  const int64_t address = next.fetch_add(bytes);
  storage->set_data_ptr_noswap({reinterpret_cast<void*>(address), new Block{device}, &end, storage->device()});
  return address;
}

// ---- pinned memory that is real: of tensors that are not fake --------------------------------------------------

void unpin(void* data) {
  {
    std::lock_guard<std::mutex> hold(noting);
    pinned.erase(reinterpret_cast<uintptr_t>(data));
  }
  GetCPUAllocator()->raw_deallocate(data);
}

struct Pinning final : Allocator {
  DataPtr allocate(size_t bytes) override {
    void* data = bytes ? GetCPUAllocator()->raw_allocate(bytes) : nullptr;
    if (data) {
      std::lock_guard<std::mutex> hold(noting);
      pinned[reinterpret_cast<uintptr_t>(data)] = bytes;
    }
    return {data, data, data ? &unpin : &c10::detail::deleteNothing, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Pinning pinning;

bool is_pinned(const void* data) {
  const auto at = reinterpret_cast<uintptr_t>(data);
  if (at >= static_cast<uintptr_t>(FIRST_PINNED) && at < static_cast<uintptr_t>(next_pinned.load())) return true;
  std::lock_guard<std::mutex> hold(noting);
  auto next = pinned.upper_bound(at);
  return next != pinned.begin() && at < std::prev(next)->first + std::prev(next)->second;
}

// ---- the CUDA hooks ------------------------------------------------------------------------------------------

struct Numbers final : at::CPUGeneratorImpl {  // keeps its state as the CPU's does: no number of it is seen
  explicit Numbers(DeviceIndex device) {
    device_ = Device(DeviceType::CUDA, device);
    key_set_ = DispatchKeySet(DispatchKey::CUDA);
  }
  void set_state(const TensorImpl&) override {}  // a state that a script has copied is fake
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const { return true; }
  bool isAvailable() const { return told.count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return static_cast<int>(told.count); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(told.count); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex to) const override { exchange(checked(to)); }
  DeviceIndex exchangeDevice(DeviceIndex to) const override { return exchange(checked(to)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchange(checked(to)); }
  void deviceSynchronize(DeviceIndex) const override { note(SYNC_DEVICE, 0, 0); }

  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  bool hasCuSOLVER() const override { return true; }
  bool hasMAGMA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return told.major >= 8; }
  bool supportsBFloat16RNNWithCuDNN() const { return told.major >= 8; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }  // CUDNN_BN_MIN_EPSILON of cuDNN 8 and 9
  long versionCuDNN() const override { return told.cudnn; }
  long versionRuntimeCuDNN() const { return told.cudnn; }
  long versionCUDART() const override { return CUDA_VERSION; }

  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinning; }
  Device getDeviceFromPtr(void*) const override { return {DeviceType::CUDA, current}; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    static auto* all = new std::array<at::Generator, MOST_DEVICES>;
    auto& one = (*all)[checked(device < 0 ? current : device)];
    if (!one.defined()) one = at::make_generator<Numbers>(device < 0 ? current : device);
    return one;
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Numbers>(device < 0 ? current : device);
  }
};
Hooks hooks;

// ---- the kernel of attention ---------------------------------------------------------------------------------

// As aten/src/ATen/native/transformers/cuda/sdp_utils.cpp decides; its checks that do not ask for the GPU are in
// a header of PyTorch, and are called.
namespace attention {
using namespace sdp;

constexpr int NEWEST = TORCH_VERSION_MINOR < 7 ? 90 : 121;  // the last architecture that has kernels

bool is_half(const sdp_params& of) { return of.query.scalar_type() == at::kHalf || of.query.scalar_type() == at::kBFloat16; }

// Rows of tensors that are not dense (jagged ones) are checked in Python (torch/nested/_internal/sdpa.py).
bool is_alike(const sdp_params& of) {
  const auto type = of.query.scalar_type();
  return type == of.key.scalar_type() && type == of.value.scalar_type() && check_tensor_shapes(of, false) &&
      !has_for_nested_inputs(of) && (!has_only_dense_inputs(of) || check_nonzero_sequence_lengths_dense(of, false));
}

// Which numbers of heads a kernel takes.
#if TORCH_VERSION_MINOR >= 14
bool groups_in_flash(const sdp_params& of) { return check_batch_size_and_num_heads_dense<true, true, true>(of, false); }
bool groups_in_efficient(const sdp_params& of) { return check_batch_size_and_num_heads_dense<true, true, true>(of, false); }
bool groups_in_cudnn(const sdp_params& of) { return check_batch_size_and_num_heads_dense<true, false, true>(of, false); }
#else
bool groups_in_flash(const sdp_params& of) { return check_batch_size_and_num_heads_dense<true>(of, false); }
bool groups_in_efficient(const sdp_params& of) { return check_batch_size_and_num_heads_dense<false>(of, false); }
#if TORCH_VERSION_MINOR >= 7
bool groups_in_cudnn(const sdp_params& of) { return check_batch_size_and_num_heads_dense<true, false>(of, false); }
#endif
#endif

bool by_flash(const sdp_params& of) {
  const auto width = of.query.sym_size(-1);
  const int64_t architecture = told.major * 10 + told.minor;
  const bool is_small = (architecture >= 86 && architecture <= 89) || architecture >= 120;
  return check_runtime_disabled_flash(of, false) && is_half(of) && is_alike(of) && told.major >= 8 &&
      architecture <= NEWEST && check_for_attn_mask(of, false) && width == of.key.sym_size(-1) &&
      width == of.value.sym_size(-1) && width <= 256 &&
      !(input_requires_grad(of) && is_small && width > 192 && (width <= 224 || of.dropout > 0.0)) &&
      !(of.is_causal && of.query.sym_size(-2) != of.key.sym_size(-2)) &&
      (!has_only_dense_inputs(of) || (groups_in_flash(of) && check_last_dim_stride_equals_1_dense<true>(of, false)));
}

bool by_memory_efficient(const sdp_params& of) {
  const auto width = of.query.sym_size(-1), depth = of.value.sym_size(-1);
  const auto type = of.query.scalar_type();
  const int64_t unit = told.major >= 8 ? (is_half(of) ? 8 : 4) : (told.major == 7 && is_half(of) ? 8 : 1);
  return check_runtime_disabled_mem_efficient(of, false) && told.major * 10 + told.minor <= NEWEST && is_alike(of) &&
      (type == at::kFloat || type == at::kHalf || (type == at::kBFloat16 && told.major >= 8)) &&
      width == of.key.sym_size(-1) && width > 0 && depth > 0 && width % unit == 0 && depth % unit == 0 &&
      (!has_only_dense_inputs(of) || (check_last_dim_stride_equals_1_dense<false>(of, false) && groups_in_efficient(of)));
}

bool by_cudnn(const sdp_params& of) {
  const auto& context = at::globalContext();
  if (!context.userEnabledCuDNNSDP() || !has_only_dense_inputs(of) || !is_half(of) || !is_alike(of) || told.major < 8 ||
      told.major * 10 + told.minor > NEWEST || !check_attn_mask_shape(of, false) ||
      (context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly()) ||
      !check_last_dim_stride_equals_1_dense<true>(of, false))
    return false;
  const auto width = of.query.sym_size(3), depth = of.value.sym_size(3);
  const auto rows = of.query.sym_size(2), columns = of.key.sym_size(2);
#if TORCH_VERSION_MINOR < 7
  if (rows == 1) return false;
  const int64_t widest = 128;
#else
  if (!groups_in_cudnn(of)) return false;
  if ((of.dropout > 0.0 && told.cudnn > 91100 && told.cudnn < 91400) || (of.dropout != 0.0 && rows == 1)) return false;
  int64_t widest = told.cudnn >= 91000 && told.major == 9 && told.minor == 0 ? 256 : 128;
  if (told.cudnn >= 91100 && told.major == 10 && width == 192 && depth == 128) widest = 192;
#endif
  if (TORCH_VERSION_MINOR >= 12 && of.dropout != 0.0) return false;
#if TORCH_VERSION_MINOR >= 14
  const bool has_backward = (width <= 128 && depth <= 128) || (width == 192 && depth == 128) || (width == 256 && depth == 256);
  if (input_requires_grad(of) && !has_backward) return false;
#endif
  return width <= widest && depth <= widest && width % 8 == 0 && depth % 8 == 0 && columns != 1;
}

// Which kernel comes first: PyTorch decides that once, and a script may order otherwise (`sdpa_kernel`).
void order() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char* off = std::getenv("TORCH_CUDNN_SDPA_DEPRIORITIZED");
    const bool is_first = TORCH_VERSION_MINOR >= 10 && told.cudnn > 91500 && (told.major == 9 || told.major == 10);
    if (is_first && !(off && std::string(off) == "1"))
      at::globalContext().setSDPPriorityOrder(
          {static_cast<int64_t>(SDPBackend::cudnn_attention), static_cast<int64_t>(SDPBackend::flash_attention),
           static_cast<int64_t>(SDPBackend::efficient_attention), static_cast<int64_t>(SDPBackend::math)});
  });
}

bool takes(SDPBackend kernel, const sdp_params& of) {
  return kernel == SDPBackend::flash_attention ? by_flash(of)
      : kernel == SDPBackend::efficient_attention ? by_memory_efficient(of)
      : kernel == SDPBackend::cudnn_attention ? by_cudnn(of)
      : kernel == SDPBackend::math && at::globalContext().userEnabledMathSDP();
}

int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double>,
               bool enable_gqa) {
  const sdp_params of{query, key, value, mask, dropout, is_causal, enable_gqa};
  order();
  for (auto one : at::globalContext().sDPPriorityOrder())
    if (takes(one, of)) return static_cast<int64_t>(one);
  TORCH_CHECK(false, "No available kernel. Aborting execution.");
}
}  // namespace attention

// ---- recurrent layers ----------------------------------------------------------------------------------------

// As aten/src/ATen/native/cudnn/RNN.cpp calls cuDNN: all layers in one operator.
namespace recurrent {
using at::Tensor;
using at::TensorList;

enum Mode : int64_t { RELU, TANH, LSTM, GRU };  // as cudnnRNNMode_t

void run(Mode mode, Tensor& out, Tensor& hy, Tensor& cy, const Tensor& input, const Tensor& hx, const Tensor& cx,
         TensorList weights, bool has_biases, int64_t layers, double dropout, bool train, bool bidirectional,
         bool batch_first, IntArrayRef batch_sizes) {
  const bool projects = cx.defined() && cx.size(2) != hx.size(2);
  const int64_t hidden = projects ? cx.size(2) : hx.size(2), projected = projects ? hx.size(2) : 0;
  // The weights lie in one buffer already (`flatten_parameters`), which the backward must be given.
  Tensor reserve, state, buffer = input.new_empty({0});
  std::tie(out, hy, cy, reserve, buffer) = at::_cudnn_rnn(
      input, weights, (has_biases ? 4 : 2) + projects, buffer, hx, cx, mode, hidden, projected, layers, batch_first,
      dropout, train, bidirectional, batch_sizes, state);
}

void lstm(Tensor& out, Tensor& hy, Tensor& cy, const Tensor& input, TensorList hidden, TensorList weights, bool has_biases,
          int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  run(LSTM, out, hy, cy, input, hidden[0], hidden[1], weights, has_biases, layers, dropout, train, bidirectional,
      batch_first, {});
}

std::vector<int64_t> numbers(const Tensor& of) {
  std::vector<int64_t> found;
  for (int64_t at = 0; at < of.numel(); ++at) found.push_back(of[at].item<int64_t>());
  return found;
}

void lstm_packed(Tensor& out, Tensor& hy, Tensor& cy, const Tensor& input, const Tensor& batch_sizes, TensorList hidden,
                 TensorList weights, bool has_biases, int64_t layers, double dropout, bool train, bool bidirectional) {
  run(LSTM, out, hy, cy, input, hidden[0], hidden[1], weights, has_biases, layers, dropout, train, bidirectional, false,
      numbers(batch_sizes));
}

template <Mode mode>
void simple(Tensor& out, Tensor& hy, const Tensor& input, const Tensor& hx, TensorList weights, bool has_biases,
            int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  Tensor none;
  run(mode, out, hy, none, input, hx, {}, weights, has_biases, layers, dropout, train, bidirectional, batch_first, {});
}

template <Mode mode>
void packed(Tensor& out, Tensor& hy, const Tensor& input, const Tensor& batch_sizes, const Tensor& hx, TensorList weights,
            bool has_biases, int64_t layers, double dropout, bool train, bool bidirectional) {
  Tensor none;
  run(mode, out, hy, none, input, hx, {}, weights, has_biases, layers, dropout, train, bidirectional, false,
      numbers(batch_sizes));
}

void install() {
  using namespace at::native;
  lstm_cudnn_stub.set_cuda_dispatch_ptr(&lstm);
  lstm_packed_cudnn_stub.set_cuda_dispatch_ptr(&lstm_packed);
  gru_cudnn_stub.set_cuda_dispatch_ptr(&simple<GRU>);
  rnn_tanh_cudnn_stub.set_cuda_dispatch_ptr(&simple<TANH>);
  rnn_relu_cudnn_stub.set_cuda_dispatch_ptr(&simple<RELU>);
  gru_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed<GRU>);
  rnn_tanh_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed<TANH>);
  rnn_relu_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed<RELU>);
}
}  // namespace recurrent

// What DDP's reducer times itself with: a build for CUDA would record events of a driver.
struct Untimed final : c10d::Timer {
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace

// ---- what Python calls: nothing here throws ------------------------------------------------------------------

extern "C" {

void device_install(int64_t count, int64_t major, int64_t minor, int64_t cudnn) {
  told = {count, major, minor, cudnn};
  impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  // PyTorch has found its hooks by now and keeps the object, which has no fields: it gets our functions.
  auto& kept = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(&kept) = *reinterpret_cast<void**>(&hooks);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention::choose);
  recurrent::install();
  c10d::TimerRegistry()->Register(
      DeviceType::CUDA, [](Device) -> std::unique_ptr<c10d::Timer> { return std::make_unique<Untimed>(); }, REGISTRY_PREFERRED);
}

// Whether a kernel of attention takes three tensors and a mask (null: none); -1: it is not known.
int64_t device_takes(int64_t kernel, void* query, void* key, void* value, void* mask, double dropout, int64_t is_causal,
                     int64_t enable_gqa) {
  auto of = [](void* one) {
    return at::Tensor(intrusive_ptr<TensorImpl, UndefinedTensorImpl>::reclaim_copy(static_cast<TensorImpl*>(one)));
  };
  try {
    std::optional<at::Tensor> masked;
    if (mask) masked = of(mask);
    return attention::takes(static_cast<sdp::SDPBackend>(kernel),
                            {of(query), of(key), of(value), masked, dropout, is_causal != 0, enable_gqa != 0});
  } catch (...) {
    return -1;
  }
}

void device_count(int64_t count) { told.count = count; }

int64_t device_exchange(int64_t to) { return exchange(static_cast<DeviceIndex>(to)); }

int64_t device_stream(int64_t device) { return streams[device < 0 ? current : device]; }

void device_set_stream(int64_t device, int64_t stream) {
  guard.exchangeStream(stream_of(static_cast<DeviceIndex>(device), stream));
}

void device_synchronize() { note(SYNC_DEVICE, 0, 0); }

int64_t device_place(void* storage, int64_t device) {
  return place(static_cast<StorageImpl*>(storage), static_cast<DeviceIndex>(device));
}

// *storage* has another size: on a GPU that is another block.
void device_resized(void* storage) {
  auto* of = static_cast<StorageImpl*>(storage);
  if (of->data_ptr().get_deleter() != &end) return;
  const auto device = static_cast<Block*>(of->data_ptr().get_context())->device;
  of->set_data_ptr_noswap({nullptr, of->device()});
  place(of, device);
}

int64_t device_is_pinned(void* storage) { return is_pinned(static_cast<StorageImpl*>(storage)->data_ptr().get()); }

void device_log(int64_t is_on) {
  std::lock_guard<std::mutex> hold(noting);
  is_noting = is_on;
}

// Takes what has happened since the last call, at most *room* entries; returns how many.
int64_t device_take(Entry* out, int64_t room) {
  std::lock_guard<std::mutex> hold(noting);
  const auto n = std::min<int64_t>(room, entries.size());
  std::copy(entries.begin(), entries.begin() + n, out);
  entries.erase(entries.begin(), entries.begin() + n);
  return n;
}
}
