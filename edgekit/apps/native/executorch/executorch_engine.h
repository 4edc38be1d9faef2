// Runs a phone's program and returns logits, as the executorch target of Python does.
#pragma once

#include <string>
#include <vector>

#include "artifact.h"
#include "engine.h"
#include "program.h"

namespace edgekit {

class ExecutorchEngine : public Engine {
 public:
  // `operators` is a library that registers operators of ExecuTorch; empty: kernels of our own, where they are missing.
  ExecutorchEngine(const Artifact& artifact, const Plan& plan, const std::string& operators, int threads,
                   bool is_exact);

  int64_t cache_bytes(size_t tokens) const override;

 private:
  const float* compute(const std::vector<TokenId>& tokens, size_t held, size_t rows) override;
  void drop(size_t start, size_t stop, size_t held) override;
  void feed_piece(const std::vector<TokenId>& tokens, size_t held, size_t first, size_t end, size_t rows);

  const bool is_exact_;
  Program program_;
  std::vector<float> logits_;
};

}  // namespace edgekit
