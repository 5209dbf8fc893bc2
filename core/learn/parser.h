// SPDX-License-Identifier: Apache-2.0
// Text in, examples out: lines of svmlight, Vowpal Wabbit or csv.
//
//   Parser parser(recipe);
//   const Examples examples = parser.parse(text, 1000, false);
//   text.remove_prefix(examples.consumed);
//
// Any bytes may be given. A line that is not as its format wants is left out whole, and reported.
// Empty lines, and those that begin with '#', are skipped. Lines end with "\n" or "\r\n".
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "learn/examples.h"
#include "learn/line.h"
#include "learn/recipe.h"

namespace commute {

// Threads may use it at the same time.
class Parser {
 public:
  // Throws std::invalid_argument.
  explicit Parser(Recipe recipe) : rules_(std::move(recipe)) {}

  // Reads whole lines, until there are `most` examples. A line without newline at the end of the
  // text is left alone, unless it is the `last` of all. Batches of more than 2^32 features end
  // early.
  Examples parse(std::string_view text, size_t most, bool last) const;

  // What those features are called, of `keys`, that this text has in lines that can be read.
  std::unordered_map<uint64_t, std::string> names(std::string_view text,
                                                  std::span<const uint64_t> keys) const;

 private:
  Rules rules_;
  mutable std::atomic<size_t> features_{0};  // of the last batch: the next will be like it
};

}  // namespace commute
