// SPDX-License-Identifier: Apache-2.0
// Arrays of NumPy and tensors of torch, read without a call into either: for the compiled call path
// (fast_call.cc), where asking Python for address, shape and dtype would take longer than the call.
//
// The fields of NumPy's array object lie as they have since NumPy 1.7, which is compared with a
// sample before any is read. Tensors are described by DLPack's C interface. What is not plainly
// usable (strided, unaligned, another dtype or library, a tensor that autograd watches) is not
// read: the Python methods know what to do with it, or what to say.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <nanobind/nanobind.h>

#include "dtype.h"

namespace commute::bindings {

// An array, as far as the core needs it: contiguous, aligned, on the CPU.
struct Memory {
  std::byte* data = nullptr;
  uint64_t count = 0;
  int dtype = -1;  // -1: not one that is read
  bool writeable = false;
  int axes_count = 0;
  const int64_t* axes = nullptr;  // their lengths; lie in the array itself

  bool known() const { return dtype >= 0; }
  uint64_t bytes() const { return count * item_bytes(static_cast<Dtype>(dtype)); }
};

struct DlExchange;

class ArrayReader {
 public:
  // `descrs`: NumPy's dtypes by the core's codes, None where it has none; they live for ever.
  // `sample`: an array of three float32 whose data lies at `address`.
  void learn_arrays(nanobind::list descrs, nanobind::handle sample, uintptr_t address);
  // `exchange`: the capsule by which torch shows its C interface of DLPack, which lives for ever.
  void learn_tensors(nanobind::handle tensor_type, nanobind::handle exchange);

  // Whether NumPy's fields are where they should be.
  bool usable() const { return array_type_ != nullptr; }

  Memory read(PyObject* object) const;
  bool is_tensor(PyObject* object) const;

 private:
  Memory read_tensor(PyObject* tensor) const;

  PyObject* array_type_ = nullptr;
  PyObject* tensor_type_ = nullptr;  // null until a tensor has been seen
  std::array<PyObject*, kDtypeCount> descrs_{};
  const DlExchange* tensors_ = nullptr;
};

}  // namespace commute::bindings
