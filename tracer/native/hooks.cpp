// The module of Python by which tracer/native talks to the hooks: its table, its type and its beginning.

#include <Python.h>

#include "module_calls.hpp"
#include "py_calls.hpp"
#include "py_lane.hpp"
#include "py_modules.hpp"
#include "py_session.hpp"

namespace foretrace {
namespace {

// A function of the module as Python calls it: an exception of C++ is one of Python, not the end of the
// process.
template <auto function>
struct Safe;

template <typename... Args, PyObject* (*function)(Args...)>
struct Safe<function> {
  static PyObject* call(Args... args) {
    try {
      return function(args...);
    } catch (const std::exception& error) {
      return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
    }
  }
};

template <auto function>
PyCFunction safe() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Safe<function>::call));
}

PyMethodDef METHODS[] = {
    {"push", safe<py_push>(), METH_FASTCALL, nullptr},
    {"replace", safe<py_replace>(), METH_FASTCALL, nullptr},
    {"pop", safe<py_pop>(), METH_O, nullptr},
    {"pause", safe<py_pause>(), METH_NOARGS, nullptr},
    {"resume", safe<py_resume>(), METH_O, nullptr},
    {"own", safe<py_own>(), METH_NOARGS, nullptr},
    {"is_own", safe<py_is_own>(), METH_NOARGS, nullptr},
    {"block", safe<py_block>(), METH_NOARGS, nullptr},
    {"depth", safe<py_depth>(), METH_NOARGS, nullptr},
    {"watch_calls", safe<py_watch_calls>(), METH_VARARGS, nullptr},
    {"unwatch_calls", safe<py_unwatch_calls>(), METH_NOARGS, nullptr},
    {"learn", safe<py_learn>(), METH_VARARGS, nullptr},
    {"learn_shell", safe<py_learn_shell>(), METH_O, nullptr},
    {"forget", safe<py_forget>(), METH_O, nullptr},
    {"block_of", safe<py_block_of>(), METH_O, nullptr},
    {"is_inside", safe<py_is_inside>(), METH_NOARGS, nullptr},
    {"end_with_graph", safe<py_end_with_graph>(), METH_O, nullptr},
    {"add_group", safe<py_add_group>(), METH_VARARGS, nullptr},
    {"n_calls", safe<py_n_calls>(), METH_O, nullptr},
    {"next_number", safe<py_next_number>(), METH_NOARGS, nullptr},
    {"open_ring", safe<py_open_ring>(), METH_VARARGS, nullptr},
    {"n_waitable", safe<py_n_waitable>(), METH_NOARGS, nullptr},
    {"is_busy", safe<py_is_busy>(), METH_NOARGS, nullptr},
    {"take_segments", safe<py_take_segments>(), METH_NOARGS, nullptr},
    {"take_calls", safe<py_take_calls>(), METH_NOARGS, nullptr},
    {"begin", safe<py_begin>(), METH_VARARGS, nullptr},
    {"end", safe<py_end>(), METH_NOARGS, nullptr},
    {"note", safe<py_note>(), METH_VARARGS, nullptr},
    {"install", safe<py_install>(), METH_NOARGS, nullptr},
    {"remove", safe<py_remove>(), METH_NOARGS, nullptr},
    {"waiting", safe<py_waiting>(), METH_O, nullptr},
    {"running_backward", safe<py_running_backward>(), METH_O, nullptr},
    {"acting", safe<py_acting>(), METH_VARARGS, nullptr},
    {"acting_backward", safe<py_acting_backward>(), METH_O, nullptr},
    {"losing", safe<py_losing>(), METH_O, nullptr},
    {"announcing", safe<py_announcing>(), METH_VARARGS, nullptr},
    {"learn_stage", safe<py_learn_stage>(), METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef POSITION[] = {
    {"step", T_INT, offsetof(PositionObject, at.step), 0, nullptr},
    {"stage", T_INT, offsetof(PositionObject, at.stage), 0, nullptr},
    {"virtual_stage", T_INT, offsetof(PositionObject, at.virtual_stage), 0, nullptr},
    {"microbatch", T_INT, offsetof(PositionObject, at.microbatch), 0, nullptr},
    {},
};

PyType_Slot POSITION_SLOTS[] = {{Py_tp_members, POSITION}, {0, nullptr}};
PyType_Spec POSITION_SPEC = {"foretrace_hooks.Position", sizeof(PositionObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, POSITION_SLOTS};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "foretrace_hooks", nullptr, -1, METHODS,
                      nullptr, nullptr, nullptr, nullptr};

// Around a fork: the child gets locks that nobody holds. None is held while another lock is waited for.
void hold_locks() {
  state().lane->hold();
  calls().hold();
  transfers().hold();
}

void release_locks() {
  transfers().release();
  calls().release();
  state().lane->release();
}

void release_in_child() {
  transfers().forget_threads();
  release_locks();
}

}  // namespace
}  // namespace foretrace

PyMODINIT_FUNC PyInit_foretrace_hooks() {
  using namespace foretrace;
  PyObject* module = PyModule_Create(&MODULE);
  PyObject* type = PyType_FromSpec(&POSITION_SPEC);
  wrapper_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&WRAPPER_SPEC));
  if (module == nullptr || type == nullptr || wrapper_type == nullptr) return nullptr;
  PyObject* made = PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0);
  auto* position = reinterpret_cast<PositionObject*>(made);
  if (position == nullptr) return nullptr;
  position->at = Position{};
  state().position = position;
  try {
    using torch::Library;
    auto* operators = new Library(Library::FRAGMENT, "foretrace", std::nullopt, __FILE__, __LINE__);
    operators->def("waited(__torch__.torch.classes.c10d.Work work) -> bool", waited_boxed);
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_ImportError, "%s", error.what());
  }
  state().lane = std::make_unique<Lane>(&position->at, &state().notes_modules);
  pthread_atfork(hold_locks, release_locks, release_in_child);
  if (PyModule_AddObjectRef(module, "position", reinterpret_cast<PyObject*>(position)) != 0) return nullptr;
  return module;
}
