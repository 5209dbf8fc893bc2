// SPDX-License-Identifier: Apache-2.0
// What the parser is made of: hashes of texts, numbers, and finding where a word ends.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "exact.h"
#include "learn/feature_hash.h"
#include "learn/number.h"
#include "learn/scan.h"
#include "seeded.h"

namespace {

using namespace commute;

// ---- Hashes ----

TEST(hashes_stay_as_they_are) {
  // Saved models hold such keys: if this fails, they cannot be read any more.
  CHECK_EQ(name_hash(""), 0xe8ccdc60a43cf38ULL);
  CHECK_EQ(feature_hash("", "constant"), 0x247bdc985e956294ULL);
  CHECK_EQ(feature_hash("f", "a123456"), 0x23b5f70ee12c222bULL);
  CHECK_EQ(feature_hash("color", "a text of more than sixteen bytes"), 0x6b530cb8993b3baaULL);
  CHECK_EQ(cross_hash(1, 2), 0x4a4884047dc3fb66ULL);
}

TEST(hashes_do_not_depend_on_what_follows) {
  Rng rng = seeded(1);
  for (size_t size = 0; size < 100; ++size) {
    std::string text(size + kHashBytes, '\0');
    for (char& c : text) c = static_cast<char>(rng());
    const uint64_t seed = rng();
    const Exact exact(std::string_view(text).substr(0, size));
    CHECK_EQ(padded_text_hash(seed, text.data(), size), text_hash(seed, exact.view()));
  }
}

TEST(hashes_tell_texts_apart) {
  std::vector<uint64_t> keys;
  for (const char* name : {"", "a", "b", "ab"})
    for (int i = 0; i < 200000; ++i) keys.push_back(feature_hash(name, std::to_string(i)));
  for (size_t i = 0; i < 200000; ++i) keys.push_back(cross_hash(keys[i], keys[i + 200000]));
  for (size_t i = 0; i < 200000; ++i) keys.push_back(cross_hash(keys[i + 200000], keys[i]));
  for (size_t n = 0; n < 64; ++n) keys.push_back(text_hash(0, std::string(n, '\0')));
  std::ranges::sort(keys);
  CHECK(std::ranges::adjacent_find(keys) == keys.end());
  // Of n numbers of 32 bits about n * n / 2^33 are equal to another: 167 of 1.2 million.
  for (const int shift : {0, 16, 32}) {
    std::vector<uint32_t> parts;
    for (const uint64_t key : keys) parts.push_back(static_cast<uint32_t>(key >> shift));
    std::ranges::sort(parts);
    size_t equal = 0;
    for (size_t i = 1; i < parts.size(); ++i) equal += parts[i - 1] == parts[i];
    CHECK(equal > 100 && equal < 250);
  }
}

TEST(every_bit_of_a_hash_depends_on_every_bit_of_a_text) {
  Rng rng = seeded(2);
  constexpr int kRounds = 2000;
  for (const size_t size : {1u, 3u, 7u, 8u, 9u, 16u, 17u, 33u})
    for (size_t bit = 0; bit < 8 * size; bit += size < 9 ? 1 : 5) {
      int changes[64] = {};
      for (int round = 0; round < kRounds; ++round) {
        std::string text(size, '\0');
        for (char& c : text) c = static_cast<char>(rng());
        const uint64_t seed = rng(), before = text_hash(seed, text);
        text[bit / 8] = static_cast<char>(text[bit / 8] ^ 1 << bit % 8);
        const uint64_t changed = before ^ text_hash(seed, text);
        for (int i = 0; i < 64; ++i) changes[i] += changed >> i & 1;
      }
      const auto [least, most] = std::minmax_element(changes, changes + 64);
      CHECK(*least > kRounds * 0.43 && *most < kRounds * 0.57);
    }
}

// ---- Numbers and scanning ----

TEST(numbers_are_read_as_the_standard_library_reads_them) {
  Rng rng = seeded(3);
  for (int round = 0; round < 100000; ++round) {
    std::string text(rng() % 3 == 0 ? "-" : "");
    const auto digits = [&](size_t most) {
      for (size_t n = rng() % (most + 1); n > 0; --n) text += static_cast<char>('0' + rng() % 10);
    };
    digits(20);
    if (rng() % 2 == 0) text += '.', digits(20);
    if (rng() % 4 == 0) text += "e", text += std::to_string(static_cast<int>(rng() % 600) - 300);
    if (rng() % 16 == 0) text += "+-.ex "[rng() % 6];
    double expected = 0, got = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, expected);
    const bool good = stop == end && error == std::errc();
    const bool read = read_number(Exact(text).view(), got);
    if (error == std::errc::result_out_of_range && stop == end) {
      CHECK(!read || got == 0);
      continue;
    }
    if (good != read || (good && std::bit_cast<uint64_t>(expected) != std::bit_cast<uint64_t>(got)))
      check::fail(__FILE__, __LINE__, "number " + text);
  }
}

TEST(odd_numbers) {
  const auto read = [](std::string_view text) {
    double number = -1;
    return read_number(text, number) ? number : std::numeric_limits<double>::quiet_NaN();
  };
  CHECK_EQ(read("+1.5"), 1.5);
  CHECK_EQ(read("5."), 5.0);
  CHECK_EQ(read(".5"), 0.5);
  CHECK_EQ(read("1e-999"), 0.0);
  CHECK_EQ(read("1E2"), 100.0);
  CHECK(std::signbit(read("-0")));
  for (const char* text : {"", "+", "-", ".", "-.", "+-1", "--1", "1e", "1 ", " 1", "0x10", "nan",
                           "inf", "-inf", "1e999", "1,5", "1:2"})
    CHECK(std::isnan(read(text)));
}

template <class Ends, class Kind>
std::vector<size_t> stops_of(const std::string& line, Ends ends) {
  Stops<Ends, Kind> stops(line.data(), ends);
  std::vector<size_t> found;
  do found.push_back(static_cast<size_t>(stops.next() - line.data()));
  while (line[found.back()] != '\n');
  return found;
}

TEST(stops_are_the_same_however_they_are_found) {
  Rng rng = seeded(4);
  for (int round = 0; round < 5000; ++round) {
    std::string line(rng() % 200, '\0');
    for (char& c : line) {
      c = rng() % 3 == 0 ? " :|\t,\x80\x1f\x21\x7f"[rng() % 9] : static_cast<char>(rng());
      if (c == '\n') c = 'n';
    }
    std::vector<size_t> tokens, cells;
    for (size_t i = 0; i <= line.size(); ++i) {
      if (i == line.size() || is_blank(line[i]) || line[i] == ':' || line[i] == '|')
        tokens.push_back(i);
      if (i == line.size() || line[i] == ',') cells.push_back(i);
    }
    line += '\n' + std::string(kScanBytes, 'x');
    using Tokens = TokenEnds<':', '|'>;
    CHECK((stops_of<Tokens, Words>(line, {}) == tokens));
    CHECK((stops_of<Tokens, Blocks>(line, {}) == tokens));
    CHECK((stops_of<CellEnds, Words>(line, {','}) == cells));
    CHECK((stops_of<CellEnds, Blocks>(line, {','}) == cells));
  }
}

}  // namespace
