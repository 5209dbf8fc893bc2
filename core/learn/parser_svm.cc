// SPDX-License-Identifier: Apache-2.0
// The format of svmlight and libsvm:
//
//   line    = [label] ["qid:" token] feature* ["#" comment]      blanks in between
//   feature = index [":" number]                                 without a number: 1
//
// An index is any text without blank or ':', so names work as well. The first token is the label
// unless it has a ':'. Features have no namespace.
#include "learn/line.h"
#include "learn/number.h"
#include "learn/scan.h"

namespace commute {
namespace {

// The label and what may follow it; returns where the features begin, or null.
template <bool named>
const char* read_head(const char* at, const char* end, Line<named>& line) {
  const auto is_feature = [](std::string_view token) {
    return token.starts_with('#') || token.find(':') != std::string_view::npos;
  };
  at = skip_blanks(at, end);
  const char* stop = skip_token(at, end);
  if (!is_feature({at, stop})) {
    if (!line.take_label({at, stop})) return nullptr;
    at = skip_blanks(stop, end);
    stop = skip_token(at, end);
  }
  return std::string_view(at, stop).starts_with("qid:") ? stop : at;
}

template <bool named>
bool fail_value(std::string_view index, const char* at, const char* end, Line<named>& line) {
  const std::string value = quoted({at, skip_token(at, end)});
  if (index.empty()) return line.fail("the value " + value + " has no index");
  return line.fail("the value " + value + " of " + quoted(index) + " is not a number");
}

}  // namespace

template <bool named>
bool read_svm(const Rules& rules, const char* at, const char* end, Line<named>& line) {
  at = read_head(at, end, line);
  if (at == nullptr) return false;
  Stops stops(at, TokenEnds<':'>());
  for (const char* stop = nullptr; stop != end; at = stop + 1) {
    stop = stops.next();
    const std::string_view index(at, stop);
    if (index.starts_with('#')) break;
    double value = 1;
    if (*stop == ':') {
      const char* const number = stop + 1;
      stop = stops.next();
      if (index.empty() || *stop == ':' || !read_number({number, stop}, value))
        return fail_value(index, number, end, line);
    }
    if (!index.empty())
      line.add(padded_text_hash(rules.nameless, index.data(), index.size()),
               static_cast<float>(value), [&] { return std::string(index); });
  }
  return true;
}

template bool read_svm(const Rules&, const char*, const char*, Line<false>&);
template bool read_svm(const Rules&, const char*, const char*, Line<true>&);

}  // namespace commute
