#include "kv_steps.h"

#include <cmath>

#include "errors.h"
#include "json.h"

namespace edgekit {
namespace {

constexpr size_t kLengthBytes = 8;
constexpr double kEighths = 8.0, kLeastExponent = -20.0;  // a step is a power of two, with eighths as exponents

[[noreturn]] void refuse_file(size_t count) {
  refuse(std::string(kStepsFile) + ": holds no " + std::to_string(count) +
         " steps of one byte; export the artifact again");
}

// The bytes of the only tensor of a safetensors file.
std::string_view only_tensor(const std::string& file, size_t count) {
  uint64_t header = 0;
  if (file.size() < kLengthBytes) refuse_file(count);
  for (size_t place = 0; place < kLengthBytes; ++place)
    header |= static_cast<uint64_t>(static_cast<uint8_t>(file[place])) << (8 * place);
  if (header > file.size() - kLengthBytes) refuse_file(count);
  const Json described = Json::parse(file.substr(kLengthBytes, header));
  const Json& tensor = described.at("steps");
  const Json::List &shape = tensor.at("shape").list("shape"), &place = tensor.at("data_offsets").list("data_offsets");
  const auto whole = static_cast<int64_t>(count);
  const bool is_right = tensor.at("dtype").text("dtype") == "U8" && shape.size() == 1 &&
                        shape[0].whole("shape") == whole && place.size() == 2 &&
                        place[0].whole("data_offsets") == 0 && place[1].whole("data_offsets") == whole;
  const std::string_view data = std::string_view(file).substr(kLengthBytes + header);
  if (!is_right || data.size() != count) refuse_file(count);
  return data;
}

}  // namespace

std::vector<std::vector<float>> read_steps(const std::string& file, const std::vector<KvLayer>& layers) {
  size_t count = 0;
  for (const KvLayer& layer : layers) count += 2 * static_cast<size_t>(layer.heads * layer.width);
  const std::string_view codes = only_tensor(file, count);
  std::vector<std::vector<float>> found;
  size_t place = 0;
  for (const KvLayer& layer : layers) {
    for (int kind = 0; kind < 2; ++kind) {
      std::vector<float>& steps = found.emplace_back();
      for (const size_t end = place + static_cast<size_t>(layer.heads * layer.width); place < end; ++place) {
        const double code = static_cast<uint8_t>(codes[place]);
        steps.push_back(static_cast<float>(std::pow(2.0, kLeastExponent + code / kEighths)));
      }
    }
  }
  return found;
}

}  // namespace edgekit
