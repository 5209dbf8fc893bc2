// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <set>
#include <stdexcept>

namespace commute {
namespace {

bool sends(Op op) {
  return op == Op::kSend || op == Op::kRecvReduceSend;
}
bool receives(Op op) {
  return op == Op::kRecv || op == Op::kRecvReduce || op == Op::kRecvReduceSend;
}
bool reads_chunks(Op op) {
  return op == Op::kSend || op == Op::kRecvReduce || op == Op::kRecvReduceSend || op == Op::kCopy ||
         op == Op::kReduceMany || op == Op::kPut;
}
bool writes_chunks(Op op) {
  return op == Op::kRecv || op == Op::kRecvReduce || op == Op::kRecvReduceSend || op == Op::kCopy ||
         op == Op::kReduceMany || op == Op::kPut;
}

class Checker {
 public:
  Checker(const Plan& plan, size_t lane, size_t step, const Instruction& instruction)
      : plan_(plan), lane_(lane), step_(step), instruction_(instruction) {}

  void run() const {
    const Op op = instruction_.op;
    require(op <= Op::kWait, "has an unknown opcode");
    if (reads_chunks(op)) run_inside(instruction_.src_space, instruction_.src, "has no source");
    if (writes_chunks(op))
      run_inside(instruction_.dst_space, instruction_.dst, "has no destination");
    require(!writes_chunks(op) || instruction_.dst_space != Space::kIn,
            "writes the caller's input");
    if (sends(op) || receives(op)) peer_is_other(instruction_.peer);
    if (op == Op::kRecvReduceSend) peer_is_other(instruction_.peer2);
    if (reads_chunks(op) && writes_chunks(op)) same_chunk(instruction_.src);
    check_outbox(op);
    check_dependency();
  }

 private:
  void require(bool truth, const char* what) const {
    if (truth) return;
    throw std::invalid_argument("plan '" + plan_.algorithm + "' is not sound: rank " +
                                std::to_string(plan_.rank) + " lane " + std::to_string(lane_) +
                                " step " + std::to_string(step_) + " " + what +
                                "; run the verifier over it");
  }

  void run_inside(Space space, uint32_t chunk, const char* which) const {
    require(static_cast<int>(space) < kSpaces, which);
    require(instruction_.count > 0, "names no chunk");
    const uint64_t chunks = uint64_t{plan_.blocks[static_cast<int>(space)]} * plan_.chunks;
    require(chunk < chunks, "names a chunk out of bounds");
    // Only in SCRATCH do blocks lie side by side, so that a run may go from one into the next.
    if (space == Space::kScratch)
      require(uint64_t{chunk} + instruction_.count <= chunks, "names a run out of bounds");
    else
      require(chunk % plan_.chunks + uint64_t{instruction_.count} <= plan_.chunks,
              "names a run of chunks that leaves its block");
  }

  // Chunks of different numbers differ in length: what fits one may overrun another.
  void same_chunk(uint32_t chunk) const {
    require(chunk % plan_.chunks == instruction_.dst % plan_.chunks,
            "moves between chunks of different lengths");
  }

  void peer_is_other(int32_t peer) const {
    require(peer >= 0 && peer < plan_.ranks && peer != plan_.rank,
            "names a peer that is not another rank");
  }

  void check_outbox(Op op) const {
    if (op == Op::kSignal || op == Op::kWait)
      require(instruction_.signal() < kFinished && plan_.uses_outbox(),
              plan_.uses_outbox() ? "names a signal out of bounds" : "signals without an outbox");
    if (op == Op::kWait || (op == Op::kCopy && instruction_.src_space == Space::kOutbox))
      require(instruction_.peer >= 0 && instruction_.peer < plan_.ranks,
              "names a peer out of range");
    if (op == Op::kReduceMany)
      require(instruction_.src_space != Space::kOutbox, "reads its own outbox");
    if (op == Op::kPut)
      require(instruction_.dst_space == Space::kOutbox && !plan_.direct,
              "does not write its outbox");
    const bool keeps = op == Op::kPut && (instruction_.flags & kFlagKeep);
    if (op != Op::kReduceMany && !keeps) return;
    run_inside(keeps ? Space::kOut : Space::kOutbox, instruction_.arg, "has no third operand");
    same_chunk(instruction_.arg);
  }

  void check_dependency() const {
    if (instruction_.dep_lane == kNoLane) return;
    require(instruction_.dep_lane < plan_.lane_ends.size(), "waits for a lane that does not exist");
    require(instruction_.dep_step < plan_.lane(instruction_.dep_lane).size(),
            "waits for a step that does not exist");
  }

  const Plan& plan_;
  size_t lane_;
  size_t step_;
  const Instruction& instruction_;
};

}  // namespace

const char* name(Collective collective) {
  static constexpr const char* kNames[kCollectives] = {
      "barrier", "broadcast", "reduce", "allreduce", "allgather", "reduce_scatter",
      "send",    "recv",      "gather", "scatter",   "alltoall"};
  const auto index = static_cast<size_t>(collective);
  return index < kCollectives ? kNames[index] : "unknown operation";
}

std::span<const Instruction> Plan::lane(size_t index) const {
  const uint32_t first = index == 0 ? 0 : lane_ends[index - 1];
  return std::span(code).subspan(first, lane_ends[index] - first);
}

std::vector<int> Plan::peers() const {
  std::set<int> found;
  for (const Instruction& instruction : code) {
    if (sends(instruction.op) || receives(instruction.op)) found.insert(instruction.peer);
    if (instruction.op == Op::kRecvReduceSend) found.insert(instruction.peer2);
  }
  return {found.begin(), found.end()};
}

void Plan::check() {
  if (ranks < 1 || rank < 0 || rank >= ranks || chunks < 1)
    throw std::invalid_argument("plan '" + algorithm +
                                "' has an impossible rank, size or chunk count");
  const auto blocks_of = [this](Space space) { return blocks[static_cast<int>(space)]; };
  if (direct && blocks_of(Space::kOutbox) != blocks_of(Space::kOut))
    throw std::invalid_argument("plan '" + algorithm + "' is direct, so OUTBOX must be as OUT");
  if (signals_per_tile.size() != size_t(ranks) * kSignals)
    throw std::invalid_argument("plan '" + algorithm +
                                "' does not count the signals of every rank");
  lane_ends.clear();
  for (uint32_t at = 0; at < code.size(); ++at) {
    const size_t lane = code[at].lane;
    if (lane + 1 < lane_ends.size() || lane > lane_ends.size())
      throw std::invalid_argument("plan '" + algorithm + "' is not sorted by lane");
    if (lane == lane_ends.size()) lane_ends.push_back(at);
    lane_ends[lane] = at + 1;
  }
  for (size_t index = 0; index < lane_ends.size(); ++index) {
    const auto steps = lane(index);
    for (size_t step = 0; step < steps.size(); ++step)
      Checker(*this, index, step, steps[step]).run();
  }
}

}  // namespace commute
