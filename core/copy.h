// SPDX-License-Identifier: Apache-2.0
// Copying of what is long.
//
// Plainly, but not by memcpy: of some kilobytes or more the C library does it in one instruction
// (rep movsb), which on AMD's processors takes five times as long where the destination lies a
// little further in its page than the source in its own. That is so for every array of NumPy that
// is filled from memory that begins on a page: 8 MB in tiles of 64 KB took 2.9 instead of 0.6 ms.
//
// Or past the caches, for large arrays that nobody reads soon: their old contents need not be
// fetched before they are overwritten, and they push nothing out of the caches. Until
// `end_of_streaming` others may see these stores later than what is stored after them.
#pragma once

#include <cstddef>
#include <vector>

namespace commute {

// As memmove.
void copy_bytes(void* to, const void* from, size_t bytes);

// As memcpy, to `streamed`, and where `cached` is not null there as well, in the same pass and not
// past the caches.
void copy_past_caches(std::byte* streamed, std::byte* cached, const std::byte* from, size_t bytes);

void end_of_streaming();

// Whole cache lines, to where one starts; either destination may be null. What there is for this
// processor, the best one last. For tests, which try them all.
using CopyLines = void (*)(std::byte* streamed, std::byte* cached, const std::byte* from,
                           size_t bytes);
std::vector<CopyLines> copies_of_lines();

}  // namespace commute
