#include "added_tokens.h"

#include <algorithm>

#include "errors.h"
#include "unicode.h"
#include "utf8.h"

namespace edgekit {
namespace {

constexpr size_t kLongest = 1024;  // bytes of an added token, since each place of a text is compared with it

bool truth_of(const Json& token, const char* name) {
  const Json* found = token.find(name);
  return found != nullptr && found->truth(name);
}

size_t spaces_before(std::string_view text, size_t place) {
  while (place > 0) {
    const size_t before = place_before(text, place);
    size_t after = before;
    if (!contains(kSpaces, next_point(text, after))) break;
    place = before;
  }
  return place;
}

size_t spaces_behind(std::string_view text, size_t place) {
  for (size_t after = place; after < text.size(); place = after) {
    if (!contains(kSpaces, next_point(text, after))) break;
  }
  return place;
}

}  // namespace

AddedTokens::AddedTokens(const Json* listed, const Bpe& bpe, const Normalizer& normalizer) {
  if (listed == nullptr) return;
  TokenId next = bpe.size();  // the id of a token that the vocabulary lacks
  for (const Json& each : listed->list("added_tokens")) {
    const std::string& text = each.at("content").text("content");
    if (text.empty()) continue;
    if (text.size() > kLongest) refuse("tokenizer.json: the added token " + quote_short(text) + " is too long");
    if (truth_of(each, "single_word")) {
      refuse("tokenizer.json: the added token " + quote_short(text) + " with single_word is not supported");
    }
    const auto known = bpe.find(text);
    const TokenId id = known ? *known : next;
    if (each.at("id").whole("id") != id) {
      refuse("tokenizer.json: the added token " + quote_short(text) + " has the id " +
             std::to_string(each.at("id").whole("id")) + ", which is not its place " + std::to_string(id));
    }
    if (!texts_.emplace(id, text).second)
      refuse("tokenizer.json: the added token " + quote_short(text) + " occurs twice");
    next = std::max(next, texts_.rbegin()->first + 1);
    if (next > kMostTokens) refuse("tokenizer.json: it has too many tokens");
    if (truth_of(each, "special")) special_.emplace(text, true);
    const bool is_normalized = truth_of(each, "normalized");
    const std::string looked_for = is_normalized ? normalizer(text) : text;
    if (looked_for.empty()) continue;
    Index& index = indexes_[is_normalized];
    index.tokens.insert_or_assign(looked_for, Token{id, truth_of(each, "lstrip"), truth_of(each, "rstrip")});
    std::vector<size_t>& lengths = index.lengths[static_cast<uint8_t>(looked_for[0])];
    const auto place = std::lower_bound(lengths.begin(), lengths.end(), looked_for.size(), std::greater<>());
    if (place == lengths.end() || *place != looked_for.size()) lengths.insert(place, looked_for.size());
  }
}

std::vector<TextPart> AddedTokens::cut(std::string_view text, bool is_normalized) const {
  const Index& index = indexes_[is_normalized];
  std::vector<TextPart> parts;
  size_t between = 0;
  std::string looked_for;
  for (size_t place = 0; place < text.size();) {
    const Token* found = nullptr;
    size_t end = place;
    for (const size_t length : index.lengths[static_cast<uint8_t>(text[place])]) {
      if (length > text.size() - place) continue;
      looked_for.assign(text.substr(place, length));
      if (const auto known = index.tokens.find(looked_for); known != index.tokens.end()) {
        found = &known->second, end = place + length;
        break;
      }
    }
    if (found == nullptr) {
      ++place;
      continue;
    }
    const size_t start = found->takes_left ? std::max(spaces_before(text, place), between) : place;
    if (found->takes_right) end = spaces_behind(text, end);
    if (start > between) parts.push_back({text.substr(between, start - between), std::nullopt});
    parts.push_back({text.substr(start, end - start), found->id});
    between = place = end;
  }
  if (between < text.size()) parts.push_back({text.substr(between), std::nullopt});
  return parts;
}

const std::string* AddedTokens::text_of(TokenId token) const {
  const auto found = texts_.find(token);
  return found == texts_.end() ? nullptr : &found->second;
}

bool AddedTokens::is_special(std::string_view text) const { return special_.find(text) != special_.end(); }

}  // namespace edgekit
