// The loop that answers one prompt: prefill in chunks, then one token at a time until the answer ends.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "engine.h"
#include "sampler.h"
#include "tokenizer.h"

namespace edgekit {

struct GenerationOptions {
  Sampling sampling;
  int64_t max_tokens = -1;  // -1: as many as the context can hold
  std::vector<std::string> stop;
  bool ignores_ends = false;   // go on where the model would end
  bool begins_text = false;    // the answer is a text of its own, as after a chat template
  bool reuses_prefix = false;  // what the prompt has in common with the text before it is not computed again
  size_t draft_tokens = 0;     // proposed by prompt lookup and verified together, at most
  std::function<void(std::string_view)> on_text;
};

enum class FinishReason { kStop, kLength, kCancelled };

struct Answer {
  std::string text;
  std::vector<TokenId> tokens;
  FinishReason reason = FinishReason::kLength;
  size_t prompt_tokens = 0, cached_tokens = 0, drafted_tokens = 0, accepted_tokens = 0;
  double prefill_s = 0.0, decode_s = 0.0;  // until the first token, and for those after it
};

// Throws std::runtime_error. `is_cancelled` is read before every call of the engine.
Answer generate(Engine& engine, const Tokenizer& tokenizer, const std::vector<TokenId>& ends,
                const std::vector<TokenId>& prompt, const GenerationOptions& options,
                const std::atomic<bool>& is_cancelled);

}  // namespace edgekit
