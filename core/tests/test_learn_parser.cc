// SPDX-License-Identifier: Apache-2.0
// Text to examples: the grammar of each format, and any bytes at all.
#include "learn/parser.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "exact.h"
#include "seeded.h"

namespace {

using namespace commute;
using Texts = std::vector<std::string>;

constexpr size_t kAll = std::numeric_limits<size_t>::max();

Examples parsed(const Recipe& recipe, std::string_view text, size_t most = kAll, bool last = true) {
  return Parser(recipe).parse(Exact(text).view(), most, last);
}

Recipe of_format(TextFormat format) {
  Recipe recipe;
  recipe.format = format;
  return recipe;
}

Column column(std::string name, ColumnKind kind, std::vector<double> edges = {}) {
  Column made;
  made.name = std::move(name);
  made.kind = kind;
  made.edges = std::move(edges);
  return made;
}

Recipe of_columns(std::vector<Column> columns) {
  Recipe recipe = of_format(TextFormat::kCsv);
  recipe.columns = std::move(columns);
  return recipe;
}

const Recipe kSvm = of_format(TextFormat::kSvm);
const Recipe kVw = of_format(TextFormat::kVw);
const Recipe kCsv =
    of_columns({column("y", ColumnKind::kLabel), column("color", ColumnKind::kCategory),
                column("size", ColumnKind::kNumber)});

// "name=value" of each feature, by the parser's own names; a value of 1 is not shown.
Texts features(const Recipe& recipe, std::string_view text, size_t example = 0) {
  const Parser parser(recipe);
  const Exact exact(text);
  const Examples examples = parser.parse(exact.view(), kAll, true);
  const auto names = parser.names(exact.view(), examples.keys);
  Texts found;
  if (example >= examples.count()) return {"no such example"};
  for (size_t i = examples.offsets[example]; i < examples.offsets[example + 1]; ++i) {
    const auto name = names.find(examples.keys[i]);
    std::string feature = name == names.end() ? "?" : name->second;
    const float value = examples.plain ? 1 : examples.values[i];
    char printed[32];
    std::snprintf(printed, sizeof printed, " (%g)", static_cast<double>(value));
    found.push_back(value == 1 ? feature : feature + printed);
  }
  return found;
}

std::string joined(const Texts& texts) {
  std::string all;
  for (const std::string& text : texts) all += (all.empty() ? "" : ", ") + text;
  return all;
}

// Why a line is bad; empty if it is not.
std::string fault(const Recipe& recipe, std::string_view text) {
  const Examples examples = parsed(recipe, text);
  return examples.bad.empty() ? "" : examples.bad.front().what;
}

std::string refusal(const Recipe& recipe) {
  try {
    const Parser parser(recipe);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// ---- Lines ----

TEST(whole_lines_are_read_and_no_others) {
  const std::string text = "# comment\n1 |f a b\r\n\n \t\n-1 |f c\nbad\n2 |f d";
  const Examples part = parsed(kVw, text, kAll, false);
  CHECK_EQ(part.count(), 2u);
  CHECK_EQ(part.lines, 6u);
  CHECK_EQ(part.consumed, text.size() - 6);
  CHECK_EQ(part.bad.size(), 1u);
  CHECK_EQ(part.bad[0].line, 5u);
  CHECK_EQ(part.bad[0].text, "bad");
  CHECK(part.plain && part.values.empty());
  const Examples whole = parsed(kVw, text);
  CHECK_EQ(whole.count(), 3u);
  CHECK_EQ(whole.consumed, text.size());
  CHECK((whole.labels == std::vector<float>{1, -1, 2}));
  CHECK((whole.weights == std::vector<float>{1, 1, 1}));
  CHECK((whole.offsets == std::vector<uint32_t>{0, 2, 3, 4}));
  const Examples first = parsed(kVw, text, 1);
  CHECK_EQ(first.count(), 1u);
  CHECK_EQ(first.lines, 2u);
  CHECK_EQ(parsed(kVw, text, 0).consumed, 0u);
  CHECK_EQ(parsed(kVw, "", 10).count(), 0u);
}

TEST(values_appear_with_the_first_that_is_not_one) {
  const Examples examples = parsed(kVw, "1 |f a b:1\n1 |f c:2 d\n1 |f e\n");
  CHECK(!examples.plain);
  CHECK((examples.values == std::vector<float>{1, 1, 2, 1, 1}));
  // A line that is bad leaves nothing, not even this.
  CHECK(parsed(kVw, "1 |f a:2 b:x\n1 |f c\n").plain);
}

TEST(labels_become_what_the_recipe_says) {
  const auto labels = [](Recipe recipe, std::string_view text) {
    return parsed(recipe, text).labels;
  };
  Recipe recipe = kVw;
  recipe.binary = true;
  CHECK((labels(recipe, "-1 |\n0 |\n0.5 |\n7 |") == std::vector<float>{0, 0, 1, 1}));
  recipe.positive = {"yes", "y"};
  CHECK((labels(recipe, "yes |\nno |\ny |\n1 |") == std::vector<float>{1, 0, 1, 0}));
  recipe.labels_needed = false;
  CHECK((labels(recipe, "yes |\n|f a") == std::vector<float>{1, 0}));
  CHECK(has(fault(kVw, "nan | a"), "label 'nan'"));
  CHECK(has(fault(kVw, "1e300 | a"), "too large"));
  CHECK_EQ(fault(kVw, "|f a"), "no label");
  CHECK_EQ(fault(kSvm, "a:1 b:2"), "no label");
  CHECK_EQ(fault(kCsv, ",red,1"), "no label");
}

TEST(the_constant_comes_last) {
  for (Recipe recipe : {kSvm, kVw}) {
    recipe.constant = true;
    const Examples examples = parsed(recipe, "1 |f a\n2 |f\n");
    for (size_t i = 0; i < 2; ++i)
      CHECK_EQ(examples.keys[examples.offsets[i + 1] - 1], feature_hash("", "constant"));
  }
  Recipe recipe = kCsv;
  recipe.constant = true;
  recipe.crosses = {{"size", "color"}};
  CHECK_EQ(joined(features(recipe, "1,red,2\n")),
           "color=red, size (2), size & color=red (2), constant");
}

// ---- svm ----

TEST(svm_lines) {
  CHECK_EQ(joined(features(kSvm, "1 qid:7 1:0.5 name 12:-2e1  # 3:4\n")),
           "1 (0.5), name, 12 (-20)");
  CHECK_EQ(joined(features(kSvm, " +1\t7:1 qid:2 a#b #x\r\n")), "7, qid (2), a#b");
  CHECK_EQ(joined(features(kSvm, "1 # all:1\n1\n", 1)), "");
  CHECK_EQ(parsed(kSvm, "-1 3:1\n").keys.at(0), feature_hash("", "3"));
  CHECK_EQ(parsed(kSvm, "-1 3:1\n").labels.at(0), -1.0f);
  for (const char* line : {"1 a:", "1 a:b", "1 :2", "1 a:1:2", "1 a:nan", "1 a:1e99", "x a:1"})
    CHECK(fault(kSvm, line) != "");
  Recipe recipe = kSvm;
  recipe.labels_needed = false;
  CHECK_EQ(joined(features(recipe, "1:2 3\n")), "1 (2), 3");
  recipe.crosses = {{"a", "b"}};
  CHECK(has(refusal(recipe), "svm text has no names"));
}

// ---- vw ----

TEST(vw_lines) {
  CHECK_EQ(joined(features(kVw, "1 |f a b:2 |g:0.5 c d:4|h e\n")),
           "f^a, f^b (2), g^c (0.5), g^d (2), h^e");
  CHECK_EQ(joined(features(kVw, "1 2 'tag | a b | c |\r\n")), "a, b, c");
  CHECK_EQ(joined(features(kVw, "1 tag|f  a\tb ||:3 c\n")), "f^a, f^b, c (3)");
  const Examples examples = parsed(kVw, "-1 2.5 tag|f a\n3 | b");
  CHECK((examples.labels == std::vector<float>{-1, 3}));
  CHECK((examples.weights == std::vector<float>{2.5, 1}));
  CHECK((examples.keys == std::vector<uint64_t>{feature_hash("f", "a"), feature_hash("", "b")}));
}

TEST(vw_lines_that_are_bad) {
  CHECK(has(fault(kVw, "1 a b"), "no '|'"));
  CHECK(has(fault(kVw, "1|f a"), "'1' touches the '|'"));
  CHECK(has(fault(kVw, "1 2 3 |f a"), "but not '3'"));
  CHECK(has(fault(kVw, "1 -2 |f a"), "weight '-2' is negative"));
  CHECK(has(fault(kVw, "1 x |f a"), "weight 'x' is not a number"));
  CHECK(has(fault(kVw, "1 |f http://x a"), "value '//x' of 'http' is not a number"));
  CHECK(has(fault(kVw, "1 |f a:1:2 a"), "value '1:2' of 'a'"));
  CHECK(has(fault(kVw, "1 |f:x a"), "scale 'x' of 'f'"));
  CHECK(has(fault(kVw, "1 |f :1"), "no feature"));
  CHECK(has(fault(kVw, "1 |f:1e30 a:1e30"), "too large"));
  for (const char* line : {"1 |f a:", "1 |f a:|g", "1 |f: a", "1 |f a:inf"})
    CHECK(fault(kVw, line) != "");
}

TEST(vw_crosses) {
  Recipe recipe = kVw;
  recipe.crosses = {{"a", "b"}, {"b", "a", "b"}, {"a", "none"}};
  CHECK_EQ(joined(features(recipe, "1 |a x:2 |b y |c z |a w\n")),
           "a^x (2), b^y, c^z, a^w, a^x & b^y (2), a^w & b^y, b^y & a^x & b^y (2), "
           "b^y & a^w & b^y");
  const Examples examples = parsed(recipe, "1 |a x |b y");
  const uint64_t x = feature_hash("a", "x"), y = feature_hash("b", "y");
  CHECK((examples.keys ==
         std::vector<uint64_t>{x, y, cross_hash(x, y), cross_hash(cross_hash(y, x), y)}));
  recipe.crosses = {{"a"}};
  CHECK(has(refusal(recipe), "two names"));
  recipe.crosses = {{"", "a"}};
  CHECK_EQ(joined(features(recipe, "1 | x |a y")), "x, a^y, x & a^y");
}

TEST(an_example_has_only_so_many_features) {
  std::string half = "1 |a";
  for (size_t i = 0; i < kMostFeatures / 2; ++i) half += " x";
  CHECK_EQ(parsed(kVw, half).keys.size(), kMostFeatures / 2);
  const std::string whole = half + half.substr(4);
  CHECK_EQ(parsed(kVw, whole).keys.size(), kMostFeatures);
  const Examples more = parsed(kVw, whole + " y\n1 |a z");
  CHECK_EQ(more.count(), 1u);
  CHECK(has(more.bad.at(0).what, "more than 1048576 features"));
  Recipe recipe = kVw;
  recipe.constant = true;
  CHECK(has(fault(recipe, whole), "more than"));
  recipe.crosses = {{"a", "a", "a"}};
  CHECK(has(fault(recipe, half), "more than"));
  CHECK(has(fault(recipe, whole + " y |a b"), "more than"));
}

// ---- csv ----

TEST(csv_lines) {
  CHECK_EQ(joined(features(kCsv, "1,red,2\n")), "color=red, size (2)");
  CHECK_EQ(joined(features(kCsv, " 1 ,\" a, \"\"b\"\" \" , 1\r\n")), "color= a, \"b\" , size");
  CHECK_EQ(joined(features(kCsv, "\"1\",\"\",\"3\"")), "color=, size (3)");
  CHECK_EQ(joined(features(kCsv, "1,,?")), "color=, size=missing");
  CHECK_EQ(joined(features(kCsv, "1,a\"b\",NaN")), "color=a\"b\", size=missing");
  CHECK_EQ(joined(features(kCsv, "1,a long category of many bytes,")),
           "color=a long category of many bytes, size=missing");
  CHECK_EQ(joined(features(kCsv, "1,\"one \"\"long\"\" category of many bytes\",")),
           "color=one \"long\" category of many bytes, size=missing");
  const Examples examples = parsed(kCsv, "1,red,2\n0,\"red\",\n");
  CHECK((examples.keys ==
         std::vector<uint64_t>{feature_hash("color", "red"), feature_hash("size", ""),
                               feature_hash("color", "red"), feature_hash("size", "missing")}));
}

TEST(csv_lines_that_are_bad) {
  CHECK_EQ(fault(kCsv, "1,red"), "expected 3 cells, got 2");
  CHECK_EQ(fault(kCsv, "1,red,x,"), "expected 3 cells, got 4");
  CHECK_EQ(fault(kCsv, "x"), "expected 3 cells, got 1");
  CHECK(has(fault(kCsv, "1,red,x"), "'x' in column 'size' is not a number"));
  CHECK(has(fault(kCsv, "1,red,inf"), "not a number"));
  CHECK(has(fault(kCsv, "1,red,1e39"), "too large"));
  CHECK(has(fault(kCsv, "1,\"red,1"), "not closed"));
  CHECK(has(fault(kCsv, "1,\"red\"x,1"), "after a closing quote"));
  CHECK(has(fault(kCsv, "1,\"a,b\"x"), "after a closing quote: '\"a,b\"x'"));
}

TEST(csv_columns) {
  Column price = column("price", ColumnKind::kNumber);
  price.log = true;
  price.shift = 1;
  price.scale = 0.5;
  Recipe recipe =
      of_columns({column("x", ColumnKind::kIgnore), column("x", ColumnKind::kIgnore),
                  column("w", ColumnKind::kWeight), price,
                  column("age", ColumnKind::kNumber, {10, 20.5}), column("y", ColumnKind::kLabel)});
  recipe.separator = '\t';
  const Examples examples = parsed(recipe, "a\t\"b\"\t2\t-3\t9\t1\n\t\t0\t3\t10\t0\n\n");
  CHECK((examples.weights == std::vector<float>{2, 0}));
  CHECK_EQ(examples.values.at(0), static_cast<float>((-std::log1p(3.0) - 1) * 0.5));
  CHECK_EQ(examples.values.at(2), static_cast<float>((std::log1p(3.0) - 1) * 0.5));
  CHECK_EQ(examples.keys.at(1), feature_hash("age", "b0"));
  CHECK_EQ(examples.keys.at(3), feature_hash("age", "b1"));
  CHECK_EQ(features(recipe, "\t\t1\t0\t9\t1").at(1), "age in [-inf, 10)");
  CHECK_EQ(features(recipe, "\t\t1\t0\t10\t1").at(1), "age in [10, 20.5)");
  CHECK_EQ(features(recipe, "\t\t1\t0\t20.5\t1").at(1), "age in [20.5, inf)");
  CHECK_EQ(features(recipe, "\t\t1\t0\t\t1").at(1), "age=missing");
  CHECK(has(fault(recipe, "\t\t\t0\t9\t1"), "weight ''"));
  CHECK_EQ(fault(recipe, "\t\t\t\n"), "expected 6 cells, got 4");
}

TEST(recipes_that_cannot_be_are_refused) {
  using enum ColumnKind;
  CHECK(has(refusal(of_columns({})), "list of its columns"));
  CHECK(has(refusal(of_columns({column("a", kCategory)})), "no column is the label"));
  CHECK(has(refusal(of_columns({column("a", kLabel), column("b", kLabel)})), "at most one"));
  CHECK(has(refusal(of_columns({column("a", kLabel), column("a", kNumber)})), "called 'a'"));
  CHECK(has(refusal(of_columns({column("a", kLabel), column("b", kNumber, {2, 1})})), "must rise"));
  Recipe recipe = kCsv;
  recipe.separator = '"';
  CHECK(has(refusal(recipe), "separator"));
  recipe = kCsv;
  recipe.crosses = {{"color", "y"}};
  CHECK(has(refusal(recipe), "cannot cross 'y'"));
  try {
    text_format("xml");
    CHECK(false);
  } catch (const std::invalid_argument& error) {
    CHECK_EQ(std::string(error.what()), "a format is one of svm, vw, csv, not 'xml'");
  }
}

// ---- Any bytes ----

void append(Examples& all, const Examples& more) {
  if (!all.plain || !more.plain) {
    if (all.plain) all.values.assign(all.keys.size(), 1);
    all.plain = false;
    Examples filled = more;
    if (more.plain) filled.values.assign(more.keys.size(), 1);
    all.values.insert(all.values.end(), filled.values.begin(), filled.values.end());
  }
  const auto base = static_cast<uint32_t>(all.keys.size());
  for (size_t i = 1; i < more.offsets.size(); ++i) all.offsets.push_back(base + more.offsets[i]);
  all.keys.insert(all.keys.end(), more.keys.begin(), more.keys.end());
  all.labels.insert(all.labels.end(), more.labels.begin(), more.labels.end());
  all.weights.insert(all.weights.end(), more.weights.begin(), more.weights.end());
  for (const BadLine& bad : more.bad) all.bad.push_back({all.lines + bad.line, bad.what, bad.text});
  all.consumed += more.consumed;
  all.lines += more.lines;
}

void check_sound(const Examples& examples, size_t size) {
  CHECK_EQ(examples.consumed, size);
  CHECK_EQ(examples.weights.size(), examples.count());
  CHECK_EQ(examples.offsets.size(), examples.count() + 1);
  CHECK(std::ranges::is_sorted(examples.offsets));
  CHECK_EQ(examples.offsets.back(), examples.keys.size());
  CHECK_EQ(examples.values.size(), examples.plain ? 0 : examples.keys.size());
  const auto finite = [](float value) { return std::isfinite(value); };
  CHECK(std::ranges::all_of(examples.values, finite));
  CHECK(std::ranges::all_of(examples.labels, finite));
  CHECK(std::ranges::all_of(examples.weights, [](float weight) { return weight >= 0; }));
  CHECK(examples.count() + examples.bad.size() <= examples.lines);
  for (const BadLine& bad : examples.bad) CHECK(bad.line < examples.lines && bad.what != "");
}

void check_equal(const Examples& a, const Examples& b) {
  CHECK(a.labels == b.labels && a.weights == b.weights && a.offsets == b.offsets);
  CHECK(a.keys == b.keys && a.values == b.values && a.plain == b.plain);
  CHECK(a.consumed == b.consumed && a.lines == b.lines && a.bad.size() == b.bad.size());
  for (size_t i = 0; i < std::min(a.bad.size(), b.bad.size()); ++i)
    CHECK(a.bad[i].line == b.bad[i].line && a.bad[i].what == b.bad[i].what &&
          a.bad[i].text == b.bad[i].text);
}

// As a file is read: what has not been consumed comes again, with more behind it.
Examples in_pieces(const Parser& parser, std::string_view text, Rng& rng) {
  Examples all;
  size_t given = 0;
  while (all.consumed < text.size()) {
    given = std::min(text.size(), given + rng() % 60);
    const Exact piece(text.substr(all.consumed, given - all.consumed));
    append(all, parser.parse(piece.view(), rng() % 4, given == text.size()));
  }
  return all;
}

std::string mutated(std::string text, Rng& rng) {
  constexpr std::string_view kOdd = "\n\r\t |:#,\"\"'.+-eE0159\0\x80\xff?an";
  for (size_t changes = rng() % 12; changes > 0 && !text.empty(); --changes) {
    const size_t at = rng() % text.size();
    const char c = rng() % 4 == 0 ? static_cast<char>(rng()) : kOdd[rng() % kOdd.size()];
    switch (rng() % 4) {
      case 0:
        text[at] = c;
        break;
      case 1:
        text.insert(at, 1, c);
        break;
      case 2:
        text.erase(at, 1 + rng() % 8);
        break;
      default:
        text.insert(at, text.substr(rng() % text.size(), rng() % 40));
    }
  }
  return text;
}

void fuzz(Recipe recipe, const std::string& text, uint64_t seed) {
  Rng rng = seeded(seed);
  for (int round = 0; round < 4000; ++round) {
    recipe.labels_needed = rng() % 2 == 0;
    recipe.constant = rng() % 2 == 0;
    recipe.binary = rng() % 2 == 0;
    const Parser parser(recipe);
    const Exact exact(mutated(text, rng));
    const int failures = check::failures;
    const Examples whole = parser.parse(exact.view(), kAll, true);
    check_sound(whole, exact.view().size());
    check_equal(whole, in_pieces(parser, exact.view(), rng));
    const auto names = parser.names(exact.view(), whole.keys);
    const std::set<uint64_t> keys(whole.keys.begin(), whole.keys.end());
    CHECK_EQ(names.size(), keys.size());
    if (check::failures != failures) {
      std::fprintf(stderr, "round %d:\n%s\n", round, std::string(exact.view()).c_str());
      return;
    }
  }
}

TEST(any_bytes_svm) {
  fuzz(kSvm, "1 qid:3 1:0.5 22:1e-3 name:7 # why\n-1 1:2 3\n+1 4:-5.25 some_longer_name_of_it:1\n",
       11);
}

TEST(any_bytes_vw) {
  Recipe recipe = kVw;
  recipe.crosses = {{"a", "b"}, {"a", "", "a"}};
  fuzz(recipe,
       "1 2 'tag |a x y:2 |b:0.5 z w:1e2 | u\n-1 |f a_feature_longer_than_16_bytes |b q\n"
       "0.5 t|a x:3|b v\n1 | a b c\n",
       12);
}

TEST(any_bytes_csv) {
  Recipe recipe = of_columns({column("y", ColumnKind::kLabel), column("c", ColumnKind::kCategory),
                              column("n", ColumnKind::kNumber), column("w", ColumnKind::kWeight),
                              column("b", ColumnKind::kNumber, {0, 1, 5})});
  recipe.crosses = {{"c", "n"}, {"n", "b", "c"}};
  const std::string text =
      "1,red,2.5,1,3\n0,\"a \"\"b\"\", c\",?,2,0.5\n1, blue ,-7e2 ,0.25, nan\r\n"
      "1,\"a category that is long, and quoted\",,1,\"9\"\n";
  fuzz(recipe, text, 13);
  for (const char separator : {'\t', ' '}) {
    recipe.separator = separator;
    std::string other = text;
    std::ranges::replace(other, ',', separator);
    fuzz(recipe, other, 14);
  }
}

}  // namespace
