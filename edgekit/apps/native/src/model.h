// An opened artifact: what a caller generates with.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "artifact.h"
#include "chat_template.h"
#include "engine.h"
#include "generation.h"
#include "tokenizer.h"

namespace edgekit {

// Bytes; -1 where the system does not count them.
struct Memory {
  int64_t weights, engine, cache, cache_used, activations, process_private, process_peak;
};

// Packs an artifact's weights for this processor into `packed`, once. Throws std::runtime_error.
void pack(const std::string& folder, const std::string& library, const std::string& packed);

class Model {
 public:
  // `threads` 0: as many as the plan says. `packed`: a folder of `pack`, or empty. Throws std::runtime_error.
  Model(const std::string& folder, const std::string& library, int threads, bool is_exact, const std::string& packed);

  const Tokenizer& tokenizer() const { return tokenizer_; }
  const ChatTemplate& chat_template() const { return chat_template_; }
  const Plan& plan() const { return engine_->plan(); }
  const Answer& generate(const std::vector<TokenId>& prompt, const GenerationOptions& options);
  Memory memory() const;
  void cancel() { is_cancelled_ = true; }  // the answer that is being generated; from any thread

 private:
  Model(const Artifact& artifact, const std::string& library, int threads, bool is_exact, const std::string& packed);

  const std::string folder_, packed_;
  const int64_t before_;  // private bytes of the process, before the model was opened
  Tokenizer tokenizer_;
  ChatTemplate chat_template_;
  std::unique_ptr<Engine> engine_;
  std::vector<TokenId> ends_;
  int64_t loaded_;  // private bytes, after it
  Answer answer_;
  std::atomic<bool> is_cancelled_{false};
};

}  // namespace edgekit
