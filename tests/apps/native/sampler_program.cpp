// Runs the native library's mathematics and sampler over files: the test compares the results with Python's.
//
//   sampler_program log|exp FILE        float64 to float64
//   sampler_program widen|halve FILE    float16 to float32, and back
//   sampler_program choose FILE VOCABULARY TEMPERATURE TOP_K TOP_P MIN_P TYPICAL_P SEED
//                                       rows of float32 to tokens, each at the position of its row
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "half.h"
#include "portable_math.h"
#include "sampler.h"

namespace {

template <class Value>
std::vector<Value> read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto* values = reinterpret_cast<const Value*>(bytes.data());
  return {values, values + bytes.size() / sizeof(Value)};
}

template <class Value>
void write(const std::vector<Value>& values) {
  std::fwrite(values.data(), sizeof(Value), values.size(), stdout);
}

}  // namespace

int main(int count, char** words) {
  const std::string task = words[1];
  if (task == "widen") {
    std::vector<float> wide;
    for (const uint16_t each : read<uint16_t>(words[2])) wide.push_back(edgekit::from_half(each));
    write(wide);
    return 0;
  }
  if (task == "halve") {
    std::vector<uint16_t> halves;
    for (const float each : read<float>(words[2])) halves.push_back(edgekit::to_half(each));
    write(halves);
    return 0;
  }
  if (task != "choose") {
    auto values = read<double>(words[2]);
    for (double& value : values) value = task == "log" ? edgekit::portable_log(value) : edgekit::portable_exp(value);
    write(values);
    return 0;
  }
  if (count != 10) return 2;
  const auto rows = read<float>(words[2]);
  const size_t vocabulary = std::strtoul(words[3], nullptr, 10);
  edgekit::Sampling options;
  options.temperature = std::strtod(words[4], nullptr);
  options.top_k = std::strtoul(words[5], nullptr, 10);
  options.top_p = std::strtod(words[6], nullptr);
  options.min_p = std::strtod(words[7], nullptr);
  options.typical_p = std::strtod(words[8], nullptr);
  options.seed = std::strtoull(words[9], nullptr, 10);
  const edgekit::Sampler sampler(options, {});
  std::vector<edgekit::TokenId> tokens;
  for (size_t row = 0; row < rows.size() / vocabulary; ++row)
    tokens.push_back(sampler.choose(rows.data() + row * vocabulary, vocabulary, row));
  write(tokens);
}
