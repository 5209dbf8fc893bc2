// SPDX-License-Identifier: Apache-2.0
// The call path of blocking collectives in shared memory: `world.allreduce(x)`,
// `world.broadcast(x)` and `world.barrier()` without a Python frame.
//
// A FastCall stands in front of the Python method. It takes over the plain case (a sum in place, no
// other argument than broadcast's root) of a NumPy array or a torch tensor whose plan has been
// bound before, and hands every other call and every error to the method or to `finish`. It reads
// the fields of NumPy's array object itself; their layout has been the same since NumPy 1.7, and
// `fast_call` compares it with a sample before it makes one. Tensors are described by DLPack's C
// interface.
//
// Up to kHeldBytes the GIL is held for the first kHoldGil: releasing it costs little, but getting
// it back from another thread can take milliseconds. Then, and for larger arrays at once, it is
// released, for a slice at a time, so that Ctrl-C works.
#include <pthread.h>

#include <array>
#include <atomic>
#include <memory>
#include <unordered_map>
#include <vector>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "engine.h"
#include "structmember.h"  // Python's, after nanobind has included Python.h

namespace nb = nanobind;

namespace commute::bindings {
namespace {

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

struct DlExchange;

struct Choice {
  uint64_t max_bytes;
  std::shared_ptr<Executor> executor;  // null until learnt
};

// What was learnt of an array that all ranks reach, by its address.
struct Direct {
  uint64_t bytes = 0;
  std::shared_ptr<Executor> executor;
  std::shared_ptr<SharedArray> array;
  size_t offset = 0;
};

struct State {
  std::shared_ptr<Engine> engine;
  Collective collective = Collective::kAllreduce;
  std::shared_ptr<Operation> spare;          // used again and again; null while a call has it
  std::vector<std::vector<Choice>> choices;  // by root; smallest first
  std::unordered_map<const std::byte*, Direct> direct;
  double timeout_s = 0;
  std::array<PyObject*, kDtypeCount> descrs{};  // NumPy's own, which live for ever
  const DlExchange* tensors = nullptr;          // torch's, which lives for ever
  int forks_seen = forks.load();
};

// An array, as far as the core needs it.
struct Memory {
  std::byte* data = nullptr;
  uint64_t count = 0;
  int dtype = -1;  // -1: not one that is taken over
};

struct FastCall {
  PyObject_HEAD vectorcallfunc call;
  PyObject* slow;    // the method
  PyObject* finish;  // waits for an operation, raises what went wrong
  PyObject* array_type;
  PyObject* tensor_type;  // null until a tensor has been seen
  State* state;
};

int code_of(const std::array<PyObject*, kDtypeCount>& known, const PyObject* dtype) {
  // Gradients are float32 nearly always: looked at first.
  constexpr int kFirst = static_cast<int>(Dtype::kFloat32);
  if (known[kFirst] == dtype) return kFirst;
  for (size_t code = 0; code < kDtypeCount; ++code)
    if (known[code] == dtype) return static_cast<int>(code);
  return -1;
}

Memory array_memory(const State& state, const ArrayFields& array) {
  Memory memory;
  if ((array.flags & kUsable) != kUsable) return memory;
  memory.data = reinterpret_cast<std::byte*>(array.data);
  memory.count = 1;
  for (int i = 0; i < array.dimensions_count; ++i)
    memory.count *= static_cast<uint64_t>(array.dimensions[i]);
  memory.dtype = code_of(state.descrs, array.descr);
  return memory;
}

// DLPack's description of an array (dlpack.h), and what of its exchange interface is used here.
struct DlTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t dimensions_count;
  uint8_t kind;
  uint8_t bits;
  uint16_t lanes;
  int64_t* dimensions;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};

struct DlExchange {
  uint32_t major;
  uint32_t minor;
  void* previous;
  void* allocate;
  void* from_object;
  void* to_object;
  int (*describe)(void* object, DlTensor* tensor);
};

int code_of(const DlTensor& tensor) {
  constexpr int32_t kCpu = 1;
  enum Kind : uint8_t { kSigned = 0, kUnsigned = 1, kFloat = 2, kBrainFloat = 4 };
  if (tensor.device_type != kCpu || tensor.lanes != 1) return -1;
  const auto is = [&](Kind kind, int bits) { return tensor.kind == kind && tensor.bits == bits; };
  if (is(kFloat, 32)) return static_cast<int>(Dtype::kFloat32);
  if (is(kFloat, 64)) return static_cast<int>(Dtype::kFloat64);
  if (is(kFloat, 16)) return static_cast<int>(Dtype::kFloat16);
  if (is(kBrainFloat, 16)) return static_cast<int>(Dtype::kBfloat16);
  if (is(kSigned, 64)) return static_cast<int>(Dtype::kInt64);
  if (is(kSigned, 32)) return static_cast<int>(Dtype::kInt32);
  return -1;  // the method takes the others
}

bool contiguous(const DlTensor& tensor) {
  int64_t expected = 1;
  for (int i = tensor.dimensions_count - 1; i >= 0 && tensor.strides != nullptr; --i) {
    if (tensor.dimensions[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.dimensions[i];
  }
  return true;
}

bool has(PyObject* tensor, PyObject* attribute, PyObject* wanted) {
  PyObject* got = PyObject_GetAttr(tensor, attribute);
  Py_XDECREF(got);  // True and False outlive this
  return got == wanted;
}

bool says(PyObject* tensor, PyObject* method, PyObject* wanted) {
  PyObject* got = PyObject_VectorcallMethod(method, &tensor, 1, nullptr);
  Py_XDECREF(got);
  return got == wanted;
}

Memory tensor_memory(const State& state, PyObject* tensor) {
  static PyObject* const kRequiresGrad = PyUnicode_InternFromString("requires_grad");
  static PyObject* const kIsNegated = PyUnicode_InternFromString("is_neg");
  Memory memory;
  DlTensor found{};
  if (has(tensor, kRequiresGrad, Py_False) && says(tensor, kIsNegated, Py_False) &&
      state.tensors->describe(tensor, &found) == 0 && contiguous(found)) {
    memory.data = static_cast<std::byte*>(found.data) + found.byte_offset;
    memory.count = 1;
    for (int i = 0; i < found.dimensions_count; ++i)
      memory.count *= static_cast<uint64_t>(found.dimensions[i]);
    memory.dtype = found.data == nullptr && memory.count > 0 ? -1 : code_of(found);
  }
  if (PyErr_Occurred()) {  // a sparse tensor, say: the method explains
    PyErr_Clear();
    memory.dtype = -1;
  }
  return memory;
}

// The plan that is chosen for so many bytes, if it has been learnt.
const std::shared_ptr<Executor>* chosen(const State& state, size_t root, uint64_t bytes) {
  if (root >= state.choices.size()) return nullptr;
  for (const Choice& choice : state.choices[root])
    if (bytes <= choice.max_bytes) return choice.executor ? &choice.executor : nullptr;
  return nullptr;
}

// The same for an array that all ranks reach; in a line it is as any other.
const Direct* chosen_direct(const State& state, size_t root, const std::byte* data,
                            uint64_t bytes) {
  const auto found = state.direct.find(data);
  if (found == state.direct.end() || found->second.bytes != bytes ||
      size_t(found->second.executor->plan().root) != root)
    return nullptr;
  return &found->second;
}

bool finished_well(const Operation& operation) {
  return operation.state.load(std::memory_order_acquire) == Operation::State::kDone;
}

// An interrupt came before `finish` could deal with it. The array is the caller's again when this
// returns, and the other ranks know.
void give_up(Engine& engine, const std::shared_ptr<Operation>& operation) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  {
    const nb::gil_scoped_release released;
    const int rank = engine.rank();
    engine.fail({FailureCode::kInterrupted, -1, rank, operation->sequence,
                 "rank " + std::to_string(rank) + " gave up " + operation->call.describe() +
                     ": the caller stopped waiting"});
    while (!engine.wait(operation, Clock::now() + kSlice)) {
    }
  }
  PyErr_Restore(type, value, trace);
}

// Runs the call if it can: 1 done, 0 not the fast case, -1 an exception is set.
int try_fast(FastCall& self, const Memory& memory, size_t root) {
  State& state = *self.state;
  if (state.forks_seen != forks.load(std::memory_order_relaxed)) return 0;
  const auto dtype = static_cast<Dtype>(memory.dtype);
  const uint64_t bytes = memory.count * item_bytes(dtype);
  const bool reached = bytes > kLineBytes && state.engine->outboxes().in_room(memory.data);
  const Direct* const direct = reached ? chosen_direct(state, root, memory.data, bytes) : nullptr;
  if (reached && direct == nullptr) return 0;
  const std::shared_ptr<Executor>* executor =
      direct != nullptr ? &direct->executor : chosen(state, root, bytes);
  if (executor == nullptr) return 0;
  // Taken out, because another thread may call while this one waits without the GIL.
  std::shared_ptr<Operation> mine =
      state.spare ? std::move(state.spare) : std::make_shared<Operation>();
  Operation& operation = *mine;
  const Plan& plan = (*executor)->plan();
  operation.call = {plan.collective, dtype,     ReduceOp::kSum,
                    false,           plan.root, static_cast<uint32_t>(plan.hash),
                    memory.count};
  operation.in = operation.out = memory.data;
  operation.array = direct != nullptr ? direct->array : nullptr;
  operation.array_offset = direct != nullptr ? direct->offset : 0;
  if (direct != nullptr) operation.call.plan ^= direct->array->mark(direct->offset);
  if (operation.executor != *executor) operation.executor = *executor;
  operation.state.store(Operation::State::kQueued, std::memory_order_relaxed);
  const auto now = Clock::now();
  operation.timeout_s = state.timeout_s;
  operation.deadline = after(now, state.timeout_s);
  try {
    const bool held = bytes <= kHeldBytes;
    if (!held || !state.engine->run(mine, now, now + kHoldGil)) {
      const nb::gil_scoped_release released;
      if (held || !state.engine->run(mine, now, now + kSlice))
        state.engine->wait(mine, now + kSlice);
    }
  } catch (const Error&) {
    return 0;  // the group is broken or closed: the method says how
  }
  if (finished_well(operation)) {
    state.spare = std::move(mine);
    return 1;
  }
  // It takes longer, or failed: Python waits for it, or raises.
  const std::shared_ptr<Operation> kept = mine;
  nb::object pending = nb::cast(std::move(mine));
  PyObject* done = PyObject_CallOneArg(self.finish, pending.ptr());
  if (done == nullptr) {
    if (!kept->finished()) give_up(*state.engine, kept);
    return -1;
  }
  Py_DECREF(done);
  return 1;
}

// The root, of broadcast(x), broadcast(x, 2) and broadcast(x, root=2); -1 for other arguments.
Py_ssize_t root_of(const FastCall& self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (count + named == 1 && named == 0) return 0;
  if (self.state->collective != Collective::kBroadcast || count < 1 || count + named != 2)
    return -1;
  if (named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "root") != 0)
    return -1;
  if (!PyLong_CheckExact(args[1])) return -1;
  const Py_ssize_t root = PyLong_AsSsize_t(args[1]);
  if (root == -1) PyErr_Clear();
  return root;
}

PyObject* fast_vectorcall(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  auto& self = *reinterpret_cast<FastCall*>(object);
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  int done = 0;
  PyObject* result = Py_None;
  if (self.state->collective == Collective::kBarrier) {
    if (count == 0 && names == nullptr)
      done = try_fast(self, {nullptr, 0, static_cast<int>(Dtype::kUint8)}, 0);
  } else if (const Py_ssize_t root = root_of(self, args, count, names); root >= 0) {
    result = args[0];
    Memory memory;
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(result));
    if (type == self.array_type)
      memory = array_memory(*self.state, *reinterpret_cast<const ArrayFields*>(result));
    else if (type == self.tensor_type)
      memory = tensor_memory(*self.state, result);
    if (memory.dtype >= 0) done = try_fast(self, memory, size_t(root));
  }
  if (done > 0) return Py_NewRef(result);
  if (done < 0) return nullptr;
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
nb::object fast_call(std::shared_ptr<Engine> engine, int collective, nb::object slow,
                     nb::object finish, nb::list descrs, nb::object sample, uintptr_t address) {
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
  self->tensor_type = nullptr;
  self->state = new State;
  self->state->engine = std::move(engine);
  self->state->collective = static_cast<Collective>(collective);
  for (size_t code = 0; code < kDtypeCount; ++code)
    if (!descrs[code].is_none()) self->state->descrs[code] = descrs[code].ptr();
  PyObject_GC_Track(reinterpret_cast<PyObject*>(self));
  return nb::steal(reinterpret_cast<PyObject*>(self));
}

FastCall& checked(nb::handle object) {
  if (Py_TYPE(object.ptr()) != fast_call_type()) throw nb::type_error("expected a FastCall");
  return *reinterpret_cast<FastCall*>(object.ptr());
}

// For each root, up to which bytes each plan is chosen, smallest first.
void expect(nb::handle object, size_t roots, const std::vector<uint64_t>& sizes, double timeout) {
  State& state = *checked(object).state;
  std::vector<Choice> choices;
  for (const uint64_t size : sizes) choices.push_back({size, nullptr});
  state.choices.assign(roots, choices);
  state.timeout_s = timeout;
}

void learn(nb::handle object, std::shared_ptr<Executor> executor, uint64_t bytes) {
  for (Choice& choice : checked(object).state->choices.at(size_t(executor->plan().root)))
    if (bytes <= choice.max_bytes) {
      choice.executor = std::move(executor);
      return;
    }
}

// What is known of arrays that all ranks reach holds until the next one is made: it may lie where
// another has been.
void learn_direct(nb::handle object, std::shared_ptr<Executor> executor, uintptr_t address,
                  uint64_t bytes, std::shared_ptr<SharedArray> array, size_t offset) {
  constexpr size_t kMost = 256;
  auto& direct = checked(object).state->direct;
  if (direct.size() >= kMost) direct.clear();
  direct[reinterpret_cast<const std::byte*>(address)] = {bytes, std::move(executor),
                                                         std::move(array), offset};
}

void forget_direct(nb::handle object) {
  checked(object).state->direct.clear();
}

// From now on tensors are taken over too. `exchange`: the capsule by which torch shows its C
// interface of DLPack.
void learn_tensors(nb::handle object, nb::handle tensor_type, nb::handle exchange) {
  constexpr const char* kName = "dlpack_exchange_api";
  if (!PyCapsule_IsValid(exchange.ptr(), kName)) return;
  const auto* found = static_cast<DlExchange*>(PyCapsule_GetPointer(exchange.ptr(), kName));
  if (found->major != 1 || found->describe == nullptr) return;  // another layout
  FastCall& self = checked(object);
  self.state->tensors = found;
  self.tensor_type = tensor_type.ptr();
}

}  // namespace

int fork_count() {
  return forks.load(std::memory_order_relaxed);
}

void bind_fast_call(nb::module_& module) {
  pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  module.def("fast_call", &fast_call, nb::arg("engine"), nb::arg("collective"), nb::arg("slow"),
             nb::arg("finish"), nb::arg("descrs"), nb::arg("sample"), nb::arg("address"),
             nb::sig("def fast_call(engine: Engine, collective: int, slow: object, finish: object, "
                     "descrs: list[object], sample: object, address: int) -> object"));
  module.def("expect", &expect, nb::arg("fast_call"), nb::arg("roots"), nb::arg("sizes"),
             nb::arg("timeout"));
  module.def("learn", &learn, nb::arg("fast_call"), nb::arg("executor"), nb::arg("bytes"));
  module.def("learn_direct", &learn_direct, nb::arg("fast_call"), nb::arg("executor"),
             nb::arg("address"), nb::arg("bytes"), nb::arg("array"), nb::arg("offset"));
  module.def("forget_direct", &forget_direct, nb::arg("fast_call"));
  module.def("learn_tensors", &learn_tensors, nb::arg("fast_call"), nb::arg("tensor_type"),
             nb::arg("exchange"),
             nb::sig("def learn_tensors(fast_call: object, tensor_type: object, "
                     "exchange: object) -> None"));
}

}  // namespace commute::bindings
