#include "engine.h"

#include <algorithm>

#include "errors.h"

namespace edgekit {
namespace {

constexpr size_t kMostGraphBytes = 64u << 20;

std::string name_of(const char* when, size_t layer, const char* kind) {
  return std::string(when) + "." + std::to_string(layer) + "." + kind;
}

}  // namespace

Engine::Engine(const Artifact& artifact, Plan plan, const std::string& library, int threads)
    : plan_(std::move(plan)), cache_(plan_.layers, plan_.capacity), runtime_(OnnxRuntime::load(library)) {
  const auto open = [&](const std::string& name) {
    return Session(runtime_, artifact.read(name + ".onnx", kMostGraphBytes), artifact.folder(), threads);
  };
  for (size_t index = 0; index + 1 < plan_.cuts.size(); ++index) {
    const size_t first = plan_.cuts[index], end = plan_.cuts[index + 1];
    parts_.push_back({open("body-" + std::to_string(first) + "-" + std::to_string(end)), first, end});
  }
  head_ = std::make_unique<Session>(open("head"));
  for (size_t layer = 0; layer < plan_.layers.size(); ++layer) {
    const std::vector<int64_t> shape{1, plan_.layers[layer].heads, static_cast<int64_t>(plan_.capacity), plan_.layers[layer].width};
    keys_and_values_.push_back(over(Number::kFloat, cache_.keys(layer), shape));
    keys_and_values_.push_back(over(Number::kFloat, cache_.values(layer), shape));
  }
  const size_t most = std::min(plan_.chunk_tokens, plan_.capacity);
  ids_.resize(most);
  for (auto& each : hidden_) each.resize(most * static_cast<size_t>(plan_.hidden_size));
  logits_.resize(static_cast<size_t>(plan_.vocabulary));
}

void Engine::feed(const std::vector<TokenId>& tokens) {
  if (tokens.empty() || tokens.size() > ids_.size() || length_ + tokens.size() > plan_.capacity) {
    refuse(std::to_string(tokens.size()) + " tokens after " + std::to_string(length_) + ": the artifact holds " +
           std::to_string(plan_.capacity));
  }
  const auto count = static_cast<int64_t>(tokens.size());
  std::copy(tokens.begin(), tokens.end(), ids_.begin());
  total_ = static_cast<int32_t>(length_ + tokens.size());
  last_place_ = total_ - 1;
  const Tensor ids = over(Number::kInt64, ids_.data(), {1, count});
  const Tensor last_place = over(Number::kInt32, &last_place_, {1}), total = over(Number::kInt32, &total_, {});
  const Tensor hidden[2] = {over(Number::kFloat, hidden_[0].data(), {1, count, plan_.hidden_size}),
                            over(Number::kFloat, hidden_[1].data(), {1, count, plan_.hidden_size})};
  for (size_t index = 0; index < parts_.size(); ++index) {
    Bound inputs, outputs;
    if (index == 0) inputs.add("input_ids", ids);
    else inputs.add("hidden_in", hidden[(index + 1) % 2]);
    inputs.add("seqlens_k", last_place);
    inputs.add("total", total);
    outputs.add("hidden", hidden[index % 2]);
    for (size_t layer = parts_[index].first; layer < parts_[index].end; ++layer) {
      for (size_t kind = 0; kind < 2; ++kind) {
        const Tensor& cached = keys_and_values_[2 * layer + kind];
        inputs.add(name_of("past", layer, kind == 0 ? "key" : "value"), cached);
        outputs.add(name_of("present", layer, kind == 0 ? "key" : "value"), cached);
      }
    }
    parts_[index].session.run(inputs, outputs);
    last_hidden_ = hidden_[index % 2].data() + (tokens.size() - 1) * static_cast<size_t>(plan_.hidden_size);
  }
  length_ += tokens.size();
}

const std::vector<float>& Engine::logits() {
  if (last_hidden_ == nullptr) refuse("there are no logits before a token was fed");
  const Tensor hidden = over(Number::kFloat, const_cast<float*>(last_hidden_), {1, plan_.hidden_size});
  const Tensor logits = over(Number::kFloat, logits_.data(), {1, plan_.vocabulary});
  Bound inputs, outputs;
  inputs.add("hidden_in", hidden);
  outputs.add("logits", logits);
  head_->run(inputs, outputs);
  return logits_;
}

}  // namespace edgekit
