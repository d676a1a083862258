// What Python tells of collectives and transfers, and takes of them.
#pragma once

#include <torch/csrc/DynamicTypes.h>

#include "names.hpp"

namespace foretrace {
namespace {

Py_buffer ring_memory{};

PyObject* py_add_group(PyObject*, PyObject* args) {
  const char *name, *axis;
  long long id;
  PyObject* members;
  if (!PyArg_ParseTuple(args, "sLsO!", &name, &id, &axis, &PyTuple_Type, &members)) return nullptr;
  std::vector<int> ranks;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(members); ++i) {
    ranks.push_back(int(PyLong_AsLong(PyTuple_GET_ITEM(members, i))));
  }
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromLong(calls().add_group(name, id, axis, std::move(ranks)));
}

// How many collectives of a group were issued, and by peer and direction how many transfers.
PyObject* py_n_calls(PyObject*, PyObject* number) {
  const Calls::Group group = calls().copy_of(int32_t(PyLong_AsLong(number)));
  PyObject* transfers = PyList_New(0);
  bool is_well = transfers != nullptr;
  for (const auto& [pair, n] : group.n_transfers) {
    if (!is_well) break;
    PyObject* row = Py_BuildValue("iNL", pair.first, PyBool_FromLong(pair.second), (long long)n);
    is_well = row != nullptr && PyList_Append(transfers, row) == 0;
    Py_XDECREF(row);
  }
  if (!is_well) {
    Py_XDECREF(transfers);
    return nullptr;
  }
  return Py_BuildValue("LN", (long long)group.n_calls, transfers);
}

PyObject* py_next_number(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(calls().next_number()); }

PyObject* py_open_ring(PyObject*, PyObject* args) {
  PyObject* memory;
  Py_ssize_t n_slots, slot_bytes;
  long long shift_ns;
  if (!PyArg_ParseTuple(args, "OnnL", &memory, &n_slots, &slot_bytes, &shift_ns)) return nullptr;
  calls().open_ring(nullptr, 0, 0, 0);
  if (ring_memory.obj != nullptr) PyBuffer_Release(&ring_memory);
  if (memory != Py_None) {
    if (PyObject_GetBuffer(memory, &ring_memory, PyBUF_WRITABLE) != 0) return nullptr;
    calls().open_ring(static_cast<char*>(ring_memory.buf), size_t(n_slots), size_t(slot_bytes), shift_ns);
  }
  Py_RETURN_NONE;
}

PyObject* py_n_waitable(PyObject*, PyObject*) { return PyLong_FromLong(calls().n_waitable); }

PyObject* py_is_busy(PyObject*, PyObject*) { return PyBool_FromLong(calls().is_busy()); }

PyObject* number_of(const CallPtr& call) { return PyLong_FromVoidPtr(call.get()); }

PyObject* row_of(const CallPtr& call) {
  const int64_t end_ns = call->end_ns;  // before the rest: who has sent something is known before its end
  PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(at::ScalarType(call->dtype)));
  return Py_BuildValue("NOiLiLOO(iiii)LL", number_of(call), state().kinds.at(call->kind), call->group,
                       (long long)call->sequence, int(call->peer), (long long)call->size_bytes, dtype,
                       state().blocks.at(call->block),
                       call->at.step, call->at.stage, call->at.virtual_stage, call->at.microbatch,
                       (long long)call->start_ns, (long long)end_ns);
}

// When a call has ended, and what is known of it by then.
PyObject* end_of(const Call& call) {
  return Py_BuildValue("LiL", (long long)call.end_ns, int(call.peer), (long long)call.sequence);
}

// Calls since the last time; of those before what has ended since; and how many were lost.
PyObject* py_take_calls(PyObject*, PyObject*) {
  std::vector<CallPtr> fresh, ended;
  int64_t n_lost = 0;
  calls().take(&fresh, &ended, &n_lost);
  PyObject* rows = PyList_New(0);
  PyObject* ends = PyDict_New();
  bool is_well = rows != nullptr && ends != nullptr;
  for (size_t i = 0; is_well && i < fresh.size(); ++i) {
    PyObject* row = row_of(fresh[i]);
    is_well = row != nullptr && PyList_Append(rows, row) == 0;
    Py_XDECREF(row);
  }
  for (size_t i = 0; is_well && i < ended.size(); ++i) {
    PyObject* number = number_of(ended[i]);
    PyObject* end = end_of(*ended[i]);
    is_well = number != nullptr && end != nullptr && PyDict_SetItem(ends, number, end) == 0;
    Py_XDECREF(number);
    Py_XDECREF(end);
  }
  if (!is_well) {
    Py_XDECREF(rows);
    Py_XDECREF(ends);
    return nullptr;
  }
  return Py_BuildValue("NNL", rows, ends, (long long)n_lost);
}

}  // namespace
}  // namespace foretrace
