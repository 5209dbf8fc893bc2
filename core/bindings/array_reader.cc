// SPDX-License-Identifier: Apache-2.0
#include "array_reader.h"

namespace nb = nanobind;

namespace commute::bindings {

// What of DLPack's exchange interface (dlpack.h) is used here.
struct DlTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t dimensions_count;
  uint8_t kind;
  uint8_t bits;
  uint16_t lanes;
  int64_t* dimensions;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};

struct DlExchange {
  uint32_t major;
  uint32_t minor;
  void* previous;
  void* allocate;
  void* from_object;
  void* to_object;
  int (*describe)(void* object, DlTensor* tensor);
};

namespace {

// NumPy's flags.
constexpr int kWriteable = 0x0400;
constexpr int kPlain = 0x0001 | 0x0100;  // C contiguous, aligned

struct ArrayFields {
  PyObject_HEAD char* data;
  int dimensions_count;
  Py_ssize_t* dimensions;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* descr;
  int flags;
};

static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));

const ArrayFields& fields_of(PyObject* array) {
  return *reinterpret_cast<const ArrayFields*>(array);
}

PyObject* type_of(PyObject* object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object));
}

void set_axes(Memory& memory, int count, const int64_t* axes) {
  memory.axes_count = count;
  memory.axes = axes;
  memory.count = 1;
  for (int i = 0; i < count; ++i) memory.count *= static_cast<uint64_t>(axes[i]);
}

int code_of(const std::array<PyObject*, kDtypeCount>& known, const PyObject* dtype) {
  // Gradients are float32 nearly always: looked at first.
  constexpr int kFirst = static_cast<int>(Dtype::kFloat32);
  if (known[kFirst] == dtype) return kFirst;
  for (size_t code = 0; code < kDtypeCount; ++code)
    if (known[code] == dtype) return static_cast<int>(code);
  return -1;
}

int code_of(const DlTensor& tensor) {
  constexpr int32_t kCpu = 1;
  enum Kind : uint8_t { kSigned = 0, kUnsigned = 1, kFloat = 2, kBrainFloat = 4 };
  if (tensor.device_type != kCpu || tensor.lanes != 1) return -1;
  const auto is = [&](Kind kind, int bits) { return tensor.kind == kind && tensor.bits == bits; };
  if (is(kFloat, 32)) return static_cast<int>(Dtype::kFloat32);
  if (is(kFloat, 64)) return static_cast<int>(Dtype::kFloat64);
  if (is(kFloat, 16)) return static_cast<int>(Dtype::kFloat16);
  if (is(kBrainFloat, 16)) return static_cast<int>(Dtype::kBfloat16);
  if (is(kSigned, 64)) return static_cast<int>(Dtype::kInt64);
  if (is(kSigned, 32)) return static_cast<int>(Dtype::kInt32);
  return -1;  // the method takes the others
}

bool contiguous(const DlTensor& tensor) {
  int64_t expected = 1;
  for (int i = tensor.dimensions_count - 1; i >= 0 && tensor.strides != nullptr; --i) {
    if (tensor.dimensions[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.dimensions[i];
  }
  return true;
}

bool has(PyObject* tensor, PyObject* attribute, PyObject* wanted) {
  PyObject* got = PyObject_GetAttr(tensor, attribute);
  Py_XDECREF(got);  // True and False outlive this
  return got == wanted;
}

bool says(PyObject* tensor, PyObject* method, PyObject* wanted) {
  PyObject* got = PyObject_VectorcallMethod(method, &tensor, 1, nullptr);
  Py_XDECREF(got);
  return got == wanted;
}

}  // namespace

void ArrayReader::learn_arrays(nb::list descrs, nb::handle sample, uintptr_t address) {
  const ArrayFields& fields = fields_of(sample.ptr());
  if (reinterpret_cast<uintptr_t>(fields.data) != address || fields.dimensions_count != 1 ||
      fields.dimensions[0] != 3 ||
      fields.descr != descrs[static_cast<size_t>(Dtype::kFloat32)].ptr() ||
      (fields.flags & (kPlain | kWriteable)) != (kPlain | kWriteable))
    return;
  array_type_ = type_of(sample.ptr());
  for (size_t code = 0; code < kDtypeCount; ++code)
    if (!descrs[code].is_none()) descrs_[code] = descrs[code].ptr();
}

void ArrayReader::learn_tensors(nb::handle tensor_type, nb::handle exchange) {
  constexpr const char* kName = "dlpack_exchange_api";
  if (!PyCapsule_IsValid(exchange.ptr(), kName)) return;
  const auto* found = static_cast<DlExchange*>(PyCapsule_GetPointer(exchange.ptr(), kName));
  if (found->major != 1 || found->describe == nullptr) return;  // another layout
  tensors_ = found;
  tensor_type_ = tensor_type.ptr();
}

Memory ArrayReader::read(PyObject* object) const {
  if (type_of(object) == tensor_type_) return read_tensor(object);
  Memory memory;
  if (type_of(object) != array_type_) return memory;
  const ArrayFields& array = fields_of(object);
  if ((array.flags & kPlain) != kPlain) return memory;
  memory.data = reinterpret_cast<std::byte*>(array.data);
  memory.writeable = array.flags & kWriteable;
  set_axes(memory, array.dimensions_count, array.dimensions);
  memory.dtype = code_of(descrs_, array.descr);
  return memory;
}

bool ArrayReader::is_tensor(PyObject* object) const {
  return type_of(object) == tensor_type_;
}

Memory ArrayReader::read_tensor(PyObject* tensor) const {
  static PyObject* const kRequiresGrad = PyUnicode_InternFromString("requires_grad");
  static PyObject* const kIsNegated = PyUnicode_InternFromString("is_neg");
  Memory memory;
  DlTensor found{};
  if (has(tensor, kRequiresGrad, Py_False) && says(tensor, kIsNegated, Py_False) &&
      tensors_->describe(tensor, &found) == 0 && contiguous(found)) {
    memory.data = static_cast<std::byte*>(found.data) + found.byte_offset;
    memory.writeable = true;
    set_axes(memory, found.dimensions_count, found.dimensions);
    memory.dtype = found.data == nullptr && memory.count > 0 ? -1 : code_of(found);
  }
  if (PyErr_Occurred()) {  // a sparse tensor, say: the method explains
    PyErr_Clear();
    memory.dtype = -1;
  }
  return memory;
}

}  // namespace commute::bindings
