// Decodes a stream of tokens. Every piece has whole characters, and all pieces together are the text of all tokens.
//
// Each run of tokens is decoded together with the visible run before it, so that spaces are those of the whole text.
#pragma once

#include <string>
#include <vector>

#include "tokenizer.h"

namespace edgekit {

class Detokeniser {
 public:
  // `context`: the tokens that the text goes on after.
  Detokeniser(const Tokenizer& tokenizer, const std::vector<TokenId>& context);

  std::string push(TokenId token);  // the text that is final now
  std::string flush();              // the text that was held back, at the end

 private:
  std::string release(const std::string& text);
  void keep_from(size_t first);

  const Tokenizer& tokenizer_;
  std::vector<TokenId> tokens_;
  std::string shown_;
  size_t released_ = 0;  // tokens whose text was returned
};

}  // namespace edgekit
