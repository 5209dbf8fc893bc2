// SPDX-License-Identifier: Apache-2.0
// What is kept of each of a few workers, in their order: a map in one piece of memory.
//
// A push changes such a map in every slot, a thousand of them: nodes here and there would take
// longer than the rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace commute {

template <class T>
class ByWorker {
 public:
  using Entry = std::pair<uint32_t, T>;

  T& operator[](uint32_t worker) {
    auto at = first_from(worker);
    if (at == entries_.end() || at->first != worker) at = entries_.insert(at, {worker, T{}});
    return at->second;
  }
  const T* find(uint32_t worker) const {
    const auto at = first_from(worker);
    return at == entries_.end() || at->first != worker ? nullptr : &at->second;
  }
  bool contains(uint32_t worker) const { return find(worker) != nullptr; }
  void erase(uint32_t worker) {
    std::erase_if(entries_, [worker](const Entry& entry) { return entry.first == worker; });
  }
  bool empty() const { return entries_.empty(); }
  auto begin() { return entries_.begin(); }
  auto end() { return entries_.end(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  auto first_from(uint32_t worker) const {
    return std::find_if(entries_.begin(), entries_.end(),
                        [worker](const Entry& entry) { return entry.first >= worker; });
  }
  auto first_from(uint32_t worker) {
    return entries_.begin() + (std::as_const(*this).first_from(worker) - entries_.cbegin());
  }

  std::vector<Entry> entries_;
};

}  // namespace commute
