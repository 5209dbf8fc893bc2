// SPDX-License-Identifier: Apache-2.0
// What the tests of the engine share: plans for two ranks, and a rank whose peer is the test
// itself.
#pragma once

#include "ranks.h"

namespace commute::check {

using Array = std::vector<int64_t>;

constexpr size_t kTile = 64;
inline const LinkKind& kMemory = kLinkKinds[1];

inline bool says(const Failure& failure, const char* part) {
  if (failure.text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "\"%s\" does not say \"%s\"\n", failure.text.c_str(), part);
  return false;
}

// Broadcast from `root` between two ranks.
inline Plan broadcast(int rank, int root = 0, uint64_t hash = 1) {
  const Lanes lanes = {
      {rank == root ? send(1 - rank, Space::kOut, 0) : recv(1 - rank, Space::kOut, 0)}};
  return plan_of(rank, 2, {Collective::kBroadcast, 1, 1, 1, 0, 0, root, hash}, lanes);
}

// Rank 1 sends what rank 0 adds, then the sum comes back.
inline Plan allreduce(int rank, uint64_t hash = 2) {
  const Lanes lanes =
      rank == 0 ? Lanes{{recv_reduce(1, Space::kOut, Space::kOut, 0), send(1, Space::kOut, 0)}}
                : Lanes{{send(0, Space::kOut, 0), recv(0, Space::kOut, 0)}};
  return plan_of(rank, 2, {Collective::kAllreduce, 1, 1, 1, 0, 0, 0, hash}, lanes);
}

inline std::shared_ptr<Operation> post(Engine& engine, Collective collective, int peer,
                                       Array& array, Dtype dtype = Dtype::kInt64,
                                       bool background = false) {
  auto operation = std::make_shared<Operation>();
  operation->call.collective = collective;
  operation->call.dtype = dtype;
  operation->call.count = array.size();
  operation->peer = peer;
  operation->in = operation->out = reinterpret_cast<std::byte*>(array.data());
  engine.submit(operation, background);
  return operation;
}

// One rank whose only peer, rank 0, is the test itself, writing frames by hand.
struct RawPeer {
  explicit RawPeer(const LinkKind& kind) {
    auto link = kind.make(poller, engine.poller());
    auto pair = kind.make(poller, engine.poller());
    engine.add_link(0, std::move(link.second));
    engine.add_pair_link(0, std::move(pair.second));
    to_link = std::make_unique<Stream>(std::move(link.first));
    to_pair = std::make_unique<Stream>(std::move(pair.first));
  }

  FrameHeader header(const Operation& operation, const Array& payload) const {
    FrameHeader made{};
    made.set_call(operation.call);
    made.group = 9;
    made.epoch = 1;
    made.operation = operation.sequence;
    made.bytes = payload.size() * sizeof(int64_t);
    return made;
  }

  // On a thread of its own, as a narrow link takes a frame only while the engine reads it.
  static std::thread writer(Stream& stream, Poller& poller, FrameHeader header, Array payload) {
    return std::thread([&stream, &poller, header, payload] {
      stream.begin(header);
      const auto* bytes = reinterpret_cast<const char*>(payload.data());
      size_t sent = 0;
      CHECK(eventually([&] {
        try {
          poller.sleep(0);
          sent += stream.send(bytes + sent, header.bytes - sent);
          return sent == header.bytes && stream.header_sent();
        } catch (const LinkClosed&) {
          return true;  // the engine refused the frame
        }
      }));
      stream.end();
    });
  }
  std::thread send_frame(const FrameHeader& made, const Array& payload) {
    return writer(*to_link, *poller, made, payload);
  }

  std::shared_ptr<Poller> poller = std::make_shared<Poller>();
  Engine engine{{1, 2, 9, 1}, std::make_shared<Poller>()};
  std::unique_ptr<Stream> to_link;
  std::unique_ptr<Stream> to_pair;
};

}  // namespace commute::check
