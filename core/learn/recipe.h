// SPDX-License-Identifier: Apache-2.0
// What to make of a line of text: how it is cut, what its columns mean, which features are crossed,
// which labels are positive.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace commute {

enum class TextFormat { kSvm, kVw, kCsv };

enum class ColumnKind { kIgnore, kCategory, kNumber, kLabel, kWeight };

// "svm" and "category", for instance. Throw std::invalid_argument.
TextFormat text_format(std::string_view name);
ColumnKind column_kind(std::string_view name);

struct Column {
  std::string name;
  ColumnKind kind = ColumnKind::kCategory;
  // A number v becomes (x - shift) * scale, where x is v, or sign(v) * log1p(|v|) with `log`.
  bool log = false;
  double shift = 0;
  double scale = 1;
  // Rising. If there are any, a number becomes the category of its bin instead: bin i holds the
  // numbers v, as they are in the text, with edges[i - 1] <= v < edges[i].
  std::vector<double> edges;
};

struct Recipe {
  TextFormat format = TextFormat::kVw;
  char separator = ',';         // of csv
  std::vector<Column> columns;  // of csv, in the order of the cells
  // Names of columns or namespaces, two or more each. A cross has a feature for every combination
  // of one feature of each name, in this order.
  std::vector<std::vector<std::string>> crosses;
  std::vector<std::string> positive;  // labels that mean 1, others mean 0; none: labels are numbers
  bool binary = false;                // numbers <= 0 become 0, others 1
  bool constant = false;              // a last feature of every example that is always 1
  bool labels_needed = true;          // else a label that is missing is 0
};

}  // namespace commute
