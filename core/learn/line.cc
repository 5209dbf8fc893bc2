// SPDX-License-Identifier: Apache-2.0
#include "learn/line.h"

#include <algorithm>

#include "learn/number.h"

namespace commute {

std::string quoted(std::string_view text) {
  constexpr size_t kShown = 40;
  std::string shown(1, '\'');
  shown.append(text.substr(0, kShown));
  return shown.append(text.size() > kShown ? "...'" : "'");
}

template <bool named>
bool Line<named>::take_label(std::string_view text) {
  const Recipe& recipe = rules_.recipe;
  if (text.empty()) return true;
  double number = 0;
  if (!recipe.positive.empty())
    number = std::ranges::find(recipe.positive, text) != recipe.positive.end();
  else if (!read_number(text, number))
    return fail("the label " + quoted(text) + " is not a number; for labels that are words, say " +
                "which are positive");
  else if (recipe.binary)
    number = number > 0;
  label_ = static_cast<float>(number);
  labelled_ = true;
  if (std::isfinite(label_)) return true;
  return fail("the label " + quoted(text) + " is too large");
}

template <bool named>
bool Line<named>::take_weight(std::string_view text) {
  double number = 0;
  if (!read_number(text, number)) return fail("the weight " + quoted(text) + " is not a number");
  weight_ = static_cast<float>(number);
  if (number < 0) return fail("the weight " + quoted(text) + " is negative");
  if (std::isfinite(weight_)) return true;
  return fail("the weight " + quoted(text) + " is too large");
}

template <bool named>
bool Line<named>::finish() {
  if (!labelled_ && rules_.recipe.labels_needed) return fail("no label");
  cross_all();
  if (rules_.recipe.constant) add(rules_.constant, 1, [] { return std::string("constant"); });
  if (too_many_) return fail("more than " + std::to_string(kMostFeatures) + " features");
  const auto finite = [](float value) { return std::isfinite(value); };
  if (!plain_ && !std::all_of(values_.data(), values_.data() + count_, finite))
    return fail("a feature's value is too large");
  return true;
}

template <bool named>
void Line<named>::move_to(Examples& examples) const {
  if (examples.plain && !plain_) {
    examples.plain = false;
    examples.values.reserve(examples.keys.capacity());
    examples.values.assign(examples.keys.size(), 1.0f);
  }
  const auto append = [this](auto& to, const auto& from) {
    to.insert(to.end(), from.data(), from.data() + count_);
  };
  append(examples.keys, keys_);
  if (!examples.plain) append(examples.values, values_);
  examples.offsets.push_back(static_cast<uint32_t>(examples.keys.size()));
  examples.labels.push_back(label_);
  examples.weights.push_back(weight_);
}

// At most `kMostFeatures` + 1.
template <bool named>
size_t Line<named>::combinations(const std::vector<uint32_t>& slots) const {
  size_t all = 1;
  for (const uint32_t slot : slots) {
    size_t features = 0;
    for (const Range& range : parts_[slot]) features += range.end - range.begin;
    if (features == 0) return 0;
    all = std::min(all * features, kMostFeatures + 1);
  }
  return all;
}

// With each feature of the first slot, and then with those of the others.
template <bool named>
void Line<named>::cross(std::span<const uint32_t> slots, const Combined& before) {
  for (const Range& range : parts_[slots.front()])
    for (size_t i = range.begin; i < range.end; ++i) {
      Combined now{true, keys_[i], before.value * values_[i], {}};
      if (before.any) now.key = cross_hash(before.key, keys_[i]);
      if constexpr (named) now.name = before.any ? before.name + " & " + names_[i] : names_[i];
      if (slots.size() > 1)
        cross(slots.subspan(1), now);
      else
        add(now.key, now.value, [&] { return std::move(now.name); });
    }
}

template <bool named>
void Line<named>::cross_all() {
  for (const std::vector<uint32_t>& slots : rules_.crosses) {
    too_many_ |= count_ + combinations(slots) > kMostFeatures;
    if (too_many_) return;
    cross(slots, {});
  }
}

template class Line<false>;
template class Line<true>;

}  // namespace commute
