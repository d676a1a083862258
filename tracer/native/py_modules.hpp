// What Python tells of modules, and asks of them.
#pragma once

#include "names.hpp"

namespace foretrace {
namespace {

PyObject* py_learn(PyObject*, PyObject* args) {
  PyObject *module, *block;
  if (!PyArg_ParseTuple(args, "OO", &module, &block)) return nullptr;
  const int32_t number = block == Py_None ? INNER : block_number(block);
  if (number < 0 && block != Py_None) return nullptr;
  modules().known[module] = number;
  modules().shells.erase(module);
  Py_RETURN_NONE;
}

PyObject* py_learn_shell(PyObject*, PyObject* module) {
  modules().shells.insert(module);
  Py_RETURN_NONE;
}

PyObject* py_forget(PyObject*, PyObject* number) {
  auto* const module = static_cast<PyObject*>(PyLong_AsVoidPtr(number));
  modules().known.erase(module);
  modules().shells.erase(module);
  return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
}

PyObject* py_block_of(PyObject*, PyObject* module) {
  const auto found = modules().known.find(module);
  if (found == modules().known.end() || found->second == INNER) Py_RETURN_NONE;
  return Py_NewRef(state().blocks.at(found->second));
}

PyObject* py_is_inside(PyObject*, PyObject*) { return PyBool_FromLong(is_inside()); }

// Whether something waits in C++ after the last node of a graph, as the reducer of DDP does.
PyObject* py_end_with_graph(PyObject*, PyObject* ends) {
  modules().ends_with_graph = ends == Py_True;
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace foretrace
