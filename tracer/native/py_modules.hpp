// What Python tells of modules, and asks of them.
#pragma once

#include "names.hpp"

namespace foretrace {
namespace {

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

// Whether something waits in C++ after the last node of a graph, as the reducer of DDP does.
PyObject* py_end_with_graph(PyObject*, PyObject* ends) {
  modules().ends_with_graph = ends == Py_True;
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace foretrace
