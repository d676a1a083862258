// The beginning and the end of a recording.
#pragma once

#include <torch/csrc/Dtype.h>

#include "kernels.hpp"
#include "pipeline.hpp"

namespace foretrace {
namespace {

Kernels* kernels = nullptr;  // never freed by the end of the process, when the dispatcher may be gone

// Begin anew: the callbacks, the names of all types of elements as JSON, the block that is none, and the
// loss.
PyObject* py_begin(PyObject*, PyObject* args) {
  PyObject *session, *dtypes, *nobody, *loss;
  if (!PyArg_ParseTuple(args, "OO!OO", &session, &PyDict_Type, &dtypes, &nobody, &loss)) return nullptr;
  State& all = state();
  Py_XSETREF(all.session, Py_NewRef(session));
  all.position->at = Position{};
  all.lane->reset();
  calls().reset();
  modules().known.clear();
  modules().shells.clear();
  modules().running.clear();
  modules().ends_with_graph = false;
  stages().clear();
  all.backward_depth = 0;
  all.begun_step = -1;
  all.n_acting = 0;
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
  all.backward_kind = all.backward = kind_named("backward");
  if (block_number(nobody) != NOBODY) {
    return PyErr_Format(PyExc_RuntimeError, "not begun with the first block");
  }
  all.loss = block_number(loss);
  return all.loss < 0 ? nullptr : Py_NewRef(Py_None);
}

PyObject* py_note(PyObject*, PyObject* args) {
  int calls_too, modules_too, pipeline_too;
  if (!PyArg_ParseTuple(args, "ppp", &calls_too, &modules_too, &pipeline_too)) return nullptr;
  state().notes_calls = calls_too != 0;
  state().notes_modules = modules_too != 0;
  state().notes_pipeline = pipeline_too != 0;
  Py_RETURN_NONE;
}

PyObject* py_install(PyObject*, PyObject*) {
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
  transfers().close();
  Py_RETURN_NONE;
}

// The recording is over: nothing asks its session any more, nor keeps it alive.
PyObject* py_end(PyObject*, PyObject*) {
  Py_CLEAR(state().session);
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace foretrace
