// SPDX-License-Identifier: Apache-2.0
// Updates: what a contribution does to a value, by name and numbers.
//
//   sum       value += g                    assign   value = g
//   min, max  value = min(value, g) ...     prod     value *= g
//   a semiring's addition is one of these; its multiplication is done by whoever pushes
//   sgd       value -= lr * g
//   momentum  b = momentum * b + (1 - dampening) * g, at first b = g;  value -= lr * b
//             nesterov: value -= lr * (g + momentum * b)
//   adagrad   s += g * g;  value -= lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)
//   adam      m = b1 * m + (1 - b1) * g;  v = b2 * v + (1 - b2) * g * g;
//             value -= lr / (1 - b1^step) * m / (sqrt(v) / sqrt(1 - b2^step) + eps)
//   ftrl      z += g - (sqrt(n + g * g) - sqrt(n)) / lr * value;  n += g * g;
//             value = |z| <= l1 ? 0 : -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)
//
// The optimizers except ftrl first add weight_decay * value to g. They take float32 and float64,
// compute in the value's own type, one rounding per operation, and so give the same bits on every
// machine; `step` counts the updates of this value from 1. All others take every dtype.
//
// ftrl's value follows from its state, which is zero at first: so must the value be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dtype.h"

namespace commute {

enum class UpdateKind : uint8_t {
  kSum = 0,
  kAssign = 1,
  kMin = 2,
  kMax = 3,
  kProd = 4,
  kSgd = 5,
  kMomentum = 6,
  kAdagrad = 7,
  kAdam = 8,
  kFtrl = 9,
};
constexpr int kUpdateKinds = 10;
const char* name(UpdateKind kind);

struct Update {
  UpdateKind kind = UpdateKind::kSum;
  bool nesterov = false;
  bool semiring = false;
  ReduceOp times = ReduceOp::kProd;  // what a push's scale does
  double lr = 0;
  double weight_decay = 0;
  double momentum = 0;   // adam: b1; ftrl: l1
  double dampening = 0;  // adam: b2; ftrl: l2
  double eps = 0;        // ftrl: beta
  double lr_decay = 0;
  double initial = 0;  // what adagrad's sum starts from

  bool operator==(const Update&) const = default;
  bool optimizes() const { return kind >= UpdateKind::kSgd; }
  // How many arrays as large as the value it keeps beside it.
  size_t states() const;
  bool takes(Dtype dtype) const;
  // How the contributions of a round become one; `assign` takes the last in rank order.
  ReduceOp combines_by() const;
  std::string describe() const;  // "Adam(lr=0.001)"

  static constexpr size_t kEncodedBytes = 64;
  std::vector<std::byte> encode() const;
  // Raises std::invalid_argument.
  static Update decode(std::span<const std::byte> bytes);
  static constexpr size_t kNumbers = 7;
  // Its numbers in the order above. Raises std::invalid_argument for codes that do not exist.
  static Update of(UpdateKind kind, bool nesterov, bool semiring, ReduceOp times,
                   std::span<const double, kNumbers> numbers);
  // With the numbers of `change` that are numbers (not NaN).
  Update changed_by(const Update& change) const;
};

// `states` as many arrays as the update keeps. Nothing may overlap.
void apply_update(const Update& update, Dtype dtype, void* value, void* const* states,
                  const void* gradient, size_t count, uint64_t step);

// What a state array holds before the first update.
double initial_state(const Update& update);

// The shortest decimal that reads back as this number: declarations are compared as text.
std::string shortest(double number);

}  // namespace commute
