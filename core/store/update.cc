// SPDX-License-Identifier: Apache-2.0
#include "store/update.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "kernels.h"

namespace commute {
namespace {

// As it travels and is kept, little endian.
struct EncodedUpdate {
  UpdateKind kind;
  uint8_t nesterov;
  uint8_t semiring;
  ReduceOp times;
  uint8_t reserved[4];
  double numbers[Update::kNumbers];
};
static_assert(sizeof(EncodedUpdate) == Update::kEncodedBytes);

template <class T>
struct Numbers {
  explicit Numbers(const Update& update)
      : lr(static_cast<T>(update.lr)),
        weight_decay(static_cast<T>(update.weight_decay)),
        momentum(static_cast<T>(update.momentum)),
        dampening(static_cast<T>(update.dampening)),
        eps(static_cast<T>(update.eps)) {}

  T lr, weight_decay, momentum, dampening, eps;
};

template <class T>
void sgd(const Update& update, T* value, const T* gradient, size_t count) {
  const Numbers<T> with(update);
  for (size_t i = 0; i < count; ++i) {
    const T g = gradient[i] + with.weight_decay * value[i];
    value[i] -= with.lr * g;
  }
}

template <class T>
void momentum(const Update& update, T* value, T* buffer, const T* gradient, size_t count,
              uint64_t step) {
  const Numbers<T> with(update);
  const T fresh = step == 1 ? T{1} : static_cast<T>(1 - update.dampening);
  for (size_t i = 0; i < count; ++i) {
    const T g = gradient[i] + with.weight_decay * value[i];
    const T b = with.momentum * buffer[i] + fresh * g;
    buffer[i] = b;
    value[i] -= with.lr * (update.nesterov ? g + with.momentum * b : b);
  }
}

template <class T>
void adagrad(const Update& update, T* value, T* sum, const T* gradient, size_t count,
             uint64_t step) {
  const Numbers<T> with(update);
  const auto lr =
      static_cast<T>(update.lr / (1 + (static_cast<double>(step) - 1) * update.lr_decay));
  for (size_t i = 0; i < count; ++i) {
    const T g = gradient[i] + with.weight_decay * value[i];
    sum[i] += g * g;
    value[i] -= lr * g / (std::sqrt(sum[i]) + with.eps);
  }
}

template <class T>
void adam(const Update& update, T* value, T* mean, T* square, const T* gradient, size_t count,
          uint64_t step) {
  const Numbers<T> with(update);
  const double first = 1 - std::pow(update.momentum, static_cast<double>(step));
  const double second = 1 - std::pow(update.dampening, static_cast<double>(step));
  const auto lr = static_cast<T>(update.lr / first);
  const auto scale = static_cast<T>(std::sqrt(second));
  // Not 1 minus the rounded number: at 0.999 that is 5e-5 off.
  const auto fresh_mean = static_cast<T>(1 - update.momentum);
  const auto fresh_square = static_cast<T>(1 - update.dampening);
  for (size_t i = 0; i < count; ++i) {
    const T g = gradient[i] + with.weight_decay * value[i];
    mean[i] = with.momentum * mean[i] + fresh_mean * g;
    square[i] = with.dampening * square[i] + fresh_square * g * g;
    value[i] -= lr * mean[i] / (std::sqrt(square[i]) / scale + with.eps);
  }
}

// Nothing overlaps, and there is no branch: so it becomes vectors, at a third of the time.
template <class T>
void ftrl(const Update& update, T* __restrict value, T* __restrict z, T* __restrict n,
          const T* __restrict gradient, size_t count) {
  const Numbers<T> with(update);
  const T beta = with.eps, l1 = with.momentum, l2 = with.dampening;
  for (size_t i = 0; i < count; ++i) {
    const T g = gradient[i];
    const T squares = n[i] + g * g;
    const T root = std::sqrt(squares);
    const T sigma = (root - std::sqrt(n[i])) / with.lr;
    const T sum = z[i] + (g - sigma * value[i]);
    z[i] = sum;
    n[i] = squares;
    const T weight = -(sum - std::copysign(l1, sum)) / ((beta + root) / with.lr + l2);
    value[i] = std::abs(sum) <= l1 ? T{0} : weight;
  }
}

template <class T>
void optimize(const Update& update, void* value, void* const* states, const void* gradient,
              size_t count, uint64_t step) {
  auto* const x = static_cast<T*>(value);
  const auto* const g = static_cast<const T*>(gradient);
  const auto state = [&](size_t index) { return static_cast<T*>(states[index]); };
  switch (update.kind) {
    case UpdateKind::kMomentum:
      return momentum(update, x, state(0), g, count, step);
    case UpdateKind::kAdagrad:
      return adagrad(update, x, state(0), g, count, step);
    case UpdateKind::kAdam:
      return adam(update, x, state(0), state(1), g, count, step);
    case UpdateKind::kFtrl:
      return ftrl(update, x, state(0), state(1), g, count);
    default:
      return sgd(update, x, g, count);
  }
}

}  // namespace

const char* name(UpdateKind kind) {
  static constexpr const char* kNames[kUpdateKinds] = {
      "sum", "assign", "min", "max", "prod", "SGD", "Momentum", "Adagrad", "Adam", "FTRL"};
  const auto index = static_cast<size_t>(kind);
  return index < kUpdateKinds ? kNames[index] : "unknown update";
}

size_t Update::states() const {
  if (kind == UpdateKind::kAdam || kind == UpdateKind::kFtrl) return 2;
  return kind == UpdateKind::kMomentum || kind == UpdateKind::kAdagrad ? 1 : 0;
}

bool Update::takes(Dtype dtype) const {
  return !optimizes() || dtype == Dtype::kFloat32 || dtype == Dtype::kFloat64;
}

ReduceOp Update::combines_by() const {
  switch (kind) {
    case UpdateKind::kMin:
      return ReduceOp::kMin;
    case UpdateKind::kMax:
      return ReduceOp::kMax;
    case UpdateKind::kProd:
      return ReduceOp::kProd;
    default:
      return ReduceOp::kSum;
  }
}

std::string Update::describe() const {
  std::string text = name(kind);
  if (semiring) return "Semiring(add=" + text + ", mul=" + name(times) + ")";
  if (!optimizes()) return text;
  const auto add = [&](const char* what, double number, bool first = false) {
    text.append(first ? "(" : ", ").append(what).append("=").append(shortest(number));
  };
  add("lr", lr, true);
  if (kind == UpdateKind::kMomentum) add("momentum", momentum);
  if (kind == UpdateKind::kMomentum && dampening != 0) add("dampening", dampening);
  if (nesterov) text += ", nesterov";
  if (kind == UpdateKind::kAdam) {
    add("beta1", momentum);
    add("beta2", dampening);
  }
  if (kind == UpdateKind::kAdam || kind == UpdateKind::kAdagrad) add("eps", eps);
  if (kind == UpdateKind::kFtrl) {
    add("beta", eps);
    add("l1", momentum);
    add("l2", dampening);
  }
  if (lr_decay != 0) add("lr_decay", lr_decay);
  if (initial != 0) add("initial", initial);
  if (weight_decay != 0) add("weight_decay", weight_decay);
  return text + ")";
}

std::vector<std::byte> Update::encode() const {
  const EncodedUpdate encoded{
      kind,  nesterov, semiring,
      times, {},       {lr, weight_decay, momentum, dampening, eps, lr_decay, initial}};
  std::vector<std::byte> bytes(sizeof encoded);
  std::memcpy(bytes.data(), &encoded, sizeof encoded);
  return bytes;
}

Update Update::decode(std::span<const std::byte> bytes) {
  EncodedUpdate encoded;
  if (bytes.size() != sizeof encoded) throw std::invalid_argument("an update has another length");
  std::memcpy(&encoded, bytes.data(), sizeof encoded);
  return of(encoded.kind, encoded.nesterov != 0, encoded.semiring != 0, encoded.times,
            encoded.numbers);
}

Update Update::of(UpdateKind kind, bool nesterov, bool semiring, ReduceOp times,
                  std::span<const double, kNumbers> n) {
  if (static_cast<int>(kind) >= kUpdateKinds || times > ReduceOp::kMax)
    throw std::invalid_argument("there is no such update");
  return {kind, nesterov, semiring, times, n[0], n[1], n[2], n[3], n[4], n[5], n[6]};
}

Update Update::changed_by(const Update& change) const {
  Update changed = *this;
  for (double Update::* number : {&Update::lr, &Update::weight_decay, &Update::momentum,
                                  &Update::dampening, &Update::eps, &Update::lr_decay})
    if (!std::isnan(change.*number)) changed.*number = change.*number;
  return changed;
}

double initial_state(const Update& update) {
  return update.kind == UpdateKind::kAdagrad ? update.initial : 0;
}

std::string shortest(double number) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof digits, number).ptr};
}

void apply_update(const Update& update, Dtype dtype, void* value, void* const* states,
                  const void* gradient, size_t count, uint64_t step) {
  if (count == 0) return;
  if (update.kind == UpdateKind::kAssign) {
    std::memcpy(value, gradient, count * item_bytes(dtype));
  } else if (!update.optimizes()) {
    kernels().reduce_for(dtype, update.combines_by())(value, value, gradient, count);
  } else if (dtype == Dtype::kFloat64) {
    optimize<double>(update, value, states, gradient, count, step);
  } else {
    optimize<float>(update, value, states, gradient, count, step);
  }
}

}  // namespace commute
