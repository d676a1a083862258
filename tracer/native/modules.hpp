// The model at work: which block computes, forward, backward and when it recomputes.
//
// What tracer/modules.py does, in C++. Hooks of modules run with the interpreter's lock; those of the nodes
// of the autograd graph without.
#pragma once

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>

#include <typeindex>

#include "transfers.hpp"

namespace foretrace {

using torch::autograd::Node;
// Differs between versions.
using NodePtr = std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

// Number of a module that is part of the block around it.
constexpr int32_t INNER = -1;

// A module whose forward runs.
struct Running {
  PyObject* module;
  int32_t block;
  int depth;
  NodePtr entry;  // what made its input
};

// In place of the layer of a block of which Python has not told yet.
constexpr int32_t UNTOLD = INT32_MIN;

// What is known of the modules of a process. Needs the interpreter's lock.
struct Modules {
  std::unordered_map<PyObject*, int32_t> known;  // block of each
  std::vector<int32_t> layers;                   // layer of each block
  std::vector<Running> running;
  std::atomic<bool> ends_with_graph{false};  // whether C++ waits after the last node, as DDP does
  std::atomic<bool> is_ending{false};
};

inline Modules& modules() {
  static Modules* found = new Modules;  // as the state
  return *found;
}

// From a node on, a block owns the time.
struct Entering final : torch::autograd::FunctionPreHook {
  explicit Entering(int32_t number) : block(number) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (state().notes_modules && state().backward_depth > 0) enter();
    return grads;
  }

  // A compiled backward pass does without: nothing of what it runs belongs to a node.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const {}
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) {}

  void enter() const {
    try {
      // The C++ reducer of DDP waits for its buckets in a callback after the last node. Ours was asked for
      // before, so it runs before: what comes then is not compute.
      if (modules().ends_with_graph && !modules().is_ending.exchange(true)) {
        torch::autograd::Engine::get_default_engine().queue_callback([] {
          if (state().notes_modules) state().lane->replace({state().backward_kind, NOBODY});
        });
      }
      transfers().sweep();
      state().lane->replace({state().backward_kind, block});
    } catch (const std::exception& error) {
      disable(state().notes_modules, "modules", error.what());
    }
  }

  const int32_t block;
};

// Make a block the owner of the time from a node on, unless the node has an owner already.
inline void tag(const NodePtr& node, int32_t block) {
  if (!node || block == NOBODY) return;
  for (const auto& hook : node->pre_hooks()) {
    if (dynamic_cast<const Entering*>(hook.get()) != nullptr) return;
  }
  node->add_pre_hook(std::make_unique<Entering>(block));
}

// Values of what a module takes or returns that are looked at for a tensor: the first of them has one.
constexpr Py_ssize_t MOST_ASKED = 64;

// The first values of a tuple, list or dict, as one that nobody else changes; nullptr with an error.
inline PyObject* first_of(PyObject* values) {
  if (PyTuple_Check(values)) return PyTuple_GetSlice(values, 0, MOST_ASKED);
  if (PyList_Check(values)) return PyList_GetSlice(values, 0, MOST_ASKED);
  PyObject* found = PyList_New(0);
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; found != nullptr && PyDict_Next(values, &at, nullptr, &value);) {
    if (PyList_GET_SIZE(found) == MOST_ASKED) break;
    if (PyList_Append(found, value) != 0) Py_CLEAR(found);
  }
  return found;
}

// The node that made the first tensor of a tuple, list or dict that has one; nullptr, perhaps with an error.
// Other things are not asked for what they hold: that may be without end, or be gone when it was asked for.
inline NodePtr node_of(PyObject* values, bool is_inside = false) {
  if (THPVariable_Check(values)) return THPVariable_Unpack(values).grad_fn();
  if (is_inside || !(PyDict_Check(values) || PyTuple_Check(values) || PyList_Check(values))) return nullptr;
  PyObject* items = first_of(values);
  if (items == nullptr) return nullptr;
  NodePtr found;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items) && !found; ++i) {
    found = node_of(PySequence_Fast_GET_ITEM(items, i), true);
  }
  Py_DECREF(items);
  return found;
}

// A model is called from outside of any other and of actions of a pipeline; false with an error of Python.
inline bool called(PyObject* model, PyObject* args) {
  PyObject* done = ask("begin", model, args);
  Py_XDECREF(done);
  return done != nullptr;
}

// A module begins its forward; false with an error of Python.
inline bool entered(PyObject* module, PyObject* args) {
  if (!state().lane->is_own()) return true;
  Modules& all = modules();
  auto found = all.known.find(module);
  if (found == all.known.end()) {
    PyObject* met = ask("met", module, args);
    if (met == nullptr) return false;
    Py_DECREF(met);
    found = all.known.find(module);
    if (found == all.known.end()) return true;
  }
  const int32_t block = found->second;
  if (block == INNER) return true;
  if (all.running.empty()) {
    if (state().n_acting == 0 && !called(module, args)) return false;
  } else if (all.layers[size_t(block)] < 0 && all.layers[size_t(all.running.back().block)] >= 0) {
    return true;  // shared by layers, as a table of rotations: part of the layer that calls it
  }
  transfers().sweep();
  const int32_t kind = state().backward_depth > 0 ? state().recompute : state().forward;
  const int depth = state().lane->push({kind, block});
  all.running.push_back({module, block, depth, node_of(args)});
  return !PyErr_Occurred();
}

// Whether a node makes another shape of what the block has computed, as that of a linear layer does.
inline bool is_view(const Node& node) {
  static auto* known = new std::unordered_map<std::type_index, bool>;  // a name costs 1 us
  auto [found, is_new] = known->emplace(typeid(node), false);
  if (is_new) {
    const std::string name = node.name();
    found->second = name == "ViewBackward0" || name == "UnsafeViewBackward0";
  }
  return found->second;
}

// A module has ended its forward; false with an error of Python. `kwargs` is nullptr after an exception.
inline bool left(PyObject* module, PyObject* args, PyObject* kwargs, PyObject* output) {
  if (!state().lane->is_own()) return true;
  auto& stack = modules().running;
  const auto is_it = [&](const Running& one) { return one.module == module; };
  if (stack.empty() || (!is_it(stack.back()) && std::none_of(stack.begin(), stack.end(), is_it))) return true;
  while (!stack.empty()) {  // what a graph keeps may run code of Python when it goes
    Running one = std::move(stack.back());
    stack.pop_back();
    state().lane->pop(size_t(one.depth));
    if (one.module != module) continue;
    const int32_t around = stack.empty() ? state().lane->block() : stack.back().block;
    const NodePtr node = node_of(output);
    if (node) {
      tag(node, one.block);
      // A view is gone if the output is changed in place.
      if (is_view(*node)) tag(node->next_edge(0).function, one.block);
    }
    NodePtr entry = one.entry ? one.entry : node_of(args);
    const bool has_kwargs = kwargs != nullptr && PyDict_GET_SIZE(kwargs) != 0;
    if (!entry && has_kwargs) entry = node_of(kwargs);
    tag(entry, around);
    if (stack.empty() && has_kwargs && !PyErr_Occurred()) {
      PyObject* noted = ask("called_with", kwargs);
      Py_XDECREF(noted);
    }
    return !PyErr_Occurred();
  }
  return true;
}

// A backward pass begins; returns what `backward_ends` takes. On any thread.
inline int backward_begins() {
  ++state().backward_depth;
  modules().is_ending = false;
  state().lane->own();
  const int32_t block = state().lane->block();
  return state().lane->push({state().backward_kind, block == NOBODY ? state().loss : block});
}

inline void backward_ends(int depth) {
  if (state().backward_depth > 0) --state().backward_depth;  // 0: a recording has begun since
  state().lane->pop(size_t(depth));
}

}  // namespace foretrace
