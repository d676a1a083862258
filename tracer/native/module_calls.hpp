// Calls of modules, seen at what torch calls them by: `torch.nn.Module._call_impl`, a function of Python.
//
// A function of Python holds the pointer that it is called by, and that may be another one (PEP 590,
// PyFunction_SetVectorcall). So nothing of torch is replaced: whoever reads, compares or compiles the function
// finds what torch wrote. And torch takes its short way to the forward of a module where nobody has put a hook.
#pragma once

#include <torch/csrc/jit/frontend/tracer.h>

#include "wrappers.hpp"

namespace foretrace {
namespace {

// What is watched, while it is, and what Python has said beside it. Needs the interpreter's lock.
struct Watched {
  PyObject* function = nullptr;        // torch.nn.Module._call_impl
  vectorcallfunc as_written = nullptr; // what it is called by when nobody watches
  PyObject* compiler = nullptr;        // the names in torch.compiler, of which one tells that torch traces
  PyObject* compiling = nullptr;       // what torch.compile asks of functions that this thread calls, or none
  PyObject* computed = nullptr;        // told of calls that are over, while there is anything in `awaited`
  PyObject* awaited = nullptr;
};

Watched watched;

void set_call(PyObject* function, vectorcallfunc call) {
  auto* const found = reinterpret_cast<PyFunctionObject*>(function);
#if PY_VERSION_HEX >= 0x030C0000
  PyFunction_SetVectorcall(found, call);
#else
  found->vectorcall = call;  // calls with arguments in a tuple, as all of this function, are never specialised
#endif
}

// Whether torch traces, exports or compiles what is called: a graph knows no moments.
bool is_traced() {
  if (torch::jit::tracer::isTracing()) return true;
  static PyObject* const flag = PyUnicode_InternFromString("_is_compiling_flag");
  if (PyDict_GetItemWithError(watched.compiler, flag) == Py_True) return true;
  PyObject* callback = PyObject_CallNoArgs(watched.compiling);
  const bool is_compiled = callback != Py_None && callback != Py_False;
  PyErr_Clear();
  Py_XDECREF(callback);
  return is_compiled;
}

// Whether a module has hooks of its own; one that lacks what torch keeps them in has none.
bool has_hooks(PyObject* module) {
  static PyObject* const kinds[] = {
      PyUnicode_InternFromString("_forward_hooks"), PyUnicode_InternFromString("_forward_pre_hooks"),
      PyUnicode_InternFromString("_backward_hooks"), PyUnicode_InternFromString("_backward_pre_hooks")};
  // Torch keeps them in the dict of a module, where they are found without its __getattr__.
  PyObject* known = PyObject_GenericGetDict(module, nullptr);
  PyErr_Clear();
  const bool has = std::any_of(std::begin(kinds), std::end(kinds), [&](PyObject* kind) {
    PyObject* hooks = known == nullptr ? nullptr : Py_XNewRef(PyDict_GetItemWithError(known, kind));
    if (hooks == nullptr) hooks = PyObject_GetAttr(module, kind);
    const bool is_some = hooks != nullptr && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) > 0;
    Py_XDECREF(hooks);
    PyErr_Clear();
    return is_some;
  });
  Py_XDECREF(known);
  return has;
}

// The forward of a module that has hooks of its own is over: what they do belongs to the block around it.
PyObject* forward_done(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != 3 || !state().notes_modules) Py_RETURN_NONE;
  const auto& running = modules().running;
  for (size_t at = running.size(); at-- > 0;) {
    if (running[at].module != args[0]) continue;
    const Values given{PySequence_Fast_ITEMS(args[1]), PySequence_Fast_GET_SIZE(args[1])};
    guarded(state().notes_modules, "modules", [&] { return left(at, given, args[2]); });
    break;
  }
  Py_RETURN_NONE;
}

// Has `forward_done` called before the other hooks of a module, if it has any, for as long as it lives.
class FirstHook {
 public:
  explicit FirstHook(PyObject* module) {
    if (!has_hooks(module)) return;
    static PyObject* const name = PyUnicode_InternFromString("_forward_hooks");
    PyObject* hooks = PyObject_GetAttr(module, name);
    if (hooks != nullptr && PyMapping_HasKey(hooks, key()) == 0 && put(hooks)) std::swap(hooks, hooks_);
    Py_XDECREF(hooks);
    PyErr_Clear();  // without it, the hooks of the module are part of it
  }
  ~FirstHook() {
    if (hooks_ == nullptr) return;
    const KeptError kept;
    if (PyObject_DelItem(hooks_, key()) != 0) PyErr_Clear();
    Py_DECREF(hooks_);
  }
  FirstHook(const FirstHook&) = delete;
  FirstHook& operator=(const FirstHook&) = delete;

 private:
  static PyObject* key() {
    static PyObject* const found = PyUnicode_InternFromString("foretrace");
    return found;
  }

  static bool put(PyObject* hooks) {
    static PyMethodDef method{"forward_done",
                              reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(forward_done)),
                              METH_FASTCALL, nullptr};
    static PyObject* const hook = PyCFunction_New(&method, nullptr);
    if (hook == nullptr || PyObject_SetItem(hooks, key(), hook) != 0) return false;
    static PyObject* const name = PyUnicode_InternFromString("move_to_end");
    PyObject* moved = PyObject_CallMethodObjArgs(hooks, name, key(), Py_False, nullptr);
    Py_XDECREF(moved);
    return true;
  }

  PyObject* hooks_ = nullptr;
};

// A model was called from outside of any other, with arguments by name; false with an error.
bool told_names(const Arguments& args) {
  PyObject* given = PyDict_New();
  const Py_ssize_t n_names = PyTuple_GET_SIZE(args.names);
  for (Py_ssize_t i = 0; given != nullptr && i < n_names; ++i) {
    if (PyDict_SetItem(given, PyTuple_GET_ITEM(args.names, i), args.values[args.n() + i]) != 0) Py_CLEAR(given);
  }
  PyObject* done = given == nullptr ? nullptr : ask("called_with", given);
  Py_XDECREF(given);
  Py_XDECREF(done);
  return done != nullptr;
}

// The call of a block is over that was number `at` of those that run; `result` is nullptr after an exception.
bool over(size_t at, const Arguments& args, const Values& given, PyObject* result) {
  const auto& running = modules().running;
  PyObject* const module = args.values[0];
  if (running.size() > at && running[at].module == module && !left(at, given, result)) return false;
  if (result != nullptr && !is_inside() && args.names != nullptr && PyTuple_GET_SIZE(args.names) > 0) {
    if (!told_names(args)) return false;
  }
  if (watched.awaited == nullptr || PyObject_Size(watched.awaited) <= 0) return !PyErr_Occurred();
  PyObject* told = Py_NewRef(watched.computed);
  PyObject* done = PyObject_CallFunctionObjArgs(told, module, result == nullptr ? Py_None : result, nullptr);
  Py_XDECREF(done);
  Py_DECREF(told);
  return done != nullptr;
}

// In place of the function's own way to be called: module, arguments.
PyObject* call_module(PyObject* function, PyObject* const* values, size_t flagged, PyObject* names) {
  const Arguments args{values, flagged, names};
  const auto as_written = watched.as_written;
  if (!state().notes_modules || args.n() == 0 || is_inner(values[0]) || is_traced()) {
    return as_written(function, values, flagged, names);
  }
  const Values given{values + 1, args.n() - 1, names == nullptr ? 0 : PyTuple_GET_SIZE(names)};
  const size_t at = modules().running.size();
  guarded(state().notes_modules, "modules", [&] { return entered(values[0], given); });
  if (modules().running.size() <= at) return as_written(function, values, flagged, names);
  PyObject* result = nullptr;
  {
    const FirstHook first(values[0]);
    result = as_written(function, values, flagged, names);
  }
  const KeptError kept;
  guarded(state().notes_modules, "modules", [&] { return over(at, args, given, result); });
  return result;
}

// Watch a function, and what else `Watched` has of Python.
PyObject* py_watch_calls(PyObject*, PyObject* args) {
  PyObject *function, *compiler, *compiling, *computed, *awaited;
  if (!PyArg_ParseTuple(args, "O!O!OOO", &PyFunction_Type, &function, &PyDict_Type, &compiler, &compiling,
                        &computed, &awaited)) {
    return nullptr;
  }
  Py_XSETREF(watched.compiler, Py_NewRef(compiler));
  Py_XSETREF(watched.compiling, Py_NewRef(compiling));
  Py_XSETREF(watched.computed, Py_NewRef(computed));
  Py_XSETREF(watched.awaited, Py_NewRef(awaited));
  if (watched.function == nullptr) {
    watched.function = Py_NewRef(function);
    watched.as_written = reinterpret_cast<PyFunctionObject*>(function)->vectorcall;
    set_call(function, call_module);
  }
  Py_RETURN_NONE;
}

PyObject* py_unwatch_calls(PyObject*, PyObject*) {
  if (watched.function != nullptr) set_call(watched.function, watched.as_written);
  Py_CLEAR(watched.function);
  Py_CLEAR(watched.awaited);  // first: a call that runs may be over before the next line, or later
  Py_CLEAR(watched.computed);
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace foretrace
