// SPDX-License-Identifier: Apache-2.0
// The call path of small allreduces: `world.allreduce(x)` without a Python frame.
//
// A FastCall stands in front of the Python method. It takes over exactly one case, a blocking sum
// in place of a plain NumPy array whose plan has been bound before, and hands every other call,
// every error and every wait longer than kHoldGil to the method or to `finish`. It reads the fields
// of the array object itself; their layout has been the same since NumPy 1.7, and `fast_call`
// compares it with a sample before it makes one.
//
// The GIL is held for the first kHoldGil: releasing it costs little, but getting it back from
// another thread can take milliseconds.
#include <pthread.h>

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "engine.h"
#include "structmember.h"  // Python's, after nanobind has included Python.h

namespace nb = nanobind;

namespace commute::bindings {
namespace {

constexpr std::chrono::microseconds kHoldGil{2};
constexpr int kUsable = 0x0001 | 0x0100 | 0x0400;  // C contiguous, aligned, writeable

struct ArrayFields {
  PyObject_HEAD char* data;
  int dimensions_count;
  Py_ssize_t* dimensions;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* descr;
  int flags;
};

// A forked child must not use the parent's links; counting forks is quicker than asking for the
// pid.
std::atomic<int> forks{0};

struct State {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Operation> operation = std::make_shared<Operation>();
  struct Choice {
    uint64_t max_bytes;
    std::shared_ptr<Executor> executor;  // null until learnt
  };
  std::vector<Choice> choices;  // smallest first
  double timeout_s = 0;
  std::array<PyObject*, kDtypeCount> descrs{};  // NumPy's own, which live for ever
  int forks_seen = forks.load();
};

struct FastCall {
  PyObject_HEAD vectorcallfunc call;
  PyObject* slow;    // the method
  PyObject* finish;  // waits for an operation, raises what went wrong
  PyObject* array_type;
  State* state;
};

int dtype_of(const State& state, const PyObject* descr) {
  // Gradients are float32 nearly always: looked at first.
  constexpr int kFirst = static_cast<int>(Dtype::kFloat32);
  if (state.descrs[kFirst] == descr) return kFirst;
  for (size_t code = 0; code < kDtypeCount; ++code)
    if (state.descrs[code] == descr) return static_cast<int>(code);
  return -1;
}

// The plan that is chosen for so many bytes, if it has been learnt.
const std::shared_ptr<Executor>* chosen(const State& state, uint64_t bytes) {
  for (const State::Choice& choice : state.choices)
    if (bytes <= choice.max_bytes) return choice.executor ? &choice.executor : nullptr;
  return nullptr;
}

// Runs the call if it is the fast case: 1 done, 0 not the fast case, -1 an exception is set.
int try_fast(FastCall& self, const ArrayFields& array) {
  State& state = *self.state;
  if ((array.flags & kUsable) != kUsable || state.forks_seen != forks.load()) return 0;
  const int code = dtype_of(state, array.descr);
  if (code < 0) return 0;
  uint64_t count = 1;
  for (int i = 0; i < array.dimensions_count; ++i)
    count *= static_cast<uint64_t>(array.dimensions[i]);
  const auto dtype = static_cast<Dtype>(code);
  const std::shared_ptr<Executor>* executor = chosen(state, count * item_bytes(dtype));
  if (executor == nullptr) return 0;
  Operation& operation = *state.operation;
  const Plan& plan = (*executor)->plan();
  operation.call = {plan.collective,
                    dtype,
                    ReduceOp::kSum,
                    false,
                    plan.root,
                    static_cast<uint32_t>(plan.hash),
                    count};
  operation.in = operation.out = reinterpret_cast<std::byte*>(array.data);
  operation.executor = *executor;
  operation.state.store(Operation::State::kQueued, std::memory_order_relaxed);
  operation.failure = {};
  const auto now = Clock::now();
  operation.timeout_s = state.timeout_s;
  operation.deadline = now + std::chrono::duration_cast<Clock::duration>(
                                 std::chrono::duration<double>(state.timeout_s));
  try {
    if (state.engine->run(state.operation, now + kHoldGil) &&
        operation.state.load(std::memory_order_relaxed) == Operation::State::kDone)
      return 1;
  } catch (const Error&) {
    return 0;  // the group is broken or closed: the method says how
  }
  // It takes longer, or failed: Python waits for it, or raises. The operation is Python's now.
  nb::object pending = nb::cast(std::exchange(state.operation, std::make_shared<Operation>()));
  PyObject* done = PyObject_CallOneArg(self.finish, pending.ptr());
  if (done == nullptr) return -1;
  Py_DECREF(done);
  return 1;
}

PyObject* fast_vectorcall(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  auto& self = *reinterpret_cast<FastCall*>(object);
  if (PyVectorcall_NARGS(flags) == 1 && names == nullptr &&
      reinterpret_cast<PyObject*>(Py_TYPE(args[0])) == self.array_type) {
    const int done = try_fast(self, *reinterpret_cast<const ArrayFields*>(args[0]));
    if (done > 0) {
      Py_INCREF(args[0]);
      return args[0];
    }
    if (done < 0) return nullptr;
  }
  return PyObject_Vectorcall(self.slow, args, flags, names);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  auto& self = *reinterpret_cast<FastCall*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self.slow);
  Py_VISIT(self.finish);
  return 0;
}

int clear(PyObject* object) {
  auto& self = *reinterpret_cast<FastCall*>(object);
  Py_CLEAR(self.slow);
  Py_CLEAR(self.finish);
  return 0;
}

void deallocate(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  clear(object);
  delete reinterpret_cast<FastCall*>(object)->state;
  PyObject_GC_Del(object);
  Py_DECREF(type);
}

PyObject* doc_of(PyObject* object, void*) {
  return PyObject_GetAttrString(reinterpret_cast<FastCall*>(object)->slow, "__doc__");
}

PyTypeObject* fast_call_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastCall, call), READONLY, nullptr}, {}};
  static PyGetSetDef getters[] = {{"__doc__", doc_of, nullptr, nullptr, nullptr}, {}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                                {Py_tp_members, members},
                                {Py_tp_getset, getters},
                                {0, nullptr}};
  static PyType_Spec spec = {"commute._core.FastCall", sizeof(FastCall), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                             slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

// `sample`: an array whose data lies at `address`. None when its fields are not where they should
// be.
nb::object fast_call(std::shared_ptr<Engine> engine, nb::object slow, nb::object finish,
                     nb::list descrs, nb::object sample, uintptr_t address) {
  const auto& fields = *reinterpret_cast<const ArrayFields*>(sample.ptr());
  if (reinterpret_cast<uintptr_t>(fields.data) != address || fields.dimensions_count != 1 ||
      fields.dimensions[0] != 3 ||
      fields.descr != descrs[static_cast<size_t>(Dtype::kFloat32)].ptr() ||
      (fields.flags & kUsable) != kUsable)
    return nb::none();
  PyTypeObject* type = fast_call_type();
  auto* self = PyObject_GC_New(FastCall, type);
  if (self == nullptr) throw nb::python_error();
  self->call = fast_vectorcall;
  self->slow = slow.release().ptr();
  self->finish = finish.release().ptr();
  self->array_type = reinterpret_cast<PyObject*>(Py_TYPE(sample.ptr()));
  self->state = new State;
  self->state->engine = std::move(engine);
  for (size_t code = 0; code < kDtypeCount; ++code)
    if (!descrs[code].is_none()) self->state->descrs[code] = descrs[code].ptr();
  PyObject_GC_Track(reinterpret_cast<PyObject*>(self));
  return nb::steal(reinterpret_cast<PyObject*>(self));
}

State& state_of(nb::handle object) {
  if (Py_TYPE(object.ptr()) != fast_call_type()) throw nb::type_error("expected a FastCall");
  return *reinterpret_cast<FastCall*>(object.ptr())->state;
}

// Sizes: up to which bytes each plan is chosen, smallest first.
void expect(nb::handle object, const std::vector<uint64_t>& sizes, double timeout) {
  State& state = state_of(object);
  for (const uint64_t size : sizes) state.choices.push_back({size, nullptr});
  state.timeout_s = timeout;
}

void learn(nb::handle object, std::shared_ptr<Executor> executor, uint64_t bytes) {
  for (State::Choice& choice : state_of(object).choices)
    if (bytes <= choice.max_bytes) {
      choice.executor = std::move(executor);
      return;
    }
}

}  // namespace

void bind_fast_call(nb::module_& module) {
  pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  module.def("fast_call", &fast_call, nb::arg("engine"), nb::arg("slow"), nb::arg("finish"),
             nb::arg("descrs"), nb::arg("sample"), nb::arg("address"),
             nb::sig("def fast_call(engine: Engine, slow: object, finish: object, "
                     "descrs: list[object], sample: object, address: int) -> object"));
  module.def("expect", &expect, nb::arg("fast_call"), nb::arg("sizes"), nb::arg("timeout"));
  module.def("learn", &learn, nb::arg("fast_call"), nb::arg("executor"), nb::arg("bytes"));
}

}  // namespace commute::bindings
