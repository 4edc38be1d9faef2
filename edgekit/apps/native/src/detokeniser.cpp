#include "detokeniser.h"

#include <algorithm>

#include "unicode.h"
#include "utf8.h"

namespace edgekit {
namespace {

constexpr size_t kContext = 16;

bool is_visible(std::string_view text) {
  for (size_t place = 0; place < text.size();) {
    const uint32_t point = next_point(text, place);
    const bool is_separator = point >= 0x1c && point <= 0x1f;  // spaces in Python, and in no regular expression
    if (!is_separator && !contains(kSpaces, point)) return true;
  }
  return false;
}

bool is_incomplete(std::string_view text) {
  return text.size() >= kReplacement.size() && text.substr(text.size() - kReplacement.size()) == kReplacement;
}

// What `text` has beyond as many characters as `shown` has.
std::string beyond(std::string_view text, std::string_view shown) {
  size_t place = 0;
  for (size_t counted = 0; counted < shown.size() && place < text.size();) {
    next_point(shown, counted);
    next_point(text, place);
  }
  return std::string(text.substr(place));
}

}  // namespace

Detokeniser::Detokeniser(const Tokenizer& tokenizer, const std::vector<TokenId>& context)
    : tokenizer_(tokenizer),
      tokens_(context.end() - static_cast<long>(std::min(kContext, context.size())), context.end()) {
  if (!tokens_.empty()) shown_ = tokenizer_.decode(tokens_, true);
  if (is_incomplete(shown_) || !is_visible(shown_)) tokens_.clear(), shown_.clear();
  released_ = tokens_.size();
}

std::string Detokeniser::push(TokenId token) {
  if (tokenizer_.is_special(token)) return "";  // it does not end a run of bytes either
  tokens_.push_back(token);
  if (tokenizer_.is_byte(token)) return "";
  const std::string text = tokenizer_.decode(tokens_, true);
  return is_incomplete(text) ? "" : release(text);
}

std::string Detokeniser::flush() { return release(tokenizer_.decode(tokens_, true)); }

std::string Detokeniser::release(const std::string& text) {
  std::string added = beyond(text, shown_);
  shown_ = text;
  if (is_visible(added)) {  // so the tokens before it are no longer needed as context
    keep_from(released_);
  } else if (tokens_.size() >= 2 * kContext) {  // so many blanks serve as well, and a run of them may be long
    keep_from(tokens_.size() - kContext);
  }
  released_ = tokens_.size();
  return added;
}

// Keep only the tokens from `first` on as context, if they have any text.
void Detokeniser::keep_from(size_t first) {
  std::vector<TokenId> kept(tokens_.begin() + static_cast<long>(first), tokens_.end());
  std::string shown = tokenizer_.decode(kept, true);
  if (!shown.empty()) tokens_ = std::move(kept), shown_ = std::move(shown);
}

}  // namespace edgekit
