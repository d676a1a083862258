// What Python asks of the compute stream.
#pragma once

#include "names.hpp"

namespace foretrace {
namespace {

PyObject* py_push(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Owner owner{};
  return owner_of(args, n, &owner) ? PyLong_FromLong(state().lane->push(owner)) : nullptr;
}

PyObject* py_replace(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Owner owner{};
  if (!owner_of(args, n, &owner)) return nullptr;
  state().lane->replace(owner);
  Py_RETURN_NONE;
}

PyObject* py_pop(PyObject*, PyObject* depth) {
  const long at = PyLong_AsLong(depth);
  if (at == -1 && PyErr_Occurred()) return nullptr;
  state().lane->pop(size_t(at));
  Py_RETURN_NONE;
}

PyObject* py_pause(PyObject*, PyObject*) {
  return PyBool_FromLong(state().lane->pause());
}

PyObject* py_own(PyObject*, PyObject*) {
  state().lane->own();
  Py_RETURN_NONE;
}

PyObject* py_is_own(PyObject*, PyObject*) { return PyBool_FromLong(state().lane->is_own()); }

PyObject* py_resume(PyObject*, PyObject* is_paused) {
  if (is_paused == Py_True) state().lane->resume();
  Py_RETURN_NONE;
}

PyObject* py_block(PyObject*, PyObject*) {
  PyObject* found = state().blocks.at(state().lane->block());
  Py_INCREF(found);
  return found;
}

PyObject* py_depth(PyObject*, PyObject*) { return PyLong_FromSize_t(state().lane->depth()); }

// All objects that have numbers, by them.
PyObject* listed(const Numbers& numbers) {
  PyObject* found = PyList_New(Py_ssize_t(numbers.size()));
  for (size_t i = 0; found != nullptr && i < numbers.size(); ++i) {
    PyList_SET_ITEM(found, Py_ssize_t(i), Py_NewRef(numbers.at(int32_t(i))));
  }
  return found;
}

// Segments since the last time, as they are in memory, the kinds and blocks that they number, and how many
// were lost.
PyObject* py_take_segments(PyObject*, PyObject*) {
  static_assert(sizeof(Segment) == 40 && std::is_trivially_copyable_v<Segment>, "tracer/columns.py reads it");
  int64_t n_lost = 0;
  const std::vector<Segment> taken = state().lane->take(&n_lost);
  const auto* const bytes = reinterpret_cast<const char*>(taken.data());
  PyObject* rows = PyBytes_FromStringAndSize(bytes, Py_ssize_t(taken.size() * sizeof(Segment)));
  PyObject* kinds = listed(state().kinds);
  PyObject* blocks = listed(state().blocks);
  if (rows != nullptr && kinds != nullptr && blocks != nullptr) {
    return Py_BuildValue("NNNL", rows, kinds, blocks, (long long)n_lost);
  }
  Py_XDECREF(rows);
  Py_XDECREF(kinds);
  Py_XDECREF(blocks);
  return nullptr;
}

}  // namespace
}  // namespace foretrace
