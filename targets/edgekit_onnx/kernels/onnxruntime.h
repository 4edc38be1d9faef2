// The few functions of ONNX Runtime's C API that an operator needs, called by their places in its table.
//
// A place never changes between versions, so the library compiles without onnxruntime's headers and runs with any
// version that answers kApiVersion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace edgekit {

constexpr uint32_t kApiVersion = 20;
constexpr int kInvalidArgument = 2;  // code of a status

enum Function {
  kCreateStatus = 0,
  kGetErrorMessage = 2,
  kCreateCustomOpDomain = 26,
  kAddToDomain = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kAllocatorAlloc = 75,
  kAllocatorFree = 76,
  kGetFloatAttribute = 85,
  kGetIntegerAttribute = 86,
  kGetInput = 90,
  kGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseShape = 99,
  kReleaseAllocator = 132,
  kGetInputCount = 230,
  kGetInputName = 232,
  kGetConstantInput = 249,
  kParallelFor = 274,
  kGetAllocator = 278,
};

enum Element { kUndefined = 0, kFloat = 1, kUInt8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7, kHalf = 10 };
enum Presence { kRequired = 0, kOptional = 1 };

using Status = void;  // null means success

// An error of a graph, whose message says in one line what is wrong.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Tensor {
  const void* data = nullptr;  // null also where a tensor has no numbers
  int element = kUndefined;    // of an input that is absent
  std::vector<int64_t> shape;

  bool is_given() const { return element != kUndefined; }
};

class Api {
 public:
  explicit Api(const void* table) : functions_(static_cast<const void* const*>(table)) {}

  template <typename Result, typename... Arguments>
  Result call(Function function, Arguments... arguments) const {
    using Called = Result (*)(Arguments...);
    return reinterpret_cast<Called>(const_cast<void*>(functions_[function]))(arguments...);
  }

  // Calls a function that returns a status; throws its message.
  template <typename... Arguments>
  void check(Function function, Arguments... arguments) const {
    Status* status = call<Status*>(function, arguments...);
    if (status == nullptr) return;
    const std::string why = call<const char*>(kGetErrorMessage, static_cast<const void*>(status));
    call<void>(kReleaseStatus, status);
    throw Refused(why);
  }

  // Runs `body` and turns what it throws into a status, since nothing may be thrown through onnxruntime.
  template <typename Body>
  Status* status_of(const Body& body) const {
    try {
      body();
      return nullptr;
    } catch (const std::exception& error) {
      return call<Status*>(kCreateStatus, kInvalidArgument, error.what());
    }
  }

  int64_t attribute(const void* info, const char* name) const {
    int64_t value = 0;
    check(kGetIntegerAttribute, info, name, &value);
    return value;
  }

  Tensor tensor(const void* value) const {
    Tensor read;
    if (value == nullptr) return read;
    void* shape = nullptr;
    check(kGetTensorTypeAndShape, value, &shape);
    size_t count = 0;
    check(kGetDimensionsCount, static_cast<const void*>(shape), &count);
    read.shape.resize(count);
    check(kGetDimensions, static_cast<const void*>(shape), read.shape.data(), count);
    check(kGetTensorElementType, static_cast<const void*>(shape), &read.element);
    call<void>(kReleaseShape, shape);
    void* data = nullptr;
    check(kGetTensorMutableData, const_cast<void*>(value), &data);
    read.data = data;
    return read;
  }

 private:
  const void* const* functions_;
};

// The layout of onnxruntime's OrtCustomOp up to this version; what stays null is not asked for.
struct CustomOp {
  uint32_t version = kApiVersion;
  void* (*create)(const CustomOp*, const void* api, const void* info) = nullptr;
  const char* (*name)(const CustomOp*) = nullptr;
  const char* (*provider)(const CustomOp*) = nullptr;
  int (*input_type)(const CustomOp*, size_t) = nullptr;
  size_t (*input_count)(const CustomOp*) = nullptr;
  int (*output_type)(const CustomOp*, size_t) = nullptr;
  size_t (*output_count)(const CustomOp*) = nullptr;
  void (*compute)(void*, void*) = nullptr;
  void (*destroy)(void*) = nullptr;
  int (*input_presence)(const CustomOp*, size_t) = nullptr;
  int (*output_presence)(const CustomOp*, size_t) = nullptr;
  int (*input_memory)(const CustomOp*, size_t) = nullptr;
  int (*variadic_input)(const CustomOp*) = nullptr;
  int (*variadic_input_alike)(const CustomOp*) = nullptr;
  int (*variadic_output)(const CustomOp*) = nullptr;
  int (*variadic_output_alike)(const CustomOp*) = nullptr;
  Status* (*create_with_status)(const CustomOp*, const void* api, const void* info, void** kernel) = nullptr;
  Status* (*compute_with_status)(void* kernel, void* context) = nullptr;
  Status* (*infer_shape)(const CustomOp*, void*) = nullptr;
  int (*first_version)(const CustomOp*) = nullptr;
  int (*last_version)(const CustomOp*) = nullptr;
  size_t (*may_inplace)(int**, int**) = nullptr;
  void (*release_may_inplace)(int*, int*) = nullptr;
  size_t (*aliases)(int**, int**) = nullptr;
  void (*release_aliases)(int*, int*) = nullptr;
};

}  // namespace edgekit
