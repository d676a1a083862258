// What all hooks of a process share.
#pragma once

#include <Python.h>

#include <atomic>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "lane.hpp"

namespace foretrace {

// Whether the interpreter is there, and not about to end: then its lock ends the thread that asks for it.
inline bool has_python() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

// Holds the interpreter's lock for as long as it lives, on a thread that may hold it already.
class Gil {
 public:
  Gil() {
    if (!has_python()) throw std::runtime_error("Python is ending");
    state_ = PyGILState_Ensure();
  }
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Objects of Python that were given numbers, which hooks that do not hold its lock can handle.
class Numbers {
 public:
  // The number of an object, a new one if it equals none before; -1 with an error of Python.
  // Needs the interpreter's lock.
  int32_t of(PyObject* object) {
    if (known_ == nullptr && (known_ = PyDict_New()) == nullptr) return -1;
    if (PyObject* found = PyDict_GetItemWithError(known_, object)) return int32_t(PyLong_AsLong(found));
    if (PyErr_Occurred()) return -1;
    PyObject* number = PyLong_FromSize_t(objects_.size());
    const int failed = number == nullptr || PyDict_SetItem(known_, object, number);
    Py_XDECREF(number);
    if (failed) return -1;
    Py_INCREF(object);
    objects_.push_back(object);
    return int32_t(objects_.size()) - 1;
  }

  PyObject* at(int32_t number) const { return objects_[number]; }
  size_t size() const { return objects_.size(); }

 private:
  PyObject* known_ = nullptr;
  std::vector<PyObject*> objects_;
};

// A Position that Python reads and writes as one of its own.
struct PositionObject {
  PyObject_HEAD
  Position at;
};

struct State {
  PositionObject* position = nullptr;
  std::unique_ptr<Lane> lane;
  Numbers kinds, blocks;
  std::atomic<bool> notes_calls{false}, notes_modules{false}, notes_pipeline{false};
  std::atomic<int> backward_depth{0};
  std::atomic<int32_t> backward_kind{0};
  int32_t forward = 0, recompute = 0, backward = 0, loss = 0;
  int n_acting = 0;     // actions of a pipeline that run
  int begun_step = -1;  // in which an action was last told to begin

  PyObject* session = nullptr;  // tracer.native.Callbacks: what only Python knows
};

inline State& state() {
  static State* found = new State;  // outlives threads of gloo that call back while the process ends
  return *found;
}

// An attribute by its name, of which a reference is taken; nullptr with an error. The name is one that Python
// has interned: only such are found in its cache of types, and one that is not costs some us on cold caches.
inline PyObject* attribute(PyObject* object, PyObject* name) {
  PyObject* found = name == nullptr ? nullptr : PyObject_GetAttr(object, name);
  Py_XDECREF(name);
  return found;
}

// Call a method of the callbacks; steals nothing, returns a new reference or nullptr with an error.
template <typename... Args>
PyObject* ask(const char* name, Args... args) {
  if (state().session == nullptr) Py_RETURN_NONE;
  PyObject* method = attribute(state().session, PyUnicode_InternFromString(name));
  if (method == nullptr) return nullptr;
  PyObject* found = PyObject_CallFunctionObjArgs(method, args..., nullptr);
  Py_DECREF(method);
  return found;
}

// An action begins: tell Python, unless one of this step has; false with an error. Needs the lock of Python.
inline bool begun() {
  State& all = state();
  if (all.position->at.step >= 0 && all.position->at.step == all.begun_step) return true;
  PyObject* done = ask("begun");
  all.begun_step = all.position->at.step;
  Py_XDECREF(done);
  return done != nullptr;
}

// Raise an exception in the main thread, as soon as it runs code of Python.
inline int raise(void* exception) {
  auto* value = static_cast<PyObject*>(exception);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value)), value);
  Py_DECREF(value);
  return -1;
}

// Whether an exception is no failure of ours, as Ctrl-C or what a handler of signals raises.
inline bool is_for_training(PyObject* value) {
  if (!PyErr_GivenExceptionMatches(value, PyExc_Exception)) return true;
  PyObject* answer = ask("is_interrupt", value);
  const bool is_interrupt = answer == Py_True;
  PyErr_Clear();
  Py_XDECREF(answer);
  return is_interrupt;
}

// Take the error of Python that is set; return it as text. What is no failure of ours is for the training: it
// is raised again where nothing of ours is around, and the text is empty.
inline std::string python_error() {
  PyObject *kind, *value, *trace;
  PyErr_Fetch(&kind, &value, &trace);
  PyErr_NormalizeException(&kind, &value, &trace);
  std::string text = "unknown error";
  if (value != nullptr && trace != nullptr) PyException_SetTraceback(value, trace);
  const bool is_passed_on = value != nullptr && is_for_training(value);
  if (is_passed_on && Py_AddPendingCall(raise, Py_NewRef(value)) != 0) Py_DECREF(value);
  PyObject* message = value != nullptr ? PyObject_Str(value) : nullptr;
  const char* said = message != nullptr ? PyUnicode_AsUTF8(message) : nullptr;
  if (said != nullptr) text = std::string(reinterpret_cast<PyTypeObject*>(kind)->tp_name) + ": " + said;
  PyErr_Clear();
  Py_XDECREF(message);
  Py_XDECREF(kind);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return is_passed_on ? "" : text;
}

// Switch a kind of hooks off, for good; `error` is told as a warning of the run, and where it is empty nothing
// of ours has failed. On any thread.
inline void disable(std::atomic<bool>& hooks, const char* name, const std::string& error) {
  if (error.empty()) return;
  hooks = false;
  if (!has_python()) return;
  Gil gil;
  PyObject* which = PyUnicode_FromString(name);
  PyObject* text = PyUnicode_DecodeUTF8(error.data(), Py_ssize_t(error.size()), "replace");
  PyObject* done = which != nullptr && text != nullptr ? ask("disable", which, text) : nullptr;
  if (done == nullptr) python_error();
  Py_XDECREF(which);
  Py_XDECREF(text);
  Py_XDECREF(done);
}

}  // namespace foretrace
