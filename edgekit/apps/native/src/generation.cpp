#include "generation.h"

#include <algorithm>
#include <chrono>

#include "detokeniser.h"
#include "errors.h"
#include "ngram.h"
#include "stop_strings.h"

namespace edgekit {
namespace {

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The text of an answer, as far as it is decided.
class Text {
 public:
  Text(const Tokenizer& tokenizer, const std::vector<TokenId>& context, const GenerationOptions& options,
       Answer& answer)
      : detokeniser_(tokenizer, context), stops_(options.stop), on_text_(options.on_text), answer_(answer) {}

  bool add(TokenId token) { return release(stops_.push(detokeniser_.push(token))); }  // true: a stop string ends it
  void end() {
    if (release(stops_.push(detokeniser_.flush()))) answer_.reason = FinishReason::kStop;
    else release(stops_.flush());
  }

 private:
  bool release(const std::string& text) {
    answer_.text += text;
    if (on_text_ && !text.empty()) on_text_(text);
    return stops_.stop().has_value();
  }

  Detokeniser detokeniser_;
  StopStrings stops_;
  const std::function<void(std::string_view)>& on_text_;
  Answer& answer_;
};

void check(const std::vector<TokenId>& prompt, const Plan& plan) {
  if (prompt.empty()) refuse("the prompt has no tokens; give at least one");
  for (const TokenId token : prompt) {
    if (token < 0 || token >= plan.vocabulary) {
      refuse("the prompt holds the token " + std::to_string(token) + ", outside the vocabulary of " +
             std::to_string(plan.vocabulary));
    }
  }
  if (!plan.window && prompt.size() >= plan.capacity) {
    refuse("the prompt has " + std::to_string(prompt.size()) + " tokens, the context holds " +
           std::to_string(plan.capacity - 1) + " before an answer; shorten it, or export a larger context or a window");
  }
}

// The tokens that need not be computed again: all but the last of the prompt, at most. None after an eviction.
size_t common_prefix(const Engine& engine, const std::vector<TokenId>& prompt) {
  const std::vector<TokenId>& fed = engine.fed();
  const size_t most = engine.has_evicted() ? 0 : std::min(fed.size(), prompt.size() - 1);
  return static_cast<size_t>(std::mismatch(fed.begin(), fed.begin() + static_cast<long>(most), prompt.begin()).first -
                             fed.begin());
}

}  // namespace

Answer generate(Engine& engine, const Tokenizer& tokenizer, const std::vector<TokenId>& ends,
                const std::vector<TokenId>& prompt, const GenerationOptions& options,
                const std::atomic<bool>& is_cancelled) {
  const Plan& plan = engine.plan();
  check(prompt, plan);
  Answer answer;
  answer.prompt_tokens = prompt.size();
  Sampler sampler(options.sampling, prompt);
  Text text(tokenizer, options.begins_text ? std::vector<TokenId>() : prompt, options, answer);
  size_t most = plan.window ? plan.capacity : plan.capacity - prompt.size();
  if (plan.window && options.max_tokens >= 0) most = static_cast<size_t>(options.max_tokens);  // which has no end
  else if (options.max_tokens >= 0) most = std::min(most, static_cast<size_t>(options.max_tokens));
  const auto finish = [&](FinishReason reason) {
    answer.reason = reason;
    text.end();
    return answer;
  };

  const double began = now_s();
  answer.cached_tokens = options.reuses_prefix ? common_prefix(engine, prompt) : 0;
  engine.rewind(answer.cached_tokens);
  const float* row = nullptr;
  while (engine.fed().size() < prompt.size()) {
    if (is_cancelled) return finish(FinishReason::kCancelled);
    engine.evict_if_full();
    // Cut at multiples of the chunk, whatever was cached, and where the window evicts.
    const size_t fed = engine.fed().size(), boundary = plan.chunk_tokens - fed % plan.chunk_tokens;
    const auto first = prompt.begin() + static_cast<long>(fed);
    const size_t count = std::min({boundary, prompt.size() - fed, engine.room()});
    row = engine.feed({first, first + static_cast<long>(count)}, fed + count == prompt.size() && most > 0 ? 1 : 0);
  }
  if (most == 0) return finish(FinishReason::kLength);
  NgramDrafter drafter;
  if (options.draft_tokens > 0) drafter.extend(prompt.data(), prompt.size());
  std::vector<TokenId> proposal;
  double first_token = 0.0;
  for (;;) {
    for (size_t place = 0;; ++place, row += plan.vocabulary) {
      const size_t position = prompt.size() + answer.tokens.size();
      const TokenId token = sampler.choose(row, static_cast<size_t>(plan.vocabulary), position);
      const double now = now_s();
      if (answer.tokens.empty()) first_token = now, answer.prefill_s = now - began;
      else answer.decode_s = now - first_token;
      if (!options.ignores_ends && std::find(ends.begin(), ends.end(), token) != ends.end())
        return finish(FinishReason::kStop);
      answer.tokens.push_back(token);
      if (text.add(token)) {
        answer.reason = FinishReason::kStop;
        return answer;
      }
      sampler.observe(token);
      if (answer.tokens.size() == most) return finish(FinishReason::kLength);
      if (is_cancelled) return finish(FinishReason::kCancelled);
      if (options.draft_tokens > 0) drafter.extend(&token, 1);
      if (place == proposal.size() || token != proposal[place]) break;
      ++answer.accepted_tokens;
    }
    engine.rewind(prompt.size() + answer.tokens.size() - 1);  // forget the drafts that were wrong
    engine.evict_if_full();
    const size_t room = std::min({options.draft_tokens, most - answer.tokens.size() - 1, plan.chunk_tokens - 1,
                                  engine.room() - 1});
    proposal = room > 0 ? drafter.propose(room) : std::vector<TokenId>();
    answer.drafted_tokens += proposal.size();
    std::vector<TokenId> fed{answer.tokens.back()};
    fed.insert(fed.end(), proposal.begin(), proposal.end());
    row = engine.feed(fed, fed.size());
  }
}

}  // namespace edgekit
