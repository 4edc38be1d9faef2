// Tokens that are found in a text as they are, before it is cut into pieces.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "bpe.h"
#include "normalizer.h"

namespace edgekit {

// A part of a text: an added token, or what is between them.
struct TextPart {
  std::string_view text;
  std::optional<TokenId> token;
};

class AddedTokens {
 public:
  AddedTokens(const Json* listed, const Bpe& bpe, const Normalizer& normalizer);  // throws std::runtime_error

  // Cut a text at its added tokens: at those of the text as it was written, or of the normalised text.
  std::vector<TextPart> cut(std::string_view text, bool is_normalized) const;

  const std::string* text_of(TokenId token) const;
  bool is_special(std::string_view text) const;

 private:
  struct Token {
    TokenId id;
    bool takes_left, takes_right;  // the spaces beside it
  };
  struct Index {  // of the texts that are looked for
    std::unordered_map<std::string, Token> tokens;
    std::array<std::vector<size_t>, 256> lengths;  // by first byte, the longest first
  };

  std::array<Index, 2> indexes_;  // by is_normalized
  std::map<TokenId, std::string> texts_;
  std::map<std::string, bool, std::less<>> special_;
};

}  // namespace edgekit
