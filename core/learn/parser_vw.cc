// SPDX-License-Identifier: Apache-2.0
// The text format of Vowpal Wabbit:
//
//   line      = [label [importance]] [tag] namespace+            blanks in between
//   namespace = "|" [name] [":" scale] feature*                  no blank before name and scale
//   feature   = text [":" number]                                without a number: 1
//
// Texts and names are without blank, ':' and '|'. A tag begins with "'" or touches the first '|';
// it is not kept. The value of a feature is its number times the namespace's scale. A namespace may
// come several times, and its features are those of all of them.
#include <cstring>

#include "learn/line.h"
#include "learn/number.h"
#include "learn/scan.h"

namespace commute {
namespace {

using VwStops = Stops<TokenEnds<':', '|'>>;

struct Namespace {
  std::string_view name;
  uint64_t seed = 0;
  double scale = 1;
};

// What is before the first '|'.
template <bool named>
bool read_head(const char* at, const char* bar, Line<named>& line) {
  std::string_view tokens[2];
  size_t count = 0;
  while ((at = skip_blanks(at, bar)) != bar) {
    const char* const stop = skip_token(at, bar);
    const std::string_view token(at, stop);
    at = stop;
    const bool last = skip_blanks(stop, bar) == bar;
    if (last && (stop == bar || token.front() == '\'')) {
      double number;
      if (count == 0 && read_number(token, number))
        return line.fail("no label: " + quoted(token) + " touches the '|', which makes it a tag; " +
                         "put a blank between");
      break;
    }
    if (count == 2)
      return line.fail("before the '|' there may be a label, an importance and a tag, but not " +
                       quoted(token));
    tokens[count++] = token;
  }
  return line.take_label(tokens[0]) && (count < 2 || line.take_weight(tokens[1]));
}

// The number behind a ':' that begins at `at`; returns its end, or null. What it belongs to is for
// messages: "scale" of "namespace x".
template <bool named>
const char* read_value(const char* at, VwStops& stops, Line<named>& line, double& value,
                       const char* what, std::string_view of) {
  const char* stop = stops.next();
  if (*stop != ':' && read_number({at, stop}, value)) return stop;
  while (*stop == ':') stop = stops.next();
  line.fail("the " + std::string(what) + " " + quoted({at, stop}) + " of " + quoted(of) +
            " is not a number");
  return nullptr;
}

// From behind its '|' on; returns where its features begin, or null.
template <bool named>
const char* read_namespace(const char* at, VwStops& stops, Line<named>& line, Namespace& space) {
  const char* const stop = stops.next();
  space.name = {at, stop};
  space.seed = padded_text_hash(kNameSeed, at, space.name.size());
  space.scale = 1;
  if (*stop != ':') return stop;
  return read_value(stop + 1, stops, line, space.scale, "scale", space.name);
}

// From the blank before them on; returns where they end, at a '|' or the line's end, or null.
template <bool named>
const char* read_features(const char* stop, const char* end, VwStops& stops, Line<named>& line,
                          const Namespace& space) {
  while (*stop != '|' && stop != end) {
    const char* const at = stop + 1;
    stop = stops.next();
    const std::string_view text(at, stop);
    double value = 1;
    if (*stop == ':') {
      stop = read_value(stop + 1, stops, line, value, "value", text);
      if (stop == nullptr) return nullptr;
      if (text.empty()) {
        line.fail("a value has no feature: ':' comes after a blank");
        return nullptr;
      }
    } else if (text.empty()) {
      continue;
    }
    line.add(padded_text_hash(space.seed, at, text.size()), static_cast<float>(value * space.scale),
             [&] {
               const std::string name(text);
               return space.name.empty() ? name : std::string(space.name) + "^" + name;
             });
  }
  return stop;
}

}  // namespace

template <bool named>
bool read_vw(const Rules& rules, const char* at, const char* end, Line<named>& line) {
  const auto* const bar =
      static_cast<const char*>(std::memchr(at, '|', static_cast<size_t>(end - at)));
  if (bar == nullptr) return line.fail("no '|' before the features");
  if (!read_head(at, bar, line)) return false;
  VwStops stops(bar + 1);
  Namespace space;
  const char* stop = bar;
  do {
    const size_t first = line.count();
    stop = read_namespace(stop + 1, stops, line, space);
    if (stop == nullptr) return false;
    stop = read_features(stop, end, stops, line, space);
    if (stop == nullptr) return false;
    line.mark(rules.slot_of(space.seed), first);
  } while (stop != end);
  return true;
}

template bool read_vw(const Rules&, const char*, const char*, Line<false>&);
template bool read_vw(const Rules&, const char*, const char*, Line<true>&);

}  // namespace commute
