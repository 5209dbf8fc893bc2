// SPDX-License-Identifier: Apache-2.0
// Small plans written by hand, run by threads as ranks over every kind of link, in lengths that cut
// badly. On the narrow link no element of 8 bytes arrives in one piece.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "ranks.h"

namespace {

using namespace commute;
using namespace commute::check;
using Array = std::vector<int64_t>;

constexpr size_t kLengths[] = {0, 1, 2, 3, 8, 9, 31, 64, 333};
constexpr size_t kTile = 64;  // bytes: eight elements, the smallest there is

// Element i of rank r's input; sums of them tell which ranks are in.
int64_t element(int rank, size_t i) {
  int64_t scale = 1;
  for (int r = 0; r < rank; ++r) scale *= 1000;
  return scale * static_cast<int64_t>(i % 300 + 1);
}

Array input(int rank, size_t count) {
  Array array(count);
  for (size_t i = 0; i < count; ++i) array[i] = element(rank, i);
  return array;
}

Array sum_of(int ranks, size_t count) {
  Array total(count);
  for (int rank = 0; rank < ranks; ++rank)
    for (size_t i = 0; i < count; ++i) total[i] += element(rank, i);
  return total;
}

// --- the chunk rule ---

// The table of tests/pure/plan/test_chunk.py: both sides cut alike.
TEST(chunks_are_cut_as_python_cuts_them) {
  struct Row {
    size_t elements, item_bytes, chunks;
    std::vector<size_t> bounds;
  };
  const Row table[] = {
      {0, 4, 1, {0, 0}},
      {0, 4, 4, {0, 0, 0, 0, 0}},
      {1, 4, 1, {0, 1}},
      {1, 4, 4, {0, 1, 1, 1, 1}},
      {3, 8, 8, {0, 3, 3, 3, 3, 3, 3, 3, 3}},
      {16, 4, 2, {0, 16, 16}},
      {17, 4, 2, {0, 16, 17}},
      {32, 4, 2, {0, 16, 32}},
      {33, 4, 2, {0, 32, 33}},
      {100, 4, 4, {0, 32, 64, 80, 100}},
      {100, 4, 3, {0, 48, 80, 100}},
      {100, 1, 3, {0, 64, 100, 100}},
      {1000, 2, 6, {0, 192, 352, 512, 672, 864, 1000}},
      {1000, 8, 7, {0, 144, 288, 432, 576, 720, 864, 1000}},
      {7, 64, 3, {0, 3, 5, 7}},
      {7, 128, 3, {0, 3, 5, 7}},
      {size_t{1} << 33, 1, 3, {0, 2863311552, 5726623104, 8589934592}},
  };
  for (const Row& row : table)
    for (size_t chunk = 0; chunk <= row.chunks; ++chunk)
      CHECK_EQ(chunk_bound(row.elements, row.item_bytes, row.chunks, chunk), row.bounds[chunk]);
}

// --- messages ---

LINK_TEST(broadcast_by_send_and_recv) {
  const Shape shape{Collective::kBroadcast, 3};
  Ranks ranks(2, kind);
  ranks.run([&](int rank, Engine& engine) {
    const Lanes lanes = rank == 0 ? Lanes{{send(1, Space::kOut, 0), send(1, Space::kOut, 1, 2)}}
                                  : Lanes{{recv(0, Space::kOut, 0), recv(0, Space::kOut, 1, 2)}};
    const auto executor = engine.bind(plan_of(rank, 2, shape, lanes), kTile);
    for (const size_t count : kLengths) {
      Array array = rank == 0 ? input(5, count) : Array(count);
      CHECK(finish(engine, submit(engine, executor, array.data(), array.data(), count)));
      CHECK(array == input(5, count));
    }
  });
}

// Every size of element, in a tile that holds many chunks and in tiles that hold one cache line.
LINK_TEST(elements_of_every_size_are_reduced_whole) {
  const Shape shape{Collective::kReduce, 4};
  const Dtype dtypes[] = {Dtype::kUint8, Dtype::kInt16, Dtype::kUint32, Dtype::kInt64};
  Ranks ranks(2, kind);
  ranks.run([&](int rank, Engine& engine) {
    const Lanes lanes = rank == 1 ? Lanes{{send(0, Space::kIn, 0, 4)}}
                                  : Lanes{{recv_reduce(1, Space::kOut, Space::kOut, 0, 4)}};
    for (const size_t tile : {kTile, size_t{1024}})
      for (const Dtype dtype : dtypes) {
        const auto executor = engine.bind(plan_of(rank, 2, shape, lanes), tile);
        const size_t bytes = 333 * item_bytes(dtype);
        std::vector<unsigned char> array(bytes);  // small numbers: no carry between bytes
        for (size_t i = 0; i < bytes; ++i)
          array[i] = static_cast<unsigned char>((rank + 1) * static_cast<int>(i % 40));
        CHECK(finish(engine, submit(engine, executor, array.data(), array.data(), 333, dtype)));
        for (size_t i = 0; i < bytes; ++i)
          CHECK_EQ(array[i], (rank == 0 ? 3 : 2) * static_cast<int>(i % 40));
      }
  });
}

// A chain of reductions 0 -> 1 -> 2 passed on as they arrive, then the result back to all.
Lanes chain(int rank) {
  if (rank == 0) return {{send(1, Space::kOut, 0, 2)}, {after(recv(2, Space::kOut, 0, 2), 0, 0)}};
  if (rank == 1)
    return {{recv_reduce_send(0, 2, Space::kOut, 0, 2)}, {after(recv(2, Space::kOut, 0, 2), 0, 0)}};
  return {{recv_reduce(1, Space::kOut, Space::kOut, 0, 2), send(0, Space::kOut, 0, 2),
           send(1, Space::kOut, 0, 2)}};
}

LINK_TEST(a_chain_of_recv_reduce_send_reduces_all) {
  const Shape shape{Collective::kAllreduce, 2};
  Ranks ranks(3, kind);
  ranks.run([&](int rank, Engine& engine) {
    for (const size_t tile : {kTile, size_t{512}}) {
      const auto executor = engine.bind(plan_of(rank, 3, shape, chain(rank)), tile);
      for (const size_t count : kLengths) {
        const Array in = input(rank, count);
        Array out(count, -1);
        CHECK(finish(engine, submit(engine, executor, in.data(), out.data(), count)));
        CHECK(out == sum_of(3, count));
        CHECK(in == input(rank, count));  // with out= the input is left alone
      }
    }
  });
}

TEST(a_mean_is_divided_once_at_the_end) {
  const Shape shape{Collective::kAllreduce, 2};
  Ranks ranks(3, kLinkKinds[1]);
  ranks.run([&](int rank, Engine& engine) {
    const auto executor = engine.bind(plan_of(rank, 3, shape, chain(rank)), kTile);
    std::vector<double> array(100, rank * 3.0);
    auto operation = call_of(executor, array.data(), array.data(), 100, Dtype::kFloat64);
    operation->call.mean = true;
    engine.submit(operation, false);
    CHECK(finish(engine, operation));
    CHECK(array == std::vector<double>(100, 3.0));
  });
}

// A rank between two raw links: what it has reduced leaves before its message has arrived whole.
LINK_TEST(what_is_reduced_is_passed_on_at_once) {
  auto mine = std::make_shared<Poller>();
  auto others = std::make_shared<Poller>();
  Engine engine({1, 3, 9, 1}, mine);
  auto left = kind.make(others, mine);
  auto right = kind.make(mine, others);
  engine.add_link(0, std::move(left.second));
  engine.add_link(2, std::move(right.first));
  const Shape shape{Collective::kAllreduce, 1};
  const auto executor =
      engine.bind(plan_of(1, 3, shape, {{recv_reduce_send(0, 2, Space::kOut, 0)}}), 4096);
  Array array(100, 1);
  const auto operation = submit(engine, executor, array.data(), array.data(), array.size());

  FrameHeader header{};
  header.set_call(operation->call);
  header.group = 9;
  header.epoch = 1;
  header.operation = 1;
  header.bytes = 800;
  seal(header);
  const Array half(50, 5);
  std::string there(reinterpret_cast<const char*>(&header), sizeof header);
  there.append(reinterpret_cast<const char*>(half.data()), 400);
  std::string back;
  const bool passed = eventually([&] {
    const iovec piece{there.data(), there.size()};
    if (!there.empty()) there.erase(0, left.first->write(&piece, 1));
    CHECK(!engine.wait(operation, Clock::now() + 1ms));
    char bytes[1000];
    others->sleep(0);
    back.append(bytes, right.second->read(bytes, sizeof bytes));
    return back.size() == sizeof header + 400;
  });
  CHECK(passed);
  Array reduced(50);
  std::memcpy(reduced.data(), back.data() + sizeof header, 400);
  CHECK(reduced == Array(50, 6));
  engine.close(0ms);
}

// Packed by two copies, both blocks leave as one message, and land side by side.
LINK_TEST(blocks_in_scratch_travel_together) {
  const Shape shape{Collective::kAlltoall, 3, 2, 2, 4};
  Ranks ranks(2, kind);
  ranks.run([&](int rank, Engine& engine) {
    const int peer = 1 - rank;
    const auto copy = [](Space from, uint32_t block, Space to, uint32_t other) {
      return move(Op::kCopy, from, block * 3, to, other * 3, 3);
    };
    const Lanes lanes = {
        {copy(Space::kIn, 0, Space::kScratch, 0), copy(Space::kIn, 1, Space::kScratch, 1),
         send(peer, Space::kScratch, 0, 6)},
        {recv(peer, Space::kScratch, 6, 6), copy(Space::kScratch, 2, Space::kOut, 0),
         copy(Space::kScratch, 3, Space::kOut, 1)}};
    for (const size_t tile : {kTile, size_t{512}}) {
      const auto executor = engine.bind(plan_of(rank, 2, shape, lanes), tile);
      for (const size_t count : kLengths) {
        const uint64_t before = executor->messages();
        const Array in = input(rank, 2 * count);
        Array out(2 * count, -1);
        CHECK(finish(engine, submit(engine, executor, in.data(), out.data(), count)));
        CHECK(out == input(peer, 2 * count));
        const size_t per_tile = tile / sizeof(int64_t);
        const size_t tiles = std::max<size_t>(1, (count + per_tile - 1) / per_tile);
        CHECK_EQ(executor->messages() - before, tiles);
      }
    }
  });
}

LINK_TEST(allgather_copies_its_own_block_and_exchanges_the_others) {
  const Shape shape{Collective::kAllgather, 2, 1, 2};
  Ranks ranks(2, kind);
  ranks.run([&](int rank, Engine& engine) {
    const auto mine = static_cast<uint32_t>(rank) * 2;
    const uint32_t theirs = 2 - mine;
    const int peer = 1 - rank;
    const Lanes lanes = {{move(Op::kCopy, Space::kIn, 0, Space::kOut, mine, 2)},
                         {send(peer, Space::kIn, 0, 2)},
                         {recv(peer, Space::kOut, theirs, 2)}};
    const auto executor = engine.bind(plan_of(rank, 2, shape, lanes), kTile);
    for (const size_t count : kLengths) {
      const Array in = input(rank, count);
      Array out(2 * count);
      CHECK(finish(engine, submit(engine, executor, in.data(), out.data(), count)));
      Array expected = input(0, count);
      const Array second = input(1, count);
      expected.insert(expected.end(), second.begin(), second.end());
      CHECK(out == expected);
    }
  });
}

// Rank 1 passes on what it received on another lane, through its scratch and back; the dependencies
// are all that keeps the order.
LINK_TEST(lanes_wait_for_each_other) {
  const Shape shape{Collective::kBroadcast, 1, 1, 1, 1};
  Ranks ranks(3, kind);
  ranks.run([&](int rank, Engine& engine) {
    Lanes lanes;
    if (rank == 0) lanes = {{send(1, Space::kOut, 0)}};
    if (rank == 1)
      lanes = {{after(send(2, Space::kOut, 0), 1, 2)},
               {after(move(Op::kCopy, Space::kOut, 0, Space::kScratch, 0), 2, 0),
                move(Op::kCopy, Space::kScratch, 0, Space::kOut, 0),
                move(Op::kCopy, Space::kScratch, 0, Space::kOut, 0)},
               {recv(0, Space::kOut, 0)}};
    if (rank == 2) lanes = {{recv(1, Space::kOut, 0)}};
    const auto executor = engine.bind(plan_of(rank, 3, shape, lanes), kTile);
    for (const size_t count : kLengths) {
      Array array = rank == 0 ? input(3, count) : Array(count, -1);
      CHECK(finish(engine, submit(engine, executor, array.data(), array.data(), count)));
      CHECK(array == input(3, count));
    }
  });
}

LINK_TEST(many_tiny_tiles_overlap) {
  const Shape shape{Collective::kAllreduce, 2};
  const size_t count = std::string_view(kind.name) == "narrow_memory" ? 2'000 : 20'000;
  Ranks ranks(3, kind);
  ranks.run([&](int rank, Engine& engine) {
    const auto executor = engine.bind(plan_of(rank, 3, shape, chain(rank)), 1);  // 64 in effect
    Array array = input(rank, count);
    CHECK(finish(engine, submit(engine, executor, array.data(), array.data(), count)));
    CHECK(array == sum_of(3, count));
    CHECK(engine.messages() >= count / 8);
  });
}

// --- outboxes ---

// One shot: everyone puts its part into its outbox, everyone sums all outboxes. Counter 0 says
// "put", counter 1 "read"; a slot is used again once all have read what it held two tiles ago.
Plan one_shot(int rank, int ranks) {
  std::vector<Instruction> lane;
  for (int peer = 0; peer < ranks; ++peer)
    if (peer != rank) lane.push_back(wait_for(peer, 1, 2, 1));
  lane.push_back(move(Op::kPut, Space::kOut, 0, Space::kOutbox, 0, 3));
  lane.push_back(signal(0));
  for (int peer = 0; peer < ranks; ++peer)
    if (peer != rank) lane.push_back(wait_for(peer, 0, 0, 1));
  lane.push_back(move(Op::kReduceMany, Space::kOut, 0, Space::kOut, 0, 3));
  lane.push_back(signal(1));
  Plan plan = plan_of(rank, ranks, {Collective::kAllreduce, 3, 1, 1, 0, 1}, {lane});
  for (int peer = 0; peer < ranks; ++peer)
    plan.signals_per_tile[size_t(peer) * kSignals] =
        plan.signals_per_tile[size_t(peer) * kSignals + 1] = 1;
  return plan;
}

// Allreduce in two shots: everyone puts the others' chunks; rank r adds up chunk r, and stores the
// sum back where it has read. Nothing but "put" and "reduced" is said: the plan is settled.
Plan two_shot(int rank, int ranks) {
  const auto mine = static_cast<uint32_t>(rank);
  std::vector<Instruction> lane;
  for (int peer = 0; peer < ranks; ++peer)
    if (peer != rank)
      lane.push_back(move(Op::kPut, Space::kOut, uint32_t(peer), Space::kOutbox, uint32_t(peer)));
  lane.push_back(signal(0));
  for (int peer = 0; peer < ranks; ++peer)
    if (peer != rank) lane.push_back(wait_for(peer, 0, 0, 1));
  Instruction reduce = move(Op::kReduceMany, Space::kOut, mine, Space::kOut, mine);
  reduce.arg = mine;
  reduce.flags = kFlagBack;
  lane.push_back(reduce);
  lane.push_back(signal(1));
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    lane.push_back(wait_for(peer, 1, 0, 1));
    Instruction copy = move(Op::kCopy, Space::kOutbox, uint32_t(peer), Space::kOut, uint32_t(peer));
    copy.peer = rank;
    lane.push_back(copy);
  }
  Plan plan = plan_of(rank, ranks, {Collective::kAllreduce, uint32_t(ranks), 1, 1, 0, 1}, {lane});
  for (int peer = 0; peer < ranks; ++peer)
    plan.signals_per_tile[size_t(peer) * kSignals] =
        plan.signals_per_tile[size_t(peer) * kSignals + 1] = 1;
  plan.settled = true;
  return plan;
}

// The hand-written kernel that stands for one_shot.
Plan line(int rank, int ranks) {
  Plan plan = one_shot(rank, ranks);
  plan.algorithm = "line";
  return plan;
}

TEST(outboxes_over_many_calls_of_different_plans_and_tile_counts) {
  Ranks ranks(4, kLinkKinds[1]);
  ranks.run([&](int rank, Engine& engine) {
    const std::shared_ptr<Executor> plans[] = {
        engine.bind(one_shot(rank, 4), kTile), engine.bind(one_shot(rank, 4), 1024),
        engine.bind(two_shot(rank, 4), kTile), engine.bind(two_shot(rank, 4), 1024),
        engine.bind(line(rank, 4), kTile)};
    std::mt19937 random(5);  // the same on all ranks
    for (int round = 0; round < 40; ++round)
      for (const size_t count : kLengths) {
        Array array = input(rank, count);
        const bool fits = count * sizeof array[0] <= kLineBytes;
        const auto& executor = plans[random() % (fits ? 5 : 4)];
        CHECK(finish(engine, submit(engine, executor, array.data(), array.data(), count)));
        CHECK(array == sum_of(4, count));
      }
  });
}

// What one rank has for another.
Array block(int from, int to, size_t count) {
  Array array(count);
  for (size_t i = 0; i < count; ++i) array[i] = 1000 * from + 100 * to + int64_t(i % 97);
  return array;
}

TEST(blocks_are_fetched_beside_plans_with_outboxes) {
  Ranks ranks(3, kLinkKinds[1]);
  ranks.run([&](int rank, Engine& engine) {
    const auto sums = engine.bind(two_shot(rank, 3), 1024);
    const auto blocks = engine.bind(fetch_of(rank, 3, Collective::kAlltoall), kTile);
    const auto parts = engine.bind(fetch_of(rank, 3, Collective::kScatter, 1), kTile);
    for (int round = 0; round < 20; ++round)
      for (const size_t count : kLengths) {
        Array in, out(3 * count), wanted;
        for (int peer = 0; peer < 3; ++peer) {
          const Array mine = block(rank, peer, count), theirs = block(peer, rank, count);
          in.insert(in.end(), mine.begin(), mine.end());
          wanted.insert(wanted.end(), theirs.begin(), theirs.end());
        }
        CHECK(finish(engine, submit(engine, blocks, in.data(), out.data(), count)));
        CHECK(out == wanted);
        out.resize(count);
        const auto* const all = rank == 1 ? in.data() : nullptr;
        CHECK(finish(engine, submit(engine, parts, all, out.data(), count)));
        CHECK(out == block(1, rank, count));
        std::fill(in.begin(), in.end(), 0);  // nobody reads it any more
        Array array = input(rank, count);
        CHECK(finish(engine, submit(engine, sums, array.data(), array.data(), count)));
        CHECK(array == sum_of(3, count));
      }
  });
}

TEST(a_copy_reads_the_outbox_of_a_peer) {
  Ranks ranks(3, kLinkKinds[1]);
  ranks.run([&](int rank, Engine& engine) {
    std::vector<Instruction> lane;
    if (rank == 1)
      lane = {wait_for(0, 1, 2, 1), wait_for(2, 1, 2, 1),
              move(Op::kPut, Space::kOut, 0, Space::kOutbox, 0), signal(0)};
    Instruction copy = move(Op::kCopy, Space::kOutbox, 0, Space::kOut, 0);
    copy.peer = 1;
    if (rank != 1) lane = {wait_for(1, 0, 0, 1), copy, signal(1)};
    Plan plan = plan_of(rank, 3, {Collective::kBroadcast, 1, 1, 1, 0, 1, 1}, {lane});
    plan.signals_per_tile[1 * kSignals] = 1;
    plan.signals_per_tile[0 * kSignals + 1] = plan.signals_per_tile[2 * kSignals + 1] = 1;
    const auto executor = engine.bind(std::move(plan), kTile);
    for (const size_t count : kLengths) {
      Array array = rank == 1 ? input(1, count) : Array(count);
      CHECK(finish(engine, submit(engine, executor, array.data(), array.data(), count)));
      CHECK(array == input(1, count));
    }
  });
}

// Allgather by put and keep; from kStreamedBytes on what is kept and read goes past the caches.
TEST(a_put_keeps_a_copy) {
  Ranks ranks(2, kLinkKinds[1]);
  ranks.run([&](int rank, Engine& engine) {
    const int peer = 1 - rank;
    Instruction put = move(Op::kPut, Space::kIn, 0, Space::kOutbox, 0);
    put.flags = kFlagKeep | kFlagStreaming;
    put.arg = uint32_t(rank);
    Instruction copy = move(Op::kCopy, Space::kOutbox, 0, Space::kOut, uint32_t(peer));
    copy.peer = peer;
    copy.flags = kFlagStreaming;
    const std::vector<Instruction> lane = {wait_for(peer, 1, 2, 1), put,  signal(0),
                                           wait_for(peer, 0, 0, 1), copy, signal(1)};
    Plan plan = plan_of(rank, 2, {Collective::kAllgather, 1, 1, 2, 0, 1}, {lane});
    for (const int each : {0, 1})
      plan.signals_per_tile[size_t(each) * kSignals] =
          plan.signals_per_tile[size_t(each) * kSignals + 1] = 1;
    const auto executor = engine.bind(std::move(plan), 4096);
    std::vector<size_t> lengths(std::begin(kLengths), std::end(kLengths));
    lengths.push_back(kStreamedBytes / sizeof(Array::value_type) + 5);
    for (const size_t count : lengths) {
      const Array mine = input(rank, count);
      Array all(2 * count + 1);
      // One element later than an allocation begins: not on a cache line.
      CHECK(finish(engine, submit(engine, executor, mine.data(), all.data() + 1, count)));
      for (const int each : {0, 1})
        CHECK(std::equal(all.begin() + 1 + long(size_t(each) * count),
                         all.begin() + 1 + long(size_t(each + 1) * count),
                         input(each, count).begin()));
    }
  });
}

// --- what binding refuses ---

std::string why_refused(Plan plan) {
  try {
    plan.check();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

// Rank 0 of 2, three chunks, one step.
std::string why_refused(const Instruction& step) {
  return why_refused(plan_of(0, 2, {Collective::kAllreduce, 3, 1, 1, 1, 1}, {{step}}));
}

template <class Change>
std::string why_refused(Instruction step, Change change) {
  change(step);
  return why_refused(step);
}

bool says(const std::string& text, const char* part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "\"%s\" does not say \"%s\"\n", text.c_str(), part);
  return false;
}

TEST(sound_plans_are_accepted) {
  CHECK_EQ(why_refused(send(1, Space::kOut, 0, 3)), "");
  CHECK_EQ(why_refused(one_shot(0, 3)), "");
  CHECK_EQ(why_refused(two_shot(1, 3)), "");
  for (int rank = 0; rank < 3; ++rank)
    CHECK_EQ(why_refused(plan_of(rank, 3, {Collective::kAllreduce, 2}, chain(rank))), "");
  CHECK_EQ(why_refused(plan_of(0, 1, {}, {})), "");
}

TEST(chunks_out_of_bounds_are_refused) {
  const char* leaves = "leaves its block";
  CHECK(says(why_refused(send(1, Space::kOut, 0, 4)), leaves));
  CHECK(says(why_refused(send(1, Space::kOut, 2, 2)), leaves));
  CHECK(says(why_refused(send(1, Space::kOut, 0, 65535)), leaves));
  CHECK(says(why_refused(send(1, Space::kOut, 3)), "out of bounds"));
  CHECK(says(why_refused(send(1, Space::kOut, UINT32_MAX)), "out of bounds"));
  CHECK(says(why_refused(recv(1, Space::kOut, 3)), "out of bounds"));
  CHECK(says(why_refused(move(Op::kCopy, Space::kOut, 0, Space::kScratch, 5)), "out of bounds"));
  CHECK(says(why_refused(send(1, Space::kScratch, 1, 3)), "out of bounds"));
  CHECK(says(why_refused(send(1, Space::kOut, 0, 0)), "names no chunk"));
  CHECK(!why_refused(send(1, Space::kNone, 0)).empty());
  CHECK(!why_refused(recv(1, Space(4), 0)).empty());
  Instruction many = move(Op::kReduceMany, Space::kOut, 0, Space::kOut, 0);
  many.arg = 3;
  CHECK(says(why_refused(many), "out of bounds"));
}

// Chunks differ in length: what was sized for one does not fit another.
TEST(a_step_between_different_chunks_is_refused) {
  const char* differ = "chunks of different lengths";
  CHECK(says(why_refused(move(Op::kCopy, Space::kOut, 0, Space::kScratch, 1)), differ));
  CHECK(says(why_refused(move(Op::kPut, Space::kOut, 1, Space::kOutbox, 2)), differ));
  CHECK(says(why_refused(recv_reduce(1, Space::kOut, Space::kOut, 0),
                         [](Instruction& step) { step.src = 2; }),
             differ));
  CHECK(says(
      why_refused(recv_reduce_send(1, 1, Space::kOut, 0), [](Instruction& step) { step.dst = 1; }),
      differ));
  Instruction many = move(Op::kReduceMany, Space::kOut, 0, Space::kOut, 2);
  CHECK(says(why_refused(many), differ));
  many.dst = 0;
  many.arg = 1;
  CHECK(says(why_refused(many), differ));
}

TEST(peers_and_spaces_that_make_no_sense_are_refused) {
  const char* other = "not another rank";
  for (const int peer : {-1, 0, 2, 1 << 30}) {
    CHECK(says(why_refused(send(peer, Space::kOut, 0)), other));
    CHECK(says(why_refused(recv(peer, Space::kOut, 0)), other));
    CHECK(says(why_refused(recv_reduce_send(1, peer, Space::kOut, 0)), other));
  }
  CHECK(says(why_refused(recv(1, Space::kIn, 0)), "writes the caller's input"));
  CHECK(says(why_refused(move(Op::kCopy, Space::kOutbox, 0, Space::kOut, 0)), "out of range"));
  CHECK(says(why_refused(wait_for(2, 0, 0, 1)), "out of range"));
  CHECK(says(why_refused(wait_for(1, kSignals, 0, 1)), "signal out of bounds"));
  CHECK(says(why_refused(signal(kSignals)), "signal out of bounds"));
  CHECK(says(why_refused(move(Op::kReduceMany, Space::kOutbox, 0, Space::kOut, 0)), "own outbox"));
  CHECK(says(why_refused(move(Op::kPut, Space::kOut, 0, Space::kScratch, 0)), "its outbox"));
  CHECK(says(why_refused(instruction(Op(9))), "unknown opcode"));
}

TEST(signals_without_an_outbox_are_refused) {
  const Shape shape{Collective::kAllreduce, 3};
  CHECK(says(why_refused(plan_of(0, 2, shape, {{signal(0)}})), "without an outbox"));
  CHECK(says(why_refused(plan_of(0, 2, shape, {{wait_for(1, 0, 0, 1)}})), "without an outbox"));
}

TEST(dependencies_on_nothing_are_refused) {
  CHECK(says(why_refused(after(send(1, Space::kOut, 0), 1, 0)), "a lane that does not exist"));
  CHECK(says(why_refused(after(send(1, Space::kOut, 0), 0, 1)), "a step that does not exist"));
}

TEST(plans_of_impossible_shape_are_refused) {
  const Lanes lanes = {{send(1, Space::kOut, 0)}};
  Plan plan = plan_of(0, 2, {}, lanes);
  plan.chunks = 0;
  CHECK(says(why_refused(plan), "impossible"));
  CHECK(says(why_refused(plan_of(2, 2, {}, lanes)), "impossible"));
  CHECK(says(why_refused(plan_of(-1, 2, {}, lanes)), "impossible"));
  plan = plan_of(0, 2, {}, lanes);
  plan.signals_per_tile.pop_back();
  CHECK(says(why_refused(plan), "signals"));
  plan = plan_of(0, 2, {}, {{send(1, Space::kOut, 0)}, {send(1, Space::kOut, 0)}});
  plan.code[0].lane = 1;
  CHECK(says(why_refused(plan), "not sorted"));
  plan.code[0].lane = 0;
  plan.code[1].lane = 2;
  CHECK(says(why_refused(plan), "not sorted"));
}

template <class Action>
bool invalid(Action action) {
  try {
    action();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

TEST(a_plan_is_bound_only_where_it_belongs) {
  Engine engine({0, 2, 9, 1}, std::make_shared<Poller>());
  CHECK(invalid([&] { engine.bind(plan_of(1, 2, {}, {}), kTile); }));
  CHECK(invalid([&] { engine.bind(plan_of(0, 3, {}, {}), kTile); }));
  CHECK(invalid([&] { engine.bind(one_shot(0, 2), kTile); }));  // it has no outboxes
  Ranks ranks(2, kLinkKinds[1]);
  CHECK(invalid([&] { ranks[0].bind(one_shot(0, 2), 2 * Ranks::kSlotBytes); }));
  CHECK(!invalid([&] { ranks[0].bind(one_shot(0, 2), Ranks::kSlotBytes); }));
}

}  // namespace
