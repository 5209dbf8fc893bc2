// SPDX-License-Identifier: Apache-2.0
// A collective that is bound once and started again and again: start and wait without a Python
// frame.
//
// One operation object is used for all starts. It is under way from `start` until `wait` has seen
// its end; the arrays are kept alive with this object, and handed to Python (`park`) should it go
// while an operation is under way. A kernel begins on the caller's thread; everything else is left
// to the progress thread, so that the caller can compute meanwhile. Errors are Python's to raise:
// `refuse` for a call at the wrong time, `finish` for what went wrong on the way.
//
// The GIL is held for the first kHoldGil of a wait for a small array, as in fast_call.cc.
#include <memory>
#include <utility>

#include <nanobind/stl/shared_ptr.h>

#include "bindings.h"
#include "engine.h"

namespace nb = nanobind;

namespace commute::bindings {
namespace {

class Persistent {
 public:
  // finish(operation, timeout), refuse(started), park(operation, keep): see above.
  Persistent(std::shared_ptr<Engine> engine, std::shared_ptr<Operation> operation,
             nb::object finish, nb::object refuse, nb::object park, nb::object keep,
             nb::object result)
      : engine_(std::move(engine)),
        operation_(std::move(operation)),
        finish_(std::move(finish)),
        refuse_(std::move(refuse)),
        park_(std::move(park)),
        keep_(std::move(keep)),
        result_(std::move(result)),
        small_(operation_->call.count * item_bytes(operation_->call.dtype) <= kHeldBytes) {}

  ~Persistent() {
    if (!under_way_ || operation_->finished()) return;
    try {
      park_(nb::cast(operation_), keep_);
    } catch (nb::python_error&) {  // no memory for it: rather let the arrays live for ever
      keep_.release();
    }
  }
  Persistent(const Persistent&) = delete;
  Persistent& operator=(const Persistent&) = delete;

  void start() {
    if (under_way_ || forks_seen_ != fork_count()) refuse_(true);
    operation_->state.store(Operation::State::kQueued, std::memory_order_relaxed);
    const auto now = Clock::now();
    operation_->deadline = after(now, operation_->timeout_s);
    try {
      engine_->begin(operation_, now);
    } catch (const Error& error) {
      operation_->fail(error.failure());
      refuse_(true);  // the group is broken or closed: it says how
    }
    started_ = under_way_ = true;
  }

  nb::object wait(const nb::object& timeout) {
    if (!started_) refuse_(false);
    if (!operation_->finished()) wait_briefly(timeout.is_none());
    if (operation_->state.load(std::memory_order_acquire) != Operation::State::kDone) {
      try {
        finish_(nb::cast(operation_), timeout);
      } catch (...) {
        under_way_ = under_way_ && !operation_->finished();
        throw;
      }
    }
    under_way_ = false;
    return result_;
  }

  bool done() {
    if (under_way_ && !operation_->finished() && operation_->executor->kernel())
      engine_->wait(operation_, Clock::now());
    return operation_->finished();
  }

  std::shared_ptr<Operation> operation() const { return operation_; }
  bool under_way() const { return under_way_; }

 private:
  void wait_briefly(bool patient) {
    if (forks_seen_ != fork_count()) return;  // `finish` explains
    const auto now = Clock::now();
    if (small_ && engine_->wait(operation_, now + kHoldGil)) return;
    if (!patient) return;
    const nb::gil_scoped_release released;
    engine_->wait(operation_, now + kSlice);
  }

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Operation> operation_;
  const nb::object finish_, refuse_, park_;
  nb::object keep_;
  const nb::object result_;
  const bool small_;
  const int forks_seen_ = fork_count();
  bool started_ = false;
  bool under_way_ = false;
};

void make(Persistent* self, std::shared_ptr<Engine> engine, std::shared_ptr<Executor> executor,
          uintptr_t in, uintptr_t out, uint64_t count, int dtype, int reduce_op, bool mean,
          double timeout, const Combine* combine, std::shared_ptr<SharedArray> array,
          size_t array_offset, nb::object finish, nb::object refuse, nb::object park,
          nb::object keep, nb::object result) {
  auto operation = new_collective(std::move(executor), in, out, count, dtype, reduce_op, mean,
                                  timeout, combine, std::move(array), array_offset);
  new (self) Persistent(std::move(engine), std::move(operation), std::move(finish),
                        std::move(refuse), std::move(park), std::move(keep), std::move(result));
}

}  // namespace

void bind_persistent(nb::module_& module) {
  nb::class_<Persistent>(module, "Persistent")
      .def("__init__", &make, nb::arg("engine"), nb::arg("executor"), nb::arg("in_address"),
           nb::arg("out_address"), nb::arg("count"), nb::arg("dtype"), nb::arg("reduce_op"),
           nb::arg("mean"), nb::arg("timeout"), nb::arg("combine").none(), nb::arg("array").none(),
           nb::arg("array_offset"), nb::arg("finish"), nb::arg("refuse"), nb::arg("park"),
           nb::arg("keep"), nb::arg("result").none())
      .def("start", &Persistent::start)
      .def("wait", &Persistent::wait, nb::arg("timeout") = nb::none())
      .def("done", &Persistent::done)
      .def_prop_ro("operation", &Persistent::operation)
      .def_prop_ro("under_way", &Persistent::under_way);
}

}  // namespace commute::bindings
