// Byte-pair encoding: the vocabulary and the merges of a tokenizer, and the tokens of one piece of text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "json.h"

namespace edgekit {

using TokenId = int32_t;
constexpr TokenId kMostTokens = 1 << 22;

class Bpe {
 public:
  explicit Bpe(const Json& model);  // `model` of a tokenizer.json; throws std::runtime_error

  std::optional<TokenId> find(std::string_view token) const;
  std::optional<std::string_view> text_of(TokenId token) const;
  TokenId size() const { return static_cast<TokenId>(by_text_.size()); }  // of tokens

  // Append the tokens of a piece.
  void encode(std::string_view piece, std::vector<TokenId>& out) const;

 private:
  struct Merge {
    uint64_t pair;  // the ids of both parts
    uint32_t rank;
    TokenId merged;
  };
  class Word;

  void read_vocabulary(const Json& vocabulary);
  void read_merges(const Json& merges);
  const Merge* merge_of(TokenId left, TokenId right) const;

  std::string texts_;             // all tokens, one after the other
  std::vector<uint32_t> starts_;  // by id, of the token's text; one more at the end
  std::vector<bool> is_known_;    // by id
  std::vector<TokenId> by_text_;  // ids in the order of their texts
  std::vector<Merge> merges_;     // in the order of their pairs
  std::vector<TokenId> bytes_;    // of raw bytes; empty without byte fallback
  std::optional<TokenId> unknown_;
  bool fuses_unknown_ = false, ignores_merges_ = false;
};

}  // namespace edgekit
