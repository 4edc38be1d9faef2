#include "protobuf.h"

#include "errors.h"

namespace edgekit {
namespace {

constexpr int kMostBits = 64;

uint64_t read_number(std::string_view message, size_t& place) {
  uint64_t found = 0;
  for (int shift = 0; shift < kMostBits; shift += 7) {
    if (place == message.size()) break;
    const auto byte = static_cast<uint8_t>(message[place++]);
    found |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return found;
  }
  refuse("a graph is damaged: a number in it has no end");
}

std::string_view read_bytes(std::string_view message, size_t& place, uint64_t count) {
  if (count > message.size() - place) refuse("a graph is damaged: a field is longer than what holds it");
  const std::string_view found = message.substr(place, count);
  place += count;
  return found;
}

void write_number(std::string& message, uint64_t value) {
  for (; value >= 0x80; value >>= 7) message += static_cast<char>(0x80 | (value & 0x7f));
  message += static_cast<char>(value);
}

}  // namespace

std::vector<ProtobufField> protobuf_fields(std::string_view message) {
  std::vector<ProtobufField> found;
  for (size_t place = 0; place < message.size();) {
    const size_t start = place;
    const uint64_t tag = read_number(message, place);
    ProtobufField field{static_cast<uint32_t>(tag >> 3), ProtobufField::Kind::kBytes, 0, {}, {}};
    switch (tag & 7) {
      case 0:
        field.kind = ProtobufField::Kind::kNumber;
        field.value = read_number(message, place);
        break;
      case 1:
        field.kind = ProtobufField::Kind::kEightBytes;
        field.content = read_bytes(message, place, 8);
        break;
      case 2: {
        const uint64_t count = read_number(message, place);
        field.content = read_bytes(message, place, count);
        break;
      }
      case 5:
        field.kind = ProtobufField::Kind::kFourBytes;
        field.content = read_bytes(message, place, 4);
        break;
      default: refuse("a graph is damaged: a field is of the kind " + std::to_string(tag & 7));
    }
    field.written = message.substr(start, place - start);
    found.push_back(field);
  }
  return found;
}

void add_number(std::string& message, uint32_t field, uint64_t value) {
  write_number(message, uint64_t{field} << 3);
  write_number(message, value);
}

void add_bytes(std::string& message, uint32_t field, std::string_view content) {
  write_number(message, uint64_t{field} << 3 | 2);
  write_number(message, content.size());
  message += content;
}

std::string text_of(std::string_view message, uint32_t field) {
  for (const ProtobufField& each : protobuf_fields(message)) {
    if (each.number == field && each.kind == ProtobufField::Kind::kBytes) return std::string(each.content);
  }
  return "";
}

std::string replaced_in(std::string_view message, uint32_t number,
                        const std::function<std::string(std::string_view)>& changed) {
  std::string made;
  for (const ProtobufField& each : protobuf_fields(message)) {
    const bool is_it = each.number == number && each.kind == ProtobufField::Kind::kBytes;
    if (is_it) add_bytes(made, number, changed(each.content));
    else made += each.written;
  }
  return made;
}

}  // namespace edgekit
