// SPDX-License-Identifier: Apache-2.0
// Frames on a link, both directions, without allocation.
//
// Receiving: `header()` reads until one header is complete and keeps it until its payload has been
// taken. The header is read through a small buffer, so a small message costs one system call; of a
// large one only the first few KB pass through the buffer, the rest is read straight into its
// destination. Sending: `begin` starts a frame, `send` moves header and payload together; frames
// never interleave.
#pragma once

#include <cstddef>
#include <memory>

#include "frame.h"
#include "link.h"

namespace commute {

// Bytes that no correct peer sends.
class BadFrame : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Stream {
 public:
  explicit Stream(std::unique_ptr<Link> link) : link_(std::move(link)) {}

  // The header of the frame being received, or nullptr when it is not complete yet. Raises
  // LinkClosed, BadFrame.
  const FrameHeader* header();
  // The next bytes of its payload; 0 when none are there now. After the last one the next frame
  // begins.
  size_t take(void* into, size_t bytes);
  size_t payload_left() const { return payload_left_; }
  // Drops the current frame; false while part of its payload has not arrived.
  bool skip();

  // Nothing of an earlier frame is left to send.
  bool idle() const { return header_left_ == 0 && !in_payload_; }
  void begin(FrameHeader header);  // seals a copy; requires idle()
  // Sends what is left of the header, then `bytes` of payload from `payload`; returns how many
  // payload bytes moved. The frame ends when `end()` is called after its last payload byte moved.
  size_t send(const void* payload, size_t bytes);
  bool header_sent() const { return header_left_ == 0; }
  void end() { in_payload_ = false; }
  void push();  // moves what is left of a header; a waiting frame, which has no payload, then ends

  void close(std::chrono::steady_clock::time_point linger_until) { link_->close(linger_until); }

 private:
  static constexpr size_t kBufferBytes = 4096;

  std::unique_ptr<Link> link_;

  char buffer_[kBufferBytes];
  size_t buffer_begin_ = 0;
  size_t buffer_end_ = 0;
  FrameHeader incoming_{};
  bool have_header_ = false;
  size_t payload_left_ = 0;

  FrameHeader outgoing_{};
  size_t header_left_ = 0;
  bool in_payload_ = false;
};

}  // namespace commute
