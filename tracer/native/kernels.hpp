// Implementations of the c10d operators that note each call and pass it on, as tracer/collectives.py does.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <array>

#include "transfers.hpp"

namespace foretrace {

// In place of the position of a peer: of a collective, and of what is received from whichever rank sends
// first.
constexpr int NO_PEER = -1, ANY_PEER = -2;

// How to read the arguments of an operator: tracer/operators.py says what each means.
struct Rule {
  const char* name;
  const char* kind;
  int group;                // position of the process group
  int sized;                // position of the tensors whose elements are counted
  int outputs;              // position of the tensors that somebody may wait for, -1: of none
  bool times_ranks = false; // whether what is counted is the part of one rank
  bool has_future = true;
  int peer = NO_PEER;       // position of the other side's rank in the group
  bool waits = false;       // whether it returns when it is over, and nothing
};

constexpr std::array<Rule, 20> RULES{{
    {"allreduce_", "all_reduce", 1, 0, 0},
    {"allreduce_coalesced_", "all_reduce", 1, 0, 0},
    {"broadcast_", "broadcast", 1, 0, 0},
    {"reduce_", "reduce", 1, 0, 0},
    {"_allgather_base_", "all_gather", 2, 0, 0},
    {"allgather_", "all_gather", 2, 0, 0},
    {"allgather_coalesced_", "all_gather", 2, 1, 0, true},
    {"allgather_into_tensor_coalesced_", "all_gather", 2, 0, 0},
    {"_reduce_scatter_base_", "reduce_scatter", 2, 1, 0, false, false},
    {"reduce_scatter_", "reduce_scatter", 2, 1, 0, false, false},
    {"reduce_scatter_tensor_coalesced_", "reduce_scatter", 2, 1, 0, false, false},
    {"gather_", "gather", 2, 1, -1, true},
    {"scatter_", "scatter", 2, 0, 0, true},
    {"alltoall_", "all_to_all", 2, 1, 0},
    {"alltoall_base_", "all_to_all", 2, 1, 0},
    {"barrier", "barrier", 1, -1, -1},
    {"send", "send", 1, 0, -1, false, false, 2},
    {"recv_", "recv", 1, 0, -1, false, false, 2},
    {"recv_any_source_", "recv", 1, 0, -1, false, false, ANY_PEER},
    {"monitored_barrier_", "barrier", 1, -1, -1, false, false, NO_PEER, true},
}};

// The key at which each call is seen, and those that come after it.
constexpr c10::DispatchKey FIRST = c10::DispatchKey::BackendSelect;
const c10::DispatchKeySet AFTER(c10::DispatchKeySet::FULL_AFTER, FIRST);

// Call `see` with each tensor of an argument; of a list of lists the first list, which is that of one device.
template <typename See>
void each_tensor(const c10::IValue& value, See see) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) see(value.toTensor());
  } else if (value.isList()) {
    const auto items = value.toListRef();
    if (!items.empty() && items[0].isList()) return each_tensor(items[0], see);
    for (const c10::IValue& item : items) {
      if (item.isTensor() && item.toTensor().defined()) see(item.toTensor());
    }
  }
}

// Where the elements of a tensor are, nullptr if nowhere.
inline const void* address(const at::Tensor& tensor) {
  try {
    return tensor.defined() && tensor.has_storage() ? tensor.const_data_ptr() : nullptr;
  } catch (const std::exception&) {
    return nullptr;
  }
}

// The kernel of one operator.
class NotingKernel final : public c10::OperatorKernel {
 public:
  NotingKernel(const Rule& rule, int32_t kind) : rule_(rule), kind_(kind) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    CallPtr call;
    if (state().notes_calls) {
      try {
        call = described(op, *stack);
        if (!calls().issue(call)) call.reset();
      } catch (const std::exception& error) {
        call.reset();
        disable(state().notes_calls, "collectives", error.what());
      }
    }
    const bool is_paused = rule_.waits && state().lane->pause();
    try {
      op.redispatchBoxed(keys & AFTER, stack);
    } catch (...) {
      if (call) calls().end(call);
      if (is_paused) state().lane->resume();
      throw;
    }
    if (is_paused) state().lane->resume();
    if (!call) return;
    try {
      rule_.waits ? calls().end(call) : follow(call, &stack->back());
    } catch (const std::exception& error) {
      calls().end(call);
      disable(state().notes_calls, "collectives", error.what());
    }
  }

 private:
  CallPtr described(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const {
    const size_t n_args = op.schema().arguments().size();
    const int last = std::max({rule_.group, rule_.sized, rule_.outputs, rule_.peer});
    if (size_t(last) >= n_args) throw std::runtime_error("new schema");
    const c10::IValue* args = stack.data() + stack.size() - n_args;
    const auto group = held<c10d::ProcessGroup>(args[rule_.group], knows_group_);
    auto call = std::make_shared<Call>();
    call->kind = kind_;
    call->group = number_of(group->getGroupName());
    call->block = state().lane->is_own() ? state().lane->block() : NOBODY;
    call->at = state().position->at;
    call->is_told = rule_.has_future;
    call->dtype = int(at::kFloat);
    if (rule_.sized >= 0) {
      each_tensor(args[rule_.sized], [&](const at::Tensor& tensor) {
        call->size_bytes += tensor.numel() * int64_t(tensor.element_size());  // sparse ones have no nbytes
        call->dtype = int(tensor.scalar_type());
      });
      if (rule_.times_ranks) call->size_bytes *= group->getSize();
    } else {
      each_tensor(args[0], [&](const at::Tensor& tensor) { call->dtype = int(tensor.scalar_type()); });
    }
    if (rule_.peer != NO_PEER) describe_transfer(*call, args);
    if (rule_.outputs >= 0) {
      each_tensor(args[rule_.outputs], [&](const at::Tensor& tensor) {
        if (const void* found = address(tensor)) call->outputs.push_back(found);
      });
    }
    return call;
  }

  // What differs in a transfer: its other side, and what a pipeline has said of it.
  void describe_transfer(Call& call, const c10::IValue* args) const {
    call.is_transfer = true;
    call.is_send = strcmp(rule_.kind, "send") == 0;
    if (rule_.peer != ANY_PEER) call.peer = calls().member(call.group, args[rule_.peer].toInt());
    const void* data = nullptr;
    each_tensor(args[rule_.sized], [&](const at::Tensor& tensor) { data = address(tensor); });
    Announced what{};
    if (transfers().take_announced(call.is_send, data, &what)) {
      what.at.step = call.at.step;
      call.at = what.at;
      call.block = what.content;
    }
    transfers().sweep();
  }

  static int32_t number_of(const std::string& name) {
    int32_t found = calls().group(name);
    if (found >= 0) return found;
    {
      Gil gil;
      PyObject* text = PyUnicode_FromStringAndSize(name.data(), Py_ssize_t(name.size()));
      PyObject* done = text != nullptr ? ask("met_group", text) : nullptr;
      Py_XDECREF(text);
      if (done == nullptr) throw std::runtime_error(python_error());
      Py_DECREF(done);
    }
    found = calls().group(name);
    if (found < 0) throw std::runtime_error("no group " + name);
    return found;
  }

  // An object of C++ that a value holds. Its class is checked once: what stands at one place of a schema is of
  // one, and torch's check takes 1 to 2 us where caches are cold.
  template <typename Class>
  static c10::intrusive_ptr<Class> held(const c10::IValue& value, std::atomic<bool>& is_checked) {
    if (is_checked) {
      return c10::static_intrusive_pointer_cast<Class>(value.toObjectRef().getSlot(0).toCapsule());
    }
    auto found = value.toCustomClass<Class>();
    is_checked = true;
    return found;
  }

  void follow(const CallPtr& call, c10::IValue* result) const {
    c10::intrusive_ptr<c10d::Work> work;
    if (result->isObject()) work = held<c10d::Work>(*result, knows_work_);
    if (!work) {  // it was complete on return
      calls().end(call);
    } else if (call->is_transfer && is_gloo_transfer(*work)) {
      const auto followed = c10::make_intrusive<Followed>(std::move(work), call);
      transfers().add(followed);
      *result = c10::IValue(c10::intrusive_ptr<c10d::Work>(followed));
    } else if (!call->is_told) {
      calls().awaits(call, std::move(work));
    } else if (const auto future = work->getFuture()) {
      future->addCallback([call](c10::ivalue::Future&) { calls().end(call); });
    } else {
      calls().awaits(call, std::move(work));
    }
  }

  const Rule& rule_;
  const int32_t kind_;
  mutable std::atomic<bool> knows_group_{false}, knows_work_{false};
};

// The kernel of `wait_tensor`, by which functional collectives are waited for.
class WaitingKernel final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    CallPtr call;
    if (state().notes_calls) call = calls().of_output(address(stack->back().toTensor()));
    if (!call) return op.redispatchBoxed(keys & AFTER, stack);  // waited for before
    const bool is_paused = state().lane->pause();
    try {
      op.redispatchBoxed(keys & AFTER, stack);
    } catch (...) {
      calls().end(call);
      if (is_paused) state().lane->resume();
      throw;
    }
    calls().end(call);
    if (is_paused) state().lane->resume();
  }
};

// The kernels, for as long as it lives.
class Kernels {
 public:
  // `number_of` gives kinds their numbers.
  explicit Kernels(int32_t (*number_of)(const char*))
      : c10d_(torch::Library::IMPL, "c10d", FIRST, __FILE__, __LINE__),
        functional_(torch::Library::IMPL, "_c10d_functional", FIRST, __FILE__, __LINE__) {
    for (const Rule& rule : RULES) {
      if (!is_known(std::string("c10d::") + rule.name)) continue;
      c10d_.impl(rule.name, kept(std::make_unique<NotingKernel>(rule, number_of(rule.kind))));
    }
    if (is_known("_c10d_functional::wait_tensor")) {
      functional_.impl("wait_tensor", kept(std::make_unique<WaitingKernel>()));
    }
  }

 private:
  // A kernel that is never freed: another thread may be inside of it when it is taken away.
  template <typename Kernel>
  static torch::CppFunction kept(std::unique_ptr<Kernel> kernel) {
    Kernel* const found = kernel.get();
    auto function = torch::CppFunction::makeFromBoxedFunctor(std::move(kernel));
    c10::raw::intrusive_ptr::incref(found);
    return function;
  }

  static bool is_known(const std::string& name) {
    return c10::Dispatcher::singleton().findSchema({name, ""}).has_value();
  }

  torch::Library c10d_, functional_;
};

}  // namespace foretrace
