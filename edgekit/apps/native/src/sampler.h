// Chooses the tokens of one answer: penalties, filters, and noise that is keyed by seed, position and token.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "bpe.h"

namespace edgekit {

// Applied in this order: penalties, temperature, top-k, top-p, min-p, typical.
struct Sampling {
  double temperature = 0.0;  // 0 takes the likeliest token
  size_t top_k = 0;          // 0: all
  double top_p = 1.0, min_p = 0.0, typical_p = 1.0;
  double repetition_penalty = 1.0, presence_penalty = 0.0, frequency_penalty = 0.0;
  uint64_t seed = 0;

  void check() const;  // throws std::runtime_error
};

class Sampler {
 public:
  Sampler(const Sampling& sampling, const std::vector<TokenId>& prompt);

  // The token for `position`, from the logits after all tokens before it.
  TokenId choose(const float* logits, size_t vocabulary, size_t position) const;
  void observe(TokenId token);  // which is now part of the text

 private:
  void adjust(std::vector<float>& scores) const;

  const Sampling sampling_;
  const bool adjusts_;
  std::map<TokenId, float> added_;  // minus presence and frequency penalties
  std::map<TokenId, bool> seen_;
};

}  // namespace edgekit
