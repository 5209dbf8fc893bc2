// SPDX-License-Identifier: Apache-2.0
// The engine for Python. Addresses are plain integers: the wrapper checks arrays and keeps them
// alive until the operation has finished. The GIL is released in `wait`, `withdraw` and `close`,
// which may block.
#include "engine.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "bindings.h"
#include "memory_link.h"
#include "shared_link.h"
#include "tcp_link.h"

namespace nb = nanobind;

namespace commute::bindings {
namespace {

constexpr const char* kFailureSignature =
    "def failure(self, /) -> tuple[int, int, int, int, str] | None";
using Release = nb::call_guard<nb::gil_scoped_release>;

nb::object failure_tuple(const Failure& failure) {
  if (failure.code == FailureCode::kNone) return nb::none();
  return nb::make_tuple(static_cast<int>(failure.code), failure.rank, failure.by, failure.operation,
                        failure.text);
}

std::shared_ptr<Operation> new_operation(int dtype, uint64_t count, uintptr_t in, uintptr_t out,
                                         double timeout) {
  auto operation = std::make_shared<Operation>();
  operation->call.dtype = static_cast<Dtype>(dtype);
  operation->call.count = count;
  operation->in = reinterpret_cast<const std::byte*>(in);
  operation->out = reinterpret_cast<std::byte*>(out);
  operation->timeout_s = timeout;
  operation->deadline = after(Clock::now(), timeout);
  return operation;
}

std::shared_ptr<Operation> submit(Engine& engine, std::shared_ptr<Executor> executor, uintptr_t in,
                                  uintptr_t out, uint64_t count, int dtype, int reduce_op,
                                  bool mean, double timeout, bool background,
                                  const Combine* combine, std::shared_ptr<SharedArray> array,
                                  size_t array_offset) {
  auto operation = new_collective(std::move(executor), in, out, count, dtype, reduce_op, mean,
                                  timeout, combine, std::move(array), array_offset);
  engine.submit(operation, background);
  return operation;
}

std::shared_ptr<Operation> post(Engine& engine, bool sends, int peer, uintptr_t address,
                                uint64_t count, int dtype, double timeout, bool background) {
  auto operation = new_operation(dtype, count, address, address, timeout);
  operation->call.collective = sends ? Collective::kSend : Collective::kRecv;
  operation->peer = peer;
  engine.submit(operation, background);
  return operation;
}

nb::list records(const Engine& engine) {
  static constexpr const char* kStates[] = {"queued", "running", "done", "failed"};
  nb::list rows;
  for (const Record& record : engine.records())
    rows.append(nb::make_tuple(
        record.number, record.sequence, name(record.call.collective), name(record.call.dtype),
        record.call.count, record.call.mean ? "mean" : name(record.call.reduce_op),
        record.call.root, record.peer, record.algorithm, kStates[static_cast<int>(record.state)],
        record.begun_ns, record.ended_ns));
  return rows;
}

// Every engine reads the outbox of every other; they are threads of one process.
void attach_outboxes(const std::vector<std::shared_ptr<Engine>>& engines, size_t slot_bytes,
                     size_t room_bytes) {
  std::vector<Outboxes*> outboxes;
  for (const auto& engine : engines)
    outboxes.push_back(&engine->share_memory(slot_bytes, room_bytes));
  for (size_t a = 0; a < engines.size(); ++a)
    for (size_t b = 0; b < engines.size(); ++b)
      if (a != b)
        outboxes[a]->attach(int(b), outboxes[b]->own(), ::dup(engines[b]->poller()->event_fd()));
}

// Engines for `ranks` threads of this process, joined by memory links and outboxes.
std::vector<std::shared_ptr<Engine>> memory_engines(int ranks, size_t capacity_bytes,
                                                    size_t slot_bytes, size_t room_bytes,
                                                    uint32_t group) {
  std::vector<std::shared_ptr<Engine>> engines;
  std::vector<std::shared_ptr<Poller>> pollers;
  for (int rank = 0; rank < ranks; ++rank) {
    pollers.push_back(std::make_shared<Poller>());
    engines.push_back(
        std::make_shared<Engine>(Engine::Settings{rank, ranks, group, 1}, pollers.back()));
  }
  attach_outboxes(engines, slot_bytes, room_bytes);
  for (int a = 0; a < ranks; ++a) {
    for (int b = a + 1; b < ranks; ++b) {
      auto link = memory_link_pair(pollers[size_t(a)], pollers[size_t(b)], capacity_bytes);
      engines[size_t(a)]->add_link(b, std::move(link.first));
      engines[size_t(b)]->add_link(a, std::move(link.second));
      auto pair = memory_link_pair(pollers[size_t(a)], pollers[size_t(b)], capacity_bytes);
      engines[size_t(a)]->add_pair_link(b, std::move(pair.first));
      engines[size_t(b)]->add_pair_link(a, std::move(pair.second));
    }
  }
  return engines;
}

// In memory there is no health thread: a failure of one engine is told to the others directly.
void tell(Engine& engine, const std::vector<std::shared_ptr<Engine>>& others) {
  std::vector<std::weak_ptr<Engine>> listeners(others.begin(), others.end());
  engine.on_failure([listeners](const Failure& failure) {
    for (const auto& listener : listeners)
      if (const auto other = listener.lock()) other->fail(failure);
  });
}

void bind_error(nb::module_& module) {
  static nb::object core_error;
  const auto name = nb::cast<std::string>(module.attr("__name__")) + ".CoreError";
  core_error = nb::steal(PyErr_NewException(name.c_str(), nullptr, nullptr));
  module.attr("CoreError") = core_error;
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      PyErr_SetObject(core_error.ptr(), failure_tuple(error.failure()).ptr());
    } catch (const std::system_error& error) {
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
    }
  });
}

void bind_operation(nb::module_& module) {
  nb::class_<Operation>(module, "Operation")
      .def_prop_ro("finished", &Operation::finished)
      .def_prop_ro("sequence", [](const Operation& operation) { return operation.sequence; })
      .def_prop_ro(
          "failure", [](const Operation& operation) { return failure_tuple(operation.failure); },
          nb::for_getter(nb::sig(kFailureSignature)))
      .def("describe", [](const Operation& operation) { return operation.call.describe(); });
  nb::class_<Executor>(module, "Executor");
}

// Takes ownership of both descriptors. `first`: whether this side made the segment.
std::unique_ptr<Link> shared_link(Engine& engine, int peer, int socket, int segment, bool first) {
  try {
    auto memory = std::make_shared<Segment>(Segment::map(segment, SharedLink::segment_bytes()));
    return std::make_unique<SharedLink>(std::move(memory), first, socket, engine.poller(),
                                        engine.doorbell(peer));
  } catch (...) {
    ::close(socket);
    throw;
  }
}

void bind_links(nb::class_<Engine>& engine) {
  engine
      .def(
          "add_tcp_link",
          [](Engine& self, int peer, int fd) {
            self.add_link(peer, std::make_unique<TcpLink>(fd, self.poller()));
          },
          nb::arg("peer"), nb::arg("fd"))
      .def(
          "add_tcp_pair_link",
          [](Engine& self, int peer, int fd) {
            self.add_pair_link(peer, std::make_unique<TcpLink>(fd, self.poller()));
          },
          nb::arg("peer"), nb::arg("fd"))
      .def(
          "add_shared_link",
          [](Engine& self, int peer, int socket, int segment, bool first, bool pair) {
            auto link = shared_link(self, peer, socket, segment, first);
            pair ? self.add_pair_link(peer, std::move(link)) : self.add_link(peer, std::move(link));
          },
          nb::arg("peer"), nb::arg("socket"), nb::arg("segment"), nb::arg("first"), nb::arg("pair"))
      .def(
          "share_memory",
          [](Engine& self, size_t slot_bytes, size_t room_bytes) {
            return self.share_memory(slot_bytes, room_bytes).own()->fd();
          },
          nb::arg("slot_bytes"), nb::arg("room_bytes"))
      .def(
          "attach_outbox",
          [](Engine& self, int peer, int segment_fd, int event_fd) {
            self.attach_outbox(peer, segment_fd, event_fd);
          },
          nb::arg("peer"), nb::arg("segment_fd"), nb::arg("event_fd"))
      .def("can_fetch", [](const Engine& self) { return self.outboxes().can_fetch(); })
      .def_prop_ro("event_fd", [](const Engine& self) { return self.poller()->event_fd(); });
}

void bind_calls(nb::class_<Engine>& engine) {
  engine.def("bind", &Engine::bind, nb::arg("plan"), nb::arg("tile_bytes"), nb::keep_alive<0, 1>())
      .def("submit", &submit, nb::arg("executor"), nb::arg("in_address"), nb::arg("out_address"),
           nb::arg("count"), nb::arg("dtype"), nb::arg("reduce_op"), nb::arg("mean"),
           nb::arg("timeout"), nb::arg("background"), nb::arg("combine").none() = nb::none(),
           nb::arg("array") = nb::none(), nb::arg("array_offset") = 0)
      .def("post", &post, nb::arg("sends"), nb::arg("peer"), nb::arg("address"), nb::arg("count"),
           nb::arg("dtype"), nb::arg("timeout"), nb::arg("background"))
      .def(
          "wait",
          [](Engine& self, const std::shared_ptr<Operation>& operation, double seconds) {
            return self.wait(operation, after(Clock::now(), seconds));
          },
          nb::arg("operation"), nb::arg("seconds"), Release())
      .def("withdraw", &Engine::withdraw, nb::arg("receive"), Release())
      .def("may_spin", &Engine::may_spin, nb::arg("yes"))
      .def("begin_anew", &Engine::begin_anew, nb::arg("epoch"), nb::arg("near"));
}

void bind_state(nb::class_<Engine>& engine) {
  engine
      .def(
          "fail",
          [](Engine& self, int code, int rank, int by, uint64_t operation, std::string text) {
            self.fail({static_cast<FailureCode>(code), rank, by, operation, std::move(text)});
          },
          nb::arg("code"), nb::arg("rank"), nb::arg("by"), nb::arg("operation"), nb::arg("text"),
          Release())
      .def_prop_ro(
          "failure", [](const Engine& self) { return failure_tuple(self.failure()); },
          nb::for_getter(nb::sig(kFailureSignature)))
      .def_prop_ro("waiting_for", &Engine::waiting_for)
      .def_prop_ro("messages", &Engine::messages)
      .def_prop_ro("rank", &Engine::rank)
      .def("has_left", &Engine::has_left, nb::arg("rank"))
      .def("records", &records, nb::sig("def records(self, /) -> list[tuple[object, ...]]"))
      .def(
          "close",
          [](Engine& self, double linger_seconds) {
            self.close(std::chrono::milliseconds(static_cast<int64_t>(linger_seconds * 1000)));
          },
          nb::arg("linger_seconds"), Release());
}

}  // namespace

std::shared_ptr<Operation> new_collective(std::shared_ptr<Executor> executor, uintptr_t in,
                                          uintptr_t out, uint64_t count, int dtype, int reduce_op,
                                          bool mean, double timeout, const Combine* combine,
                                          std::shared_ptr<SharedArray> array, size_t array_offset) {
  if (!is_dtype(uint64_t(dtype)) || !is_reduce_op(uint64_t(reduce_op)) ||
      !reduces(static_cast<Dtype>(dtype), static_cast<ReduceOp>(reduce_op)) ||
      (combine != nullptr) != (static_cast<ReduceOp>(reduce_op) == ReduceOp::kCustom))
    throw std::invalid_argument("there is no such reduction");
  auto operation = new_operation(dtype, count, in, out, timeout);
  const Plan& plan = executor->plan();
  if (plan.direct != (array != nullptr))
    throw std::invalid_argument("direct plans, and only they, need an array that all ranks reach");
  operation->call.collective = plan.collective;
  operation->call.reduce_op = static_cast<ReduceOp>(reduce_op);
  operation->call.root = plan.root;
  operation->call.plan = static_cast<uint32_t>(plan.hash);
  operation->call.mean = mean;
  operation->combine = combine;
  if (combine != nullptr) operation->call.plan ^= combine->fingerprint();
  if (array) operation->call.plan ^= array->mark(array_offset);
  operation->array = std::move(array);
  operation->array_offset = array_offset;
  operation->executor = std::move(executor);
  return operation;
}

void bind_engine(nb::module_& module) {
  bind_error(module);
  bind_operation(module);
  nb::class_<Engine> engine(module, "Engine");
  engine.def(
      "__init__",
      [](Engine* self, int rank, int ranks, uint32_t group, uint32_t epoch) {
        new (self) Engine(Engine::Settings{rank, ranks, group, epoch}, std::make_shared<Poller>());
      },
      nb::arg("rank"), nb::arg("ranks"), nb::arg("group"), nb::arg("epoch"));
  bind_links(engine);
  bind_calls(engine);
  bind_state(engine);
  module.def("link_segment", [] { return new_segment(SharedLink::segment_bytes()); });
  module.def("tell", &tell, nb::arg("engine"), nb::arg("others"));
  module.def("memory_engines", &memory_engines, nb::arg("ranks"), nb::arg("capacity_bytes"),
             nb::arg("slot_bytes"), nb::arg("room_bytes"), nb::arg("group") = 0);
}

}  // namespace commute::bindings
