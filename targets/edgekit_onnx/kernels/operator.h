// What the operators of this library share.
#pragma once

#include <atomic>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "onnxruntime.h"
#include "product.h"

namespace edgekit {

extern std::atomic<const Path*> chosen;  // the functions for this processor

std::string shown(const std::vector<int64_t>& shape);

// One node of a graph; what it refuses begins with its name.
class Node {
 public:
  Node(const char* name, const Api& api, const void* info) : api_(api), name_(name) {
    api.check(kGetAllocator, info, 0, &allocator_);
  }
  ~Node() { api_.call<void>(kReleaseAllocator, allocator_); }
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

 protected:
  // Memory of onnxruntime's arena, which keeps it for the next node.
  struct Scratch {
    Scratch(const Node& node, size_t bytes) : node(node) {
      node.api_.check(kAllocatorAlloc, node.allocator_, bytes, &data);
    }
    ~Scratch() { node.api_.call<Status*>(kAllocatorFree, node.allocator_, data); }
    const Node& node;
    void* data = nullptr;
  };

  void require(bool holds, const std::string& message) const {
    if (!holds) throw Refused(std::string("edgekit ") + name_ + ": " + message);
  }

  // An attribute that may be missing.
  template <typename Value>
  Value attribute(const void* info, const char* name, Value value) const {
    constexpr Function function = sizeof(Value) == sizeof(float) ? kGetFloatAttribute : kGetIntegerAttribute;
    void* status = api_.call<Status*>(function, info, name, &value);
    if (status != nullptr) api_.call<void>(kReleaseStatus, status);
    return value;
  }

  int64_t size(const void* info, const char* name, int64_t most) const {
    const int64_t value = api_.attribute(info, name);
    require(value > 0 && value <= most,
            std::string(name) + " is " + std::to_string(value) + ", it must be 1 to " + std::to_string(most));
    return value;
  }

  Tensor input(void* context, size_t index) const {
    const void* value = nullptr;
    api_.check(kGetInput, static_cast<const void*>(context), index, &value);
    return api_.tensor(value);
  }

  template <typename Number>
  Number* output(void* context, size_t index, const std::vector<int64_t>& shape) const {
    void *value = nullptr, *data = nullptr;
    api_.check(kGetOutput, context, index, static_cast<const int64_t*>(shape.data()), shape.size(), &value);
    api_.check(kGetTensorMutableData, value, &data);
    return static_cast<Number*>(data);
  }

  // Runs `run_one(all, index)` for each index on onnxruntime's threads: in one range for each of them, or with
  // `one_by_one` as threads become free.
  template <typename All>
  void parallel(void* context, size_t total, All& all, void (*run_one)(void*, size_t), bool one_by_one = false) const {
    api_.check(kParallelFor, static_cast<const void*>(context), run_one, total, one_by_one ? total : size_t{0},
               static_cast<void*>(&all));
  }

  Api api_;

 private:
  const char* name_;
  void* allocator_ = nullptr;
};

// The parts of an operator's description that all of them have.
struct NodeOp : CustomOp {
  template <typename Kind>
  void runs() {
    create_with_status = [](const CustomOp* op, const void* table, const void* info, void** kernel) -> Status* {
      const Api api(table);
      return api.status_of([&] { *kernel = new Kind(*op, api, info); });
    };
    compute_with_status = [](void* kernel, void* context) -> Status* {
      return static_cast<const Kind*>(kernel)->status_of_compute(context);
    };
    destroy = [](void* kernel) { delete static_cast<Kind*>(kernel); };
    provider = [](const CustomOp*) -> const char* { return "CPUExecutionProvider"; };
    input_memory = [](const CustomOp*, size_t) { return 0; };
    output_presence = [](const CustomOp*, size_t) -> int { return kRequired; };
    first_version = [](const CustomOp*) { return 1; };
    last_version = [](const CustomOp*) { return std::numeric_limits<int>::max(); };
  }
};

const std::vector<const CustomOp*>& attention_operators();

}  // namespace edgekit
