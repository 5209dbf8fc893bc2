// SPDX-License-Identifier: Apache-2.0
// Numbers in text: [+-] digits [. digits] [e [+-] digits], as everywhere. A few digits, which is
// what data mostly has, are read here; the standard library reads the others.
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <system_error>

namespace commute {
namespace number_detail {

// So many digits, and the power of ten to divide by, are exact as doubles: so is the rounding.
inline constexpr size_t kExactDigits = 15;
inline constexpr double kPowers[] = {1e0, 1e1, 1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                     1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};

// What the standard library calls out of range is too large, or so small that 0 is near enough.
inline bool is_tiny(std::string_view text) {
  const size_t exponent = text.find_first_of("eE");
  if (exponent != std::string_view::npos) return text.substr(exponent + 1).starts_with('-');
  if (text.starts_with('-')) text.remove_prefix(1);
  return text.starts_with('0') || text.starts_with('.');
}

inline bool read_any(std::string_view text, double& number) {
  if (text.starts_with('+')) {
    text.remove_prefix(1);
    if (text.starts_with('-')) return false;
  }
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (stop != end || error == std::errc::invalid_argument) return false;
  if (error == std::errc::result_out_of_range) {
    if (!is_tiny(text)) return false;
    number = 0;
  }
  return std::isfinite(number);
}

inline const char* read_digits(const char* at, const char* end, uint64_t& digits) {
  for (; at != end; ++at) {
    const auto digit = static_cast<unsigned char>(*at - '0');
    if (digit > 9) break;
    digits = digits * 10 + digit;
  }
  return at;
}

}  // namespace number_detail

// False if the text, all of it, is not a finite number.
inline bool read_number(std::string_view text, double& number) {
  using namespace number_detail;
  const char* const end = text.data() + text.size();
  const char* at = text.data();
  const bool negative = at != end && *at == '-';
  if (at != end && (*at == '-' || *at == '+')) ++at;
  uint64_t digits = 0;  // wraps around if there are many; then it is not used
  const char* const whole = at;
  at = read_digits(at, end, digits);
  size_t count = static_cast<size_t>(at - whole), decimals = 0;
  if (at != end && *at == '.') {
    const char* const point = ++at;
    at = read_digits(at, end, digits);
    decimals = static_cast<size_t>(at - point);
    count += decimals;
  }
  if (at != end || count == 0 || count > kExactDigits) return read_any(text, number);
  const double size = static_cast<double>(digits) / kPowers[decimals];
  number = negative ? -size : size;
  return true;
}

}  // namespace commute
