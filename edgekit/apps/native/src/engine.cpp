#include "engine.h"

#include <algorithm>

#include "errors.h"
#include "onnx_engine.h"

#ifdef NATIVE_EXECUTORCH
#include "executorch_engine.h"
#endif

namespace edgekit {

void Engine::rewind(size_t count) {
  if (count == 0) evicted_ = 0;
  fed_.resize(std::min(count, fed_.size()));
}

size_t Engine::room() const { return (plan_.window ? plan_.window->tokens : plan_.capacity) - held(); }

void Engine::evict_if_full() {
  if (!plan_.window || held() < plan_.window->tokens) return;
  drop(plan_.window->sinks, plan_.window->sinks + plan_.window->block, held());
  evicted_ += plan_.window->block;
}

const float* Engine::feed(const std::vector<TokenId>& tokens, size_t rows) {
  if (tokens.empty() || tokens.size() > std::min(plan_.chunk_tokens, room())) {
    refuse(std::to_string(tokens.size()) + " tokens after " + std::to_string(held()) + ": the artifact holds " +
           std::to_string(plan_.capacity));
  }
  const float* logits = compute(tokens, held(), std::min(rows, tokens.size()));
  fed_.insert(fed_.end(), tokens.begin(), tokens.end());
  most_held_ = std::max(most_held_, held());
  return logits;
}

std::unique_ptr<Engine> open_engine(const Artifact& artifact, const Plan& plan, const std::string& library, int threads,
                                    bool is_exact, const std::string& packed) {
  if (plan.target == "onnx") return std::make_unique<OnnxEngine>(artifact, plan, library, threads, is_exact, packed);
  if (!packed.empty()) refuse(packed + ": only weights for ONNX Runtime are packed; open without packed weights");
#ifdef NATIVE_EXECUTORCH
  return std::make_unique<ExecutorchEngine>(artifact, plan, library, threads, is_exact);
#else
  refuse("the artifact is for " + quote_short(plan.target) +
         "; export it for onnx on a CPU, or build this library with -DEXECUTORCH=ON");
#endif
}

}  // namespace edgekit
