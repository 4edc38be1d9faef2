#include "tokenizer.h"

#include "errors.h"
#include "utf8.h"

namespace edgekit {
namespace {

constexpr int kDeepest = 8;
constexpr size_t kMostSpecial = 64;

}  // namespace

Tokenizer::Tokenizer(const std::string& json) : Tokenizer(Json::parse(json)) {}

Tokenizer::Tokenizer(const Json& described)
    : bpe_(described.at("model")),
      normalizer_(described.find("normalizer")),
      added_(described.find("added_tokens"), bpe_, normalizer_),
      pre_tokenizer_(described.find("pre_tokenizer")),
      decoder_(described.find("decoder")) {
  if (const Json* post_processor = described.find("post_processor")) read_post_processor(*post_processor, 0);
}

void Tokenizer::read_post_processor(const Json& described, int depth) {
  const std::string& kind = described.at("type").text("type");
  if (kind == "ByteLevel") return;  // it changes offsets alone
  if (kind == "Sequence" && depth < kDeepest) {
    for (const Json& each : described.at("processors").list("processors")) read_post_processor(each, depth + 1);
    return;
  }
  if (kind != "TemplateProcessing" || !before_.empty() || !after_.empty()) {
    refuse("tokenizer.json: the post-processor " + quote_short(kind) + " is not supported");
  }
  std::vector<TokenId>* side = &before_;
  for (const Json& each : described.at("single").list("single")) {
    if (each.find("Sequence") != nullptr) {
      if (side == &after_) refuse("tokenizer.json: a template that repeats the text is not supported");
      side = &after_;
      continue;
    }
    const std::string& name = each.at("SpecialToken").at("id").text("id");
    for (const Json& id : described.at("special_tokens").at(name).at("ids").list("ids")) {
      if (id.whole("ids") < 0 || id.whole("ids") >= kMostTokens || side->size() >= kMostSpecial) {
        refuse("tokenizer.json: the special token " + quote_short(name) + " of its template cannot be used");
      }
      side->push_back(static_cast<TokenId>(id.whole("ids")));
    }
  }
  if (side != &after_) refuse("tokenizer.json: a template without the text is not supported");
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, bool adds_special) const {
  if (text.size() > kMostPromptBytes) {
    refuse("a text of " + std::to_string(text.size()) + " bytes; at most " + std::to_string(kMostPromptBytes) +
           " are read");
  }
  if (const size_t wrong = first_invalid(text); wrong < text.size()) {
    refuse("the text is not UTF-8 at byte " + std::to_string(wrong) + "; decode it again");
  }
  std::vector<TokenId> tokens;
  if (adds_special) tokens = before_;
  bool is_first = true;
  for (const TextPart& written : added_.cut(text, false)) {
    if (written.token) {
      tokens.push_back(*written.token);
      is_first = false;
      continue;
    }
    const std::string normalized = normalizer_(written.text);
    for (const TextPart& part : added_.cut(normalized, true)) {
      if (part.token) {
        tokens.push_back(*part.token);
      } else {
        for (const std::string& piece : pre_tokenizer_(std::string(part.text), is_first)) bpe_.encode(piece, tokens);
      }
      is_first = false;
    }
  }
  if (adds_special) tokens.insert(tokens.end(), after_.begin(), after_.end());
  return tokens;
}

std::string Tokenizer::decode(const std::vector<TokenId>& tokens, bool skips_special) const {
  std::vector<std::string> texts;
  for (const TokenId token : tokens) {
    const std::string_view text = text_of(token);
    if (text.data() == nullptr || (skips_special && added_.is_special(text))) continue;
    texts.emplace_back(text);
  }
  return decoder_(std::move(texts));
}

bool Tokenizer::is_special(TokenId token) const {
  const std::string_view text = text_of(token);
  return text.data() != nullptr && added_.is_special(text);
}

bool Tokenizer::is_byte(TokenId token) const {
  return decoder_.has_byte_fallback() && byte_of_token(text_of(token)) >= 0;
}

std::string_view Tokenizer::text_of(TokenId token) const {
  if (const std::string* added = added_.text_of(token)) return *added;
  return bpe_.text_of(token).value_or(std::string_view());
}

}  // namespace edgekit
