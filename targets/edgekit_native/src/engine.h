// Feeds tokens to the graphs of an artifact and returns logits, as the onnx target of Python does.
#pragma once

#include <algorithm>
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
  // `is_exact`: logits do not depend on the pieces in which tokens are fed. Throws std::runtime_error.
  Engine(const Artifact& artifact, Plan plan, const std::string& library, int threads, bool is_exact);

  const Plan& plan() const { return plan_; }
  const std::vector<TokenId>& fed() const { return fed_; }  // the text, as far as it was fed
  bool has_evicted() const { return evicted_ > 0; }

  // Forget what was fed behind the first `count` tokens, all of it or what was fed since an eviction.
  void rewind(size_t count);

  // Where the window is full, drop its oldest block after the sinks.
  void evict_if_full();
  size_t room() const;  // tokens that can be fed before the next eviction, or at all

  // Append at most `plan().chunk_tokens` tokens.
  void feed(const std::vector<TokenId>& tokens);

  // Rows of logits after each of the last `count` tokens that were fed in one call; valid until the next call.
  const float* logits(size_t count);

  std::string runtime_version() const { return runtime_->version(); }

 private:
  struct Part {  // a graph of the body
    Session session;
    size_t first, end;  // its layers
  };
  size_t held() const { return fed_.size() - evicted_; }
  void shift(float* cache, const KvLayer& layer, const Rotation* rotation);
  Tensor over(Number kind, void* data, const std::vector<int64_t>& shape) const {
    return {runtime_, kind, data, shape};
  }

  const Plan plan_;
  const bool is_exact_;
  KvCache cache_;
  std::shared_ptr<OnnxRuntime> runtime_;
  std::vector<Part> parts_;
  std::unique_ptr<Session> head_;
  std::vector<Tensor> keys_and_values_;
  std::vector<int64_t> ids_;
  int32_t last_place_ = 0, total_ = 0;  // what the graphs read instead of a mask
  std::vector<float> hidden_[2];        // parts alternate between the two, so that none reads what it writes
  std::vector<float> logits_;
  const float* last_hidden_ = nullptr;     // of the last call
  size_t last_tokens_ = 0, last_fed_ = 0;  // of the last call, without and with padding
  std::vector<TokenId> fed_;
  size_t evicted_ = 0;  // of them; the others are in the cache
};

}  // namespace edgekit
