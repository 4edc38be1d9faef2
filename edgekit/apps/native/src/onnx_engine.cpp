#include "onnx_engine.h"

#include <algorithm>

#include "errors.h"
#include "files.h"
#include "graph_audit.h"
#include "kv_steps.h"
#include "narrow_graph.h"
#include "packed_weights.h"

namespace edgekit {
namespace {

constexpr size_t kMostGraphBytes = 64u << 20, kMostPackedGraphBytes = 512u << 20;
constexpr size_t kMostStepsBytes = 64u << 20;
constexpr size_t kSpare = 2;  // tokens of padding for which rotary tables have room
// Tokens that attend at once to a cache of 16 bits: attention holds the scores of each over the whole cache.
constexpr size_t kHalvesAtOnce = 64;
constexpr size_t kStepTokens = 32;  // of a step with drafts, at most
constexpr int64_t kWidestExactHead = 128;

// Kernels compute a single row by other steps than several, and some take rows in pairs. So in exact mode every call
// has an even number of tokens, and the padding is dropped after the call; or one token, where that does not suffice.
size_t padded(size_t tokens) { return tokens + tokens % 2; }

#ifdef __aarch64__
constexpr bool kFeedsSingleTokens = true;  // in exact mode
#else
constexpr bool kFeedsSingleTokens = false;
#endif

std::string name_of(const char* when, size_t layer, const char* kind) {
  return std::string(when) + "." + std::to_string(layer) + "." + kind;
}

// Python's rules: edgekit_onnx/exactness.py gives the measured reasons.
void refuse_inexact(const Plan& plan) {
  if (plan.cache == Number::kHalf)
    refuse("exact mode needs a cache of 32 or 8 bits: with 16 a text depends on its pieces; export it with --kv-bits 8");
  for (const KvLayer& layer : plan.layers) {
    if (layer.width > kWidestExactHead && plan.cache != Number::kInt8)
      refuse("exact mode needs a cache of 8 bits for heads of " + std::to_string(layer.width) +
             " values; export it with --kv-bits 8");
  }
}

}  // namespace

std::vector<std::string> graph_names(const Plan& plan) {
  std::vector<std::string> names;
  for (size_t index = 0; index + 1 < plan.cuts.size(); ++index) {
    names.push_back("body-" + std::to_string(plan.cuts[index]) + "-" + std::to_string(plan.cuts[index + 1]) + ".onnx");
  }
  names.push_back("head.onnx");
  return names;
}

std::string read_graph(const Artifact& artifact, const Plan& plan, size_t index) {
  const std::string name = graph_names(plan)[index], graph = artifact.read(name, kMostGraphBytes);
  const size_t layers = index + 1 < plan.cuts.size() ? plan.cuts[index + 1] - plan.cuts[index] : 0;
  audit_graph(graph, artifact.path(name), {artifact.bytes(kWeightsFile), layers, plan.capacity + kSpare});
  return graph;
}

OnnxEngine::OnnxEngine(const Artifact& artifact, const Plan& plan, const std::string& library, int threads,
                       bool is_exact, const std::string& packed)
    : Engine(plan),
      pads_(is_exact && !kFeedsSingleTokens),
      is_single_(is_exact && kFeedsSingleTokens),
      cache_(plan.layers, plan.capacity + (is_exact ? kSpare : 0), plan.cache),
      runtime_(OnnxRuntime::load(library)) {
  if (is_exact) refuse_inexact(plan_);
  if (!packed.empty()) check_packed(artifact, plan_, runtime_->version(), packed);
  const std::vector<std::string> names = graph_names(plan_);
  const auto graph = [&](size_t index) {
    return packed.empty() ? read_graph(artifact, plan_, index)
                          : read_file(packed + "/" + names[index], kMostPackedGraphBytes);
  };
  const auto open = [&](const std::string& bytes) {
    return Session(runtime_, bytes, packed.empty() ? artifact.folder() : packed, threads);
  };
  for (size_t index = 0; index + 1 < names.size(); ++index) {
    parts_.push_back({open(narrow(graph(index))), plan_.cuts[index], plan_.cuts[index + 1], {}, {}});
  }
  head_ = std::make_unique<Session>(open(graph(names.size() - 1)));
  bind_cache(artifact);
  const size_t most = std::min(plan_.chunk_tokens, plan_.capacity) + kSpare;
  ids_.resize(most);
  for (auto& each : hidden_) each.resize(most * static_cast<size_t>(plan_.hidden_size));
}

// The graph whose cache has the plan's width.
std::string OnnxEngine::narrow(const std::string& graph) const {
  switch (plan_.cache) {
    case Number::kHalf: return with_half_cache(graph);
    case Number::kInt8: return with_int8_cache(graph);
    default: return graph;
  }
}

// Inputs and outputs that are the same in all calls.
void OnnxEngine::bind_cache(const Artifact& artifact) {
  for (size_t layer = 0; layer < plan_.layers.size(); ++layer) {
    keys_and_values_.push_back(over(plan_.cache, cache_.keys(layer), cache_.shape(layer)));
    keys_and_values_.push_back(over(plan_.cache, cache_.values(layer), cache_.shape(layer)));
  }
  if (plan_.cache == Number::kInt8) {
    if (!artifact.has(kStepsFile))
      refuse(artifact.folder() + ": has no " + kStepsFile + ", the steps of an 8-bit cache; export the artifact again");
    steps_ = read_steps(artifact.read(kStepsFile, kMostStepsBytes), plan_.layers);
    for (size_t place = 0; place < steps_.size(); ++place) {
      const KvLayer& layer = plan_.layers[place / 2];
      step_inputs_.push_back(over(Number::kFloat, steps_[place].data(), {layer.heads, 1, layer.width}));
    }
  }
  places_.push_back(over(Number::kInt32, &last_place_, {1}));
  places_.push_back(over(Number::kInt32, &total_, {}));
  for (Part& part : parts_) {
    part.inputs.add(part.first == 0 ? "input_ids" : "hidden_in", places_[0]);  // each call puts its own in this place
    part.outputs.add("hidden", places_[0]);
    part.inputs.add("seqlens_k", places_[0]);
    part.inputs.add("total", places_[1]);
    for (size_t place = 2 * part.first; place < 2 * part.end; ++place) {
      const char* kind = place % 2 == 0 ? "key" : "value";
      part.inputs.add(name_of("past", place / 2, kind), keys_and_values_[place]);
      part.outputs.add(name_of("present", place / 2, kind), keys_and_values_[place]);
      if (!step_inputs_.empty()) part.inputs.add(name_of("step", place / 2, kind), step_inputs_[place]);
    }
  }
}

void OnnxEngine::drop(size_t start, size_t stop, size_t held) { cache_.drop(start, stop, held, plan_.rotations); }

const float* OnnxEngine::compute(const std::vector<TokenId>& tokens, size_t held, size_t rows) {
  last_tokens_ = tokens.size(), last_fed_ = pads_ ? padded(tokens.size()) : tokens.size();
  std::copy(tokens.begin(), tokens.end(), ids_.begin());
  ids_[tokens.size()] = tokens.back();  // the padding, if there is any
  const size_t most = is_single_ ? 1 : plan_.cache == Number::kHalf ? kHalvesAtOnce : last_fed_;
  for (size_t part = 0; part < parts_.size(); ++part) {
    for (size_t first = 0; first < last_fed_; first += most)
      run_piece(part, held, first, std::min(first + most, last_fed_));
    last_hidden_ = hidden_[part % 2].data();
  }
  return rows > 0 ? logits(rows) : nullptr;
}

// Runs one graph for the tokens `first` to `end` of a call.
void OnnxEngine::run_piece(size_t index, size_t held, size_t first, size_t end) {
  Part& part = parts_[index];
  const auto count = static_cast<int64_t>(end - first);
  const auto hidden = [&](size_t buffer) {
    return over(Number::kFloat, hidden_[buffer % 2].data() + first * static_cast<size_t>(plan_.hidden_size),
                {1, count, plan_.hidden_size});
  };
  const Tensor from = index == 0 ? over(Number::kInt64, ids_.data() + first, {1, count}) : hidden(index + 1);
  const Tensor to = hidden(index);
  part.inputs.tensors[0] = &from, part.outputs.tensors[0] = &to;
  total_ = static_cast<int32_t>(held + end);
  last_place_ = total_ - 1;
  // In float16 each step requests larger buffers than the one before, and the arena would keep those of every step.
  part.session.run(part.inputs, part.outputs, plan_.cache == Number::kHalf && last_fed_ <= kStepTokens);
}

// Rows of logits after each of the last `count` tokens of the last call.
const float* OnnxEngine::logits(size_t count) {
  size_t first = last_tokens_ - count, end = last_tokens_;
  if (pads_ && count % 2 == 1) end < last_fed_ ? ++end : --first;  // one row more, so that they are even here too
  const size_t width = static_cast<size_t>(plan_.vocabulary), most = is_single_ ? 1 : end - first;
  logits_.resize(std::max(logits_.size(), (end - first) * width));
  for (size_t row = first; row < end; row += most) {
    const auto rows = static_cast<int64_t>(most);
    auto* start = const_cast<float*>(last_hidden_ + row * static_cast<size_t>(plan_.hidden_size));
    const Tensor hidden = over(Number::kFloat, start, {rows, plan_.hidden_size});
    const Tensor logits = over(Number::kFloat, logits_.data() + (row - first) * width, {rows, plan_.vocabulary});
    Bound inputs, outputs;
    inputs.add("hidden_in", hidden);
    outputs.add("logits", logits);
    head_->run(inputs, outputs);
  }
  return logits_.data() + (last_tokens_ - count - first) * width;
}

}  // namespace edgekit
