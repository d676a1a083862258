// Functions of torch with ours around them, without a function of Python in between.
//
// A Wrapper stands where a function or a method of a class stood, and is called as that was.
#pragma once

#include <structmember.h>

#include "names.hpp"

namespace foretrace {
namespace {

// What stands in place of `original`; its type is that of a function, which classes bind to their objects.
struct Wrapper {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject* original;
  PyObject* attributes;  // a dict, for functools.wraps
  int32_t kind, block;   // numbers, of what needs them
};

PyTypeObject* wrapper_type = nullptr;

// The arguments of a call.
struct Arguments {
  PyObject* const* values;
  size_t flagged;  // their number by position, and what vectorcall says beside it
  PyObject* names;

  Py_ssize_t n() const { return PyVectorcall_NARGS(flagged); }

  // One of them, by its position or its name; nullptr if it was not given.
  PyObject* at(Py_ssize_t position, const char* name) const {
    if (position < n()) return values[position];
    const Py_ssize_t n_names = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t i = 0; i < n_names; ++i) {
      if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), name) == 0) return values[n() + i];
    }
    return nullptr;
  }

  // The one after the object, whatever its name: of methods that name it differently.
  PyObject* first() const {
    const bool is_given = n() > 1 || (names != nullptr && PyTuple_GET_SIZE(names) > 0);
    return is_given ? values[1] : nullptr;
  }
};

PyObject* passed_on(const Wrapper* wrapper, const Arguments& args) {
  return PyObject_Vectorcall(wrapper->original, args.values, args.flagged, args.names);
}

// Keeps an error of the training while ours runs.
class KeptError {
 public:
  KeptError() { PyErr_Fetch(&kind_, &value_, &trace_); }
  ~KeptError() { PyErr_Restore(kind_, value_, trace_); }
  KeptError(const KeptError&) = delete;
  KeptError& operator=(const KeptError&) = delete;

 private:
  PyObject *kind_, *value_, *trace_;
};

// Run `ours`, which returns false with an error of Python: then, or after an exception, hooks are off.
template <typename Ours>
bool guarded(std::atomic<bool>& hooks, const char* name, Ours ours) {
  try {
    if (ours()) return true;
    disable(hooks, name, python_error());
  } catch (const std::exception& error) {
    if (PyErr_Occurred()) python_error();
    disable(hooks, name, error.what());
  }
  return false;
}

// Whether it is settled by now if a work that was waited for is that of a call without a future.
//
// pybind11 holds the address of an object behind the head of that of Python, where it is one of a single base
// (pybind11/detail/common.h, `instance::simple_value_holder`). It is compared with addresses of works, and no
// more: until it has been the right one once, the answer "no" settles nothing.
bool settles(PyObject* work) {
  static bool is_trusted = false;
  const void* address = nullptr;
  if (Py_TYPE(work)->tp_basicsize >= Py_ssize_t(sizeof(PyObject) + sizeof address)) {
    memcpy(&address, reinterpret_cast<const char*>(work) + sizeof(PyObject), sizeof address);
  }
  if (waited(static_cast<const c10d::Work*>(address))) is_trusted = true;
  return is_trusted;
}

// Work.wait: its time is not compute, and some calls are over by it.
PyObject* call_wait(PyObject* self, PyObject* const* values, size_t flagged, PyObject* names) {
  const Arguments args{values, flagged, names};
  const bool is_paused = state().lane->pause();
  PyObject* result = passed_on(reinterpret_cast<Wrapper*>(self), args);
  if (calls().n_waitable > 0 && args.n() > 0 && !settles(args.values[0])) {
    const KeptError kept;
    guarded(state().notes_calls, "collectives", [&] {
      PyObject* done = ask("waited", args.values[0]);
      Py_XDECREF(done);
      return done != nullptr;
    });
  }
  if (is_paused) state().lane->resume();
  return result;
}

// The entry to the autograd engine.
PyObject* call_backward(PyObject* self, PyObject* const* values, size_t flagged, PyObject* names) {
  const Arguments args{values, flagged, names};
  auto* const wrapper = reinterpret_cast<Wrapper*>(self);
  if (!state().notes_modules) return passed_on(wrapper, args);
  const int depth = backward_begins();
  PyObject* result = passed_on(wrapper, args);
  backward_ends(depth);
  const KeptError kept;  // what is freed may run code of Python
  guarded(state().notes_modules, "modules", [] { return transfers().sweep(), true; });
  return result;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  auto* const wrapper = reinterpret_cast<Wrapper*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(wrapper->original);
  Py_VISIT(wrapper->attributes);
  return 0;
}

int clear(PyObject* self) {
  auto* const wrapper = reinterpret_cast<Wrapper*>(self);
  Py_CLEAR(wrapper->original);
  Py_CLEAR(wrapper->attributes);
  return 0;
}

void deallocate(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* bound(PyObject* self, PyObject* object, PyObject*) {
  return object == nullptr || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

// What ours has not is asked of the function that stood here, as its name: libraries trace by it.
PyObject* attribute_of_wrapper(PyObject* self, PyObject* name) {
  PyObject* found = PyObject_GenericGetAttr(self, name);
  if (found != nullptr || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
  PyErr_Clear();
  return PyObject_GetAttr(reinterpret_cast<Wrapper*>(self)->original, name);
}

PyMemberDef WRAPPER_MEMBERS[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Wrapper, call), READONLY, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(Wrapper, attributes), READONLY, nullptr},
    {},
};

PyGetSetDef WRAPPER_GETSET[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr}, {}};

PyType_Slot WRAPPER_SLOTS[] = {
    {Py_tp_members, WRAPPER_MEMBERS},
    {Py_tp_getattro, reinterpret_cast<void*>(attribute_of_wrapper)},
    {Py_tp_getset, WRAPPER_GETSET},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_descr_get, reinterpret_cast<void*>(bound)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
    {0, nullptr},
};

PyType_Spec WRAPPER_SPEC = {"foretrace_hooks.Wrapper", sizeof(Wrapper), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_HAVE_GC |
                                Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
                            WRAPPER_SLOTS};

// A wrapper of `original`; nullptr with an error.
PyObject* wrapped(vectorcallfunc call, PyObject* original, int32_t kind = 0, int32_t block = NOBODY) {
  auto* made = reinterpret_cast<Wrapper*>(PyType_GenericAlloc(wrapper_type, 0));
  if (made == nullptr) return nullptr;
  made->call = call;
  // A method of pybind11 is one of C within something that only binds it.
  if (PyInstanceMethod_Check(original)) original = PyInstanceMethod_GET_FUNCTION(original);
  made->original = Py_NewRef(original);
  made->kind = kind;
  made->block = block;
  return reinterpret_cast<PyObject*>(made);
}

PyObject* py_waiting(PyObject*, PyObject* original) { return wrapped(call_wait, original); }
PyObject* py_running_backward(PyObject*, PyObject* original) { return wrapped(call_backward, original); }

}  // namespace
}  // namespace foretrace
