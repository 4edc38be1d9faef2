#include "executorch_engine.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "errors.h"
#include "int8_cache.h"

namespace edgekit {
namespace {

constexpr const char* kProgram = "model.pte";
constexpr int64_t kStepBytes = 5;  // of a head's token in 8 bits: its scale and its zero point

// A phone's plan counts the phone's cores.
int threads_here(int planned) {
  return std::min(planned, std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
}

// The program's path, after its operators are there.
std::string prepared(const Artifact& artifact, const Plan& plan, const std::string& operators) {
  if (!artifact.has(kProgram)) refuse(artifact.folder() + ": has no " + kProgram + "; export the artifact again");
  if (!operators.empty()) load_operators(operators);
  return artifact.path(kProgram);
}

// A plan whose calls the program takes.
Plan bounded(Plan plan) {
  plan.chunk_tokens = std::min(plan.chunk_tokens, plan.capacity);
  return plan;
}

}  // namespace

ExecutorchEngine::ExecutorchEngine(const Artifact& artifact, const Plan& plan, const std::string& operators,
                                   int threads, bool is_exact)
    : Engine(bounded(plan)),
      is_exact_(is_exact),
      program_(prepared(artifact, plan, operators), threads_here(threads), Program::Method::kAppend) {
  const bool agrees = program_.slots() >= static_cast<int64_t>(plan_.capacity) &&
                      program_.chunk() >= static_cast<int64_t>(plan_.chunk_tokens) &&
                      program_.vocabulary() == plan_.vocabulary &&
                      program_.layers() == static_cast<int64_t>(plan_.layers.size());
  if (!agrees) refuse(artifact.folder() + ": its program is not the one of its plan; export the artifact again");
}

const float* ExecutorchEngine::compute(const std::vector<TokenId>& tokens, size_t held, size_t rows) {
  const size_t count = tokens.size(), most = static_cast<size_t>(program_.rows());
  logits_.clear();
  if (is_exact_) {
    for (size_t place = 0; place < count; ++place) feed_piece(tokens, held, place, place + 1, place + rows >= count);
  } else {
    // As Python cuts it: rows that are more than the program gives at once are a call each time.
    const size_t first = count - rows + std::min(rows, most);
    feed_piece(tokens, held, 0, first, std::min(rows, most));
    for (size_t place = first; place < count; place += most) {
      const size_t end = std::min(place + most, count);
      feed_piece(tokens, held, place, end, end - place);
    }
  }
  return rows > 0 ? logits_.data() : nullptr;
}

// Feeds the tokens from `first` to `end` and keeps logits after each of the last `rows` of them.
void ExecutorchEngine::feed_piece(const std::vector<TokenId>& tokens, size_t held, size_t first, size_t end,
                                  size_t rows) {
  const std::vector<int64_t> ids(tokens.begin() + static_cast<long>(first), tokens.begin() + static_cast<long>(end));
  // A program gives at least one row.
  const float* found = program_.feed(ids.data(), static_cast<int64_t>(ids.size()), static_cast<int64_t>(held + first),
                                     std::max<int64_t>(1, static_cast<int64_t>(rows)));
  logits_.insert(logits_.end(), found, found + rows * static_cast<size_t>(plan_.vocabulary));
}

int64_t ExecutorchEngine::cache_bytes(size_t tokens) const {
  int64_t bytes = 0;
  for (const KvLayer& layer : plan_.layers) {
    const int64_t head = plan_.cache == Number::kInt8 ? layer.width + kStepBytes
                                                      : layer.width * static_cast<int64_t>(sizeof(float));
    bytes += 2 * layer.heads * head;
  }
  return bytes * static_cast<int64_t>(tokens);
}

void ExecutorchEngine::drop(size_t start, size_t stop, size_t held) {
  const auto slots = static_cast<size_t>(program_.slots());
  for (size_t layer = 0; layer < plan_.layers.size(); ++layer) {
    const auto heads = static_cast<size_t>(plan_.layers[layer].heads);
    const auto width = static_cast<size_t>(plan_.layers[layer].width);
    const auto index = static_cast<int64_t>(layer);
    for (const std::string& part : {std::string("keys"), std::string("values")}) {
      const Rotation* rotation = part == "keys" && plan_.rotations[layer] ? &*plan_.rotations[layer] : nullptr;
      if (plan_.cache == Number::kInt8) {
        const Int8Cache cache{program_.integers(index, part, slots * heads * width),
                              program_.floats(index, part + "_scales", slots * heads),
                              program_.integers(index, part + "_zeros", slots * heads), heads, width};
        cache.drop(start, stop, held, rotation);
        continue;
      }
      const size_t token = heads * width;
      float* cache = program_.floats(index, part, slots * token);
      std::memmove(cache + start * token, cache + stop * token, (held - stop) * token * sizeof(float));
      if (rotation == nullptr) continue;
      for (size_t place = start * heads; place < (start + held - stop) * heads; ++place)
        rotation->back(cache + place * width);
    }
  }
}

}  // namespace edgekit
