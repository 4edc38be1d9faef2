// The tokenizer that a tokenizer.json describes: the tokens and texts of the `tokenizers` library.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "added_tokens.h"
#include "bpe.h"
#include "decoder.h"
#include "normalizer.h"
#include "pre_tokenizer.h"

namespace edgekit {

constexpr size_t kMostTokenizerBytes = 128u << 20;
constexpr size_t kMostPromptBytes = 64u << 20;

class Tokenizer {
 public:
  explicit Tokenizer(const std::string& json);  // throws std::runtime_error, also for what it does not support

  // With `adds_special`, between the tokens that the tokenizer puts around a text.
  std::vector<TokenId> encode(std::string_view text, bool adds_special) const;

  // Unknown tokens have no text; with `skips_special`, special ones have none either.
  std::string decode(const std::vector<TokenId>& tokens, bool skips_special) const;

  bool is_special(TokenId token) const;
  bool is_byte(TokenId token) const;  // a raw byte, whose character is known when its run of bytes ends

 private:
  explicit Tokenizer(const Json& described);
  void read_post_processor(const Json& described, int depth);
  std::string_view text_of(TokenId token) const;

  Bpe bpe_;
  Normalizer normalizer_;
  AddedTokens added_;
  PreTokenizer pre_tokenizer_;
  Decoder decoder_;
  std::vector<TokenId> before_, after_;
};

}  // namespace edgekit
