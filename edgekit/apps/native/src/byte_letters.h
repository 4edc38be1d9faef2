// GPT-2's alphabet: each byte as one visible character.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace edgekit {

// The bytes of a text as letters of the alphabet.
std::string to_byte_letters(std::string_view bytes);

// The byte that a letter stands for; -1: the code point is not in the alphabet.
int byte_of_letter(uint32_t point);

}  // namespace edgekit
