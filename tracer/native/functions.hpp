// The functions of the module of Python by which tracer/native talks to the hooks.
#pragma once

#include <Python.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Dtype.h>

#include "kernels.hpp"
#include "modules.hpp"

namespace foretrace {
namespace {

Kernels* kernels = nullptr;  // never freed by the end of the process, when the dispatcher may be gone
Py_buffer ring_memory{};

// The number of a block that Python names, -1 with an error. What lines and hooks need to know of it is asked
// for once.
int32_t block_number(PyObject* block) {
  const int32_t number = state().blocks.of(block);
  auto& layers = modules().layers;
  if (number < 0 || (size_t(number) < layers.size() && layers[size_t(number)] != UNTOLD)) return number;
  PyObject* told = ask("describe_block", block);  // its layer, and what a line says of it
  long layer = -1;
  const char* words = nullptr;
  if (told == nullptr || !PyArg_ParseTuple(told, "ls", &layer, &words)) {
    Py_XDECREF(told);
    return -1;
  }
  // Not always the next one: another thread may have learned a block meanwhile.
  if (layers.size() <= size_t(number)) layers.resize(size_t(number) + 1, UNTOLD);
  layers[size_t(number)] = int32_t(layer);
  calls().name_block(number, words);
  Py_DECREF(told);
  return number;
}

int32_t kind_number(PyObject* kind) {
  const int32_t number = state().kinds.of(kind);
  if (number >= 0 && size_t(number) >= calls().n_kinds()) {
    const char* text = PyUnicode_AsUTF8(kind);
    if (text == nullptr) return -1;
    calls().name_kind(number, "\"" + std::string(text) + "\"");
  }
  return number;
}

int32_t kind_named(const char* name) {
  PyObject* text = PyUnicode_InternFromString(name);
  const int32_t number = text == nullptr ? -1 : kind_number(text);
  Py_XDECREF(text);
  return number;
}

bool owner_of(PyObject* const* args, Py_ssize_t n, Owner* owner) {
  if (n != 2) {
    PyErr_SetString(PyExc_TypeError, "kind and block");
    return false;
  }
  owner->kind = kind_number(args[0]);
  owner->block = owner->kind < 0 ? -1 : block_number(args[1]);
  return owner->block >= 0;
}

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
  state().lane->pause();
  Py_RETURN_TRUE;
}

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

// Hooks of modules never raise: the first error switches them off.
PyObject* survived(bool is_well) {
  if (!is_well || PyErr_Occurred()) disable(state().notes_modules, "modules", python_error());
  Py_RETURN_NONE;
}

PyObject* py_entered(PyObject*, PyObject* const* args, Py_ssize_t) {
  if (!state().notes_modules) Py_RETURN_NONE;
  try {
    return survived(entered(args[0], args[1]));
  } catch (const std::exception& error) {
    disable(state().notes_modules, "modules", error.what());
    Py_RETURN_NONE;
  }
}

// Module, arguments, those by name, output; after an exception torch leaves those by name out.
PyObject* py_left(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!state().notes_modules) Py_RETURN_NONE;
  try {
    return survived(left(args[0], args[1], n > 3 ? args[2] : nullptr, args[n - 1]));
  } catch (const std::exception& error) {
    disable(state().notes_modules, "modules", error.what());
    Py_RETURN_NONE;
  }
}

PyObject* py_learn(PyObject*, PyObject* args) {
  PyObject *module, *block;
  if (!PyArg_ParseTuple(args, "OO", &module, &block)) return nullptr;
  const int32_t number = block == Py_None ? INNER : block_number(block);
  if (number < 0 && block != Py_None) return nullptr;
  modules().known[module] = number;
  Py_RETURN_NONE;
}

PyObject* py_forget(PyObject*, PyObject* number) {
  modules().known.erase(static_cast<PyObject*>(PyLong_AsVoidPtr(number)));
  return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
}

PyObject* py_block_of(PyObject*, PyObject* module) {
  const auto found = modules().known.find(module);
  if (found == modules().known.end() || found->second == INNER) Py_RETURN_NONE;
  return Py_NewRef(state().blocks.at(found->second));
}

PyObject* py_is_inside(PyObject*, PyObject*) { return PyBool_FromLong(!modules().running.empty()); }

PyObject* py_backward_began(PyObject*, PyObject*) {
  ++state().backward_depth;
  modules().is_ending = false;
  const int32_t block = state().lane->block();
  const Owner owner{state().backward_kind, block == NOBODY ? state().loss : block};
  return PyLong_FromLong(state().lane->push(owner));
}

PyObject* py_backward_ended(PyObject*, PyObject* depth) {
  if (state().backward_depth > 0) --state().backward_depth;  // 0: a recording has begun since
  return py_pop(nullptr, depth);
}

PyObject* py_set_backward(PyObject*, PyObject* args) {
  PyObject* kind;
  int ends_with_graph;
  if (!PyArg_ParseTuple(args, "Op", &kind, &ends_with_graph)) return nullptr;
  const int32_t number = kind_number(kind);
  if (number < 0) return nullptr;
  state().backward_kind = number;
  modules().ends_with_graph = ends_with_graph != 0;
  Py_RETURN_NONE;
}

PyObject* py_add_group(PyObject*, PyObject* args) {
  const char *name, *axis;
  long long id;
  if (!PyArg_ParseTuple(args, "sLs", &name, &id, &axis)) return nullptr;
  return PyLong_FromLong(calls().add_group(name, id, axis));
}

PyObject* py_n_calls(PyObject*, PyObject* group) {
  return PyLong_FromLongLong(calls().n_calls(int32_t(PyLong_AsLong(group))));
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

// Whether it is settled by now if a work that was waited for is that of a call without a future.
//
// pybind11 holds the address of an object behind the head of that of Python, where it is one of a single base
// (pybind11/detail/common.h, `instance::simple_value_holder`). It is compared with addresses of works, and no
// more: until it has been the right one once, the answer "no" settles nothing.
PyObject* py_waited(PyObject*, PyObject* work) {
  static bool is_trusted = false;
  const void* address = nullptr;
  if (Py_TYPE(work)->tp_basicsize >= Py_ssize_t(sizeof(PyObject) + sizeof address)) {
    memcpy(&address, reinterpret_cast<const char*>(work) + sizeof(PyObject), sizeof address);
  }
  if (waited(static_cast<const c10d::Work*>(address))) is_trusted = true;
  return PyBool_FromLong(is_trusted);
}

PyObject* py_is_busy(PyObject*, PyObject*) { return PyBool_FromLong(calls().is_busy()); }

// Segments since the last time, as tuples of what tracer.records.Segment holds, and how many were lost.
PyObject* py_take_segments(PyObject*, PyObject*) {
  int64_t n_lost = 0;
  const std::vector<Segment> taken = state().lane->take(&n_lost);
  PyObject* rows = PyList_New(Py_ssize_t(taken.size()));
  for (size_t i = 0; rows != nullptr && i < taken.size(); ++i) {
    const Segment& one = taken[i];
    PyObject* row = Py_BuildValue("OOLLiiii", state().kinds.at(one.owner.kind), state().blocks.at(one.owner.block),
                                  (long long)one.start_ns, (long long)one.end_ns, one.at.step, one.at.stage,
                                  one.at.virtual_stage, one.at.microbatch);
    if (row == nullptr) {
      Py_CLEAR(rows);
    } else {
      PyList_SET_ITEM(rows, Py_ssize_t(i), row);
    }
  }
  return rows == nullptr ? nullptr : Py_BuildValue("NL", rows, (long long)n_lost);
}

PyObject* number_of(const CallPtr& call) { return PyLong_FromVoidPtr(call.get()); }

PyObject* row_of(const CallPtr& call) {
  PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(at::ScalarType(call->dtype)));
  return Py_BuildValue("NOiLLOO(iiii)LL", number_of(call), state().kinds.at(call->kind), call->group,
                       (long long)call->sequence, (long long)call->size_bytes, dtype, state().blocks.at(call->block),
                       call->at.step, call->at.stage, call->at.virtual_stage, call->at.microbatch,
                       (long long)call->start_ns, (long long)call->end_ns.load());
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
    PyObject* end = PyLong_FromLongLong(ended[i]->end_ns);
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

// Begin anew: the callbacks, the names of all types of elements as JSON, the block that is none, that of the loss.
PyObject* py_begin(PyObject*, PyObject* args) {
  PyObject *session, *dtypes, *nobody, *loss;
  if (!PyArg_ParseTuple(args, "OO!OO", &session, &PyDict_Type, &dtypes, &nobody, &loss)) return nullptr;
  State& all = state();
  Py_XSETREF(all.session, Py_NewRef(session));
  all.position->at = Position{};
  all.lane->reset();
  calls().reset();
  modules().known.clear();
  modules().running.clear();
  modules().ends_with_graph = false;
  all.backward_depth = 0;
  std::vector<std::string> types(size_t(at::ScalarType::NumOptions), "\"\"");
  PyObject *dtype, *words;
  for (Py_ssize_t at = 0; PyDict_Next(dtypes, &at, &dtype, &words);) {
    const char* text = PyUnicode_AsUTF8(words);
    if (text == nullptr) return nullptr;
    types[size_t(reinterpret_cast<THPDtype*>(dtype)->scalar_type)] = text;
  }
  calls().name_types(std::move(types));
  all.forward = kind_named("forward");
  all.recompute = kind_named("recompute");
  all.backward_kind = kind_named("backward");
  if (block_number(nobody) != NOBODY) return PyErr_Format(PyExc_RuntimeError, "not begun with the first block");
  all.loss = block_number(loss);
  return all.loss < 0 ? nullptr : Py_NewRef(Py_None);
}

PyObject* py_note(PyObject*, PyObject* args) {
  int calls_too, modules_too;
  if (!PyArg_ParseTuple(args, "pp", &calls_too, &modules_too)) return nullptr;
  state().notes_calls = calls_too != 0;
  state().notes_modules = modules_too != 0;
  Py_RETURN_NONE;
}

PyObject* py_install(PyObject*, PyObject* loose) {
  state().loose = Py_NewRef(loose);
  try {
    delete std::exchange(kernels, nullptr);
    kernels = new Kernels(kind_named);
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
  }
  Py_RETURN_NONE;
}

PyObject* py_remove(PyObject*, PyObject*) {
  delete std::exchange(kernels, nullptr);
  state().loose = nullptr;
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace foretrace
