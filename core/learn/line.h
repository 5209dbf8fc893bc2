// SPDX-License-Identifier: Apache-2.0
// One line on its way to an example: what the readers of the formats (parser_svm.cc, parser_vw.cc,
// parser_csv.cc) share.
//
// A reader is given a line as two pointers. Two things hold, so that tokens can be scanned and
// hashed a block at a time (scan.h):
//   - the byte at its end is a newline;
//   - `kScanBytes` bytes can be read from its end on.
// It adds features to a `Line`, and returns false when it has failed the line. Then nothing stays.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "learn/examples.h"
#include "learn/feature_hash.h"
#include "learn/recipe.h"

namespace commute {

// Of one example, crosses included. More is a broken file, or a cross of two long texts, and would
// take all memory.
inline constexpr size_t kMostFeatures = 1 << 20;

// What can be known of a recipe before there is text. Names that are crossed have numbers, slots.
struct Rules {
  static constexpr uint32_t kNoSlot = ~uint32_t{0};

  struct ColumnKeys {
    uint64_t seed = 0;  // of categories
    uint64_t number = 0;
    uint64_t missing = 0;
    std::vector<uint64_t> bins;
    uint32_t slot = kNoSlot;
  };

  explicit Rules(Recipe given);  // throws std::invalid_argument

  // Few names are crossed, so a look at all of them is quick.
  uint32_t slot_of(uint64_t name) const {
    for (uint32_t slot = 0; slot < slots.size(); ++slot)
      if (slots[slot] == name) return slot;
    return kNoSlot;
  }

  Recipe recipe;
  uint64_t nameless = name_hash("");
  uint64_t constant = feature_hash("", "constant");
  std::vector<ColumnKeys> columns;
  std::vector<uint64_t> slots;                 // their names' hashes
  std::vector<std::vector<uint32_t>> crosses;  // slots
};

// For messages: the beginning of a text, in quotes.
std::string quoted(std::string_view text);

// A named one knows what its features are called, and takes its time for it.
template <bool named>
class Line {
 public:
  explicit Line(const Rules& rules) : rules_(rules), parts_(rules.slots.size()) {}

  void clear() {
    count_ = 0;
    plain_ = true;
    too_many_ = false;
    labelled_ = false;
    label_ = 0;
    weight_ = 1;
    for (auto& part : parts_) part.clear();
    names_.clear();
  }

  // `naming` makes the feature's name.
  template <class Naming>
  void add(uint64_t key, float value, [[maybe_unused]] Naming naming) {
    if (count_ == keys_.size()) [[unlikely]]
      grow();
    keys_[count_] = key;
    values_[count_] = value;
    ++count_;
    plain_ &= value == 1.0f;
    if constexpr (named) names_.push_back(naming());
  }

  // Features from `first` on belong to a name that is crossed, or to none.
  void mark(uint32_t slot, size_t first) {
    if (slot != Rules::kNoSlot && first < count_) parts_[slot].push_back({first, count_});
  }

  bool fail(std::string what) {
    fault_ = std::move(what);
    return false;
  }

  bool take_label(std::string_view text);
  bool take_weight(std::string_view text);

  // Adds what all formats have, and checks what they all have to keep.
  bool finish();

  void move_to(Examples& examples) const;

  size_t count() const { return count_; }
  std::span<const uint64_t> keys() const { return {keys_.data(), count_}; }
  const std::vector<std::string>& names() const { return names_; }
  std::string& fault() { return fault_; }
  // For a cell that has to be copied.
  std::string& scratch() { return scratch_; }

 private:
  struct Range {
    size_t begin;
    size_t end;
  };

  // Too many: begins anew, as the line has failed anyway.
  void grow() {
    if (count_ >= kMostFeatures) {
      too_many_ = true;
      count_ = 0;
      for (auto& part : parts_) part.clear();
      names_.clear();
    } else {
      keys_.resize(count_ == 0 ? 64 : count_ * 2);
      values_.resize(keys_.size());
    }
  }

  size_t combinations(const std::vector<uint32_t>& slots) const;
  // Of what has been combined so far.
  struct Combined {
    bool any = false;
    uint64_t key = 0;
    float value = 1;
    std::string name;
  };
  void cross(std::span<const uint32_t> slots, const Combined& before);
  void cross_all();

  const Rules& rules_;
  std::vector<uint64_t> keys_;  // as large as there is room
  std::vector<float> values_;
  size_t count_ = 0;
  bool plain_ = true;
  bool too_many_ = false;
  bool labelled_ = false;
  float label_ = 0;
  float weight_ = 1;
  std::vector<std::vector<Range>> parts_;  // by slot
  std::vector<std::string> names_;
  std::string fault_;
  std::string scratch_;
};

template <bool named>
bool read_svm(const Rules& rules, const char* at, const char* end, Line<named>& line);
template <bool named>
bool read_vw(const Rules& rules, const char* at, const char* end, Line<named>& line);
template <bool named>
bool read_csv(const Rules& rules, const char* at, const char* end, Line<named>& line);

}  // namespace commute
