// SPDX-License-Identifier: Apache-2.0
// An alltoall, or a scatter, in which everyone fetches its blocks from the memory of the others: by
// a system call that reads another process (outbox.h), or, where the other's array is one of
// `empty`, from its room, which is mapped here. Each byte is copied once, not into an outbox and
// out of it.
//
//   entered    the line says what was called, and where this rank's array is
//   fetching   of each peer whose line is there, which is told when its block is fetched; the root
//              of a scatter only looks that all called the same. The own block is copied when no
//              line is there, or at the end: peers wait for what they fetch, nobody for this
//   fetched    waits until all have fetched what they need of this rank's array
//
// Invariant: whoever has seen a rank's line may read its array until it has told that it has, and
// the rank waits for that. A rank that fails in between lets go of its array, but says so before
// (Outboxes::gave_up), and one that dies is not there any more (Outboxes::fetch): what was read of
// memory that is somebody else's by then is never a result. A room outlives its process, and stays
// as it was when the line was published.
//
// A line's payload is the array's address, then a byte for each rank: whether its block is fetched.
// A rank writes its own line only, and looks at a peer's bytes only once it has seen that line, so
// never at those of the use before the last; it has finished with them when it ends its use, which
// the peer waits for before it clears them for the use after the next.
//
// It stands for a plan that is proved, shown and compared with, as the other kernels do.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>

#include "copy.h"
#include "executor.h"
#include "trial.h"

namespace commute {
namespace {

// Without looking up. A rank that asks for a great deal lets its thread see to other things too.
constexpr size_t kAtOnceBytes = 64 << 20;
// An alltoall of large arrays may go by way of so much that stays in the caches, and be stored past
// them: the system would first read what it is about to overwrite. Whether that pays for copying
// twice is up to the processor. 16 MB took, straight and by the way,
//   Intel Xeon   2 ranks   1.76   1.60 ms
//   AMD EPYC     2 ranks   2.8    2.9 ms
//                4 ranks   6.1    8.3 ms
// so each process tries both. A scatter, where each rank stores one block, does not gain (0.80 to
// 1.15 ms). Blocks smaller than the way are no sample: what a system call costs would blur it.
constexpr size_t kWayBytes = 512 << 10;
// The system copies by the one instruction that on AMD's processors is slow where the destination
// lies a little further in its page than the source (copy.h): 16 MB of an array that begins on a
// page into one of NumPy's took 6.9 ms between 2 ranks, 2.2 the other way round, and 3.0 by a way
// that lies in its page as the source does. So blocks of so many bytes that lie awkwardly are a
// trial of their own.
constexpr size_t kAwkwardBytes = 64 << 10;
constexpr size_t kPageBytes = 4096;

bool is_awkward(uintptr_t from, const std::byte* to, size_t bytes) {
  const size_t further = (reinterpret_cast<uintptr_t>(to) - from) % kPageBytes;
  return further > 0 && further < kCacheLineBytes && bytes >= kAwkwardBytes;
}

constexpr auto kStraight = Trial::kFirst;

Trial& trial(bool awkward) {
  static Trial of_this_process[2];
  return of_this_process[awkward];
}

}  // namespace

bool Executor::is_read() const {
  return plan_.collective == Collective::kAlltoall || plan_.rank == plan_.root;
}

// From the next rank on, so that not all read the same one at once.
void Executor::list_whom_to_hear() {
  to_hear_.clear();
  if (!is_read()) to_hear_.push_back(plan_.root);
  for (int step = 1; is_read() && step < plan_.ranks; ++step)
    to_hear_.push_back((plan_.rank + step) % plan_.ranks);
}

// Brings a peer that has called to the front. Where ranks outnumber cores some come late: waiting
// for a certain one would let the processor sleep beside work that is there.
bool Executor::hear_any() {
  const auto there = std::find_if(to_hear_.begin(), to_hear_.end(), [&](int p) { return hear(p); });
  if (there == to_hear_.end()) return false;
  std::rotate(to_hear_.begin(), there, there + 1);
  return true;
}

void Executor::enter_to_fetch() {
  const auto at = reinterpret_cast<uintptr_t>(operation_->in);
  std::byte* const mine = fetch_payload(plan_.rank);
  std::memset(mine, 0, fetch_payload_bytes());
  std::memcpy(mine, &at, sizeof at);
  enter();
  list_whom_to_hear();
  fetched_ = 0;
  own_copied_ = !is_read() || operation_->call.count == 0;
}

void Executor::copy_own_block() {
  const size_t bytes = operation_->call.count * item_bytes_;
  copy_past_caches(place_of(plan_.rank), nullptr, operation_->in + size_t(plan_.rank) * bytes,
                   bytes);
  end_of_streaming();
  own_copied_ = true;
}

// Where the block that comes from a rank goes.
std::byte* Executor::place_of(int rank) const {
  const size_t block = plan_.collective == Collective::kAlltoall ? size_t(rank) : 0;
  return operation_->out + block * operation_->call.count * item_bytes_;
}

Executor::Progress Executor::own_block_or_blocked() {
  if (own_copied_) return Progress::kBlocked;
  copy_own_block();
  return Progress::kMoved;
}

Executor::Progress Executor::advance_fetch() {
  if (!entered_) {
    if (!may_enter()) return Progress::kBlocked;
    enter_to_fetch();
  }
  const size_t bytes = operation_->call.count * item_bytes_;
  const bool reads = plan_.collective == Collective::kAlltoall || !is_read();
  for (; !to_hear_.empty(); to_hear_.erase(to_hear_.begin()), fetched_ = 0) {
    if (fetched_ == 0 && !hear_any()) return own_block_or_blocked();
    if (!reads) continue;
    fetch(to_hear_.front());
    if (fetched_ < bytes) return Progress::kMoved;
    tell_fetched(to_hear_.front());
  }
  if (!own_copied_) copy_own_block();
  if (yet_to_fetch() >= 0) return Progress::kBlocked;
  end_use();
  return Progress::kDone;
}

void Executor::fetch(int peer) {
  const size_t bytes = operation_->call.count * item_bytes_;
  const size_t step = std::min(bytes - fetched_, kAtOnceBytes);
  uintptr_t theirs;
  std::memcpy(&theirs, fetch_payload(peer), sizeof theirs);
  try {
    fetch_step(peer, theirs + size_t(plan_.rank) * bytes + fetched_, place_of(peer) + fetched_,
               step);
  } catch (const std::system_error& error) {
    raise(FailureCode::kPeerLost, peer,
          std::string("its memory cannot be read any more: ") + error.what());
  }
  if (links_.outboxes->gave_up(peer)) raise(FailureCode::kPeerLost, peer, "it gave this call up");
  fetched_ += step;
}

void Executor::fetch_step(int peer, uintptr_t from, std::byte* to, size_t bytes) {
  if (const std::byte* const here = links_.outboxes->in_room_of(peer, from, bytes))
    return fetch_from_room(here, to, bytes);
  const bool awkward = is_awkward(from, to, bytes);
  if (!awkward && (plan_.collective != Collective::kAlltoall || !fetches_much()))
    return links_.outboxes->fetch(peer, from, to, bytes);
  const Trial::Form form = trial(awkward).next();
  const auto begun = Clock::now();
  if (form == kStraight)
    links_.outboxes->fetch(peer, from, to, bytes);
  else
    fetch_by_way(peer, from, to, bytes);
  const std::chrono::duration<double> took = Clock::now() - begun;
  if (awkward || bytes >= kWayBytes) trial(awkward).note(form, took.count() / double(bytes));
}

// The system has no part in this: what lies in a room is mapped by all.
void Executor::fetch_from_room(const std::byte* from, std::byte* to, size_t bytes) const {
  if (!fetches_much()) return copy_bytes(to, from, bytes);
  copy_past_caches(to, nullptr, from, bytes);
  end_of_streaming();
}

// So much that it goes past the caches.
bool Executor::fetches_much() const {
  const size_t blocks = plan_.collective == Collective::kAlltoall ? size_t(plan_.ranks) : 1;
  return blocks * operation_->call.count * item_bytes_ >= kStreamedBytes;
}

void Executor::fetch_by_way(int peer, uintptr_t from, std::byte* to, size_t bytes) {
  std::byte* const way = way_through_caches(from % kPageBytes);
  const bool past_caches = fetches_much();
  for (size_t at = 0; at < bytes; at += kWayBytes) {
    const size_t some = std::min(kWayBytes, bytes - at);
    links_.outboxes->fetch(peer, from + at, way, some);
    if (past_caches)
      copy_past_caches(to + at, nullptr, way, some);
    else
      copy_bytes(to + at, way, some);
  }
  end_of_streaming();
}

std::byte* Executor::way_through_caches(size_t place_in_page) {
  scratch_.resize(kWayBytes + 2 * kPageBytes);
  return scratch_.data() + -reinterpret_cast<uintptr_t>(scratch_.data()) % kPageBytes +
         place_in_page;
}

size_t Executor::fetch_payload_bytes() const {
  return sizeof(uintptr_t) + size_t(plan_.ranks);
}

std::byte* Executor::fetch_payload(int rank) const {
  return links_.outboxes->payload(rank, links_.outbox_uses, fetch_payload_bytes());
}

// Whether the block of the array of `of` that is for `by` is fetched.
std::atomic_ref<std::byte> Executor::block_fetched(int of, int by) const {
  return std::atomic_ref(fetch_payload(by)[sizeof(uintptr_t) + size_t(of)]);
}

void Executor::tell_fetched(int peer) {
  block_fetched(peer, plan_.rank).store(std::byte{1}, std::memory_order_seq_cst);
  links_.outboxes->ring(peer);
}

// A rank that has yet to fetch its block of this rank's array, or -1.
int Executor::yet_to_fetch() const {
  for (int peer = 0; is_read() && peer < plan_.ranks; ++peer) {
    // Looked at first: what a peer told before it left is seen below.
    const bool left = links_.left[size_t(peer)].load(std::memory_order_seq_cst);
    if (peer == plan_.rank || block_fetched(plan_.rank, peer).load() != std::byte{0}) continue;
    if (left) raise(FailureCode::kPeerLost, peer, links_.goodbye());
    return peer;
  }
  return -1;
}

void Executor::wait_to_fetch(std::set<int>& found) const {
  for (const int peer : to_hear_)
    if (!links_.outboxes->published(peer, links_.outbox_uses, operation_->sequence))
      found.insert(peer);
  if (to_hear_.empty()) found.insert(yet_to_fetch());
}

}  // namespace commute
