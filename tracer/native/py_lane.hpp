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

// Segments since the last time, as tuples of what tracer.records.Segment holds, and how many were lost.
PyObject* py_take_segments(PyObject*, PyObject*) {
  int64_t n_lost = 0;
  const std::vector<Segment> taken = state().lane->take(&n_lost);
  PyObject* rows = PyList_New(Py_ssize_t(taken.size()));
  for (size_t i = 0; rows != nullptr && i < taken.size(); ++i) {
    const Segment& one = taken[i];
    PyObject* row = Py_BuildValue("OOLLiiii", state().kinds.at(one.owner.kind),
                                  state().blocks.at(one.owner.block), (long long)one.start_ns,
                                  (long long)one.end_ns, one.at.step, one.at.stage,
                                  one.at.virtual_stage, one.at.microbatch);
    if (row == nullptr) {
      Py_CLEAR(rows);
    } else {
      PyList_SET_ITEM(rows, Py_ssize_t(i), row);
    }
  }
  return rows == nullptr ? nullptr : Py_BuildValue("NL", rows, (long long)n_lost);
}

}  // namespace
}  // namespace foretrace
