// SPDX-License-Identifier: Apache-2.0
// The chunk rule: how any length is cut into chunks, the same on every rank and in Python
// (plan/chunk.py).
#pragma once

#include <algorithm>
#include <cstddef>

namespace commute {

constexpr size_t kCacheLineBytes = 64;

// First element of chunk `chunk` when `elements` of `item_bytes` each are cut into `chunks` pieces
// whose borders lie on 64-byte boundaries of the tile. Chunks may be empty; the last one ends at
// `elements`.
inline size_t chunk_bound(size_t elements, size_t item_bytes, size_t chunks, size_t chunk) {
  if (chunk >= chunks) return elements;
  const size_t grain = item_bytes >= kCacheLineBytes ? 1 : kCacheLineBytes / item_bytes;
  const size_t fair = (elements * chunk + chunks - 1) / chunks;
  return std::min(elements, (fair + grain - 1) / grain * grain);
}

}  // namespace commute
