// Actions of torch.distributed.pipelining: which stage works on which micro-batch. As tracer/pipeline.py.
#pragma once

#include "wrappers.hpp"

namespace foretrace {
namespace {

// A stage of this rank, as the timeline numbers it.
struct Stage {
  int32_t block, loss;  // whose time its actions are, and that of the loss behind it
  int number, virtual_stage;
};

// By their index. Needs the interpreter's lock.
std::unordered_map<long, Stage>& stages() {
  static auto* found = new std::unordered_map<long, Stage>;  // as the state
  return *found;
}

// An action that runs.
struct Action {
  int depth = -1;  // on the stack; -1: it is not noted
  bool is_backward = false;
  Position before;
};

// A number of Python; throws, with an error of Python, if it is none.
long number_in(PyObject* value) {
  const long found = value == nullptr ? -1 : PyLong_AsLong(value);
  if (value == nullptr || PyErr_Occurred()) throw std::runtime_error("new arguments of actions");
  return found;
}

// What is known of a stage; nullptr with an error. Python is asked about one made before the recording began.
const Stage* stage_of(PyObject* stage) {
  static PyObject* const name = PyUnicode_InternFromString("stage_index");
  PyObject* index = attribute(stage, Py_XNewRef(name));
  if (index == nullptr) return nullptr;
  const long number = PyLong_AsLong(index);
  Py_DECREF(index);
  if (PyErr_Occurred()) return nullptr;
  auto found = stages().find(number);
  if (found == stages().end()) {
    PyObject* told = ask("met_stage", stage);
    Py_XDECREF(told);
    found = stages().find(number);
    if (found == stages().end()) {
      if (told != nullptr) PyErr_SetString(PyExc_RuntimeError, "a stage without a number");
      return nullptr;
    }
  }
  return &found->second;
}

bool begin_action(Action* action, PyObject* object, PyObject* microbatch, int32_t kind, bool is_loss) {
  const Stage* stage = stage_of(object);
  if (stage == nullptr) return false;
  const long number = number_in(microbatch);
  if (!begun()) return false;
  state().lane->own();
  const int32_t block = is_loss ? stage->loss : stage->block;
  action->before = state().position->at;
  action->is_backward = kind != state().forward;
  action->depth = state().lane->push({kind, block});
  ++state().n_acting;
  Position& at = state().position->at;
  at.stage = stage->number;
  at.virtual_stage = stage->virtual_stage;
  at.microbatch = int(number);
  if (action->is_backward) state().backward_kind = kind;
  return true;
}

void end_action(const Action& action) {
  if (action.depth < 0) return;
  state().lane->pop(size_t(action.depth));
  if (state().n_acting > 0) --state().n_acting;  // 0: a recording has begun since
  Position& at = state().position->at;
  const int step = at.step;
  at = action.before;
  at.step = step;
  if (action.is_backward) state().backward_kind = state().backward;
}

// Call a method of a stage or a schedule as an action.
template <typename Begin>
PyObject* acted(PyObject* self, const Arguments& args, Begin begin) {
  Action action;
  if (state().notes_modules) guarded(state().notes_modules, "modules", [&] { return begin(&action); });
  PyObject* result = passed_on(reinterpret_cast<Wrapper*>(self), args);
  end_action(action);
  return result;
}

// forward_one_chunk(stage, microbatch, ...) and backward_weight_one_chunk.
PyObject* call_action(PyObject* self, PyObject* const* values, size_t flagged, PyObject* names) {
  const Arguments args{values, flagged, names};
  return acted(self, args, [&](Action* action) {
    return begin_action(action, args.values[0], args.first(), reinterpret_cast<Wrapper*>(self)->kind, false);
  });
}

// backward_one_chunk(stage, microbatch, loss, full_backward=True, ...), which may be of the input only.
PyObject* call_backward_action(PyObject* self, PyObject* const* values, size_t flagged, PyObject* names) {
  const Arguments args{values, flagged, names};
  return acted(self, args, [&](Action* action) {
    PyObject* full = args.at(3, "full_backward");
    const int is_full = full == nullptr ? 1 : PyObject_IsTrue(full);
    const int32_t kind = is_full ? state().backward : reinterpret_cast<Wrapper*>(self)->kind;
    return is_full >= 0 && begin_action(action, args.values[0], args.first(), kind, false);
  });
}

// _maybe_compute_loss(schedule, stage, output, targets, microbatch, ...)
PyObject* call_loss(PyObject* self, PyObject* const* values, size_t flagged, PyObject* names) {
  const Arguments args{values, flagged, names};
  return acted(self, args, [&](Action* action) {
    PyObject* stage = args.at(1, "stage");
    if (stage == nullptr) throw std::runtime_error("new arguments of the loss");
    return begin_action(action, stage, args.at(4, "mb_index"), state().forward, true);
  });
}

// Note transfers, P2POps in a list, before they are issued: they will be known by their tensors.
bool announce(const Wrapper* wrapper, const Arguments& args, PyObject* operations) {
  if (!PyList_Check(operations) || PyList_GET_SIZE(operations) == 0) return true;
  const Stage* stage = stage_of(args.values[0]);
  if (stage == nullptr) return false;
  const Position at{-1, stage->number, stage->virtual_stage, int(number_in(args.first()))};
  static PyObject* const name = PyUnicode_InternFromString("tensor");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(operations); ++i) {
    PyObject* tensor = attribute(PyList_GET_ITEM(operations, i), Py_XNewRef(name));
    if (tensor == nullptr) return false;
    if (THPVariable_Check(tensor)) {
      const void* data = address(THPVariable_Unpack(tensor));
      transfers().announce(wrapper->kind != 0, data, {at, wrapper->block});
    }
    Py_DECREF(tensor);
  }
  return true;
}

// get_fwd_recv_ops(stage, microbatch) and its like.
PyObject* call_announced(PyObject* self, PyObject* const* values, size_t flagged, PyObject* names) {
  const Arguments args{values, flagged, names};
  auto* const wrapper = reinterpret_cast<Wrapper*>(self);
  PyObject* result = passed_on(wrapper, args);
  if (result != nullptr && state().notes_pipeline) {
    guarded(state().notes_pipeline, "pipeline", [&] { return announce(wrapper, args, result); });
  }
  return result;
}

PyObject* py_acting(PyObject*, PyObject* args) {
  PyObject *original, *kind;
  if (!PyArg_ParseTuple(args, "OO", &original, &kind)) return nullptr;
  const int32_t number = kind_number(kind);
  return number < 0 ? nullptr : wrapped(call_action, original, number);
}

PyObject* py_acting_backward(PyObject*, PyObject* original) {
  const int32_t number = kind_named("backward_input");
  return number < 0 ? nullptr : wrapped(call_backward_action, original, number);
}

PyObject* py_losing(PyObject*, PyObject* original) { return wrapped(call_loss, original); }

PyObject* py_announcing(PyObject*, PyObject* args) {
  PyObject *original, *content;
  int is_send;
  if (!PyArg_ParseTuple(args, "OpO", &original, &is_send, &content)) return nullptr;
  const int32_t block = block_number(content);
  return block < 0 ? nullptr : wrapped(call_announced, original, is_send, block);
}

PyObject* py_learn_stage(PyObject*, PyObject* args) {
  long index;
  PyObject *block, *loss;
  Stage stage{};
  if (!PyArg_ParseTuple(args, "lOOii", &index, &block, &loss, &stage.number, &stage.virtual_stage)) {
    return nullptr;
  }
  stage.block = block_number(block);
  stage.loss = stage.block < 0 ? -1 : block_number(loss);
  if (stage.loss < 0) return nullptr;
  stages()[index] = stage;
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace foretrace
