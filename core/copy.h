// SPDX-License-Identifier: Apache-2.0
// Copying past the caches, for large arrays that nobody reads soon: their old contents need not be
// fetched before they are overwritten, and they push nothing out of the caches.
//
// Until `end_of_streaming` others may see these stores later than what is stored after them.
#pragma once

#include <cstddef>
#include <vector>

namespace commute {

// As memcpy, to `streamed`, and where `cached` is not null there as well, in the same pass and not
// past the caches.
void copy_past_caches(std::byte* streamed, std::byte* cached, const std::byte* from, size_t bytes);

void end_of_streaming();

// The same for whole cache lines, to where one starts: what there is for this processor, the best
// one last. For tests, which try them all.
using CopyLines = void (*)(std::byte* streamed, std::byte* cached, const std::byte* from,
                           size_t bytes);
std::vector<CopyLines> copies_of_lines();

}  // namespace commute
