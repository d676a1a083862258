// Numbers of what Python names: blocks and kinds of work.
#pragma once

#include "calls.hpp"
#include "modules.hpp"

namespace foretrace {
namespace {

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

}  // namespace
}  // namespace foretrace
