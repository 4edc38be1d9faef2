// Feeds tokens to the graphs of an artifact and returns logits, as the onnx target of Python does.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "artifact.h"
#include "kv_cache.h"
#include "onnxruntime.h"
#include "plan.h"

namespace edgekit {

class Engine {
 public:
  Engine(const Artifact& artifact, Plan plan, const std::string& library, int threads);  // throws std::runtime_error

  const Plan& plan() const { return plan_; }
  size_t length() const { return length_; }  // of the text that is held
  void rewind(size_t length) { length_ = length; }

  // Append at most `plan().chunk_tokens` tokens.
  void feed(const std::vector<TokenId>& tokens);

  // A row of logits, after the last token that was fed; valid until the next call.
  const std::vector<float>& logits();

  std::string runtime_version() const { return runtime_->version(); }

 private:
  struct Part {  // a graph of the body
    Session session;
    size_t first, end;  // its layers
  };
  Tensor over(Number kind, void* data, const std::vector<int64_t>& shape) const { return {runtime_, kind, data, shape}; }

  const Plan plan_;
  KvCache cache_;
  std::shared_ptr<OnnxRuntime> runtime_;
  std::vector<Part> parts_;
  std::unique_ptr<Session> head_;
  std::vector<Tensor> keys_and_values_;
  std::vector<int64_t> ids_;
  int32_t last_place_ = 0, total_ = 0;  // what the graphs read instead of a mask
  std::vector<float> hidden_[2];        // parts alternate between the two, so that none reads what it writes
  std::vector<float> logits_;
  const float* last_hidden_ = nullptr;
  size_t length_ = 0;
};

}  // namespace edgekit
