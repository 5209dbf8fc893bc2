// SPDX-License-Identifier: Apache-2.0
// A server with two shards and several workers as threads, over both kinds of channels: values,
// broken channels, a worker that never reads, the end. For the sanitizers above all.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <thread>

#include "check.h"
#include "store/endpoint.h"
#include "store/server.h"

using namespace commute;
using namespace std::chrono_literals;

namespace {

constexpr uint32_t kShards = 2;

struct Job {
  Job(uint32_t workers, bool shared) : server({workers, 0, kShards, kShards, 16}), shared(shared) {
    for (uint32_t worker = 0; worker < workers; ++worker) {
      endpoints.push_back(
          std::make_unique<Endpoint>(Client::Settings{worker, 1, kShards, Planted::kNone}));
      for (uint32_t shard = 0; shard < kShards; ++shard) connect(worker, shard);
    }
  }

  void connect(uint32_t worker, uint32_t shard) {
    int ends[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    int segment = -1;
    if (shared)
      segment = ::fcntl(Segment::create(SharedChannel::segment_bytes()).fd(), F_DUPFD_CLOEXEC, 0);
    server.add_channel(shard, ends[0], segment < 0 ? -1 : ::dup(segment));
    endpoints[worker]->add_channel(int(shard), ends[1], segment);
  }

  // Waits, and mends what breaks.
  void finish(uint32_t worker, uint64_t call) {
    while (!endpoints[worker]->wait(call, Endpoint::Clock::now() + 100ms))
      for (const int shard : endpoints[worker]->broken()) connect(worker, uint32_t(shard));
  }

  Server server;
  const bool shared;
  std::vector<std::unique_ptr<Endpoint>> endpoints;
};

TableSpec floats(uint64_t count, int32_t staleness) {
  TableSpec spec;
  spec.count = count;
  spec.staleness = staleness;
  return spec;
}

uint32_t declare(Job& job, uint32_t worker, const std::string& name, const TableSpec& spec) {
  Endpoint& endpoint = *job.endpoints[worker];
  job.finish(worker, endpoint.call(Endpoint::Then::kReturn, [&](Client& client) {
    return client.declare_table(name, spec, spec.describe());
  }));
  job.finish(worker, endpoint.call(Endpoint::Then::kReturn,
                                   [&](Client& client) { return client.declare(name, spec, {}); }));
  return endpoint.look([&](const Client& client) { return client.table_of(name)->table; });
}

template <class Work>
void on_threads(uint32_t workers, Work work) {
  std::vector<std::thread> threads;
  for (uint32_t worker = 0; worker < workers; ++worker)
    threads.emplace_back([worker, &work] { work(worker); });
  for (auto& thread : threads) thread.join();
}

void rounds(bool shared, bool breaking) {
  constexpr uint32_t kWorkers = 3;
  constexpr size_t kCount = 50'000;  // several chunks
  Job job(kWorkers, shared);
  on_threads(kWorkers, [&](uint32_t worker) {
    const uint32_t table = declare(job, worker, "t", floats(kCount, 0));
    std::vector<float> gradient(kCount, float(worker + 1)), out(kCount);
    for (int round = 1; round <= 20; ++round) {
      Endpoint& endpoint = *job.endpoints[worker];
      const uint64_t call = endpoint.call(Endpoint::Then::kReturn, [&](Client& client) {
        return client.push_pull(table, std::as_bytes(std::span(gradient)), nullptr,
                                reinterpret_cast<std::byte*>(out.data()));
      });
      if (breaking && round % 7 == int(worker)) job.connect(worker, uint32_t(round) % kShards);
      job.finish(worker, call);
      CHECK_EQ(out.front(), float(6 * round));
      CHECK_EQ(out.back(), float(6 * round));
    }
  });
}

TEST(workers_in_step_over_shared_memory) {
  rounds(true, false);
}

TEST(workers_in_step_over_sockets) {
  rounds(false, false);
}

TEST(channels_that_are_replaced_in_the_middle) {
  rounds(true, true);
  rounds(false, true);
}

// One thread waits, another pushes without waiting, a third reads: one endpoint.
TEST(several_threads_share_an_endpoint) {
  Job job(1, true);
  const uint32_t table = declare(job, 0, "t", floats(100'000, -1));
  Endpoint& endpoint = *job.endpoints[0];
  on_threads(3, [&](uint32_t thread) {
    std::vector<float> array(100'000, 1);
    const auto then = thread == 1 ? Endpoint::Then::kBackground : Endpoint::Then::kReturn;
    for (int i = 0; i < 20; ++i) {
      const uint64_t call = endpoint.call(then, [&](Client& client) {
        const Bytes bytes = std::as_bytes(std::span(array));
        auto copy = std::make_shared<const std::vector<std::byte>>(bytes.begin(), bytes.end());
        if (thread < 2) return client.push(table, Bytes(*copy), copy, false);
        return client.pull(table, reinterpret_cast<std::byte*>(array.data()));
      });
      if (thread != 1) job.finish(0, call);
    }
  });
  CHECK(endpoint.wait_flushed(Endpoint::Clock::now() + 60s));
  std::vector<float> out(100'000);
  job.finish(0, endpoint.call(Endpoint::Then::kReturn, [&](Client& client) {
    return client.pull(table, reinterpret_cast<std::byte*>(out.data()));
  }));
  CHECK_EQ(out.back(), 40.0f);
}

// A client that asks and never reads is not served any more; the other one is.
TEST(beside_a_client_that_never_reads) {
  for (const bool shared : {true, false}) {
    Job job(1, shared);
    const uint32_t table = declare(job, 0, "t", floats(300'000, -1));
    int ends[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    job.server.add_channel(0, ends[0], -1);
    StoreHeader pull;
    pull.kind = StoreKind::kPull;
    pull.incarnation = 1;
    pull.table = table;
    for (int i = 0; i < 100'000; ++i)
      if (::send(ends[1], &pull, sizeof pull, MSG_NOSIGNAL) < 0) break;
    std::vector<float> gradient(300'000, 1), out(300'000);
    for (int i = 1; i <= 20; ++i) {
      job.finish(0, job.endpoints[0]->call(Endpoint::Then::kReturn, [&](Client& client) {
        return client.push_pull(table, std::as_bytes(std::span(gradient)), nullptr,
                                reinterpret_cast<std::byte*>(out.data()));
      }));
      CHECK_EQ(out.back(), float(i));
    }
    ::close(ends[1]);
  }
}

TEST(garbage_closes_its_channel_only) {
  Job job(1, true);
  const uint32_t table = declare(job, 0, "t", floats(10, -1));
  int ends[2];
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  job.server.add_channel(0, ends[0], -1);
  const std::string garbage(1000, 'x');
  CHECK(::send(ends[1], garbage.data(), garbage.size(), MSG_NOSIGNAL) > 0);
  char byte;
  CHECK(::recv(ends[1], &byte, 1, 0) <= 0);
  ::close(ends[1]);
  CHECK_EQ(job.server.counts().refused, uint64_t{1});
  std::vector<float> out(10);
  job.finish(0, job.endpoints[0]->call(Endpoint::Then::kReturn, [&](Client& client) {
    return client.pull(table, reinterpret_cast<std::byte*>(out.data()));
  }));
}

TEST(a_closed_server_breaks_the_channel_and_a_failure_ends_waiting) {
  Job job(2, true);
  const TableSpec spec = floats(10, 0);
  uint32_t table = 0;
  on_threads(2, [&](uint32_t worker) {
    const uint32_t declared = declare(job, worker, "t", spec);
    if (worker == 0) table = declared;
  });
  std::vector<float> gradient(10), out(10);
  std::thread waiting([&] {
    bool raised = false;
    try {
      const uint64_t call = job.endpoints[0]->call(Endpoint::Then::kReturn, [&](Client& client) {
        return client.push_pull(table, std::as_bytes(std::span(gradient)), nullptr,
                                reinterpret_cast<std::byte*>(out.data()));
      });
      job.endpoints[0]->wait(call, Endpoint::Clock::time_point::max());
    } catch (const Error& error) {
      raised = error.failure().code == FailureCode::kPeerLost;
    }
    CHECK(raised);
  });
  job.endpoints[0]->fail({FailureCode::kPeerLost, 2, -1, 0, "the server died"});
  waiting.join();
  job.server.on_left(0);
  CHECK(!job.server.wait_until_over(1ms));
  job.server.on_lost(1);
  CHECK(job.server.wait_until_over(10s));
  job.server.close();
}

}  // namespace
