#include "plan.h"

#include <set>

#include "errors.h"

namespace edgekit {
namespace {

constexpr int64_t kMostLayers = 1024, kMostWidth = 1 << 20, kMostTokensHeld = 1 << 24, kMostThreads = 1024;
constexpr int64_t kMostCacheBytes = int64_t{1} << 42;

int64_t bounded(const Json& from, const char* name, int64_t most, int64_t least = 1) {
  const int64_t found = from.at(name).whole(name);
  if (found < least || found > most) refuse("plan: " + std::string(name) + " is " + std::to_string(found));
  return found;
}

// A list that older plans lack.
const Json::List& listed_in(const Json& from, const char* name) {
  static const Json::List none;
  const Json* found = from.find(name);
  return found == nullptr ? none : found->list(name);
}

void refuse_unsupported(const Json& plan, const Json& model) {
  const std::string &target = plan.at("target").text("target"), &backend = plan.at("backend").text("backend");
  if ((target != "onnx" || backend != "cpu") && target != "executorch") {
    refuse("the artifact is for " + quote_short(target) + " on " + quote_short(backend) +
           "; export it for onnx on a CPU");
  }
  if (model.find("encoder") != nullptr) refuse("the artifact is an encoder, which has no text to generate");
  if (model.find("experts") != nullptr) refuse("the artifact is a mixture of experts, which is not supported");
  for (const Json& layer : model.at("layers").list("layers")) {
    const Json* stores = layer.find("stores_kv");
    if ((stores != nullptr && !stores->truth("stores_kv")) || layer.find("conv_taps") != nullptr) {
      refuse("the model " + quote_short(model.at("family").text("family")) +
             " has layers without keys and values, which are not supported");
    }
  }
}

Number cache_of(const Json& storage) {
  const int64_t bits = storage.at("kv_bits").whole("kv_bits");
  switch (bits) {
    case 8: return Number::kInt8;
    case 16: return Number::kHalf;
    case 32: return Number::kFloat;
    default:
      refuse("the artifact has a cache of " + std::to_string(bits) + " bits; export it with --kv-bits 8, 16 or 32");
  }
}

std::optional<Window> window_of(const Json& cache, size_t capacity) {
  if (cache.find("window") == nullptr) return std::nullopt;
  const Json* keep = cache.find("keep");
  if (keep != nullptr && keep->text("keep") != "newest")
    refuse("a window that keeps tokens by " + quote_short(keep->text("keep")) +
           " is not supported; export it with --keep newest");
  const auto most = static_cast<int64_t>(capacity);
  const Window found{static_cast<size_t>(bounded(cache, "window", most)),
                     static_cast<size_t>(bounded(cache, "sinks", most, 0)),
                     static_cast<size_t>(bounded(cache, "block", most))};
  if (found.tokens < found.sinks + found.block + 1) refuse("plan: the window has no room for its sinks and a block");
  return found;
}

// The rotation of a layer's keys; none: the layer has no rope.
std::optional<Rotation> rotation_of(const Json& layer, const Json& ropes, const Window& window) {
  const Json* rope = layer.find("rope");
  if (rope == nullptr) return std::nullopt;
  Rotation found(ropes.at(rope->text("rope")), layer.at("head_dim").whole("head_dim"));
  found.prepare(window.block);
  return found;
}

}  // namespace

Plan::Plan(const Json& described) {
  const Json& model = described.at("model");
  refuse_unsupported(described, model);
  target = described.at("target").text("target");
  const Json::List& listed = model.at("layers").list("layers");
  if (listed.empty() || static_cast<int64_t>(listed.size()) > kMostLayers)
    refuse("plan: the model has no layers or too many");
  hidden_size = bounded(model, "hidden_size", kMostWidth);
  vocabulary = bounded(model, "vocab_size", kMostTokens);
  capacity = static_cast<size_t>(bounded(described.at("storage"), "capacity_tokens", kMostTokensHeld));
  chunk_tokens = static_cast<size_t>(bounded(described, "chunk_tokens", kMostTokensHeld));
  threads = static_cast<int>(bounded(described, "threads", kMostThreads));
  cache = cache_of(described.at("storage"));
  int64_t bytes_a_token = 0;
  for (const Json& layer : listed) {
    layers.push_back({bounded(layer, "kv_heads", kMostWidth), bounded(layer, "head_dim", kMostWidth)});
    bytes_a_token += 2 * 4 * layers.back().heads * layers.back().width;
    if (bytes_a_token > kMostCacheBytes / static_cast<int64_t>(capacity)) refuse("plan: its cache is too large");
  }
  window = window_of(described.at("cache"), capacity);
  for (const Json& layer : listed) {
    if (window) rotations.push_back(rotation_of(layer, model.at("ropes"), *window));
  }
  std::set<size_t> ordered{0, layers.size()};
  for (const Json& exit : listed_in(described, "exits")) {
    const int64_t layer = exit.whole("exits");
    if (layer < 1 || layer >= static_cast<int64_t>(layers.size())) refuse("plan: exits are not layers of the model");
    ordered.insert(static_cast<size_t>(layer));
  }
  cuts.assign(ordered.begin(), ordered.end());
  for (const Json& end : listed_in(model, "eos_ids")) {
    const int64_t token = end.whole("eos_ids");
    if (token < 0 || token >= kMostTokens) refuse("plan: eos_ids holds " + std::to_string(token));
    ends.push_back(static_cast<TokenId>(token));
  }
}

}  // namespace edgekit
