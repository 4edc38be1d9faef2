// Noise that is keyed by (seed, position, token), and the choice by it: each token with its softmax probability.
#pragma once

#include <cstdint>
#include <vector>

#include "bpe.h"

namespace edgekit {

// A token that may be chosen, with its score.
struct Candidate {
  TokenId token;
  float score;
};

// The token with the largest sum of score / temperature and noise; of equal sums, the first.
TokenId choose_by_noise(const std::vector<Candidate>& candidates, uint64_t seed, uint64_t position, double temperature);

}  // namespace edgekit
