// A simulated accelerator for torch: two devices with the CPU's kernels, which count what a real
// one would wait for.
//
// Its memory is the host's, bounded and counted for each device. Streams and events keep their
// order and their times; work is done at once. Random numbers come from a generator of the device.

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;

thread_local DeviceIndex current_device = 0;
thread_local StreamId current_streams[kDevices] = {0, 0};

DeviceIndex index_of(Device device) {
  return device.index() < 0 ? current_device : device.index();
}

// What the host has done since the process began.

struct Counts {
  std::atomic<int64_t> items;             // .item()
  std::atomic<int64_t> copies_in;         // from the host to a device
  std::atomic<int64_t> blocking_copies;   // of these: not pinned, or without non_blocking
  std::atomic<int64_t> side_copies;       // of these: in a stream that is not the default one
  std::atomic<int64_t> copies_back;       // from a device to the host
  std::atomic<int64_t> synchronisations;  // waits for a device, a stream or an event
  std::atomic<int64_t> stream_waits;      // waits of one stream for another
  std::atomic<int64_t> recorded;          // Tensor.record_stream
} counts;

// Memory

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Device device(kType, current_device);
    if (bytes == 0) {
      return {nullptr, nullptr, &release, device};
    }
    std::lock_guard<std::mutex> guard(mutex);
    int64_t held = stats[current_device].allocated_bytes[0].current;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        held + bytes <= limits[current_device],
        "Out of memory on ", device, ": tried to allocate ", bytes, " bytes where ", held, " of ",
        limits[current_device], " are in use.");
    auto* header = static_cast<Header*>(std::aligned_alloc(kHeader, kHeader * (2 + bytes / kHeader)));
    *header = {bytes, current_device};
    count(*header, &c10::CachingAllocator::Stat::increase);
    void* data = reinterpret_cast<char*>(header) + kHeader;
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override { counts.recorded++; }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(mutex);
    stats[device].allocated_bytes[0].reset_accumulated();
    stats[device].reserved_bytes[0].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(mutex);
    stats[device].allocated_bytes[0].reset_peak();
    stats[device].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(mutex);
    return {limits[device] - stats[device].allocated_bytes[0].current, limits[device]};
  }
  void limit(DeviceIndex device, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex);
    limits[device] = bytes;
  }

 private:
  static constexpr size_t kHeader = 64;  // bytes in front of each block, for its alignment
  struct Header {
    size_t bytes;
    DeviceIndex device;
  };
  static void release(void* data);
  void count(const Header& block, void (c10::CachingAllocator::Stat::*change)(size_t)) {
    (stats[block.device].allocated_bytes[0].*change)(block.bytes);
    (stats[block.device].reserved_bytes[0].*change)(block.bytes);
  }
  std::mutex mutex;
  c10::CachingDeviceAllocator::DeviceStats stats[kDevices];
  size_t limits[kDevices] = {size_t(16) << 30, size_t(16) << 30};
} memory;

void Memory::release(void* data) {
  if (data != nullptr) {
    auto* header = reinterpret_cast<Header*>(static_cast<char*>(data) - kHeader);
    std::lock_guard<std::mutex> guard(memory.mutex);
    memory.count(*header, &c10::CachingAllocator::Stat::decrease);
    std::free(header);
  }
}

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> guard(mutex());
    blocks().insert(data);
    return {data, data, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  static bool has(const void* data) {
    std::lock_guard<std::mutex> guard(mutex());
    return blocks().count(data) > 0;
  }
  // It caches and counts nothing.
  bool record_event(void*, void*, Stream) override { return false; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void release(void* data) {
    std::lock_guard<std::mutex> guard(mutex());
    blocks().erase(data);
    std::free(data);
  }
  // Never destroyed: tensors may outlive this library's static objects.
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::unordered_set<const void*>& blocks() {
    static auto* blocks = new std::unordered_set<const void*>;
    return *blocks;
  }
} pinned_memory;

// Devices, streams and events

struct Event {
  double milliseconds;
};

double now() {
  auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(time).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no device ", device);
    current_device = index_of(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = index_of(device);
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }

  Stream getStream(Device device) const override { return stream(device, current_streams[index_of(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<StreamId> last{0};
    return stream(device, ++last);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream next) const override {
    Stream before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { counts.synchronisations++; }
  void synchronizeDevice(const DeviceIndex) const override { counts.synchronisations++; }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {
    counts.recorded++;
  }

  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    static_cast<Event*>(*event)->milliseconds = now();
  }
  void block(void*, const Stream&) const override { counts.stream_waits++; }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { counts.synchronisations++; }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    return static_cast<Event*>(end)->milliseconds - static_cast<Event*>(start)->milliseconds;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

 private:
  static Stream stream(Device device, StreamId id) {
    return Stream(Stream::UNSAFE, Device(kType, index_of(device)), id);
  }
};

// Random numbers

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex device) {
    device_ = Device(kType, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_generator(int64_t device) {
  static const auto* generators = new std::vector<at::Generator>{
      at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return (*generators)[device < 0 ? current_device : device];
}

// Lets the CPU's kernels draw from a generator of the device: they get its state, and it theirs.
class DrawsFrom {
 public:
  explicit DrawsFrom(at::Generator generator)
      : lock(mutex()), device(std::move(generator)), before(cpu().get_state()) {
    cpu().set_state(device.get_state());
  }
  ~DrawsFrom() {
    device.set_state(cpu().get_state());
    cpu().set_state(before);
  }

 private:
  static at::Generator& cpu() {
    static auto* generator = new at::Generator(at::detail::getDefaultCPUGenerator());
    return *generator;
  }
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  std::lock_guard<std::mutex> lock;
  at::Generator device;
  Tensor before;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void*) const override { return Device(kType, current_device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = memory.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// Tensors

Tensor empty(
    IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef sizes,
    IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      sizes, strides, &memory, keys, c10::dtype_or_default(dtype));
}

// A CPU tensor on the same memory.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) {
    return tensor;
  }
  void* data = tensor.numel() > 0 ? tensor.data_ptr() : nullptr;
  return at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

// Inside of a kernel: what it copies to be computed by the CPU is no copy of the program's.
thread_local bool in_kernel = false;

struct Kernel {
  bool before = std::exchange(in_kernel, true);
  ~Kernel() { in_kernel = before; }
};

void count_copy(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.is_cpu()) {
    counts.copies_in++;
    counts.side_copies += current_streams[index_of(to.device())] != 0;
    bool is_pinned = PinnedMemory::has(from.storage().data());
    counts.blocking_copies += !(non_blocking && is_pinned);
  }
  counts.copies_back += to.is_cpu();
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (!in_kernel) {
    count_copy(from, to, non_blocking);
  }
  on_host(to.detach()).copy_(on_host(from.detach()));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& tensor) {
  counts.items++;
  return on_host(tensor).item();
}

// Kernels

// Whether a device would have to tell the host a size or a value before the host could go on.
bool host_must_wait(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  if (op.schema().name().find("aten::index") == 0 ||
      op.schema().name().find("aten::_index_put") == 0) {  // a mask is counted, positions are not
    for (const auto& argument : arguments) {
      if (argument.isList()) {
        for (const c10::IValue& index : argument.toListRef()) {
          if (index.isTensor() && index.toTensor().scalar_type() == at::kBool) {
            return true;
          }
        }
      }
    }
    return false;
  }
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

// The generator that was passed, or that of the device; none for the kernel, which is the CPU's.
at::Generator take_generator(torch::jit::Stack& stack, size_t arguments) {
  at::Generator generator = default_generator(-1);
  for (auto& argument : torch::jit::last(stack, arguments).vec()) {
    if (argument.isTensor() && argument.toTensor().is_privateuseone()) {
      generator = default_generator(argument.toTensor().device().index());
      break;
    }
  }
  for (size_t i = stack.size() - arguments; i < stack.size(); i++) {
    if (stack[i].isGenerator()) {
      generator = stack[i].toGenerator();
      stack[i] = c10::IValue();
    }
  }
  return generator;
}

void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t arguments = op.schema().arguments().size();
  counts.synchronisations += host_must_wait(op, torch::jit::last(*stack, arguments));
  Kernel kernel;
  std::optional<DrawsFrom> random;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    random.emplace(take_generator(*stack, arguments));
  }
  at::native::cpu_fallback(op, stack);
}

// Kernels that the fallback cannot have: it gives the CPU copies of the arguments, and of those that
// the schema does not say are changed, no copy comes back.

std::optional<Tensor> on_host(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional(on_host(*tensor)) : std::nullopt;
}

// Results of the CPU, on the device.
template <class... Results>
auto on_device(Device device, const std::tuple<Results...>& results) {
  auto move = [&](const Tensor& result) { return result.defined() ? result.to(device) : result; };
  return std::apply([&](auto&... each) { return std::tuple(move(each)...); }, results);
}

std::tuple<Tensor, Tensor, Tensor> batch_norm(
    const Tensor& input,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& running_mean,
    const std::optional<Tensor>& running_var,
    bool training,
    double momentum,
    double eps) {
  Kernel kernel;
  auto results = at::native_batch_norm(
      on_host(input), on_host(weight), on_host(bias), on_host(running_mean), on_host(running_var),
      training, momentum, eps);
  return on_device(input.device(), results);
}

// What torch dispatches convolutions to on a device that is not its own.

Tensor convolution(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& bias,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups) {
  Kernel kernel;
  Tensor output = at::convolution(
      on_host(input), on_host(weight), on_host(bias), stride, padding, dilation, transposed,
      output_padding, groups);
  return output.to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient,
    const Tensor& input,
    const Tensor& weight,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> mask) {
  Kernel kernel;
  auto gradients = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), gradient.size(1),
      stride, padding, dilation, transposed, output_padding, groups, mask);
  return on_device(input.device(), gradients);
}

// Registrations

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(kType, &memory);
REGISTER_HOST_ALLOCATOR(kType, &pinned_memory);  // torch 2.14 asks for one without a check
const bool has_hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  for (const char* name : {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}) {
    auto kernel = [] { return torch::CppFunction::makeFromBoxedFunction<&compute_on_host>(); };
    m.impl(name, kernel());
    m.impl(std::string(name).append(".tensor_lr").c_str(), kernel());
  }
  m.impl("native_batch_norm", batch_norm);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("record_stream", [](Tensor&, Stream) { counts.recorded++; });
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", [](const Tensor& tensor, IntArrayRef sizes,
                       std::optional<at::MemoryFormat> format) -> const Tensor& {
    return at::native::resize_(tensor, sizes, format);
  });
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& tensor, c10::Storage storage, int64_t offset, IntArrayRef sizes,
            IntArrayRef strides) -> Tensor& {
    return at::native::set_storage_meta__symint(
        tensor, storage, offset, c10::fromIntArrayRefSlow(sizes), c10::fromIntArrayRefSlow(strides));
  });
}

// Autocast casts what it casts on CUDA.

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FULL_PRECISION)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET_DTYPE)
  AT_FORALL_PROMOTE(PROMOTE)
}

// What the Python module asks for.

TORCH_LIBRARY(simulated, m) {
  m.def("counts() -> Dict(str, int)", [] {
    c10::Dict<std::string, int64_t> result;
    result.insert("items", counts.items);
    result.insert("copies_in", counts.copies_in);
    result.insert("blocking_copies", counts.blocking_copies);
    result.insert("side_copies", counts.side_copies);
    result.insert("copies_back", counts.copies_back);
    result.insert("synchronisations", counts.synchronisations);
    result.insert("stream_waits", counts.stream_waits);
    result.insert("recorded", counts.recorded);
    return result;
  });
  m.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return default_generator(device);
  });
  m.def("limit_memory(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
    memory.limit(device, bytes);
  });
}

}  // namespace
