// The part of an artifact's plan that this library computes with; what it does not compute is refused.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bpe.h"
#include "json.h"
#include "numbers.h"
#include "rotation.h"

namespace edgekit {

struct KvLayer {
  int64_t heads, width;  // of keys, and of values
};

// The first `sinks` tokens and the newest ones stay: a full window drops its oldest `block` after the sinks.
struct Window {
  size_t tokens, sinks, block;
};

struct Plan {
  explicit Plan(const Json& described);  // throws std::runtime_error

  std::string target;
  std::vector<KvLayer> layers;
  std::vector<size_t> cuts;  // the graphs of the body have the layers between these
  int64_t hidden_size, vocabulary;
  size_t capacity, chunk_tokens;  // tokens that the cache holds, and of one call
  Number cache;                   // kind of its numbers
  int threads;
  std::vector<TokenId> ends;  // tokens that end a text
  std::optional<Window> window;
  std::vector<std::optional<Rotation>> rotations;  // of each layer's keys, where there is a window
};

}  // namespace edgekit
