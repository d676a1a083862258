// Collectives: an implementation of the c10d operators that notes each call and passes it on.
//
// What tracer/collectives.py and tracer/completion.py do, for tensors of the processor, without the
// interpreter's lock. The end of a collective is told by a callback on its future, on the thread of gloo that
// completes it. A reduce-scatter of gloo has no future, as it does its last copy inside of `wait`: it is over
// when somebody has waited.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <deque>

#include "ring.hpp"
#include "state.hpp"

namespace foretrace {

// How to read the arguments of an operator: tracer/operators.py says what each means.
struct Rule {
  const char* name;
  const char* kind;
  int group;                // position of the process group
  int sized;                // position of the tensors whose elements are counted
  int outputs;              // position of the tensors that somebody may wait for, -1: of none
  bool times_ranks = false; // whether what is counted is the part of one rank
  bool has_future = true;
};

constexpr std::array<Rule, 16> RULES{{
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
}};

// A collective from its issue to its end.
struct Call {
  int32_t kind, group, block;
  int dtype;
  int64_t sequence = 0, size_bytes = 0;
  Position at;
  int64_t start_ns;
  std::atomic<int64_t> end_ns{0};  // 0: under way
  bool has_future;
  std::vector<const void*> outputs;
  c10::intrusive_ptr<c10d::Work> work;  // of what has no future, until it was waited for
};
using CallPtr = std::shared_ptr<Call>;

// Works that nobody has waited for are looked through when there are that many more of them.
constexpr size_t KEPT_WORKS = 64;

// The collectives of a process, from their issue until Python has taken them. For any thread.
class Calls {
 public:
  // Count and note a call that is about to be made; false: too many wait to be taken.
  bool issue(const CallPtr& call) {
    std::lock_guard<std::mutex> guard(lock_);
    call->sequence = groups_[call->group].n_calls++;
    call->start_ns = now_ns();
    ring_.note(*this, *call);
    if (fresh_.size() + told_.size() >= MOST_RECORDS) {
      ++n_lost_;
      return false;
    }
    fresh_.push_back(call);
    for (const void* output : call->outputs) by_output_[output] = call;
    return true;
  }

  // Whoever needed the result of a call has it, or gloo does.
  void end(const CallPtr& call) {
    c10::intrusive_ptr<c10d::Work> work;  // freed after the lock: its tensors may need that of the interpreter
    int64_t under_way = 0;
    call->end_ns.compare_exchange_strong(under_way, now_ns());
    std::lock_guard<std::mutex> guard(lock_);
    for (const void* output : call->outputs) {
      auto found = by_output_.find(output);
      if (found != by_output_.end() && found->second == call) by_output_.erase(found);
    }
    if (call->work) {
      by_work_.erase(call->work.get());
      n_waitable = int(by_work_.size());
      work = std::move(call->work);
    }
  }

  // A call without a future goes on until its work is waited for.
  void awaits(const CallPtr& call, c10::intrusive_ptr<c10d::Work> work) {
    std::vector<CallPtr> dropped;
    {
      std::lock_guard<std::mutex> guard(lock_);
      by_work_[work.get()] = call;
      n_waitable = int(by_work_.size());
      call->work = std::move(work);
      if (by_work_.size() > most_works_) {
        for (const auto& [_, one] : by_work_) {
          if (one->work.use_count() == 1) dropped.push_back(one);
        }
        most_works_ = by_work_.size() - dropped.size() + KEPT_WORKS;
      }
    }
    for (const CallPtr& one : dropped) end(one);  // nobody can wait any more, and tensors are kept for that
  }

  CallPtr of_output(const void* output) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = by_output_.find(output);
    return found == by_output_.end() ? nullptr : found->second;
  }

  CallPtr of_work(const c10d::Work* work) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = by_work_.find(work);
    return found == by_work_.end() ? nullptr : found->second;
  }

  // The number of a group, -1 if Python has not told of it.
  int32_t group(const std::string& name) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = by_name_.find(name);
    return found == by_name_.end() ? -1 : found->second;
  }

  // Learn or rename a group.
  int32_t add_group(const std::string& name, int64_t id, std::string axis) {
    std::lock_guard<std::mutex> guard(lock_);
    auto [found, is_new] = by_name_.emplace(name, int32_t(groups_.size()));
    if (is_new) groups_.emplace_back();
    groups_[found->second].id = id;
    groups_[found->second].axis = std::move(axis);
    ring_.forget_lines();
    return found->second;
  }

  // What lines of the ring say of a kind, of a block and of all types, as JSON; where it is.
  void name_kind(int32_t number, std::string words) { name(ring_.kinds, number, std::move(words)); }
  void name_block(int32_t number, std::string words) { name(ring_.blocks, number, std::move(words)); }
  void name_types(std::vector<std::string> words) {
    std::lock_guard<std::mutex> guard(lock_);
    ring_.dtypes = std::move(words);
  }
  void open_ring(char* memory, size_t n_slots, size_t slot_bytes, int64_t shift_ns) {
    std::lock_guard<std::mutex> guard(lock_);
    ring_.open(memory, n_slots, slot_bytes, shift_ns);
  }
  size_t n_kinds() {
    std::lock_guard<std::mutex> guard(lock_);
    return ring_.kinds.size();
  }
  uint64_t next_number() { return ring_.next(); }

  int64_t n_calls(int32_t group) {
    std::lock_guard<std::mutex> guard(lock_);
    return group >= 0 && size_t(group) < groups_.size() ? groups_[group].n_calls : 0;
  }

  // What was issued since the last time, and what of that before has ended since.
  void take(std::vector<CallPtr>* fresh, std::vector<CallPtr>* ended, int64_t* n_lost) {
    std::lock_guard<std::mutex> guard(lock_);
    size_t kept = 0;
    for (CallPtr& call : told_) {
      if (call->end_ns != 0) {
        ended->push_back(std::move(call));
      } else {
        told_[kept++] = std::move(call);
      }
    }
    told_.resize(kept);
    fresh->swap(fresh_);
    for (const CallPtr& call : *fresh) told_.push_back(call);
    *n_lost += n_lost_;
    n_lost_ = 0;
  }

  // Whether a call is under way that gloo will tell the end of.
  bool is_busy() {
    std::lock_guard<std::mutex> guard(lock_);
    auto busy = [](const CallPtr& call) { return call->end_ns == 0 && call->has_future; };
    return std::any_of(fresh_.begin(), fresh_.end(), busy) || std::any_of(told_.begin(), told_.end(), busy);
  }

  void reset() {
    decltype(by_work_) works;  // freed after the lock, as in `end`
    std::lock_guard<std::mutex> guard(lock_);
    fresh_.clear();
    told_.clear();
    by_output_.clear();
    works.swap(by_work_);
    by_name_.clear();
    groups_.clear();
    n_waitable = 0;
    n_lost_ = 0;
    ring_.forget_lines();
  }

  // As those of Lane.
  void hold() { lock_.lock(); }
  void release() { lock_.unlock(); }

  struct Group {
    int64_t id = 0, n_calls = 0;
    std::string axis;  // as JSON
  };
  const Group& known_group(int32_t number) const { return groups_[number]; }

  std::atomic<int> n_waitable{0};  // calls that are over when somebody has waited

 private:
  void name(std::vector<std::string>& names, int32_t number, std::string words) {
    std::lock_guard<std::mutex> guard(lock_);
    if (names.size() <= size_t(number)) names.resize(size_t(number) + 1, "\"\"");
    names[size_t(number)] = std::move(words);
  }

  std::mutex lock_;
  Ring<Calls, Call> ring_;
  std::vector<CallPtr> fresh_, told_;
  std::unordered_map<const void*, CallPtr> by_output_;
  std::unordered_map<const c10d::Work*, CallPtr> by_work_;
  std::unordered_map<std::string, int32_t> by_name_;
  std::deque<Group> groups_;
  size_t most_works_ = KEPT_WORKS;
  int64_t n_lost_ = 0;
};

inline Calls& calls() {
  static Calls* found = new Calls;  // as the state
  return *found;
}

const c10::DispatchKeySet AFTER(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

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
    try {
      op.redispatchBoxed(keys & AFTER, stack);
    } catch (...) {
      if (call) calls().end(call);
      throw;
    }
    if (!call) return;
    try {
      follow(call, stack->back());
    } catch (const std::exception& error) {
      calls().end(call);
      disable(state().notes_calls, "collectives", error.what());
    }
  }

 private:
  CallPtr described(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const {
    const size_t n_args = op.schema().arguments().size();
    if (size_t(std::max({rule_.group, rule_.sized, rule_.outputs})) >= n_args) throw std::runtime_error("new schema");
    const c10::IValue* args = stack.data() + stack.size() - n_args;
    const auto group = args[rule_.group].toCustomClass<c10d::ProcessGroup>();
    auto call = std::make_shared<Call>();
    call->kind = kind_;
    call->group = number_of(group->getGroupName());
    call->block = state().lane->block();
    call->at = state().position->at;
    call->has_future = rule_.has_future;
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
    if (rule_.outputs >= 0) {
      each_tensor(args[rule_.outputs], [&](const at::Tensor& tensor) {
        if (const void* found = address(tensor)) call->outputs.push_back(found);
      });
    }
    return call;
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

  static void follow(const CallPtr& call, const c10::IValue& result) {
    c10::intrusive_ptr<c10d::Work> work;
    if (result.isObject()) work = result.toCustomClass<c10d::Work>();
    if (!work) {  // it was complete on return
      calls().end(call);
    } else if (!call->has_future) {
      calls().awaits(call, std::move(work));
    } else if (const auto future = work->getFuture()) {
      future->addCallback([call](c10::ivalue::Future&) { calls().end(call); });
    } else {
      calls().awaits(call, std::move(work));
    }
  }

  const Rule& rule_;
  const int32_t kind_;
};

// The kernel of `wait_tensor`, by which functional collectives are waited for.
class WaitingKernel final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    CallPtr call;
    if (state().notes_calls) call = calls().of_output(address(stack->back().toTensor()));
    if (!call) return op.redispatchBoxed(keys & AFTER, stack);  // waited for before
    state().lane->pause();
    try {
      op.redispatchBoxed(keys & AFTER, stack);
    } catch (...) {
      calls().end(call);
      state().lane->resume();
      throw;
    }
    calls().end(call);
    state().lane->resume();
  }
};

// Note that a work was waited for; whether it is that of a call that is over by that.
inline bool waited(const c10d::Work* work) {
  const CallPtr call = calls().of_work(work);
  if (call) calls().end(call);
  return call != nullptr;
}

// The same for Python, by way of the dispatcher, which takes some 100 us.
inline bool waited_boxed(const c10::intrusive_ptr<c10d::Work>& work) { return waited(work.get()); }

// The kernels, for as long as it lives.
class Kernels {
 public:
  // `number_of` gives kinds their numbers.
  explicit Kernels(int32_t (*number_of)(const char*))
      : c10d_(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__),
        functional_(torch::Library::IMPL, "_c10d_functional", c10::DispatchKey::BackendSelect, __FILE__, __LINE__) {
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
