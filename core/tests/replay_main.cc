// SPDX-License-Identifier: Apache-2.0
//
// The main of a fuzz target where no fuzzer is at hand: feeds LLVMFuzzerTestOneInput
//   1. the empty input and every file below the files and folders given as arguments, as they are,
//   2. mutations of those inputs: bytes flipped, cut, repeated, joined and replaced by
//      numbers that decoders tend to get wrong.
//
//   fuzz_frame [--mutations N] [--seed S] PATH...
//
// The seed is printed first; the same seed over the same files replays the same bytes. A failing
// input is left to the sanitizer's report and the number of the mutation, printed on abort.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;
using Rng = std::mt19937_64;

constexpr std::size_t kInputBytesMax = 1 << 20;  // as libFuzzer's -max_len, to bound the time

volatile std::sig_atomic_t current_mutation = -1;

// Tells which mutation was running, then lets the default handler end the process as it should.
void report_mutation(int signal_number) {
  std::array<char, 64> text{};
  const int length = std::snprintf(text.data(), text.size(), "replay: died in mutation %d\n",
                                   static_cast<int>(current_mutation));
  [[maybe_unused]] const auto written =
      ::write(STDERR_FILENO, text.data(), static_cast<std::size_t>(length));
  std::signal(signal_number, SIG_DFL);
  std::raise(signal_number);
}

Bytes read_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

// All inputs, in an order that does not depend on the file system.
std::vector<Bytes> read_corpus(const std::vector<std::string>& arguments) {
  std::vector<std::filesystem::path> paths;
  for (const auto& argument : arguments) {
    if (std::filesystem::is_directory(argument)) {
      for (const auto& entry : std::filesystem::recursive_directory_iterator(argument)) {
        if (entry.is_regular_file()) paths.push_back(entry.path());
      }
    } else if (std::filesystem::exists(argument)) {
      paths.emplace_back(argument);
    } else {
      std::fprintf(stderr, "replay: no such file or folder: %s\n", argument.c_str());
      std::exit(2);
    }
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> corpus{Bytes{}};
  for (const auto& path : paths) corpus.push_back(read_bytes(path));
  return corpus;
}

std::size_t below(Rng& rng, std::size_t bound) {
  return bound == 0 ? 0 : rng() % bound;
}

void overwrite_number(Bytes& bytes, Rng& rng) {
  static constexpr std::array<std::uint64_t, 8> kNumbers = {
      0, 1, 0x7f, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, 0xffffffffffffffff};
  const std::uint64_t number = kNumbers[below(rng, kNumbers.size())];
  const std::size_t width = std::min<std::size_t>(std::size_t{1} << below(rng, 4), bytes.size());
  if (width == 0) return;
  std::memcpy(bytes.data() + below(rng, bytes.size() - width + 1), &number, width);
}

void mutate_once(Bytes& bytes, const std::vector<Bytes>& corpus, Rng& rng) {
  const auto at = static_cast<std::ptrdiff_t>(below(rng, bytes.size()));
  switch (below(rng, 6)) {
    case 0:
      if (!bytes.empty()) bytes[static_cast<std::size_t>(at)] ^= std::uint8_t(1u << below(rng, 8));
      break;
    case 1:
      bytes.resize(static_cast<std::size_t>(at));
      break;
    case 2:
      bytes.insert(bytes.begin() + at, std::uint8_t(rng()));
      break;
    case 3: {  // append another input: decoders read streams, and the second frame counts too
      const Bytes& other = corpus[below(rng, corpus.size())];
      bytes.insert(bytes.end(), other.begin(), other.end());
      break;
    }
    case 4:
      if (!bytes.empty()) bytes.erase(bytes.begin() + at);
      break;
    default:
      overwrite_number(bytes, rng);
  }
}

Bytes mutated(const std::vector<Bytes>& corpus, Rng& rng) {
  Bytes bytes = corpus[below(rng, corpus.size())];
  const std::size_t times = 1 + below(rng, 8);
  for (std::size_t i = 0; i < times; ++i) mutate_once(bytes, corpus, rng);
  if (bytes.size() > kInputBytesMax) bytes.resize(kInputBytesMax);
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t seed = std::random_device{}();
  int mutations = 20000;
  std::vector<std::string> paths;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--seed" && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (argument == "--mutations" && i + 1 < argc) {
      mutations = std::atoi(argv[++i]);
    } else {
      paths.push_back(argument);
    }
  }
  std::signal(SIGABRT, report_mutation);
  std::signal(SIGSEGV, report_mutation);

  const std::vector<Bytes> corpus = read_corpus(paths);
  std::printf("replay: %zu inputs, %d mutations, --seed %llu\n", corpus.size(), mutations,
              static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  for (const Bytes& bytes : corpus) LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  Rng rng(seed);
  for (int i = 0; i < mutations; ++i) {
    current_mutation = i;
    const Bytes bytes = mutated(corpus, rng);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  return 0;
}
