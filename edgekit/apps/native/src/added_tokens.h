// Tokens that are found in a text as they are, before it is cut into pieces.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
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
  AddedTokens(const AddedTokens&) = delete;

  // Cut a text at its added tokens: at those of the text as it was written, or of the normalised text.
  std::vector<TextPart> cut(std::string_view text, bool is_normalized) const;

  const std::string* text_of(TokenId token) const;
  bool is_special(std::string_view text) const;

 private:
  struct Token {
    TokenId id;
    bool takes_left, takes_right;  // the spaces beside it
  };
  struct Match {
    size_t place, size;  // in the text
    const Token* token;
  };

  // Finds texts by a tree of them, each read backwards (Aho and Corasick). One walk from the end of a text gives the
  // longest match at each place, in time that grows with the text and not with what is looked for.
  class Index {
   public:
    void add(const std::string& text, const Token& token);  // the last token of a text counts
    void build();
    std::vector<Match> matches(std::string_view text) const;  // the longest at each place, the last place first

   private:
    struct Node {
      uint32_t children, stop;  // a range of nodes, in the order of their bytes
      uint32_t shorter;         // the node of the longest other text that this one's ends with
      const Token* token;       // the longest that this node's text ends with
      uint32_t size;            // of that token's text
      uint8_t byte;
    };
    uint32_t step(uint32_t node, uint8_t byte) const;

    std::map<std::string, Token> tokens_;  // by text, read backwards
    std::vector<Node> nodes_;              // the children after their parents; the first is the root
  };

  std::array<Index, 2> indexes_;  // by is_normalized
  std::map<TokenId, std::string> texts_;
  std::map<std::string, bool, std::less<>> special_;
};

}  // namespace edgekit
