#include "added_tokens.h"

#include <algorithm>

#include "errors.h"
#include "unicode.h"
#include "utf8.h"

namespace edgekit {
namespace {

constexpr size_t kLongest = 1024;     // bytes of an added token, since a normaliser may multiply them
constexpr size_t kMostBytes = 1 << 20;  // of all that is looked for: each takes a node of some 32 bytes

bool truth_of(const Json& token, const char* name) {
  const Json* found = token.find(name);
  return found != nullptr && found->truth(name);
}

size_t spaces_before(std::string_view text, size_t place, size_t first) {
  while (place > first) {
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
  size_t bytes = 0;
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
    bytes += looked_for.size();
    if (bytes > kMostBytes) refuse("tokenizer.json: its added tokens have too many bytes");
    indexes_[is_normalized].add(looked_for, Token{id, truth_of(each, "lstrip"), truth_of(each, "rstrip")});
  }
  for (Index& index : indexes_) index.build();
}

void AddedTokens::Index::add(const std::string& text, const Token& token) {
  tokens_.insert_or_assign(std::string(text.rbegin(), text.rend()), token);
}

void AddedTokens::Index::build() {
  if (tokens_.empty()) return;
  struct Texts {  // those that begin with a node's
    std::map<std::string, Token>::const_iterator first, stop;
    size_t size;
  };
  std::vector<Texts> texts{{tokens_.begin(), tokens_.end(), 0}};
  nodes_.push_back(Node{});
  for (uint32_t node = 0; node < nodes_.size(); ++node) {
    auto [first, stop, size] = texts[node];
    const uint32_t shorter = nodes_[node].shorter;
    nodes_[node].token = nodes_[shorter].token, nodes_[node].size = nodes_[shorter].size;
    if (first->first.size() == size) {
      nodes_[node].token = &first->second, nodes_[node].size = static_cast<uint32_t>(size);
      ++first;
    }
    const auto children = static_cast<uint32_t>(nodes_.size());
    while (first != stop) {
      const auto byte = static_cast<uint8_t>(first->first[size]);
      const auto begin = first;
      while (first != stop && static_cast<uint8_t>(first->first[size]) == byte) ++first;
      nodes_.push_back(Node{0, 0, node == 0 ? 0 : step(shorter, byte), nullptr, 0, byte});
      texts.push_back({begin, first, size + 1});
    }
    nodes_[node].children = children, nodes_[node].stop = static_cast<uint32_t>(nodes_.size());
  }
}

uint32_t AddedTokens::Index::step(uint32_t node, uint8_t byte) const {
  for (;; node = nodes_[node].shorter) {
    const auto stop = nodes_.begin() + nodes_[node].stop;
    const auto child = std::lower_bound(nodes_.begin() + nodes_[node].children, stop, byte,
                                        [](const Node& each, uint8_t wanted) { return each.byte < wanted; });
    if (child != stop && child->byte == byte) return static_cast<uint32_t>(child - nodes_.begin());
    if (node == 0) return 0;
  }
}

std::vector<AddedTokens::Match> AddedTokens::Index::matches(std::string_view text) const {
  std::vector<Match> found;
  if (nodes_.empty()) return found;
  uint32_t node = 0;
  for (size_t place = text.size(); place-- > 0;) {
    node = step(node, static_cast<uint8_t>(text[place]));
    if (const Token* token = nodes_[node].token) found.push_back({place, nodes_[node].size, token});
  }
  return found;
}

std::vector<TextPart> AddedTokens::cut(std::string_view text, bool is_normalized) const {
  std::vector<TextPart> parts;
  size_t between = 0;
  const std::vector<Match> matches = indexes_[is_normalized].matches(text);
  for (auto match = matches.rbegin(); match != matches.rend(); ++match) {
    if (match->place < between) continue;
    const Token& found = *match->token;
    const size_t start = found.takes_left ? spaces_before(text, match->place, between) : match->place;
    size_t end = match->place + match->size;
    if (found.takes_right) end = spaces_behind(text, end);
    if (start > between) parts.push_back({text.substr(between, start - between), std::nullopt});
    parts.push_back({text.substr(start, end - start), found.id});
    between = end;
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
