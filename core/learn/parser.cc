// SPDX-License-Identifier: Apache-2.0
#include "learn/parser.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "learn/scan.h"

namespace commute {
namespace {

// Of a line that is reported: enough for 80 characters of UTF-8.
constexpr size_t kReportedBytes = 320;

// Cuts a text into lines that readers can take (line.h): those near its end are copied, as nothing
// behind it may be read.
class Cutter {
 public:
  Cutter(const Recipe& recipe, std::string_view text, bool last)
      : text_(text), last_(last), format_(recipe.format), separator_(recipe.separator) {}

  // The next whole line. False: there is none.
  bool next() {
    const char* const from = text_.data() + consumed_;
    const size_t left = text_.size() - consumed_;
    if (left == 0) return false;
    const auto* newline = static_cast<const char*>(std::memchr(from, '\n', left));
    if (newline == nullptr && !last_) return false;
    const size_t size = newline != nullptr ? static_cast<size_t>(newline - from) : left;
    begin = from;
    if (left - size < kScanBytes) {
      copy_.assign(from, size).push_back('\n');
      copy_.append(kScanBytes, '\0');
      begin = copy_.data();
    }
    end = begin + size;
    consumed_ += size + (newline != nullptr);
    ++lines_;
    return true;
  }

  // A separator counts, even if it is a blank: it makes cells.
  bool empty() const {
    const char* const first = skip_blanks(begin, end);
    const bool cells = format_ == TextFormat::kCsv && is_blank(separator_);
    if (first == end)
      return !cells || std::memchr(begin, separator_, static_cast<size_t>(end - begin)) == nullptr;
    return *begin == '#';
  }
  size_t consumed() const { return consumed_; }
  size_t lines() const { return lines_; }

  const char* begin = nullptr;
  const char* end = nullptr;

 private:
  std::string_view text_;
  bool last_;
  TextFormat format_;
  char separator_;
  size_t consumed_ = 0;
  size_t lines_ = 0;
  std::string copy_;
};

template <bool named>
auto reader_of(TextFormat format) {
  switch (format) {
    case TextFormat::kSvm:
      return &read_svm<named>;
    case TextFormat::kVw:
      return &read_vw<named>;
    case TextFormat::kCsv:
      break;
  }
  return &read_csv<named>;
}

// Reads one line after the other, always into the same `Line`.
template <bool named>
struct Reader {
  explicit Reader(const Rules& of)
      : rules(of), reader(reader_of<named>(of.recipe.format)), line(of) {}

  // False: the line has failed.
  bool read(const Cutter& cutter) {
    line.clear();
    return reader(rules, cutter.begin, cutter.end, line) && line.finish();
  }

  const Rules& rules;
  bool (*reader)(const Rules&, const char*, const char*, Line<named>&);
  Line<named> line;
};

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument(what);
}

void check_column(const Column& column) {
  const std::string name = "column " + quoted(column.name);
  if (!std::isfinite(column.shift) || !std::isfinite(column.scale))
    refuse(name + ": shift and scale must be finite");
  if (!std::ranges::all_of(column.edges, [](double edge) { return std::isfinite(edge); }))
    refuse(name + ": edges must be finite");
  if (std::ranges::adjacent_find(column.edges, std::greater_equal{}) != column.edges.end())
    refuse(name + ": edges must rise; sort them and leave repeated ones out");
}

void check_columns(const Recipe& recipe) {
  if (recipe.columns.empty()) refuse("csv text needs a list of its columns");
  const char separator = recipe.separator;
  if (separator == '\n' || separator == '\r' || separator == '"')
    refuse("a separator cannot be a quote or the end of a line; use ',' or a tab");
  std::unordered_set<std::string_view> names;
  size_t labels = 0, weights = 0;
  for (const Column& column : recipe.columns) {
    if (column.kind == ColumnKind::kIgnore) continue;
    check_column(column);
    labels += column.kind == ColumnKind::kLabel;
    weights += column.kind == ColumnKind::kWeight;
    if (!names.insert(column.name).second)
      refuse("two columns are called " + quoted(column.name) + "; rename or ignore one");
  }
  if (labels > 1 || weights > 1) refuse("at most one column can be the label, and one the weight");
  if (labels == 0 && recipe.labels_needed) refuse("no column is the label");
}

bool has_features(const Recipe& recipe, std::string_view name) {
  return std::ranges::any_of(recipe.columns, [&](const Column& column) {
    return column.name == name &&
           (column.kind == ColumnKind::kCategory || column.kind == ColumnKind::kNumber);
  });
}

void check_crosses(const Recipe& recipe) {
  if (recipe.format == TextFormat::kSvm && !recipe.crosses.empty())
    refuse("svm text has no names that could be crossed; use vw or csv");
  for (const std::vector<std::string>& cross : recipe.crosses) {
    if (cross.size() < 2) refuse("a cross needs two names or more");
    if (recipe.format != TextFormat::kCsv) continue;
    for (const std::string& name : cross)
      if (!has_features(recipe, name))
        refuse("cannot cross " + quoted(name) + ": no column of categories or numbers has this " +
               "name");
  }
}

Rules::ColumnKeys keys_of(const Column& column, const Rules& rules) {
  const uint64_t seed = name_hash(column.name);
  Rules::ColumnKeys keys{.seed = seed,
                         .number = text_hash(seed, ""),
                         .missing = text_hash(seed, "missing"),
                         .bins = {},
                         .slot = rules.slot_of(seed)};
  for (size_t bin = 0; bin <= column.edges.size(); ++bin)
    keys.bins.push_back(text_hash(seed, std::string(1, 'b').append(std::to_string(bin))));
  return keys;
}

template <class Kind>
Kind named_in(std::initializer_list<std::pair<std::string_view, Kind>> all, std::string_view name,
              const char* what) {
  std::string known;
  for (const auto& [known_name, kind] : all) {
    if (known_name == name) return kind;
    known += (known.empty() ? "" : ", ") + std::string(known_name);
  }
  refuse(std::string(what) + " is one of " + known + ", not " + quoted(name));
}

}  // namespace

TextFormat text_format(std::string_view name) {
  using enum TextFormat;
  return named_in<TextFormat>({{"svm", kSvm}, {"vw", kVw}, {"csv", kCsv}}, name, "a format");
}

ColumnKind column_kind(std::string_view name) {
  using enum ColumnKind;
  return named_in<ColumnKind>({{"ignore", kIgnore},
                               {"category", kCategory},
                               {"number", kNumber},
                               {"label", kLabel},
                               {"weight", kWeight}},
                              name, "a column's kind");
}

Rules::Rules(Recipe given) : recipe(std::move(given)) {
  if (recipe.format == TextFormat::kCsv) check_columns(recipe);
  check_crosses(recipe);
  for (const std::vector<std::string>& names : recipe.crosses) {
    std::vector<uint32_t>& cross = crosses.emplace_back();
    for (const std::string& name : names) {
      const uint64_t hash = name_hash(name);
      if (slot_of(hash) == kNoSlot) slots.push_back(hash);
      cross.push_back(slot_of(hash));
    }
  }
  for (const Column& column : recipe.columns) columns.push_back(keys_of(column, *this));
}

Examples Parser::parse(std::string_view text, size_t most, bool last) const {
  Examples examples;
  examples.keys.reserve(features_.load(std::memory_order_relaxed));
  Cutter cutter(rules_.recipe, text, last);
  Reader<false> reader(rules_);
  const auto has_room = [&] {
    return examples.count() < most &&
           examples.keys.size() <= std::numeric_limits<uint32_t>::max() - kMostFeatures;
  };
  while (has_room() && cutter.next()) {
    if (cutter.empty()) continue;
    if (reader.read(cutter)) {
      reader.line.move_to(examples);
    } else {
      const auto size = static_cast<size_t>(cutter.end - cutter.begin);
      examples.bad.push_back({cutter.lines() - 1, std::move(reader.line.fault()),
                              std::string(cutter.begin, std::min(size, kReportedBytes))});
    }
  }
  examples.consumed = cutter.consumed();
  examples.lines = cutter.lines();
  features_.store(examples.keys.size(), std::memory_order_relaxed);
  return examples;
}

// Names are made of lines only that have a feature that is still looked for.
std::unordered_map<uint64_t, std::string> Parser::names(std::string_view text,
                                                        std::span<const uint64_t> keys) const {
  std::unordered_map<uint64_t, std::string> found;
  std::unordered_set<uint64_t> wanted(keys.begin(), keys.end());
  Cutter cutter(rules_.recipe, text, true);
  Reader<false> reader(rules_);
  Reader<true> naming(rules_);
  while (!wanted.empty() && cutter.next()) {
    if (cutter.empty() || !reader.read(cutter)) continue;
    const auto is_wanted = [&](uint64_t key) { return wanted.contains(key); };
    if (!std::ranges::any_of(reader.line.keys(), is_wanted)) continue;
    naming.read(cutter);
    for (size_t i = 0; i < naming.line.count(); ++i) {
      const uint64_t key = naming.line.keys()[i];
      if (wanted.erase(key) > 0) found.emplace(key, naming.line.names()[i]);
    }
  }
  return found;
}

}  // namespace commute
