// One loaded .pte of edgekit: its facts and one of its methods. The only page that calls ExecuTorch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace edgekit {

class Program {
 public:
  // `kForward` is the method that ExecuTorch's own runners call; `kAppend` can give more than one row of logits.
  enum class Method { kForward, kAppend };

  // Loads the program and packs its weights. The first program of a process fixes the number of threads.
  Program(const std::string& path, int threads, Method method);
  ~Program();

  int64_t slots() const { return slots_; }  // tokens that its cache holds
  int64_t chunk() const { return chunk_; }  // tokens of one call, at most
  int64_t rows() const { return rows_; }    // of logits of one call, at most
  int64_t vocabulary() const { return vocabulary_; }
  int64_t layers() const { return layers_; }
  int threads() const;

  // Append `count` tokens at `start`, which is the number of tokens that are held; logits after each of the last
  // `rows` of them, until the next call.
  const float* feed(const int64_t* tokens, int64_t count, int64_t start, int64_t rows = 1);

  // A part of a layer's cache, such as `keys` or `values_scales`, with `count` numbers of that kind; another is refused.
  float* floats(int64_t layer, const std::string& part, size_t count);
  int8_t* integers(int64_t layer, const std::string& part, size_t count);

  static const char* version();  // of ExecuTorch

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
  const Method method_;
  int64_t slots_ = 0, chunk_ = 0, rows_ = 1, vocabulary_ = 0, layers_ = 0;
};

// Load a library that registers operators, before any program. Throws std::runtime_error.
void load_operators(const std::string& library);

// Whether attention is computed by kernels of our own, because no library brought ExecuTorch's.
bool has_own_attention();

}  // namespace edgekit
