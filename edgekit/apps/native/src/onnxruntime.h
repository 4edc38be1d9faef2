// ONNX Runtime's C API, loaded when a model is opened: sessions, and tensors over memory of our own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "numbers.h"

namespace edgekit {

// The library, its environment and the memory of activations, which all sessions share.
class OnnxRuntime : public std::enable_shared_from_this<OnnxRuntime> {
 public:
  static std::shared_ptr<OnnxRuntime> load(const std::string& library);  // empty: the system's; throws
  ~OnnxRuntime();
  OnnxRuntime(const OnnxRuntime&) = delete;
  OnnxRuntime& operator=(const OnnxRuntime&) = delete;

  std::string version() const { return version_; }

 private:
  friend class Session;
  friend class Tensor;
  OnnxRuntime() = default;
  void share_activations();
  template <typename Result, typename... Arguments>
  Result call(int function, Arguments... arguments) const;
  template <typename... Arguments>
  void check(int function, Arguments... arguments) const;

  const void* const* functions_ = nullptr;
  void *environment_ = nullptr, *memory_ = nullptr;
  void* giving_back_ = nullptr;  // options of a call
  std::string version_;
};

// A tensor over memory that outlives it.
class Tensor {
 public:
  Tensor(std::shared_ptr<OnnxRuntime> runtime, Number kind, void* data, const std::vector<int64_t>& shape);
  ~Tensor();
  Tensor(Tensor&& other) noexcept;
  Tensor& operator=(Tensor&&) = delete;

  void* value() const { return value_; }

 private:
  std::shared_ptr<OnnxRuntime> runtime_;
  void* value_ = nullptr;
};

// Names and tensors of a call; outputs are written where they stand.
struct Bound {
  std::vector<std::string> names;
  std::vector<const Tensor*> tensors;

  void add(std::string name, const Tensor& tensor) {
    names.push_back(std::move(name));
    tensors.push_back(&tensor);
  }
};

// Where a session saves its graph with packed weights: the graph's path, and the name of the data file beside it.
struct SavedGraph {
  std::string path, data;
};

class Session {
 public:
  // Opens the bytes of a graph, whose weights are in files of `folder`.
  Session(std::shared_ptr<OnnxRuntime> runtime, const std::string& graph, const std::string& folder, int threads,
          const SavedGraph& saved = {});
  ~Session();
  Session(Session&& other) noexcept;
  Session& operator=(Session&&) = delete;

  // `gives_back` returns unused memory of activations to the system.
  void run(const Bound& inputs, const Bound& outputs, bool gives_back = false) const;

 private:
  std::shared_ptr<OnnxRuntime> runtime_;
  void* session_ = nullptr;
};

}  // namespace edgekit
