// SPDX-License-Identifier: Apache-2.0
#include "spread.h"

#include <map>

namespace commute {

int better_core(const std::vector<int>& cores, int rank, const cpu_set_t& allowed) {
  const int mine = cores[size_t(rank)];
  std::map<int, int> crowd;  // ranks on each core
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed)) crowd[core] = 0;
  int last_here = -1;
  for (size_t other = 0; other < cores.size(); ++other) {
    if (cores[other] >= 0) ++crowd[cores[other]];
    if (cores[other] == mine) last_here = int(other);
  }
  if (last_here != rank) return -1;  // so that only one of a core moves
  int best = -1;
  for (const auto& [core, ranks] : crowd)
    if (CPU_ISSET(core, &allowed) && ranks + 2 <= crowd[mine] && (best < 0 || ranks < crowd[best]))
      best = core;
  return best;
}

void Spread::look(Outboxes& outboxes, Clock::time_point now) {
  const int mine = ::sched_getcpu();
  outboxes.runs_on(mine);
  if (mine < 0 || now < not_before_) return;
  std::vector<int> cores;
  for (int rank = 0; rank < outboxes.ranks(); ++rank) cores.push_back(outboxes.core_of(rank));
  outboxes.runs_on(move(cores, outboxes.rank(), now));
}

int Spread::look(std::vector<int> cores, Clock::time_point now) {
  const int mine = ::sched_getcpu();
  cores.push_back(mine);
  if (mine < 0 || now < not_before_) return mine;
  const int core = move(cores, int(cores.size()) - 1, now);
  not_before_ = core == mine ? now : now + kRestOfShard;
  return core;
}

int Spread::move(const std::vector<int>& cores, int self, Clock::time_point now) {
  const int mine = cores[size_t(self)];
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return mine;
  not_before_ = now + kRest;
  const int core = better_core(cores, self, allowed);
  if (core < 0) return mine;
  cpu_set_t there;
  CPU_ZERO(&there);
  CPU_SET(core, &there);
  if (::sched_setaffinity(0, sizeof there, &there) != 0) return mine;
  ::sched_setaffinity(0, sizeof allowed, &allowed);
  return core;
}

}  // namespace commute
