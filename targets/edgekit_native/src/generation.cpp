#include "generation.h"

#include <algorithm>
#include <chrono>

#include "detokeniser.h"
#include "errors.h"
#include "stop_strings.h"

namespace edgekit {
namespace {

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The text of an answer, as far as it is decided.
class Text {
 public:
  Text(const Tokenizer& tokenizer, const std::vector<TokenId>& context, const GenerationOptions& options, Answer& answer)
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
      refuse("the prompt holds the token " + std::to_string(token) + ", outside the vocabulary of " + std::to_string(plan.vocabulary));
    }
  }
  if (prompt.size() >= plan.capacity) {
    refuse("the prompt has " + std::to_string(prompt.size()) + " tokens, the context holds " +
           std::to_string(plan.capacity - 1) + " before an answer; shorten it, or export a larger context");
  }
}

}  // namespace

Answer generate(Engine& engine, const Tokenizer& tokenizer, const std::vector<TokenId>& ends,
                const std::vector<TokenId>& prompt, const GenerationOptions& options, const std::atomic<bool>& is_cancelled) {
  const Plan& plan = engine.plan();
  check(prompt, plan);
  Answer answer;
  answer.prompt_tokens = prompt.size();
  Sampler sampler(options.sampling, prompt);
  Text text(tokenizer, options.begins_text ? std::vector<TokenId>() : prompt, options, answer);
  size_t most = plan.capacity - prompt.size();
  if (options.max_tokens >= 0) most = std::min(most, static_cast<size_t>(options.max_tokens));
  const auto finish = [&](FinishReason reason) {
    answer.reason = reason;
    text.end();
    return answer;
  };

  const double began = now_s();
  engine.rewind(0);
  while (engine.length() < prompt.size()) {
    if (is_cancelled) return finish(FinishReason::kCancelled);
    const size_t count = std::min(plan.chunk_tokens, prompt.size() - engine.length());
    const auto first = prompt.begin() + static_cast<long>(engine.length());
    engine.feed({first, first + static_cast<long>(count)});
  }
  if (most == 0) return finish(FinishReason::kLength);
  double first_token = 0.0;
  for (;;) {
    const TokenId token = sampler.choose(engine.logits(), engine.length());
    const double now = now_s();
    if (answer.tokens.empty()) first_token = now, answer.prefill_s = now - began;
    else answer.decode_s = now - first_token;
    if (!options.ignores_ends && std::find(ends.begin(), ends.end(), token) != ends.end()) return finish(FinishReason::kStop);
    answer.tokens.push_back(token);
    if (text.add(token)) {
      answer.reason = FinishReason::kStop;
      return answer;
    }
    sampler.observe(token);
    if (answer.tokens.size() == most) return finish(FinishReason::kLength);
    if (is_cancelled) return finish(FinishReason::kCancelled);
    engine.feed({token});
  }
}

}  // namespace edgekit
