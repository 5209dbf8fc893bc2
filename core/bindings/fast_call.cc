// SPDX-License-Identifier: Apache-2.0
// The call path of blocking collectives in shared memory, `world.allreduce(x)` and the like,
// without a Python frame.
//
// A FastCall stands in front of the Python method. It takes over the plain case (a sum, of an array
// in place or into `out=`, no other argument than the root) of a NumPy array or a torch tensor
// whose plan has been bound before, and hands every other call and every error to the method or to
// `finish`.
//
// It is not only for what is small: what a program has just computed with has pushed the
// interpreter out of the caches, and the frames of a method then cost 0.2 ms, a seventh of the time
// in which 16 MB are gathered.
//
// A scatter is two operations. Its head, which tells ranks without `out=` what they will get
// (group/exchanges.py), goes ahead by a plan of broadcast, and nobody here waits for it: operations
// run in order, so it has finished when the scatter has.
//
// Up to kHeldBytes the GIL is held for the first kHoldGil: releasing it costs little, but getting
// it back from another thread can take milliseconds. Then, and for larger arrays at once, it is
// released, for a slice at a time, so that Ctrl-C works.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "array_reader.h"
#include "bindings.h"
#include "engine.h"
#include "structmember.h"  // Python's, after nanobind has included Python.h

namespace nb = nanobind;

namespace commute::bindings {
namespace {

// A forked child must not use the parent's links; counting forks is quicker than asking for the
// pid.
std::atomic<int> forks{0};

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

// The head of a scatter: dtype, whether it is a tensor, how many axes a part has, their lengths.
struct Head : Operation {
  std::vector<int64_t> words;
};
constexpr size_t kHeadAxesAt = 3;

struct State {
  std::shared_ptr<Engine> engine;
  Collective collective = Collective::kAllreduce;
  ArrayReader arrays;
  std::shared_ptr<Operation> spare;          // used again and again; null while a call has it
  std::vector<std::vector<Choice>> choices;  // by root; smallest first
  std::unordered_map<const std::byte*, Direct> direct;
  double timeout_s = 0;
  int forks_seen = forks.load();
  // Of a scatter:
  std::shared_ptr<const State> heads_by;  // the broadcast's
  size_t head_words = 0;
  std::shared_ptr<Head> spare_head;  // as `spare`
};

struct FastCall {
  PyObject_HEAD vectorcallfunc call;
  PyObject* slow;    // the method
  PyObject* finish;  // waits for an operation, raises what went wrong
  std::shared_ptr<State> state;
};

// What a call was given, as far as it may be taken over.
struct Given {
  PyObject* x = nullptr;
  PyObject* out = nullptr;  // null: none
  size_t root = 0;
};

// What the core is given.
struct Operands {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  uint64_t count = 0;  // of a block
  Dtype dtype = Dtype::kUint8;
  uint64_t bytes = 0;  // by which a plan is chosen (plan/choose.py)
  PyObject* result = Py_None;
  Memory x;  // what `in` is
};

// --- arguments ---

bool is_rooted(Collective collective) {
  return collective == Collective::kBroadcast || collective == Collective::kReduce ||
         collective == Collective::kGather || collective == Collective::kScatter;
}

// Without out=.
bool is_in_place(Collective collective) {
  return collective == Collective::kAllreduce || collective == Collective::kBroadcast ||
         collective == Collective::kReduce;
}

// Whether a rank that is not the root gets something.
bool is_for_all(Collective collective) {
  return collective != Collective::kGather && collective != Collective::kReduce;
}

// Whether there are plans that work on arrays that all ranks reach, where they are.
bool has_direct(Collective collective) {
  return collective == Collective::kAllreduce || collective == Collective::kBroadcast;
}

bool is_named(PyObject* name, const char* what) {
  return PyUnicode_CompareWithASCIIString(name, what) == 0;
}

// x, a root by its place or name, out=; nothing for any other argument.
std::optional<Given> given_by(const State& state, PyObject* const* args, Py_ssize_t count,
                              PyObject* names) {
  const bool rooted = is_rooted(state.collective);
  if (count < 1 || count > (rooted ? 2 : 1)) return {};
  Given given{args[0]};
  PyObject* root = count == 2 ? args[1] : nullptr;
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(names, i);
    PyObject* const value = args[count + i];
    if (is_named(name, "out"))
      given.out = value == Py_None ? nullptr : value;
    else if (rooted && root == nullptr && is_named(name, "root"))
      root = value;
    else
      return {};
  }
  if (root == nullptr) return given;
  if (!PyLong_CheckExact(root)) return {};
  given.root = PyLong_AsSize_t(root);
  if (PyErr_Occurred()) {  // negative, say: the method explains
    PyErr_Clear();
    return {};
  }
  return given;
}

bool same_axes(const Memory& a, const Memory& b) {
  return std::equal(a.axes, a.axes + a.axes_count, b.axes, b.axes + b.axes_count);
}

// Whether the whole is one part for each rank, along a leading axis.
bool holds(const Memory& whole, const Memory& part, int ranks) {
  return whole.axes_count == part.axes_count + 1 && whole.axes[0] == ranks &&
         std::equal(part.axes, part.axes + part.axes_count, whole.axes + 1);
}

bool overlap(const Memory& a, const Memory& b) {
  return a.data < b.data + b.bytes() && b.data < a.data + a.bytes();
}

bool fit(Collective collective, const Memory& in, const Memory& out, int ranks) {
  if (in.dtype != out.dtype || overlap(in, out)) return false;
  switch (collective) {
    case Collective::kAllgather:
    case Collective::kGather:
      return holds(out, in, ranks);
    case Collective::kReduceScatter:
    case Collective::kScatter:
      return holds(in, out, ranks);
    case Collective::kAlltoall:
      return in.axes_count > 0 && in.axes[0] == ranks && same_axes(in, out);
    default:
      return same_axes(in, out);
  }
}

// Torch has no bound on the number of axes.
bool fits_head(const State& state, const Memory& whole) {
  return kHeadAxesAt + size_t(whole.axes_count) <= state.head_words + 1;
}

// Nothing where the arrays are not plain, or not such as the collective takes: the method knows
// what to do, or what to say.
std::optional<Operands> operands_of(const State& state, const Given& given) {
  const Collective collective = state.collective;
  const int ranks = state.engine->ranks();
  const bool at_root = given.root == size_t(state.engine->rank());
  const bool reads = collective != Collective::kScatter || at_root;
  const bool writes = is_for_all(collective) || at_root;
  const bool in_place = is_in_place(collective) && given.out == nullptr;
  if (writes && given.out == nullptr && !in_place) return {};  // somebody has to make one
  const Memory in = reads ? state.arrays.read(given.x) : Memory();
  const Memory out = !writes ? Memory() : in_place ? in : state.arrays.read(given.out);
  if ((reads && !in.known()) || (writes && !(out.known() && out.writeable))) return {};
  if (reads && writes && !in_place && !fit(collective, in, out, ranks)) return {};
  if (collective == Collective::kScatter && !fits_head(state, in)) return {};
  Operands found;
  found.x = in;
  found.in = in.data;
  found.out = out.data;
  found.dtype = static_cast<Dtype>(reads ? in.dtype : out.dtype);
  found.bytes = reads ? in.bytes() : size_t(ranks) * out.bytes();
  const bool by_out =
      collective == Collective::kScatter || collective == Collective::kReduceScatter;
  found.count = by_out ? out.count : in.count;
  if (collective == Collective::kAlltoall) found.count /= size_t(ranks);
  if (writes || collective == Collective::kReduce)
    found.result = given.out == nullptr ? given.x : given.out;
  return found;
}

// --- running ---

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

void prepare(Operation& operation, const std::shared_ptr<Executor>& executor,
             const Operands& operands, double timeout_s, Clock::time_point now) {
  const Plan& plan = executor->plan();
  operation.call = {plan.collective, operands.dtype, ReduceOp::kSum,
                    false,           plan.root,      static_cast<uint32_t>(plan.hash),
                    operands.count};
  operation.in = operands.in;
  operation.out = operands.out;
  if (operation.executor != executor) operation.executor = executor;
  operation.state.store(Operation::State::kQueued, std::memory_order_relaxed);
  operation.timeout_s = timeout_s;
  operation.deadline = after(now, timeout_s);
}

// Sends the head of a scatter on its way. Raises Error.
std::shared_ptr<Head> send_head(State& state, const std::shared_ptr<Executor>& executor,
                                const Given& given, const Memory& whole, Clock::time_point now) {
  std::shared_ptr<Head> head =
      state.spare_head ? std::move(state.spare_head) : std::make_shared<Head>();
  head->words.assign(state.head_words, 0);
  if (whole.known()) {  // at the root
    head->words[0] = whole.dtype;
    head->words[1] = state.arrays.is_tensor(given.x);
    head->words[2] = whole.axes_count - 1;
    std::copy(whole.axes + 1, whole.axes + whole.axes_count, head->words.begin() + kHeadAxesAt);
  }
  auto* const data = reinterpret_cast<std::byte*>(head->words.data());
  Operands operands;
  operands.in = operands.out = data;
  operands.count = state.head_words;
  operands.dtype = Dtype::kInt64;
  prepare(*head, executor, operands, state.timeout_s, now);
  state.engine->submit(head, false);
  return head;
}

// Returns when it has finished, or after a slice.
void run(Engine& engine, const std::shared_ptr<Operation>& operation, uint64_t bytes,
         Clock::time_point now) {
  const bool held = bytes <= kHeldBytes;
  if (held && engine.run(operation, now, now + kHoldGil)) return;
  const nb::gil_scoped_release released;
  if (!held && engine.run(operation, now, now + kSlice)) return;
  engine.wait(operation, now + kSlice);
}

// It takes longer, or failed: Python waits for it, or raises.
int finish_slowly(FastCall& self, const std::shared_ptr<Operation>& operation) {
  nb::object pending = nb::cast(operation);
  PyObject* done = PyObject_CallOneArg(self.finish, pending.ptr());
  if (done == nullptr) {
    if (!operation->finished()) give_up(*self.state->engine, operation);
    return -1;
  }
  Py_DECREF(done);
  return 1;
}

// Runs the call if it can: 1 done, 0 not the fast case, -1 an exception is set.
int try_fast(FastCall& self, const Given& given, const Operands& operands) {
  State& state = *self.state;
  if (state.forks_seen != forks.load(std::memory_order_relaxed)) return 0;
  const bool reached = has_direct(state.collective) && operands.bytes > kLineBytes &&
                       operands.in == operands.out &&
                       state.engine->outboxes().in_room(operands.out);
  const Direct* const direct =
      reached ? chosen_direct(state, given.root, operands.out, operands.bytes) : nullptr;
  if (reached && direct == nullptr) return 0;
  const std::shared_ptr<Executor>* executor =
      direct != nullptr ? &direct->executor : chosen(state, given.root, operands.bytes);
  if (executor == nullptr) return 0;
  const bool headed = state.heads_by != nullptr;
  const auto* const head_executor =
      headed ? chosen(*state.heads_by, given.root, state.head_words * sizeof(int64_t)) : nullptr;
  if (headed && head_executor == nullptr) return 0;
  const auto now = Clock::now();
  // Taken out, because another thread may call while this one waits without the GIL.
  std::shared_ptr<Operation> mine =
      state.spare ? std::move(state.spare) : std::make_shared<Operation>();
  prepare(*mine, *executor, operands, state.timeout_s, now);
  mine->array = direct != nullptr ? direct->array : nullptr;
  mine->array_offset = direct != nullptr ? direct->offset : 0;
  if (direct != nullptr) mine->call.plan ^= direct->array->mark(direct->offset);
  std::shared_ptr<Head> head;
  try {
    if (headed) head = send_head(state, *head_executor, given, operands.x, now);
    run(*state.engine, mine, operands.bytes, now);
  } catch (const Error&) {
    return 0;  // the group is broken or closed: the method says how
  }
  if (!finished_well(*mine)) return finish_slowly(self, mine);
  state.spare = std::move(mine);
  state.spare_head = std::move(head);
  return 1;
}

PyObject* fast_vectorcall(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  auto& self = *reinterpret_cast<FastCall*>(object);
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  int done = 0;
  PyObject* result = Py_None;
  if (self.state->collective == Collective::kBarrier) {
    if (count == 0 && names == nullptr) done = try_fast(self, {}, {});
  } else if (const auto given = given_by(*self.state, args, count, names)) {
    if (const auto operands = operands_of(*self.state, *given)) {
      result = operands->result;
      done = try_fast(self, *given, *operands);
    }
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
  std::destroy_at(&reinterpret_cast<FastCall*>(object)->state);
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

// None where arrays cannot be read (array_reader.h).
nb::object fast_call(std::shared_ptr<Engine> engine, int collective, nb::object slow,
                     nb::object finish, nb::list descrs, nb::object sample, uintptr_t address) {
  auto state = std::make_shared<State>();
  state->arrays.learn_arrays(descrs, sample, address);
  if (!state->arrays.usable()) return nb::none();
  state->engine = std::move(engine);
  state->collective = static_cast<Collective>(collective);
  PyTypeObject* type = fast_call_type();
  auto* self = PyObject_GC_New(FastCall, type);
  if (self == nullptr) throw nb::python_error();
  self->call = fast_vectorcall;
  self->slow = slow.release().ptr();
  self->finish = finish.release().ptr();
  new (&self->state) std::shared_ptr<State>(std::move(state));
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

// From now on tensors are taken over too.
void learn_tensors(nb::handle object, nb::handle tensor_type, nb::handle exchange) {
  checked(object).state->arrays.learn_tensors(tensor_type, exchange);
}

// Heads of so many words travel ahead of this scatter, by the plans of that broadcast.
void send_heads_by(nb::handle scatter, nb::handle broadcast, size_t words) {
  FastCall& self = checked(scatter);
  self.state->heads_by = checked(broadcast).state;
  self.state->head_words = words;
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
  module.def("send_heads_by", &send_heads_by, nb::arg("scatter"), nb::arg("broadcast"),
             nb::arg("words"),
             nb::sig("def send_heads_by(scatter: object, broadcast: object, words: int) -> None"));
  module.def("learn_tensors", &learn_tensors, nb::arg("fast_call"), nb::arg("tensor_type"),
             nb::arg("exchange"),
             nb::sig("def learn_tensors(fast_call: object, tensor_type: object, "
                     "exchange: object) -> None"));
}

}  // namespace commute::bindings
