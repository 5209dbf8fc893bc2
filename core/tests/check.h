// SPDX-License-Identifier: Apache-2.0
// The core's test harness, whole:
//
//   TEST(ring_wraps_around) {
//     CHECK(ring.empty());
//     CHECK_EQ(ring.size(), 0u);
//   }
//
// A failed check is printed and the test goes on; an exception ends it. The program runs all tests,
// or those whose name contains its first argument, and exits with 1 if any failed or none matched.
// Checks may be made from any thread.
#pragma once

#include <atomic>
#include <cstdio>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace commute::check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline std::atomic<int> failures{0};  // of the running test

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

inline void fail(const char* file, int line, const std::string& what) {
  constexpr int kPrinted = 20;  // a broken kernel fails thousands of times
  const int before = failures.fetch_add(1);
  if (before < kPrinted) std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  if (before == kPrinted) std::fprintf(stderr, "%s:%d: further failures not shown\n", file, line);
}

template <class T>
std::string printed(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<long long>(value));
  } else if constexpr (std::is_integral_v<T> && sizeof(T) == 1) {
    return std::to_string(static_cast<int>(value));  // a number, not a character
  } else if constexpr (requires(std::ostream& out) { out << value; }) {
    std::ostringstream out;
    out << value;
    return out.str();
  } else {
    return "?";
  }
}

template <class A, class B>
void equal(const A& a, const B& b, const char* expression, const char* file, int line) {
  if (a == b) return;
  fail(file, line, std::string(expression) + ": " + printed(a) + " != " + printed(b));
}

inline bool passes(const Test& test) {
  failures = 0;
  try {
    test.run();
  } catch (const std::exception& error) {
    fail(test.name, 0, std::string("unexpected exception: ") + error.what());
  } catch (...) {
    fail(test.name, 0, "unexpected exception");
  }
  std::printf("%s %s\n", failures == 0 ? "ok" : "FAILED", test.name);
  std::fflush(stdout);
  return failures == 0;
}

inline int run(std::string_view wanted) {
  int passed = 0;
  int failed = 0;
  for (const Test& test : tests()) {
    if (std::string_view(test.name).find(wanted) == std::string_view::npos) continue;
    ++(passes(test) ? passed : failed);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed > 0 || passed == 0 ? 1 : 0;
}

}  // namespace commute::check

#define TEST(name)                                                                       \
  static void test_##name();                                                             \
  static const commute::check::Registration registration_of_##name(#name, &test_##name); \
  static void test_##name()

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) commute::check::fail(__FILE__, __LINE__, "not true: " #condition); \
  } while (false)

#define CHECK_EQ(a, b) commute::check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)

// Weak, so that several test files may be linked into one program.
[[gnu::weak]] int main(int argc, char** argv) {
  return commute::check::run(argc > 1 ? argv[1] : "");
}
