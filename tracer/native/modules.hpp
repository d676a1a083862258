// The model at work: which block computes, forward, backward and when it recomputes.
//
// What tracer/modules.py and tracer/backward.py do, in C++. Hooks of modules run with the interpreter's lock;
// those of the nodes of the autograd graph without.
#pragma once

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>

#include <typeindex>
#include <unordered_set>

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
  std::unordered_set<PyObject*> shells;          // those without parameters, called from outside of any model
  std::vector<int32_t> layers;                   // layer of each block
  std::vector<Running> running;
  std::atomic<bool> ends_with_graph{false};  // whether C++ waits after the last node, as DDP does
  std::atomic<bool> is_ending{false};
};

inline Modules& modules() {
  static Modules* found = new Modules;  // as the state
  return *found;
}

// Whether the forward of a model runs; a module without parameters, as a loss that calls one, is none.
inline bool is_inside() {
  const Modules& all = modules();
  return std::any_of(all.running.begin(), all.running.end(),
                     [&](const Running& one) { return all.shells.count(one.module) == 0; });
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

// What a module is called with: by position, and by name behind that.
struct Values {
  PyObject* const* items;
  Py_ssize_t n, n_named = 0;

  // Those by position as a tuple; nullptr with an error.
  PyObject* tuple() const {
    PyObject* found = PyTuple_New(n);
    for (Py_ssize_t i = 0; found != nullptr && i < n; ++i) PyTuple_SET_ITEM(found, i, Py_NewRef(items[i]));
    return found;
  }
};

// The node that made the first tensor among values that has one; nullptr: none.
inline NodePtr node_of(const Values& values) {
  for (Py_ssize_t i = 0; i < std::min(values.n + values.n_named, MOST_ASKED); ++i) {
    if (!THPVariable_Check(values.items[i])) continue;
    if (NodePtr found = THPVariable_Unpack(values.items[i]).grad_fn()) return found;
  }
  return nullptr;
}

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

// The same of what one returns: a tensor, or a tuple, list or dict of them; perhaps with an error. Other
// things are not asked for what they hold: that may be without end, or be gone when it was asked for.
inline NodePtr node_of(PyObject* values) {
  if (THPVariable_Check(values)) return THPVariable_Unpack(values).grad_fn();
  if (!(PyDict_Check(values) || PyTuple_Check(values) || PyList_Check(values))) return nullptr;
  PyObject* items = first_of(values);
  if (items == nullptr) return nullptr;
  const NodePtr found = node_of(Values{PySequence_Fast_ITEMS(items), PySequence_Fast_GET_SIZE(items)});
  Py_DECREF(items);
  return found;
}

// Whether a module is known as part of the block around it.
inline bool is_inner(PyObject* module) {
  const auto found = modules().known.find(module);
  return found != modules().known.end() && found->second == INNER;
}

// Ask Python, with a module and what it is called with; false with an error.
inline bool told(const char* method, PyObject* module, const Values& args) {
  PyObject* given = args.tuple();
  PyObject* done = given == nullptr ? nullptr : ask(method, module, given);
  Py_XDECREF(given);
  Py_XDECREF(done);
  return done != nullptr;
}

// A module begins its forward; false with an error of Python.
inline bool entered(PyObject* module, const Values& args) {
  if (!state().lane->is_own()) return true;
  Modules& all = modules();
  auto found = all.known.find(module);
  if (found == all.known.end()) {
    if (!told("met", module, args)) return false;
    found = all.known.find(module);
    if (found == all.known.end()) return true;
  }
  const int32_t block = found->second;
  if (block == INNER) return true;
  if (!is_inside()) {
    // A model is called from outside of any other and of actions of a pipeline.
    if (state().n_acting == 0 && !told("begin", module, args)) return false;
  } else if (all.layers[size_t(block)] < 0 && all.layers[size_t(all.running.back().block)] >= 0) {
    return true;  // shared by layers, as a table of rotations: part of the layer that calls it
  }
  transfers().sweep();
  const int32_t kind = state().backward_depth > 0 ? state().recompute : state().forward;
  const int depth = state().lane->push({kind, block});
  all.running.push_back({module, block, depth, node_of(args)});
  return true;
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

// The module that has begun as number `at` of those that run has ended its forward, with all that run within.
// Returns false with an error of Python. `output` is nullptr after an exception.
inline bool left(size_t at, const Values& args, PyObject* output) {
  auto& stack = modules().running;
  while (stack.size() > at) {  // what a graph keeps may run code of Python when it goes
    const Running one = std::move(stack.back());
    stack.pop_back();
    state().lane->pop(size_t(one.depth));
    if (stack.size() > at || output == nullptr) continue;
    if (const NodePtr node = node_of(output)) {
      tag(node, one.block);
      // A view is gone if the output is changed in place.
      if (is_view(*node)) tag(node->next_edge(0).function, one.block);
    }
    tag(one.entry ? one.entry : node_of(args), stack.empty() ? state().lane->block() : stack.back().block);
  }
  return !PyErr_Occurred();
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
