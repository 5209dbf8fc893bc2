// SPDX-License-Identifier: Apache-2.0
// Cells, each of which belongs to a column:
//
//   line = cell (separator cell)*
//   cell = blanks text blanks | blanks '"' (byte but '"' | '""')* '"' blanks
//
// A text is without separator. Within quotes everything counts, and '""' is one quote; there is no
// newline in a cell. The separator is no blank, whatever it is.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "learn/line.h"
#include "learn/number.h"
#include "learn/scan.h"

namespace commute {
namespace {

// A column, and a line that its cell is added to.
template <bool named>
class Cell {
 public:
  Cell(const Column& column, const Rules::ColumnKeys& keys, Line<named>& line)
      : column_(column), keys_(keys), line_(line) {}

  // `kHashBytes` can be read from anywhere in the text on.
  bool take(std::string_view text) {
    switch (column_.kind) {
      case ColumnKind::kIgnore:
        return true;
      case ColumnKind::kCategory:
        add(padded_text_hash(keys_.seed, text.data(), text.size()), 1,
            [&] { return column_.name + "=" + std::string(text); });
        return true;
      case ColumnKind::kNumber:
        return take_number(text);
      case ColumnKind::kLabel:
        return line_.take_label(text);
      case ColumnKind::kWeight:
        break;
    }
    return line_.take_weight(text);
  }

 private:
  template <class Naming>
  void add(uint64_t key, float value, Naming naming) {
    line_.add(key, value, naming);
    line_.mark(keys_.slot, line_.count() - 1);
  }

  static bool is_missing(std::string_view text) {
    const auto is = [&](size_t i, char c) { return (text[i] | 0x20) == c; };
    return text.empty() || text == "?" ||
           (text.size() == 3 && is(0, 'n') && is(1, 'a') && is(2, 'n'));
  }

  bool take_number(std::string_view text) {
    double number = 0;
    if (is_missing(text)) {
      add(keys_.missing, 1, [&] { return column_.name + "=missing"; });
    } else if (!read_number(text, number)) {
      return line_.fail(quoted(text) + " in column " + quoted(column_.name) + " is not a number");
    } else if (!column_.edges.empty()) {
      const auto above = std::ranges::upper_bound(column_.edges, number);
      const auto bin = static_cast<size_t>(above - column_.edges.begin());
      add(keys_.bins[bin], 1, [&] { return bin_name(bin); });
    } else {
      if (column_.log) number = std::copysign(std::log1p(std::abs(number)), number);
      add(keys_.number, static_cast<float>((number - column_.shift) * column_.scale),
          [&] { return column_.name; });
    }
    return true;
  }

  std::string bin_name(size_t bin) const {
    const auto printed = [](double number) {
      char text[32];
      return std::string(text, std::to_chars(text, text + sizeof text, number).ptr);
    };
    const std::vector<double>& edges = column_.edges;
    return column_.name + " in [" + (bin == 0 ? "-inf" : printed(edges[bin - 1])) + ", " +
           (bin == edges.size() ? "inf" : printed(edges[bin])) + ")";
  }

  const Column& column_;
  const Rules::ColumnKeys& keys_;
  Line<named>& line_;
};

const char* skip_blanks_before(const char* at, const char* end, char separator) {
  while (at != end && is_blank(*at) && *at != separator) ++at;
  return at;
}

std::string_view without_blanks_behind(const char* at, const char* end) {
  while (at != end && is_blank(end[-1])) --end;
  return {at, end};
}

// From behind the first quote on; returns what is behind the last, or null if there is none. The
// text is a copy if it has a quote itself.
const char* read_quoted(const char* at, const char* end, std::string& copy,
                        std::string_view& text) {
  const char* begin = at;
  bool copied = false;
  copy.clear();
  for (;; ++at) {
    at = static_cast<const char*>(std::memchr(at, '"', static_cast<size_t>(end - at)));
    if (at == nullptr) return nullptr;
    const bool doubled = at + 1 != end && at[1] == '"';
    if (copied || doubled) copy.append(begin, at);
    if (!doubled) break;
    begin = ++at;  // this one is part of the text
    copied = true;
  }
  text = {begin, at};
  if (copied) {
    const size_t size = copy.size();
    copy.append(kHashBytes, '\0');  // may be read
    text = std::string_view(copy).substr(0, size);
  }
  return at + 1;
}

// One cell; returns where it ends, or null. `stops` has not passed that yet.
template <bool named>
const char* read_cell(const char* at, const char* end, Stops<CellEnds>& stops, char separator,
                      Line<named>& line, std::string_view& text) {
  const char* const first = skip_blanks_before(at, end, separator);
  const char* stop = stops.next();
  if (*first != '"') {
    text = without_blanks_behind(first, stop);
    return stop;
  }
  const char* const behind = read_quoted(first + 1, end, line.scratch(), text);
  if (behind == nullptr) {
    line.fail("a quote is not closed: " + quoted({first, end}));
    return nullptr;
  }
  while (stop < behind) stop = stops.next();
  if (skip_blanks_before(behind, end, separator) == stop) return stop;
  line.fail("text after a closing quote: " + quoted({first, stop}));
  return nullptr;
}

}  // namespace

template <bool named>
bool read_csv(const Rules& rules, const char* at, const char* end, Line<named>& line) {
  const std::vector<Column>& columns = rules.recipe.columns;
  const char separator = rules.recipe.separator;
  Stops stops(at, CellEnds{separator});
  size_t cells = 0;
  bool good = true;
  for (;; ++at) {
    std::string_view text;
    at = read_cell(at, end, stops, separator, line, text);
    if (at == nullptr) return false;
    if (good && cells < columns.size())
      good = Cell<named>(columns[cells], rules.columns[cells], line).take(text);
    ++cells;
    if (at == end) break;
  }
  // Says more than what is wrong in a cell that is not where it should be.
  if (cells != columns.size())
    return line.fail("expected " + std::to_string(columns.size()) + " cells, got " +
                     std::to_string(cells));
  return good;
}

template bool read_csv(const Rules&, const char*, const char*, Line<false>&);
template bool read_csv(const Rules&, const char*, const char*, Line<true>&);

}  // namespace commute
