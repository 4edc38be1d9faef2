// Reads and writes the fields of a message in Protocol Buffers' wire format.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace edgekit {

struct ProtobufField {
  enum class Kind { kNumber, kEightBytes, kBytes, kFourBytes };  // groups are refused

  uint32_t number;
  Kind kind;
  uint64_t value;            // of a number
  std::string_view content;  // of bytes: a text or a message
  std::string_view written;  // the whole field, with its tag
};

// The fields of a message in their order; they point into it. Throws std::runtime_error.
std::vector<ProtobufField> protobuf_fields(std::string_view message);

// The bytes of the first field with this number; empty without one.
std::string text_of(std::string_view message, uint32_t field);

// A message whose field `number` is replaced, wherever it occurs.
std::string replaced_in(std::string_view message, uint32_t number,
                        const std::function<std::string(std::string_view)>& changed);

void add_number(std::string& message, uint32_t field, uint64_t value);
void add_bytes(std::string& message, uint32_t field, std::string_view content);

}  // namespace edgekit
