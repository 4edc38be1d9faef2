// Feeds tokens to the graphs of an artifact and returns logits, as the onnx target of Python does.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "artifact.h"
#include "engine.h"
#include "kv_cache.h"
#include "onnxruntime.h"

namespace edgekit {

// The files of the graphs: those of the body in their order, then the head.
std::vector<std::string> graph_names(const Plan& plan);

// One of them by its place, audited. Throws std::runtime_error.
std::string read_graph(const Artifact& artifact, const Plan& plan, size_t index);

class OnnxEngine : public Engine {
 public:
  // `packed`: a folder of `pack_weights`; empty: the runtime packs weights into private memory.
  OnnxEngine(const Artifact& artifact, const Plan& plan, const std::string& library, int threads, bool is_exact,
             const std::string& packed);

  int64_t cache_bytes(size_t tokens) const override { return cache_.bytes(tokens); }

 private:
  struct Part {  // a graph of the body
    Session session;
    size_t first, end;      // its layers
    Bound inputs, outputs;  // the first of each are those of a call
  };
  const float* compute(const std::vector<TokenId>& tokens, size_t held, size_t rows) override;
  void drop(size_t start, size_t stop, size_t held) override;
  const float* logits(size_t rows);

  std::string narrow(const std::string& graph) const;
  void bind_cache(const Artifact& artifact);
  void run_piece(size_t part, size_t held, size_t first, size_t end);
  Tensor over(Number kind, void* data, const std::vector<int64_t>& shape) const {
    return {runtime_, kind, data, shape};
  }

  const bool pads_, is_single_;  // in exact mode: calls have an even number of tokens, or one
  KvCache cache_;
  std::shared_ptr<OnnxRuntime> runtime_;
  std::vector<Part> parts_;
  std::unique_ptr<Session> head_;
  std::vector<Tensor> keys_and_values_;
  std::vector<std::vector<float>> steps_;  // of a cache of 8 bits
  std::vector<Tensor> step_inputs_;
  std::vector<int64_t> ids_;
  int32_t last_place_ = 0, total_ = 0;  // what the graphs read instead of a mask
  std::vector<Tensor> places_;          // over these two
  std::vector<float> hidden_[2];        // parts alternate between the two, so that none reads what it writes
  std::vector<float> logits_;
  const float* last_hidden_ = nullptr;     // of the last call
  size_t last_tokens_ = 0, last_fed_ = 0;  // of the last call, without and with padding
};

}  // namespace edgekit
