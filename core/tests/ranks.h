// SPDX-License-Identifier: Apache-2.0
// A group whose ranks are threads of one process, and plans written by hand.
//
//   Ranks ranks(3, kind);
//   ranks.run([&](int rank, Engine& engine) {
//     auto executor = engine.bind(plan_of(rank, 3, {{...}}), 64);
//     CHECK(finish(engine, submit(engine, executor, in, out, count)));
//   });
//
// Every wait has a deadline far beyond what it takes: a hang is a failed test.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../engine.h"
#include "link_kinds.h"

namespace commute::check {

using namespace std::chrono_literals;
constexpr auto kDeadline = 20s;

// What a test waits for outside of any engine.
inline bool eventually(const std::function<bool()>& truth) {
  const auto end = Clock::now() + kDeadline;
  while (!truth()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

class Ranks {
 public:
  static constexpr size_t kSlotBytes = 4096;
  static constexpr size_t kRoomBytes = 1 << 20;

  Ranks(int size, const LinkKind& kind) {
    for (int rank = 0; rank < size; ++rank) {
      pollers_.push_back(std::make_shared<Poller>());
      engines_.push_back(
          std::make_unique<Engine>(Engine::Settings{rank, size, 9, 1}, pollers_.back()));
    }
    attach_outboxes();
    for (int a = 0; a < size; ++a) {
      for (int b = a + 1; b < size; ++b) connect(a, b, kind);
      // As the health thread does between processes.
      (*this)[a].on_failure([this, a](const Failure& failure) {
        for (int b = 0; b < this->size(); ++b)
          if (a != b) (*this)[b].fail(failure);
      });
    }
  }

  void attach_outboxes() {
    std::vector<Outboxes*> outboxes;
    for (const auto& engine : engines_)
      outboxes.push_back(&engine->share_memory(kSlotBytes, kRoomBytes));
    for (size_t a = 0; a < outboxes.size(); ++a)
      for (size_t b = 0; b < outboxes.size(); ++b)
        if (a != b) outboxes[a]->attach(int(b), outboxes[b]->own(), ::dup(pollers_[b]->event_fd()));
  }

  int size() const { return static_cast<int>(engines_.size()); }
  Engine& operator[](int rank) { return *engines_[size_t(rank)]; }

  // `body` on a thread per rank; an exception is a failed check.
  void run(const std::function<void(int, Engine&)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank)
      threads.emplace_back([&, rank] {
        try {
          body(rank, (*this)[rank]);
        } catch (const std::exception& error) {
          fail("rank", rank, error.what());
        }
      });
    for (auto& thread : threads) thread.join();
  }

 private:
  void connect(int a, int b, const LinkKind& kind) {
    auto link = kind.make(pollers_[size_t(a)], pollers_[size_t(b)]);
    (*this)[a].add_link(b, std::move(link.first));
    (*this)[b].add_link(a, std::move(link.second));
    auto pair = kind.make(pollers_[size_t(a)], pollers_[size_t(b)]);
    (*this)[a].add_pair_link(b, std::move(pair.first));
    (*this)[b].add_pair_link(a, std::move(pair.second));
  }

  std::vector<std::shared_ptr<Poller>> pollers_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

// --- plans ---

inline Instruction instruction(Op op) {
  Instruction made{};
  made.op = op;
  made.dep_lane = kNoLane;
  made.peer = made.peer2 = -1;
  made.src_space = made.dst_space = Space::kNone;
  return made;
}

inline Instruction send(int peer, Space space, uint32_t chunk, uint16_t count = 1) {
  Instruction made = instruction(Op::kSend);
  made.peer = peer;
  made.src_space = space;
  made.src = chunk;
  made.count = count;
  return made;
}

inline Instruction recv(int peer, Space space, uint32_t chunk, uint16_t count = 1) {
  Instruction made = instruction(Op::kRecv);
  made.peer = peer;
  made.dst_space = space;
  made.dst = chunk;
  made.count = count;
  return made;
}

inline Instruction move(Op op, Space from, uint32_t src, Space to, uint32_t dst,
                        uint16_t count = 1) {
  Instruction made = instruction(op);
  made.src_space = from;
  made.src = src;
  made.dst_space = to;
  made.dst = dst;
  made.count = count;
  return made;
}

inline Instruction recv_reduce(int peer, Space from, Space to, uint32_t chunk, uint16_t count = 1) {
  Instruction made = move(Op::kRecvReduce, from, chunk, to, chunk, count);
  made.peer = peer;
  return made;
}

inline Instruction recv_reduce_send(int peer, int peer2, Space space, uint32_t chunk,
                                    uint16_t count = 1) {
  Instruction made = move(Op::kRecvReduceSend, space, chunk, space, chunk, count);
  made.peer = peer;
  made.peer2 = peer2;
  return made;
}

inline Instruction signal(uint32_t counter) {
  Instruction made = instruction(Op::kSignal);
  made.arg = counter;
  return made;
}

inline Instruction wait_for(int peer, uint32_t counter, uint32_t lag, uint32_t times) {
  Instruction made = instruction(Op::kWait);
  made.peer = peer;
  made.arg = counter | lag << 16;
  made.src = times;
  return made;
}

inline Instruction after(Instruction made, uint8_t lane, uint32_t step) {
  made.dep_lane = lane;
  made.dep_step = step;
  return made;
}

struct Shape {
  Collective collective = Collective::kAllreduce;
  uint32_t chunks = 1;
  uint32_t in = 1;  // blocks
  uint32_t out = 1;
  uint32_t scratch = 0;
  uint32_t outbox = 0;
  int root = 0;
  uint64_t hash = 1;
};

using Lanes = std::vector<std::vector<Instruction>>;

inline Plan plan_of(int rank, int ranks, const Shape& shape, const Lanes& lanes) {
  Plan plan;
  plan.collective = shape.collective;
  plan.algorithm = "by-hand";
  plan.rank = rank;
  plan.ranks = ranks;
  plan.root = shape.root;
  plan.hash = shape.hash;
  plan.chunks = shape.chunks;
  const uint32_t blocks[kSpaces] = {shape.in, shape.out, shape.scratch, shape.outbox};
  std::copy(std::begin(blocks), std::end(blocks), std::begin(plan.blocks));
  plan.signals_per_tile.resize(size_t(ranks) * kSignals);
  for (size_t lane = 0; lane < lanes.size(); ++lane)
    for (Instruction step : lanes[lane]) {
      step.lane = static_cast<uint8_t>(lane);
      plan.code.push_back(step);
    }
  return plan;
}

// The kernel that reads the peers' own arrays; its plan only says what it stands for.
inline Plan fetch_of(int rank, int ranks, Collective collective, int root = 0) {
  const auto blocks = static_cast<uint32_t>(ranks);
  const uint32_t out = collective == Collective::kAlltoall ? blocks : 1;
  Plan plan = plan_of(rank, ranks, {collective, 1, blocks, out, 0, blocks, root}, {{}});
  plan.algorithm = "fetch";
  return plan;
}

// --- calls ---

inline std::shared_ptr<Operation> call_of(const std::shared_ptr<Executor>& executor, const void* in,
                                          void* out, uint64_t count, Dtype dtype = Dtype::kInt64) {
  auto operation = std::make_shared<Operation>();
  const Plan& plan = executor->plan();
  operation->call = {plan.collective,
                     dtype,
                     ReduceOp::kSum,
                     false,
                     plan.root,
                     static_cast<uint32_t>(plan.hash),
                     count};
  operation->in = static_cast<const std::byte*>(in);
  operation->out = static_cast<std::byte*>(out);
  operation->executor = executor;
  return operation;
}

inline std::shared_ptr<Operation> submit(Engine& engine, const std::shared_ptr<Executor>& executor,
                                         const void* in, void* out, uint64_t count,
                                         Dtype dtype = Dtype::kInt64, bool background = false) {
  auto operation = call_of(executor, in, out, count, dtype);
  engine.submit(operation, background);
  return operation;
}

// Waits as Python does: in slices of 100 ms. True once the operation has finished.
inline bool settled(Engine& engine, const std::shared_ptr<Operation>& operation) {
  const auto end = Clock::now() + kDeadline;
  while (!engine.wait(operation, Clock::now() + 100ms))
    if (Clock::now() > end) return false;
  return true;
}

inline bool done(const Operation& operation) {
  return operation.state.load() == Operation::State::kDone;
}

// Waits; true when the operation has succeeded.
inline bool finish(Engine& engine, const std::shared_ptr<Operation>& operation) {
  if (!settled(engine, operation)) return false;
  if (!done(*operation)) std::fprintf(stderr, "failed: %s\n", operation->failure.text.c_str());
  return done(*operation);
}

}  // namespace commute::check
