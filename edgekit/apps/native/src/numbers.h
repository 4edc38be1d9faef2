// Kinds of numbers in tensors, by ONNX's own numbers of them.
#pragma once

#include <cstddef>

namespace edgekit {

enum class Number { kFloat = 1, kInt8 = 3, kInt32 = 6, kInt64 = 7, kHalf = 10 };

inline size_t bytes_of(Number kind) {
  switch (kind) {
    case Number::kInt8: return 1;
    case Number::kHalf: return 2;
    case Number::kInt64: return 8;
    default: return 4;
  }
}

}  // namespace edgekit
