// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include <algorithm>
#include <cstring>

namespace commute {

const FrameHeader* Stream::header() {
  if (have_header_) return &incoming_;
  while (buffer_end_ - buffer_begin_ < sizeof(FrameHeader)) {
    if (buffer_begin_ > 0) {
      std::memmove(buffer_, buffer_ + buffer_begin_, buffer_end_ - buffer_begin_);
      buffer_end_ -= buffer_begin_;
      buffer_begin_ = 0;
    }
    const size_t moved = link_->read(buffer_ + buffer_end_, kBufferBytes - buffer_end_);
    if (moved == 0) return nullptr;
    buffer_end_ += moved;
  }
  std::memcpy(&incoming_, buffer_ + buffer_begin_, sizeof incoming_);
  if (const char* wrong = refuse(incoming_)) throw BadFrame(wrong);
  buffer_begin_ += sizeof incoming_;
  have_header_ = true;
  payload_left_ = incoming_.bytes;
  return &incoming_;
}

size_t Stream::take(void* into, size_t bytes) {
  bytes = std::min(bytes, payload_left_);
  size_t moved = std::min(bytes, buffer_end_ - buffer_begin_);
  if (moved > 0) {
    std::memcpy(into, buffer_ + buffer_begin_, moved);
    buffer_begin_ += moved;
  }
  if (moved < bytes) moved += link_->read(static_cast<char*>(into) + moved, bytes - moved);
  payload_left_ -= moved;
  if (payload_left_ == 0) have_header_ = false;
  return moved;
}

bool Stream::skip() {
  char dropped[4096];
  while (payload_left_ > 0)
    if (take(dropped, sizeof dropped) == 0) return false;
  have_header_ = false;
  return true;
}

void Stream::begin(FrameHeader header) {
  outgoing_ = header;
  seal(outgoing_);
  header_left_ = sizeof outgoing_;
  in_payload_ = true;
}

void Stream::push() {
  if (header_left_ > 0) send(nullptr, 0);
  if (header_left_ == 0 && outgoing_.kind == FrameKind::kWaiting) end();
}

size_t Stream::send(const void* payload, size_t bytes) {
  iovec pieces[2];
  int count = 0;
  if (header_left_ > 0) {
    pieces[count++] = {reinterpret_cast<char*>(&outgoing_) + sizeof outgoing_ - header_left_,
                       header_left_};
  }
  if (bytes > 0) pieces[count++] = {const_cast<void*>(payload), bytes};
  if (count == 0) return 0;
  const size_t moved = link_->write(pieces, count);
  const size_t of_header = std::min(moved, header_left_);
  header_left_ -= of_header;
  return moved - of_header;
}

}  // namespace commute
