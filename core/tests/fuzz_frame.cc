// SPDX-License-Identifier: Apache-2.0
// Feeds hostile bytes to everything that decodes them: a Stream of frames on a link that gives its
// bytes in random pieces, and the decoder of control frames.
//
// The first byte of an input seeds the pieces, so an input replays the same way; the rest is what
// the peer sent. With its highest bit set, headers are sealed again first, so that mutations get
// past the checksum. Checked besides the sanitizers: payloads come out as they went in, no frame
// yields more bytes than it announced, and memory never follows an announced length (the
// destination here is small and fixed, whatever the header says).
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "../control.h"
#include "../stream.h"

namespace {

using namespace commute;
using Rng = std::minstd_rand;

void require(bool truth) {
  if (!truth) std::abort();
}

class PiecewiseLink final : public Link {
 public:
  PiecewiseLink(std::string bytes, unsigned seed) : bytes_(std::move(bytes)), rng_(seed) {}

  size_t write(const iovec*, int) override { return 0; }
  size_t read(void* into, size_t bytes) override {
    if (at_ == bytes_.size()) throw LinkClosed("the input has ended");
    const size_t moved = std::min({bytes, size_t(rng_() % 200), bytes_.size() - at_});
    std::memcpy(into, bytes_.data() + at_, moved);
    at_ += moved;
    return moved;
  }
  void close(std::chrono::steady_clock::time_point) override {}

 private:
  const std::string bytes_;
  Rng rng_;
  size_t at_ = 0;
};

// Takes the payload of one frame and compares it with the input at `at`.
void take_frame(Stream& stream, const std::string& input, size_t at, uint64_t bytes, Rng& rng) {
  char destination[512];
  uint64_t taken = 0;
  while (taken < bytes) {
    const size_t wanted = 1 + rng() % sizeof destination;
    const size_t moved = stream.take(destination, wanted);
    require(moved <= wanted && moved <= bytes - taken && at + taken + moved <= input.size());
    require(std::memcmp(destination, input.data() + at + taken, moved) == 0);
    taken += moved;
    require(stream.payload_left() == bytes - taken);
  }
}

void read_stream(const std::string& input, unsigned seed) {
  Rng rng(seed);
  Stream stream(std::make_unique<PiecewiseLink>(input, seed + 1));
  size_t at = 0;
  try {
    for (;;) {
      const FrameHeader* header = stream.header();
      if (header == nullptr) continue;
      const uint64_t bytes = header->bytes;
      require(bytes <= kFrameBytesMax && at + sizeof *header <= input.size());
      require(std::memcmp(header, input.data() + at, sizeof *header) == 0);
      require(!header->call().describe().empty());
      at += sizeof *header;
      if (bytes == 0 || rng() % 2 == 0) {
        while (!stream.skip()) {
        }
      } else {
        take_frame(stream, input, at, bytes, rng);
      }
      at += bytes;
      require(at <= input.size());
    }
  } catch (const LinkClosed&) {
  } catch (const BadFrame&) {
    require(at + sizeof(FrameHeader) <= input.size());
  }
}

// Gives the headers that a reader would see the right magic and checksum.
std::string sealed(std::string input) {
  size_t at = 0;
  while (input.size() - at >= sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(&header, input.data() + at, sizeof header);
    seal(header);
    std::memcpy(input.data() + at, &header, sizeof header);
    at += sizeof header;
    at += std::min<uint64_t>(header.bytes, input.size() - at);
  }
  return input;
}

void read_control(const std::string& input, unsigned seed) {
  Rng rng(seed);
  std::string waiting;
  size_t at = 0;
  try {
    while (at < input.size()) {
      const size_t piece = std::min<size_t>(1 + rng() % 100, input.size() - at);
      waiting.append(input, at, piece);
      at += piece;
      while (const auto frame = decode(waiting)) {
        require(frame->text.size() <= kControlTextMax);
        std::string again = encode(*frame);
        require(decode(again).has_value() && again.empty());
      }
      require(waiting.size() < kControlHeaderBytes + kControlTextMax);
    }
  } catch (const std::runtime_error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string input(reinterpret_cast<const char*>(data) + 1, size - 1);
  read_stream((data[0] & 0x80) != 0 ? sealed(input) : input, data[0] + 1u);
  read_control(input, data[0] + 1u);
  return 0;
}
