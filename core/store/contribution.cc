// SPDX-License-Identifier: Apache-2.0
#include "store/contribution.h"

#include <utility>

#include "kernels.h"

namespace commute {

void Pile::add(const TableSpec& spec, const Contribution& more) {
  const bool first = !std::exchange(any_, true);
  sparse_ = spec.sparse;
  if (sparse_)
    rows_.add(spec, more.keys, more.payload);
  else if (first || spec.update.kind == UpdateKind::kAssign)
    dense_.assign(more.payload.begin(), more.payload.end());
  else
    kernels().reduce_for(spec.dtype, spec.update.combines_by())(dense_.data(), dense_.data(),
                                                                more.payload.data(), spec.count);
}

Contribution Pile::all(const TableSpec& spec) {
  if (!sparse_) return {true, dense_, {}, nullptr};
  if (!rows_.empty()) {
    RowSum sum;
    sum.add(spec, whole_.keys, whole_.rows);
    const RowBytes newer = rows_.take(spec);
    sum.add(spec, newer.keys, newer.rows);
    whole_ = sum.take(spec);
  }
  return {true, whole_.rows, whole_.keys, nullptr};
}

void Pile::clear() {
  any_ = false;
  rows_ = {};
  whole_ = {};
}

}  // namespace commute
