#include "engine.h"

#include <algorithm>

#include "errors.h"

namespace edgekit {
namespace {

constexpr size_t kMostGraphBytes = 64u << 20;
constexpr size_t kSpare = 2;  // tokens of padding for which rotary tables have room

// Kernels compute a single row by other steps than several, and some take rows in pairs. So in exact mode every call
// has an even number of tokens; the padding is dropped after the call.
size_t padded(size_t tokens) { return tokens + tokens % 2; }

std::string name_of(const char* when, size_t layer, const char* kind) {
  return std::string(when) + "." + std::to_string(layer) + "." + kind;
}

}  // namespace

Engine::Engine(const Artifact& artifact, Plan plan, const std::string& library, int threads, bool is_exact)
    : plan_(std::move(plan)),
      is_exact_(is_exact),
      cache_(plan_.layers, plan_.capacity + (is_exact ? kSpare : 0)),
      runtime_(OnnxRuntime::load(library)) {
#ifdef __aarch64__
  if (is_exact) refuse("exact mode does not hold with onnxruntime's kernels for arm64; open without it");
#endif
  const auto open = [&](const std::string& name) {
    return Session(runtime_, artifact.read(name + ".onnx", kMostGraphBytes), artifact.folder(), threads);
  };
  for (size_t index = 0; index + 1 < plan_.cuts.size(); ++index) {
    const size_t first = plan_.cuts[index], end = plan_.cuts[index + 1];
    parts_.push_back({open("body-" + std::to_string(first) + "-" + std::to_string(end)), first, end});
  }
  head_ = std::make_unique<Session>(open("head"));
  for (size_t layer = 0; layer < plan_.layers.size(); ++layer) {
    const std::vector<int64_t> shape{1, plan_.layers[layer].heads,
                                     static_cast<int64_t>(plan_.capacity + (is_exact ? kSpare : 0)),
                                     plan_.layers[layer].width};
    keys_and_values_.push_back(over(Number::kFloat, cache_.keys(layer), shape));
    keys_and_values_.push_back(over(Number::kFloat, cache_.values(layer), shape));
  }
  const size_t most = std::min(plan_.chunk_tokens, plan_.capacity) + kSpare;
  ids_.resize(most);
  for (auto& each : hidden_) each.resize(most * static_cast<size_t>(plan_.hidden_size));
}

size_t Engine::room() const { return (plan_.window ? plan_.window->tokens : plan_.capacity) - held(); }

void Engine::rewind(size_t count) {
  if (count == 0) evicted_ = 0;
  fed_.resize(std::min(count, fed_.size()));
}

void Engine::evict_if_full() {
  if (!plan_.window || held() < plan_.window->tokens) return;
  for (size_t layer = 0; layer < plan_.layers.size(); ++layer) {
    const std::optional<Rotation>& rotation = plan_.rotations[layer];
    shift(cache_.keys(layer), plan_.layers[layer], rotation ? &*rotation : nullptr);
    shift(cache_.values(layer), plan_.layers[layer], nullptr);
  }
  evicted_ += plan_.window->block;
}

// Moves what is behind the block that is dropped to its place.
void Engine::shift(float* cache, const KvLayer& layer, const Rotation* rotation) {
  const auto width = static_cast<size_t>(layer.width);
  const size_t stride = (plan_.capacity + (is_exact_ ? kSpare : 0)) * width;
  const size_t start = plan_.window->sinks, stop = start + plan_.window->block;
  for (int64_t head = 0; head < layer.heads; ++head, cache += stride) {
    std::copy(cache + stop * width, cache + held() * width, cache + start * width);
    for (size_t place = start; rotation != nullptr && place < start + held() - stop; ++place)
      rotation->back(cache + place * width);
  }
}

void Engine::feed(const std::vector<TokenId>& tokens) {
  const size_t length = held();
  if (tokens.empty() || tokens.size() + kSpare > ids_.size() || tokens.size() > room()) {
    refuse(std::to_string(tokens.size()) + " tokens after " + std::to_string(length) + ": the artifact holds " +
           std::to_string(plan_.capacity));
  }
  last_tokens_ = tokens.size(), last_fed_ = is_exact_ ? padded(tokens.size()) : tokens.size();
  const auto count = static_cast<int64_t>(last_fed_);
  std::copy(tokens.begin(), tokens.end(), ids_.begin());
  ids_[tokens.size()] = tokens.back();  // the padding, if there is any
  total_ = static_cast<int32_t>(length + last_fed_);
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
    last_hidden_ = hidden_[index % 2].data();
  }
  fed_.insert(fed_.end(), tokens.begin(), tokens.end());
}

const float* Engine::logits(size_t count) {
  if (count == 0 || count > last_tokens_) refuse("there are no logits for " + std::to_string(count) + " tokens");
  size_t first = last_tokens_ - count, end = last_tokens_;
  if (is_exact_ && count % 2 == 1) end < last_fed_ ? ++end : --first;  // one row more, so that they are even here too
  const auto rows = static_cast<int64_t>(end - first);
  const size_t width = static_cast<size_t>(plan_.vocabulary);
  logits_.resize(std::max(logits_.size(), (end - first) * width));
  auto* start = const_cast<float*>(last_hidden_ + first * static_cast<size_t>(plan_.hidden_size));
  const Tensor hidden = over(Number::kFloat, start, {rows, plan_.hidden_size});
  const Tensor logits = over(Number::kFloat, logits_.data(), {rows, plan_.vocabulary});
  Bound inputs, outputs;
  inputs.add("hidden_in", hidden);
  outputs.add("logits", logits);
  head_->run(inputs, outputs);
  return logits_.data() + (last_tokens_ - count - first) * width;
}

}  // namespace edgekit
