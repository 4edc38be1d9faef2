// What the loop generates with: a model that tokens are fed to, by one of the runtimes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "artifact.h"
#include "plan.h"

namespace edgekit {

class Engine {
 public:
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Plan& plan() const { return plan_; }
  const std::vector<TokenId>& fed() const { return fed_; }  // the text, as far as it was fed
  bool has_evicted() const { return evicted_ > 0; }

  // Forget what was fed behind the first `count` tokens, all of it or what was fed since an eviction.
  void rewind(size_t count);

  // Where the window is full, drop its oldest block after the sinks.
  void evict_if_full();
  size_t room() const;  // tokens that can be fed before the next eviction, or at all

  size_t held() const { return fed_.size() - evicted_; }  // tokens that the cache holds
  size_t most_held() const { return most_held_; }         // so far: pages of the cache are never given back
  virtual int64_t cache_bytes(size_t tokens) const = 0;   // keys and values of so many

  // Append at most `plan().chunk_tokens` tokens. Rows of logits after each of the last `rows` of them, valid until the
  // next call; null for no rows.
  const float* feed(const std::vector<TokenId>& tokens, size_t rows);

 protected:
  explicit Engine(Plan plan) : plan_(std::move(plan)) {}

  const Plan plan_;

 private:
  // The same after `held` tokens that are in the cache; checked.
  virtual const float* compute(const std::vector<TokenId>& tokens, size_t held, size_t rows) = 0;

  // Of `held` tokens in the cache, drop those from `start` to `stop`, and rotate later keys back.
  virtual void drop(size_t start, size_t stop, size_t held) = 0;

  std::vector<TokenId> fed_;
  size_t evicted_ = 0;    // of them; the others are in the cache
  size_t most_held_ = 0;
};

// Opens an artifact by the runtime of its target. `library` is ONNX Runtime's, or one with operators for ExecuTorch.
// `is_exact`: logits do not depend on the pieces in which tokens are fed. `packed`: a folder of packed weights, or empty.
// Throws std::runtime_error.
std::unique_ptr<Engine> open_engine(const Artifact& artifact, const Plan& plan, const std::string& library, int threads,
                                    bool is_exact, const std::string& packed);

}  // namespace edgekit
