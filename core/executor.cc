// SPDX-License-Identifier: Apache-2.0
#include "executor.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace commute {
namespace {

bool in_place(const Plan& plan) {
  if (plan.collective == Collective::kAllreduce || plan.collective == Collective::kBroadcast)
    return true;
  return plan.collective == Collective::kReduce && plan.rank == plan.root;
}

bool is_fetched(const Plan& plan) {
  return plan.algorithm == "fetch" && plan.uses_outbox() &&
         (plan.collective == Collective::kAlltoall || plan.collective == Collective::kScatter);
}

bool is_kernel(const Plan& plan) {
  const Collective what = plan.collective;
  if (is_fetched(plan)) return true;
  return plan.algorithm == "line" && plan.uses_outbox() &&
         (what == Collective::kAllreduce || what == Collective::kBroadcast ||
          what == Collective::kBarrier);
}

}  // namespace

Executor::Executor(Plan plan, size_t tile_bytes, Links& links)
    : plan_(std::move(plan)),
      tile_bytes_(std::max(tile_bytes / kCacheLineBytes, size_t{1}) * kCacheLineBytes),
      links_(links),
      line_(is_kernel(plan_)),
      fetches_(is_fetched(plan_)) {
  for (size_t index = 0; index < plan_.lane_ends.size(); ++index) {
    Lane lane;
    lane.steps = plan_.lane(index);
    lanes_.push_back(lane);
  }
  sent_to_.resize(size_t(plan_.ranks));
  received_from_.resize(size_t(plan_.ranks));
  scratch_.resize(plan_.blocks[static_cast<int>(Space::kScratch)] * tile_bytes_);
  sources_.resize(size_t(plan_.ranks));
  targets_.resize(size_t(plan_.ranks));
  to_hear_.reserve(size_t(plan_.ranks));
  if (!plan_.uses_outbox()) return;
  if (!links_.outboxes)
    throw std::invalid_argument("plan '" + plan_.algorithm + "' needs shared memory");
  if (!plan_.direct &&
      plan_.blocks[static_cast<int>(Space::kOutbox)] * tile_bytes_ > links_.outboxes->slot_bytes())
    throw std::invalid_argument("plan '" + plan_.algorithm +
                                "' needs a larger outbox; use smaller tiles");
}

void Executor::begin(const Operation& operation) {
  operation_ = &operation;
  item_bytes_ = item_bytes(operation.call.dtype);
  tile_elements_ = tile_bytes_ / item_bytes_;
  tiles_ = std::max<uint64_t>(1, (operation.call.count + tile_elements_ - 1) / tile_elements_);
  const Call& call = operation.call;
  reduce_ = operation.combine ? nullptr : kernels().reduce_for(call.dtype, call.reduce_op);
  if (in_place(plan_) && operation.in != operation.out && operation.call.count > 0)
    copy_bytes(operation.out, operation.in, operation.call.count * item_bytes_);
  entered_ = !plan_.uses_outbox();
  if (!entered_) begin_use();
  if (line_) return;
  lanes_left_ = lanes_.size();
  for (Lane& lane : lanes_) {
    const auto steps = lane.steps;
    lane = Lane{};
    lane.steps = steps;
  }
  std::fill(sent_to_.begin(), sent_to_.end(), 0);
  std::fill(received_from_.begin(), received_from_.end(), 0);
}

Executor::Progress Executor::advance() {
  if (fetches_) return advance_fetch();
  if (line_) return advance_line();
  if (!entered_ && !enter()) return Progress::kBlocked;
  bool moved = false;
  for (Lane& lane : lanes_) {
    while (lane.tile < tiles_) {
      const Instruction& step = lane.steps[lane.step];
      if (!ready(lane, step)) break;
      const size_t before = lane.sent + lane.received;
      try {
        if (perform(lane, step)) {
          complete(lane);
          moved = true;
          continue;
        }
      } catch (const LinkClosed& closed) {
        raise(FailureCode::kPeerLost, touching_, closed.what());
      } catch (const BadFrame& bad) {
        raise(FailureCode::kProtocol, touching_,
              std::string("it sent a frame that no rank sends: ") + bad.what());
      }
      moved |= lane.sent + lane.received != before;
      break;
    }
  }
  if (lanes_left_ == 0) {
    finish();
    return Progress::kDone;
  }
  return moved ? Progress::kMoved : Progress::kBlocked;
}

bool Executor::ready(const Lane& lane, const Instruction& step) const {
  if (step.dep_lane == kNoLane) return true;
  const Lane& other = lanes_[step.dep_lane];
  return other.completed > lane.tile * other.steps.size() + step.dep_step;
}

void Executor::complete(Lane& lane) {
  ++lane.completed;
  lane.begun = lane.accepted = false;
  lane.sent = lane.received = lane.carried = 0;
  if (++lane.step < lane.steps.size()) return;
  lane.step = 0;
  if (++lane.tile == tiles_) --lanes_left_;
}

bool Executor::perform(Lane& lane, const Instruction& step) {
  switch (step.op) {
    case Op::kSend:
      return send(lane, step.peer,
                  run_of(step.src_space, step.src, step.count, lane.tile, plan_.rank));
    case Op::kRecv:
      return receive(lane, step);
    case Op::kRecvReduce:
      return receive_reduce(lane, step);
    case Op::kRecvReduceSend:
      return receive_reduce_send(lane, step);
    case Op::kCopy:
      copy(lane, step);
      return true;
    case Op::kPut:
      if (!slot_free(lane)) return false;
      put(lane, step);
      return true;
    case Op::kReduceMany:
      reduce_many(lane, step);
      return true;
    case Op::kSignal:
      links_.outboxes->signal(step.signal());
      return true;
    case Op::kWait:
      return signal_seen(lane, step);
  }
  return true;
}

// --- chunks in memory ---

// Blocks of IN and OUT are as far apart as the whole array is long. Those of SCRATCH lie side by
// side, so a run of several blocks is one piece of memory, and travels as one message. They lie at
// the same places in all tiles, as the verifier takes them to: a last tile that is shorter leaves
// gaps, which travel too.
Executor::Run Executor::run_of(Space space, uint32_t chunk, uint32_t count, uint64_t tile,
                               int owner) const {
  const size_t total = operation_->call.count;
  const size_t begin = tile * tile_elements_;
  const size_t elements = std::min(tile_elements_, total - std::min(total, begin));
  const auto bound = [&](size_t which) {
    return chunk_bound(elements, item_bytes_, plan_.chunks, which);
  };
  const size_t block = chunk / plan_.chunks;
  const size_t first = bound(chunk % plan_.chunks);
  if (space == Space::kScratch) {
    const size_t apart = std::min(tile_elements_, total);
    const size_t last = chunk + count - 1;
    const size_t from = block * apart + first;
    const size_t to = last / plan_.chunks * apart + bound(last % plan_.chunks + 1);
    return {const_cast<std::byte*>(scratch_.data()) + from * item_bytes_,
            (to - from) * item_bytes_};
  }
  const size_t bytes = (bound(chunk % plan_.chunks + count) - first) * item_bytes_;
  const size_t in_array = (block * total + begin + first) * item_bytes_;
  const size_t in_tile = block * tile_bytes_ + first * item_bytes_;
  switch (space) {
    case Space::kIn:
      return {const_cast<std::byte*>(operation_->in) + in_array, bytes};
    case Space::kOut:
      return {operation_->out + in_array, bytes};
    default:
      if (plan_.direct)
        return {operation_->array->at[size_t(owner)] + operation_->array_offset + in_array, bytes};
      return {links_.outboxes->slot(owner, links_.outbox_tiles + tile) + in_tile, bytes};
  }
}

// --- messages ---

// Begins the frame of a message once a waiting frame that may still be on its way out has left.
bool Executor::open(Lane& lane, int peer, size_t bytes) {
  if (lane.begun) return true;
  Stream& to = stream(peer);
  if (!to.idle()) {
    to.send(nullptr, 0);
    if (!to.header_sent()) return false;
    to.end();
  }
  to.begin(frame_header(FrameKind::kData, lane, peer, bytes));
  lane.begun = true;
  return true;
}

bool Executor::send(Lane& lane, int peer, Run payload) {
  Stream& to = stream(peer);
  if (!open(lane, peer, payload.bytes)) return false;
  while (lane.sent < payload.bytes || !to.header_sent()) {
    const bool header_was_sent = to.header_sent();
    const size_t moved = to.send(payload.at + lane.sent, payload.bytes - lane.sent);
    lane.sent += moved;
    if (moved == 0 && header_was_sent == to.header_sent()) return false;
  }
  to.end();
  ++sent_to_[size_t(peer)];
  return true;
}

// True once the header of the message this step waits for is there.
bool Executor::accept(Lane& lane, int peer, size_t bytes) {
  if (lane.accepted) return true;
  Stream& from = stream(peer);
  for (;;) {
    const FrameHeader* header = from.header();
    if (header == nullptr) return false;
    // Of an operation that is over, only "I am waiting" can be left: a message that nobody took
    // came from a rank that had called something else.
    const bool stale = header->epoch < links_.epoch || (header->operation < operation_->sequence &&
                                                        header->kind == FrameKind::kWaiting);
    if (!stale && !expected(*header, peer, bytes)) explain(*header, peer);
    if (stale || header->kind == FrameKind::kWaiting) {
      if (!from.skip()) return false;
      continue;
    }
    lane.accepted = true;
    ++received_from_[size_t(peer)];
    ++messages_;
    if (bytes == 0) from.skip();
    return true;
  }
}

bool Executor::receive(Lane& lane, const Instruction& step) {
  const Run to = run_of(step.dst_space, step.dst, step.count, lane.tile, plan_.rank);
  if (!accept(lane, step.peer, to.bytes)) return false;
  Stream& from = stream(step.peer);
  while (lane.received < to.bytes) {
    const size_t moved = from.take(to.at + lane.received, to.bytes - lane.received);
    if (moved == 0) return false;
    lane.received += moved;
  }
  return true;
}

bool Executor::receive_reduce(Lane& lane, const Instruction& step) {
  const Run to = run_of(step.dst_space, step.dst, step.count, lane.tile, plan_.rank);
  const Run mine = run_of(step.src_space, step.src, step.count, lane.tile, plan_.rank);
  if (!accept(lane, step.peer, to.bytes)) return false;
  Stream& from = stream(step.peer);
  while (lane.received < to.bytes) {
    // Whole elements are reduced as they arrive; what is left of one waits in `carry`.
    std::memcpy(links_.staging.data(), lane.carry, lane.carried);
    const size_t wanted = std::min(to.bytes - lane.received, kPieceBytes) - lane.carried;
    const size_t moved = from.take(links_.staging.data() + lane.carried, wanted);
    if (moved == 0) return false;
    const size_t there = lane.carried + moved;
    const size_t whole = there / item_bytes_ * item_bytes_;
    const void* const arrived = links_.staging.data();
    const void* const own = mine.at + lane.received;
    const bool first = step.flags & kFlagFirst;
    combine(to.at + lane.received, first ? arrived : own, first ? own : arrived, whole);
    lane.received += whole;
    lane.carried = there - whole;
    std::memcpy(lane.carry, links_.staging.data() + whole, lane.carried);
  }
  return true;
}

bool Executor::receive_reduce_send(Lane& lane, const Instruction& step) {
  const bool all_here = receive_reduce(lane, step);
  if (!lane.accepted) return false;
  const Run to = run_of(step.dst_space, step.dst, step.count, lane.tile, plan_.rank);
  if (all_here) return send(lane, step.peer2, to);
  // Cut through: pass on what has been reduced so far, without ending the frame.
  if (lane.received > lane.sent && open(lane, step.peer2, to.bytes))
    lane.sent += stream(step.peer2).send(to.at + lane.sent, lane.received - lane.sent);
  return false;
}

// --- reductions ---

void Executor::combine(void* to, const void* a, const void* b, size_t bytes) const {
  if (reduce_ != nullptr)
    reduce_(to, a, b, bytes / item_bytes_);
  else
    apply(a, b, to, bytes / item_bytes_);
}

// All of sources_, left to right, into the first `targets` of targets_, which may be sources.
void Executor::combine_all(size_t targets, size_t bytes) {
  const Call& call = operation_->call;
  if (reduce_ != nullptr) {
    kernels().reduce_many_for(call.dtype, call.reduce_op)(targets_.data(), targets, sources_.data(),
                                                          sources_.size(), bytes / item_bytes_);
    return;
  }
  // Two at a time, in pieces, by way of the staging buffer: a target may be a later source.
  for (size_t at = 0; at < bytes; at += kPieceBytes) {
    const size_t piece = std::min(kPieceBytes, bytes - at);
    const auto place = [at](const void* array) {
      return static_cast<const std::byte*>(array) + at;
    };
    const void* so_far = place(sources_[0]);
    for (size_t k = 1; k < sources_.size(); ++k) {
      apply(so_far, place(sources_[k]), links_.staging.data(), piece / item_bytes_);
      so_far = links_.staging.data();
    }
    for (size_t k = 0; k < targets; ++k)
      copy_bytes(static_cast<std::byte*>(targets_[k]) + at, so_far, piece);
  }
}

void Executor::apply(const void* a, const void* b, void* out, size_t count) const {
  if (count == 0) return;
  try {
    operation_->combine->apply(a, b, out, count);
  } catch (const CombineFailed& failed) {
    raise(FailureCode::kInterrupted, -1,
          named(links_.rank) + " gave up " + operation_->call.describe() + ": " + failed.what());
  }
}

FrameHeader Executor::frame_header(FrameKind kind, const Lane& lane, int peer, size_t bytes) const {
  FrameHeader header{};
  header.kind = kind;
  header.set_call(operation_->call);
  header.group = links_.group;
  header.epoch = links_.epoch;
  header.operation = operation_->sequence;
  header.tile = static_cast<uint32_t>(lane.tile);
  header.index = sent_to_[size_t(peer)];
  header.bytes = bytes;
  header.sender = static_cast<uint32_t>(links_.rank);
  return header;
}

bool Executor::expected(const FrameHeader& header, int peer, size_t bytes) const {
  if (header.operation != operation_->sequence || header.group != links_.group ||
      header.epoch != links_.epoch)
    return false;
  if (header.call() != operation_->call) return false;
  if (header.kind == FrameKind::kWaiting) return true;
  return header.kind == FrameKind::kData && header.bytes == bytes &&
         header.index == received_from_[size_t(peer)];
}

// Says why a frame is not the expected one; all ranks will read this sentence.
void Executor::explain(const FrameHeader& header, int peer) const {
  if (header.kind == FrameKind::kPair || header.group != links_.group)
    raise(FailureCode::kProtocol, peer, "it sent a frame that belongs on another link");
  if (header.operation > operation_->sequence || header.epoch > links_.epoch)
    explain_ahead(header.operation, " (" + header.call().describe() + ")", peer);
  if (header.operation < operation_->sequence)
    raise(FailureCode::kMismatch, peer,
          "in operation " + std::to_string(header.operation) + " " + named(peer) + " called " +
              header.call().describe() + ", and " + named(links_.rank) +
              " something else, which did not take its message" + kSameCalls);
  if (header.call() == operation_->call)
    raise(FailureCode::kProtocol, peer, "it sent a message that the plan does not have");
  explain_call(header.call(), peer);
}

void Executor::explain_ahead(uint64_t operation, const std::string& call, int peer) const {
  raise(FailureCode::kMismatch, peer,
        named(peer) + " went on to operation " + std::to_string(operation) + call +
            " without its part of operation " + std::to_string(operation_->sequence) +
            ", in which " + named(links_.rank) + " called " + operation_->call.describe() +
            kSameCalls);
}

void Executor::explain_call(const Call& theirs, int peer) const {
  Call but_plan = theirs;
  but_plan.plan = operation_->call.plan;
  const bool same = but_plan == operation_->call;
  const bool custom = operation_->call.reduce_op == ReduceOp::kCustom;
  raise(FailureCode::kMismatch, peer,
        "in operation " + std::to_string(operation_->sequence) + " " + named(links_.rank) +
            " called " + operation_->call.describe() + ", " + named(peer) + " called " +
            theirs.describe() +
            (!same    ? kSameCalls
             : custom ? " by another op or plan; pass the same op= and algorithm= on all ranks"
                      : " by another plan, or in another array of empty(); pass the same array, "
                        "algorithm= and settings on all ranks"));
}

// --- the end, and the time when nothing moves ---

void Executor::finish() {
  if (plan_.uses_outbox()) end_use();
  const bool has_result = plan_.collective != Collective::kReduce || plan_.rank == plan_.root;
  if (operation_->call.mean && has_result)
    kernels().divide_for(operation_->call.dtype)(operation_->out, operation_->call.count,
                                                 static_cast<uint64_t>(plan_.ranks));
}

std::vector<int> Executor::waiting_for() const {
  std::set<int> found;
  if (plan_.uses_outbox()) wait_in_memory(found);
  for (const Lane& lane : lanes_) {
    if (!entered_ || line_ || lane.tile >= tiles_) continue;
    const Instruction& step = lane.steps[lane.step];
    if (!ready(lane, step)) continue;
    if (step.op == Op::kPut && !slot_free(lane)) found.insert(unfinished(links_.outbox_uses - 1));
    found.insert(step.peer);
    if (step.op == Op::kRecvReduceSend && lane.accepted && lane.received > lane.sent)
      found.insert(step.peer2);
  }
  found.erase(-1);  // nobody in particular
  return {found.begin(), found.end()};
}

void Executor::announce() {
  if (line_) return;
  for (const Lane& lane : lanes_) {
    if (lane.tile >= tiles_) continue;
    const Instruction& step = lane.steps[lane.step];
    const bool receiving =
        step.op == Op::kRecv || step.op == Op::kRecvReduce || step.op == Op::kRecvReduceSend;
    if (!receiving || lane.accepted || !stream(step.peer).idle()) continue;
    Stream& to = stream(step.peer);
    try {
      to.begin(frame_header(FrameKind::kWaiting, lane, step.peer, 0));
      to.push();
    } catch (const LinkClosed&) {
      // The step itself, or the health thread, will say so with a better message.
    }
  }
}

// A rank that called something else may have sent its frames to us although our plan expects none.
void Executor::look_around() {
  for (int peer = 0; links_.outboxes && peer < plan_.ranks; ++peer) {
    if (peer == plan_.rank || !links_.outboxes->attached(peer)) continue;
    if (plan_.uses_outbox())
      compare_call(peer, false);
    else
      find_in_outbox(peer);
  }
  for (int peer = 0; peer < plan_.ranks; ++peer) {
    if (peer == plan_.rank ||
        links_.streams[size_t(peer)].load(std::memory_order_acquire) == nullptr)
      continue;
    try {
      stream(peer).push();  // a waiting frame that found the link full
      const FrameHeader* header = stream(peer).header();
      if (header == nullptr || header->epoch != links_.epoch) continue;
      const bool unclaimed =
          header->operation < operation_->sequence && header->kind != FrameKind::kWaiting;
      const bool now = header->operation == operation_->sequence;
      if (unclaimed || (now && header->call() != operation_->call)) explain(*header, peer);
    } catch (const LinkClosed&) {
      // A closed link matters only to those who still expect something from it.
    } catch (const BadFrame& bad) {
      raise(FailureCode::kProtocol, peer,
            std::string("it sent a frame that no rank sends: ") + bad.what());
    }
  }
}

Stream& Executor::stream(int peer) const {
  Stream* found = links_.streams[size_t(peer)].load(std::memory_order_acquire);
  if (found == nullptr)
    raise(FailureCode::kProtocol, peer, "there is no link to it; the plan was not bound");
  touching_ = peer;
  return *found;
}

void Executor::raise(FailureCode code, int peer, const std::string& text) const {
  throw Error({code, peer, links_.rank, operation_ ? operation_->sequence : 0, text});
}

}  // namespace commute
