// SPDX-License-Identifier: Apache-2.0
// Plain values into bytes and out of them, little endian as the processors we run on.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "store/message.h"

namespace commute {

inline void put_bytes(std::vector<std::byte>& into, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const size_t at = into.size();
  into.resize(at + bytes);
  std::memcpy(into.data() + at, from, bytes);
}

template <class T>
void put(std::vector<std::byte>& into, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  put_bytes(into, &value, sizeof value);
}

template <class T>
void put_all(std::vector<std::byte>& into, const std::vector<T>& values) {
  static_assert(std::is_trivially_copyable_v<T>);
  put_bytes(into, values.data(), values.size() * sizeof(T));
}

inline void put_text(std::vector<std::byte>& into, const std::string& text) {
  put(into, static_cast<uint32_t>(text.size()));
  put_bytes(into, text.data(), text.size());
}

inline Bytes take_bytes(Bytes& from, size_t bytes) {
  if (from.size() < bytes) throw std::invalid_argument("it ends too early");
  const Bytes taken = from.first(bytes);
  from = from.subspan(bytes);
  return taken;
}

template <class T>
T take(Bytes& from) {
  T value;
  std::memcpy(&value, take_bytes(from, sizeof value).data(), sizeof value);
  return value;
}

inline std::string take_text(Bytes& from) {
  const Bytes text = take_bytes(from, take<uint32_t>(from));
  return {reinterpret_cast<const char*>(text.data()), text.size()};
}

}  // namespace commute
