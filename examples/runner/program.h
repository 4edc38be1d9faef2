// One loaded .pte of edgekit: its facts, and its method `forward`. The only page that calls ExecuTorch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

class Program {
 public:
  // Loads the program and packs its weights. `threads` is set once, before anything is loaded.
  Program(const std::string& path, int threads);
  ~Program();

  int64_t slots() const { return slots_; }            // tokens that its cache holds
  int64_t chunk() const { return chunk_; }            // tokens of one call, at most
  int64_t vocabulary() const { return vocabulary_; }
  int threads() const;

  // Append `count` tokens at `start`, which is the number of tokens that are held; the likeliest next token.
  int64_t feed(const int64_t* tokens, int64_t count, int64_t start);

  static const char* version();  // of ExecuTorch

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
  int64_t slots_ = 0, chunk_ = 0, vocabulary_ = 0;
};

// Load a library that registers operators, before any program. Throws std::runtime_error.
void load_operators(const std::string& library);

// Whether attention is computed by this runner's own kernels, because no library brought ExecuTorch's.
bool has_own_attention();
